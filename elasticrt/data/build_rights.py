"""The right to build a prepared directory, which one process holds at a time.

On a node it is a file lock, which ends with its holder. For storage that nodes share it is a claim through the agents,
fenced by the generation. Both have the same methods.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elasticrt.data import prepared_dir
from elasticrt.distributed import agent_client
from elasticrt.distributed.user_notice import say
from elasticrt.errors import PreparationError
from elasticrt.ipc.file_modes import FILE_MODE
from elasticrt.ipc.messages import Built, Claim, Reply

_ANSWER_S = 60.0
_VISIBLE_S = 60.0
"""How long a network file system may take to show what another node has published."""

UNSURE_S = 1200.0
"""How long etcd may be away or full: longer than an agent lives without it."""

_ERROR_CHARS = 1000
_threads: dict[str, threading.Lock] = {}


class LockRight:
    """The right to build on this node: a lock beside the directory, which ends with its holder.

    A POSIX record lock: forks do not inherit it, as they do with flock, so that a DataLoader's worker that outlives a
    killed trainer keeps no other process waiting. Such locks do not exclude threads of one process; an ordinary lock
    does. The file stays, because to remove a lock file is a race.

    Args:
        target: the directory to build.

    Attributes:
        poll_s: seconds between two questions.
        holder: who builds, in words.
        workshop: a part of the names of the private directories that are built in.
    """

    poll_s = 0.1
    holder = "another process of this node"
    workshop = "building"

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name(f".{target.name}.lock")
        self._thread = _threads.setdefault(str(self._path), threading.Lock())
        self._fd = -1

    def ask(self) -> bool:
        """Take the right if it is free. Raises OSError."""
        if not self._thread.acquire(blocking=False):
            return False
        with contextlib.ExitStack() as stack:
            stack.callback(self.release)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # Either says that another process has it, which says who it is.
                self.holder = os.read(self._fd, 100).decode(errors="replace") or self.holder
                return False
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"process {os.getpid()}".encode())
            stack.pop_all()
        return True

    def sweep(self) -> None:
        """Before building: remove what dead builders left."""
        for leftover in self._target.parent.glob(f".{self._target.name}.{self.workshop}-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def failed(self, error: str) -> None:
        """The build has failed. The next process that gets the lock builds, and fails, by itself."""

    def publish(self, put_in_place: Callable[[], None]) -> bool:
        """Put the result in place. No other process can have the lock meanwhile."""
        put_in_place()
        return True

    def release(self) -> None:
        """Give the right back, however the build has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._thread.release()


class ClaimRight:
    """The right to build for all nodes: a claim that this node's agent makes in etcd. As LockRight.

    Only local rank 0 claims, so that a node never builds twice. The other local ranks wait for the result; should
    their node's builder fail, its error ends the generation and them with it.

    Args:
        target: the directory to build, on storage that all nodes share.
        version: of what is built.
    """

    poll_s = 0.5

    def __init__(self, target: Path, version: str) -> None:
        worker = agent_client.worker_env()
        self._agent = agent_client.agent_link()
        self._target = target
        self._version = version
        self._claims = worker.local_rank == 0
        self._generation = worker.generation
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:12]
        self._name = re.sub(r"[^A-Za-z0-9._-]", "_", target.name)[:64].lstrip(".") + "-" + digest
        self.holder = "another process of this node"
        self._refusal, self._since = "", 0.0  # The last answer's, and since when it is so.
        self.workshop = f"shared-{self._generation}"

    def ask(self) -> bool:
        """Claim. Raises PreparationError when the build has failed elsewhere, or its result does not show."""
        if not self._claims:
            return False
        reply = self._claim()
        if reply.refusal == "wait":
            self.holder = reply.reason
        if reply.refusal == "failed" and not prepared_dir.fits(self._target, self._version):
            raise PreparationError(reply.reason or "the build failed elsewhere")
        if reply.refusal == "done" and time.monotonic() - self._since > _VISIBLE_S:
            got, expected = f"nothing that fits its record for {_VISIBLE_S:.0f} s", "storage that all nodes share"
            what, remedy = "prepared, but not there", 'Use scope="node", or another version'
            raise PreparationError(what, str(self._target), got=got, expected=expected, remedy=remedy)
        return reply.ok

    def sweep(self) -> None:
        """Only of earlier generations: a builder of this one may be paused, and live."""
        for leftover in self._target.parent.glob(f".{self._target.name}.shared-*"):
            generation = leftover.name.rpartition("shared-")[2].partition("-")[0]
            if generation.isdigit() and int(generation) < self._generation:
                shutil.rmtree(leftover, ignore_errors=True)

    def failed(self, error: str) -> None:
        """All nodes fail with `error`."""
        self._request(lambda number: Built(number, self._name, self._version, error[:_ERROR_CHARS]))

    def publish(self, put_in_place: Callable[[], None]) -> bool:
        """Put the result in place and record it, if the claim still stands. False when it was lost."""
        while (reply := self._claim()).refusal == "unsure":
            time.sleep(self.poll_s)
        if not reply.ok:
            return False
        put_in_place()
        return self._request(lambda number: Built(number, self._name, self._version)).ok

    def release(self) -> None:
        """A claim ends by what was said of it, or with its builder's lease."""

    def _claim(self) -> Reply:
        """Ask for the claim. After "unsure" it may stand, and is asked for again. Raises PreparationError."""
        reply = self._request(lambda number: Claim(number, self._name, self._version))
        if reply.refusal != self._refusal:
            self._refusal, self._since = reply.refusal, time.monotonic()
            if reply.refusal == "unsure":
                say(f"{self._target} waits for etcd: {reply.reason}")
        waits = reply.refusal in ("wait", "done", "failed", "unsure")
        if not (reply.ok or waits) or (reply.refusal == "unsure" and time.monotonic() - self._since > UNSURE_S):
            raise PreparationError("the agent refuses the preparation", str(self._target), got=reply.reason)
        return reply

    def _request(self, make: Callable[[int], Claim | Built]) -> Reply:
        reply = self._agent.request(make, _ANSWER_S)
        if reply is None:
            got = f"nothing in {_ANSWER_S:.0f} s"
            raise PreparationError("no answer from the agent", str(self._target), got=got)
        return reply
