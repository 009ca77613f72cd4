"""One process builds the data, the others wait, and none ever sees half of it.

The builder writes into a private directory beside the destination, which is then synced and renamed into place together
with a record of every file: name, size, time and SHA-256. A directory whose record fits is used as it is; any other is
built again.

One process at a time has the right to build. On a node it is a file lock, which ends with its holder. For storage that
nodes share it is a claim through the agents, fenced by the generation. Both have the same methods.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from elasticrt.data.durable_files import sync, sync_tree
from elasticrt.distributed import agent_client
from elasticrt.errors import ConfigError, PreparationError, explain
from elasticrt.ipc.file_modes import DIRECTORY_MODE, FILE_MODE, make_directory, write_text
from elasticrt.ipc.messages import Built, Claim, Reply
from elasticrt.ipc.std_streams import say

PROGRESS_S = 10.0
"""A rank that waits names the builder as often as this."""

RECORD = ".elasticrt-prepared.json"
"""The record of a prepared directory. It lies inside of it, so that both appear in one rename."""

_FORMAT = 1
_READ_BYTES = 1 << 20
_ANSWER_S = 60.0
_VISIBLE_S = 60.0
"""How long a network file system may take to show what another node has published."""

UNSURE_S = 1200.0
"""How long etcd may be away or full: longer than an agent lives without it."""

_ERROR_CHARS = 1000
_threads: dict[str, threading.Lock] = {}


def prepare(
    path: str | os.PathLike[str],
    build: Callable[[Path], object],
    *,
    version: str = "1",
    scope: Literal["node", "shared"] = "node",
    timeout_s: float | None = None,
) -> Path:
    """The directory `path`, built by `build` exactly once, complete. Call it on every rank, before or after `init`.

    Args:
        path: where the result lies; its parent must be writable. A result that is there and fits its record is reused.
        build: called in one process with an empty private directory, which it fills. What it returns is ignored.
        version: a result of another version is built again.
        scope: "node": every node builds for itself. "shared": one node builds for all (the storage is shared).
        timeout_s: how long to wait for another builder, in seconds; None: as long as it lives.

    A builder that dies is replaced by a process that waits. One that raises, or leaves its directory empty, fails with
    PreparationError, which ends the run; in the "shared" scope all nodes fail with its error. Raises PreparationError
    too when `timeout_s` passes, TypeError, ValueError and ConfigError for invalid arguments.

    After `init` no rank returns before all nodes have their data: what follows is often a collective, and those wait
    for half an hour only.
    """
    target = _checked(path, build, version, scope, timeout_s)
    limit_s = math.inf if timeout_s is None else timeout_s
    ranks = None  # Before `init`, and where ranks come one after the other.
    if "torch.distributed" in sys.modules:  # Data can be prepared without loading torch; then there is no group.
        from elasticrt.distributed.barrier import Barrier, together

        ranks = Barrier(f"prepare({str(target)!r})") if together() else None
    if ranks is None:
        _ready(target, build, version, scope, limit_s)
        return target
    ranks.come()
    try:
        _ready(target, build, version, scope, limit_s)
    except PreparationError as error:
        with contextlib.suppress(RuntimeError):  # The other ranks may have ended: this error is what counts.
            ranks.through(str(error))
        raise
    ranks.through()
    try:
        problem = ranks.wait(limit_s)
    except TimeoutError as late:
        raise PreparationError(str(late)) from late
    if problem:
        raise PreparationError(problem)
    return target


def _ready(target: Path, build: Callable[[Path], object], version: str, scope: str, limit_s: float) -> None:
    """Return when the directory is complete on this node. Raises PreparationError."""
    if fits(target, version):
        return
    page, began = agent_client.status_page(), time.monotonic()
    try:
        make_directory(target.parent)
        for_all = scope == "shared" and agent_client.agent_link().linked
        right = ClaimRight(target, version) if for_all else LockRight(target)
        while True:
            if right.ask():
                try:
                    page.building = 1  # The agent lets it finish when the membership changes.
                    if _build(right, target, build, version):
                        return
                finally:
                    page.building = 0
                    right.release()
            # Another process has built it, or takes over from here: this one has no right, or has lost it.
            if fits(target, version):
                return
            _pause(right, target, time.monotonic() - began, limit_s)
    except OSError as error:
        raise _failed(target, error) from error


def _failed(target: Path, error: OSError) -> PreparationError:
    expected, remedy = "a directory that this user can write to, with room", "Mend it, or prepare the data elsewhere"
    return PreparationError("preparation failed", str(target), got=error, expected=expected, remedy=remedy)


def _pause(right: LockRight | ClaimRight, target: Path, waited_s: float, limit_s: float) -> None:
    """Wait until it is time to ask for the right again, and say so. Raises PreparationError after `limit_s`."""
    if waited_s >= limit_s:
        got = f"{waited_s:.0f} s; built by {right.holder}"
        remedy = "Give it a larger timeout_s, or look at what the builder is doing"
        raise PreparationError("waited too long for the preparation", str(target), got=got, remedy=remedy)
    pause_s = min(right.poll_s, limit_s - waited_s)
    time.sleep(pause_s)
    if (waited_s + pause_s) // PROGRESS_S > waited_s // PROGRESS_S:
        say(f"waiting for {target}: {right.holder} builds, {waited_s:.0f} s so far")


def _build(right: LockRight | ClaimRight, target: Path, build: Callable[[Path], object], version: str) -> bool:
    """Build and publish. False when the right was lost meanwhile: then the result of another builder counts."""
    if fits(target, version):  # It may have been built while this process waited.
        return right.publish(lambda: None)
    right.sweep()
    workshop = target.with_name(f".{target.name}.{right.workshop}-{secrets.token_hex(8)}")
    try:
        try:
            _fill(workshop, target, build, version)
        except PreparationError as error:
            right.failed(str(error))
            raise
        return right.publish(lambda: _publish(workshop, target, version))
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _fill(workshop: Path, target: Path, build: Callable[[Path], object], version: str) -> None:
    """Run the user's function in a private directory, which is then complete and durable. Raises PreparationError."""
    try:
        workshop.mkdir(DIRECTORY_MODE)
        try:
            build(workshop)
        except (Exception, SystemExit) as error:
            got, expected = f"{type(error).__name__}: {error}", "a build without an exception"
            what, remedy = "the build function failed", "Mend it, then start again"
            raise PreparationError(what, str(target), got=got, expected=expected, remedy=remedy) from error
        _describe(workshop, version, str(target))
    except OSError as error:
        raise _failed(target, error) from error


def _checked(path: object, build: object, version: object, scope: object, timeout_s: object) -> Path:
    where = "prepare"
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(explain("path is not a path", where, got=path))
    if not callable(build):
        raise TypeError(explain("build is not callable", where, got=build, expected="a function of one directory"))
    if not isinstance(version, str):
        raise TypeError(explain("version is not a text", where, got=version, expected='such as "1"'))
    if scope not in ("node", "shared"):
        raise ValueError(explain("no such scope", where, got=scope, expected='"node" or "shared"'))
    if timeout_s is not None and (isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float))):
        raise TypeError(explain("timeout_s is not a number", where, got=timeout_s))
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(explain("timeout_s out of range", where, got=timeout_s, expected="> 0 seconds, or None"))
    target = Path(os.path.realpath(path))
    # What is at `target` may be replaced, so a path that can only be a mistake is refused.
    if target in (Path.home(), *Path.cwd().parents, Path.cwd()) or os.path.ismount(target) or target.is_file():
        got, expected = str(target), "a directory of its own"
        raise ConfigError("not a place for prepared data", where, got=got, expected=expected)
    return target


def _publish(workshop: Path, target: Path, version: str) -> None:
    """Put the result in place in one rename. What is there and does not fit is renamed first."""
    if fits(target, version):
        return
    aside = None
    if os.path.lexists(target):
        ours = (target / RECORD).is_file()
        aside = workshop.with_name(f"{workshop.name}-old")  # If this process dies, it is swept as the workshop is.
        if not ours and any(target.iterdir()):
            # Something else than a prepared directory: it may be the only copy.
            aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
            say(f"{target} has no record of its preparation; moved to {aside.name} and prepared anew")
        target.rename(aside)
    workshop.rename(target)
    sync(target.parent)
    if aside is not None and aside.name.startswith("."):
        shutil.rmtree(aside, ignore_errors=True)


def _describe(directory: Path, version: str, shown: str) -> None:
    """Write the record of everything in `directory`, and make all of it durable.

    Raises PreparationError, with the name `shown`, when there is nothing in it; OSError.
    """
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    if not paths:
        raise PreparationError("the build function made nothing", shown, got="an empty directory", expected="some file")
    files = [{**_stamp(path), "path": str(path.relative_to(directory))} for path in paths]
    write_text(directory / RECORD, json.dumps({"format": _FORMAT, "version": version, "files": files}, indent=1) + "\n")
    sync_tree(directory)


def fits(directory: Path, version: str) -> bool:
    """Whether the `directory` is there, of this `version`, and every file is as it was published.

    A file of the same size and modification time is taken as unchanged, so that a restart does not read all data again;
    any other, such as that of a copy, is compared by digest.
    """
    try:
        record = json.loads((directory / RECORD).read_text())
        if record["format"] != _FORMAT or record["version"] != version:
            return False
        return all(_is_as_it_was(directory / each["path"], each) for each in record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_as_it_was(path: Path, entry: dict[str, Any]) -> bool:
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) == (entry["size"], entry["mtime_ns"]):
        return True
    return bool(status.st_size == entry["size"] and _stamp(path)["sha256"] == entry["sha256"])


def _stamp(path: Path) -> dict[str, Any]:
    """Size, time and digest of a file. A link counts as what it leads to."""
    status, digest = path.stat(), hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": digest.hexdigest()}


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
        if reply.refusal == "failed" and not fits(self._target, self._version):
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
