"""The right to build a prepared directory, which one process has at a time, and waiting for who has it.

Two kinds with the same methods: a file lock that dies with its holder, and for storage that nodes share a claim through
the agents, fenced by the generation.
"""

from __future__ import annotations

import fcntl
import hashlib
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
from elasticrt.distributed.user_notice import say
from elasticrt.errors import PreparationError, explain
from elasticrt.ipc.file_modes import FILE_MODE
from elasticrt.ipc.messages import Built, Claim, Reply

_POLL_S = 0.1
_CLAIM_POLL_S = 0.5
_PROGRESS_S = 10.0
_ANSWER_S = 60.0
_VISIBLE_S = 60.0
"""How long a network file system may take to show what another node has published."""

_ERROR_CHARS = 1000
_HOLDER_BYTES = 200

_threads: dict[str, threading.Lock] = {}


class Waiting:
    """Waiting for another builder: in small steps, with a deadline, and not in silence.

    Args:
        target: what is waited for.
        deadline: of `time.monotonic`, in seconds.
    """

    def __init__(self, target: Path, deadline: float) -> None:
        self._target = target
        self._deadline = deadline
        self._started = time.monotonic()
        self._told = self._started

    def pause(self, holder: Callable[[], str], step_s: float) -> None:
        """Wait for `step_s` seconds. `holder` says who builds. Raises PreparationError when the deadline has passed."""
        now = time.monotonic()
        if now >= self._deadline:
            raise PreparationError(
                explain(
                    "waited too long for the preparation",
                    str(self._target),
                    got=f"{now - self._started:.0f} s; built by {holder() or 'another process'}",
                    remedy="Give it a larger timeout_s, or look at what the builder is doing",
                )
            )
        if now - self._told >= _PROGRESS_S:
            self._told = now
            who = holder() or "another process"
            say(f"waiting for {self._target}: {who} builds, {now - self._started:.0f} s so far")
        time.sleep(min(step_s, max(0.0, self._deadline - now)))


class Right:
    """The right to build one directory.

    Args:
        target: the directory to build.
        version: of what is built.

    Attributes:
        poll_s: seconds between two questions.
        workshop: a part of the names of the private directories that are built in.
    """

    poll_s = _POLL_S
    workshop = "building"

    def __init__(self, target: Path, version: str) -> None:
        self._target = target
        self._version = version

    def ask(self) -> bool:
        """Take the right if it is free. Raises PreparationError when there is nothing to wait for, OSError."""
        raise NotImplementedError

    def holder(self) -> str:
        """Who has it, in words; "" when unknown."""
        raise NotImplementedError

    def begin(self) -> None:
        """Before building: remove what dead builders left. Raises PreparationError when the build failed just now."""

    def failed(self, error: str) -> None:
        """The build has failed: all who wait fail with `error`."""
        raise NotImplementedError

    def still_mine(self) -> bool:
        """Whether nobody else has got the right meanwhile."""
        return True

    def published(self) -> bool:
        """The result is in place: let all know. False when the right was lost."""
        return True

    def release(self) -> None:
        """Let go, however the build has ended."""


class LockRight(Right):
    """The right to build on this node: a lock beside the directory, which ends with its holder.

    A POSIX record lock: unlike flock it is not inherited by forks, so that a DataLoader's worker that outlives a
    killed trainer keeps nobody waiting. Between threads of one process, which such locks do not know, it is an
    ordinary lock. The file stays; to remove a lock file is a race.
    """

    def __init__(self, target: Path, version: str) -> None:
        super().__init__(target, version)
        self._path = target.with_name(f".{target.name}.lock")
        self._thread = _threads.setdefault(str(self._path), threading.Lock())
        self._fd = -1

    def ask(self) -> bool:  # noqa: D102  As in Right.
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
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()}".encode()[:_HOLDER_BYTES], 0)
        return True

    def holder(self) -> str:  # noqa: D102  As in Right. Never asked while holding: to close the file would release it.
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return ""
        try:
            return os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace")
        finally:
            os.close(fd)

    def begin(self) -> None:  # noqa: D102  As in Right.
        error = prepared_dir.noted_failure(self._target, self._version)
        if error:
            raise PreparationError(error)
        prepared_dir.clear_failure(self._target)
        for leftover in self._target.parent.glob(f".{self._target.name}.{self.workshop}-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def failed(self, error: str) -> None:  # noqa: D102  As in Right.
        prepared_dir.note_failure(self._target, self._version, error)

    def release(self) -> None:  # noqa: D102  As in Right.
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._thread.release()


class ClaimRight(Right):
    """The right to build for all nodes: a claim that this node's agent makes in etcd.

    Only local rank 0 claims, so that a node never builds twice. The other local ranks wait for the result; should
    their node's builder fail, its error ends the generation and them with it.

    Args:
        agent: this process's link.
        target: the directory to build, on storage that all nodes share.
        version: of what is built.
        waiting: for answers that say that the outcome of a claim is unknown.
    """

    def __init__(self, agent: agent_client.AgentClient, target: Path, version: str, waiting: Waiting) -> None:
        super().__init__(target, version)
        worker = agent_client.worker_env()
        self._agent = agent
        self._waiting = waiting
        self._claims = worker is None or worker.local_rank == 0
        self._generation = 0 if worker is None else worker.generation
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:12]
        self._name = re.sub(r"[^A-Za-z0-9._-]", "_", target.name)[:64].lstrip(".") + "-" + digest
        self._holder = "another process of this node"
        self._done_at = 0.0
        self.poll_s = _CLAIM_POLL_S
        self.workshop = f"shared-{self._generation}"

    def ask(self) -> bool:  # noqa: D102  As in Right.
        if not self._claims:
            return False
        reply = self._claim()
        if reply.ok:
            return True
        answer, _, detail = (part.strip() for part in reply.reason.partition(":"))
        if answer == "failed" and not prepared_dir.fits(self._target, self._version):
            raise PreparationError(detail or "the build failed elsewhere")
        if answer == "done":
            self._check_visible()
        elif answer not in ("wait", "failed"):
            raise PreparationError(explain("the agent refuses the preparation", str(self._target), got=reply.reason))
        self._holder = detail
        return False

    def holder(self) -> str:  # noqa: D102  As in Right.
        return self._holder

    def still_mine(self) -> bool:  # noqa: D102  As in Right.
        return self._claim().ok

    def begin(self) -> None:  # noqa: D102  As in Right. A builder of this generation may be paused, and live.
        for leftover in self._target.parent.glob(f".{self._target.name}.shared-*"):
            generation = leftover.name.rpartition("shared-")[2].partition("-")[0]
            if generation.isdigit() and int(generation) < self._generation:
                shutil.rmtree(leftover, ignore_errors=True)

    def failed(self, error: str) -> None:  # noqa: D102  As in Right.
        self._request(lambda number: Built(number, self._name, self._version, "", error[:_ERROR_CHARS]))

    def published(self) -> bool:  # noqa: D102  As in Right.
        digest = prepared_dir.digest_of(self._target)
        return self._request(lambda number: Built(number, self._name, self._version, digest)).ok

    def _claim(self) -> Reply:
        """Ask to build, until the answer is known: a claim whose answer was lost may stand."""
        while True:
            reply = self._request(lambda number: Claim(number, self._name, self._version))
            if reply.ok or not reply.reason.startswith("unsure"):
                return reply
            self._waiting.pause(lambda: "an unknown process", self.poll_s)

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
