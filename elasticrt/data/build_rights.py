"""The right to build a prepared directory, which one process has at a time.

On a node it is a file lock, which ends with its holder. For storage that nodes share it is a claim through the agents,
fenced by the generation. Both have the same methods.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elasticrt.data import prepared_dir
from elasticrt.distributed import agent_client
from elasticrt.errors import PreparationError, explain
from elasticrt.ipc.file_modes import FILE_MODE
from elasticrt.ipc.messages import Built, Claim, Reply

_POLL_S = 0.1
_CLAIM_POLL_S = 0.5
_ANSWER_S = 60.0
_VISIBLE_S = 60.0
"""How long a network file system may take to show what another node has published."""

_FAILURE_S = 60.0
"""For so long a late process fails with the last builder's error. After that it builds again."""

_ERROR_CHARS = 1000
_NOTE_BYTES = 8192

_threads: dict[str, threading.Lock] = {}


class LockRight:
    """The right to build on this node: a lock beside the directory, which ends with its holder.

    A POSIX record lock: unlike flock it is not inherited by forks, so that a DataLoader's worker that outlives a
    killed trainer keeps nobody waiting. Between threads of one process, which such locks do not know, it is an
    ordinary lock. The file stays; to remove a lock file is a race. In it the holder says who it is, or why its build
    has failed.

    Args:
        target: the directory to build.
        version: of what is built.

    Attributes:
        poll_s: seconds between two questions.
        workshop: a part of the names of the private directories that are built in.
    """

    workshop = "building"

    def __init__(self, target: Path, version: str) -> None:
        self._target = target
        self._version = version
        self._path = target.with_name(f".{target.name}.lock")
        self._thread = _threads.setdefault(str(self._path), threading.Lock())
        self._fd = -1
        self.poll_s = _POLL_S

    def ask(self) -> bool:
        """Take the right if it is free. Raises PreparationError when the build has just failed; OSError."""
        if not self._thread.acquire(blocking=False):
            return False
        held = False
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            held = self._lock()
        finally:
            if not held:
                self.release()
        return held

    def _lock(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # Either says that another process has it.
            return False
        start, version, error = _note(self._fd)
        late_s = time.time() - os.fstat(self._fd).st_mtime
        if error and (start, version) == (_this_start(), self._version) and late_s < _FAILURE_S:
            raise PreparationError(error)
        self._say(f"process {os.getpid()} on {socket.gethostname()}", "")
        return True

    def holder(self) -> str:
        """The holder, in words; "" when unknown. Never ask while holding: to close the file would release it."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return _note(fd)[0]
        finally:
            os.close(fd)

    def sweep(self) -> None:
        """Before building: remove what dead builders left."""
        for leftover in self._target.parent.glob(f".{self._target.name}.{self.workshop}-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def failed(self, error: str) -> None:
        """The build has failed: all who wait, or come late in this start of the job, fail with `error`."""
        with contextlib.suppress(OSError):  # On a full disk they build, and fail, by themselves.
            self._say(_this_start(), error)

    def publish(self, put_in_place: Callable[[], None]) -> bool:
        """Put the result in place. Nobody else can have the lock meanwhile."""
        put_in_place()
        return True

    def release(self) -> None:
        """Let go, however the build has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._thread.release()

    def _say(self, who: str, error: str) -> None:
        text = json.dumps([who, self._version if error else "", error[:_ERROR_CHARS]]).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)


def _note(fd: int) -> tuple[str, str, str]:
    """What the last holder of a lock has said: who it is; or in which start, of which version, what has failed."""
    try:
        who, version, error = json.loads(os.pread(fd, _NOTE_BYTES, 0))
    except (ValueError, TypeError):
        return "", "", ""
    return str(who), str(version), str(error)


def _this_start() -> str:
    """Names this start of this job on this node: equal for all its processes, another one after a restart."""
    generation = os.environ.get("ELASTICRT_NONCE", "") + os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    # Processes of one job have a launcher in common; a process alone has only itself.
    together = os.environ.get("WORLD_SIZE", "1") != "1"
    return f"{generation}:{os.getppid() if together else os.getpid()}"


class ClaimRight:
    """The right to build for all nodes: a claim that this node's agent makes in etcd. As LockRight.

    Only local rank 0 claims, so that a node never builds twice. The other local ranks wait for the result; should
    their node's builder fail, its error ends the generation and them with it.

    Args:
        agent: this process's link.
        target: the directory to build, on storage that all nodes share.
        version: of what is built.
    """

    def __init__(self, agent: agent_client.AgentClient, target: Path, version: str) -> None:
        worker = agent_client.worker_env()
        self._agent = agent
        self._target = target
        self._version = version
        self._claims = worker is None or worker.local_rank == 0
        self._generation = 0 if worker is None else worker.generation
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:12]
        self._name = re.sub(r"[^A-Za-z0-9._-]", "_", target.name)[:64].lstrip(".") + "-" + digest
        self._holder = "another process of this node"
        self._done_at = 0.0
        self.poll_s = _CLAIM_POLL_S
        self.workshop = f"shared-{self._generation}"

    def ask(self) -> bool:
        """Claim. Raises PreparationError when the build has failed elsewhere, or its result does not show."""
        if not self._claims:
            return False
        reply = self._claim()
        if reply.ok:
            return True
        # After "unsure" the claim may stand: it is asked for again.
        answer, _, self._holder = (part.strip() for part in reply.reason.partition(":"))
        if answer == "failed" and not prepared_dir.fits(self._target, self._version):
            raise PreparationError(self._holder or "the build failed elsewhere")
        if answer == "done":
            self._check_visible()
        elif answer not in ("wait", "failed", "unsure"):
            raise PreparationError(explain("the agent refuses the preparation", str(self._target), got=reply.reason))
        return False

    def holder(self) -> str:
        """The node that builds."""
        return self._holder

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
        """Put the result in place and let all know, if the claim still stands. False when it was lost.

        Asked until it is known: its agent ends before etcd has been away for ever.
        """
        while (reply := self._claim()).reason.startswith("unsure"):
            time.sleep(self.poll_s)
        if not reply.ok:
            return False
        put_in_place()
        return self._request(lambda number: Built(number, self._name, self._version)).ok

    def release(self) -> None:
        """A claim ends by what was said of it, or with its builder's lease."""

    def _claim(self) -> Reply:
        return self._request(lambda number: Claim(number, self._name, self._version))

    def _request(self, make: Callable[[int], Claim | Built]) -> Reply:
        reply = self._agent.request(make).wait(_ANSWER_S)
        if reply is None:
            text = explain("no answer from the agent", str(self._target), got=f"nothing in {_ANSWER_S:.0f} s")
            raise PreparationError(text)
        return reply

    def _check_visible(self) -> None:
        self._done_at = self._done_at or time.monotonic()
        if time.monotonic() - self._done_at > _VISIBLE_S:
            raise PreparationError(
                explain(
                    "prepared, but not there",
                    str(self._target),
                    got=f"nothing that fits its record for {_VISIBLE_S:.0f} s",
                    expected='storage that all nodes share (scope="shared")',
                    remedy='Use scope="node", or another version',
                )
            )
