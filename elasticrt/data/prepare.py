"""`prepare`: one process builds the data, the others wait, and no process ever sees half of the data.

The builder writes into a private directory, the workshop, beside the destination. The workshop is then synced and
renamed into place, together with a record of every file: name, size, modification time and SHA-256. A directory that
fits its record is used as it is; any other is built again.

One process at a time has the right to build. On a node the right is a file lock, which ends with its holder
(`LockRight`). For storage that nodes share it is a claim in etcd through the agents, fenced by the generation
(`ClaimRight`). Both classes have the same methods.
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
from elasticrt.ipc.messages import BuildDone, ClaimBuild, Reply
from elasticrt.ipc.std_streams import say

PROGRESS_S = 10.0
"""A rank that waits names the builder once in so many seconds."""

RECORD = ".elasticrt-prepared.json"
"""The name of the record. It lies inside of the prepared directory, so that one rename shows both."""

_FORMAT = 1
_READ_BYTES = 1 << 20
# How long, in seconds, an agent may take to answer one request.
_ANSWER_S = 60.0
_VISIBLE_S = 60.0
"""How long, in seconds, a network file system may take to show what another node has published."""

UNSURE_S = 1200.0
"""How long, in seconds, etcd may be unreachable or full. An agent gives up on etcd earlier than that."""

# The longest text of a build function's error that other processes are told.
_ERROR_CHARS = 1000
# The first word in a lock file that tells of a failed build.
_FAILED = "failed"
# By lock file, the lock between the threads of this process.
_threads: dict[str, threading.Lock] = {}


def prepare(
    path: str | os.PathLike[str],
    build: Callable[[Path], object],
    *,
    version: str = "1",
    scope: Literal["node", "shared"] = "node",
    timeout_s: float | None = None,
) -> Path:
    """Build the directory `path` exactly once, in one process. Returns its path when it is complete.

    Call this on every rank, before or after `init`.

    Args:
        path: the directory of the result; its parent must be writable. A result that is there and fits its record is
            reused.
        build: the function that builds. It is called in one process, with the path of an empty private directory, which
            it fills. Its return value is ignored.
        version: a result of another version is built again.
        scope: "node": every node builds for itself. "shared": one node builds for all nodes, which share the storage.
        timeout_s: how long to wait for another builder, in seconds; None: as long as the builder lives.

    If the builder dies, a process that waits takes over. If `build` raises, or leaves its directory empty, the builder
    and all that wait for it fail with PreparationError, which ends the run; in the "shared" scope on all nodes. Raises
    PreparationError too when `timeout_s` passes; TypeError, ValueError and ConfigError for invalid arguments.

    After `init` no rank returns before all nodes have their data. What follows is often a collective, and a collective
    waits for half an hour only.
    """
    target = _checked(path, build, version, scope, timeout_s)
    limit_s = math.inf if timeout_s is None else timeout_s
    # None before `init`, and in a block of `local_first` or `global_first`, where ranks must not wait for each other.
    ranks = None
    # Data can be prepared without loading torch. Then there is no process group, and no reason to import torch now.
    if "torch.distributed" in sys.modules:
        from elasticrt.distributed.barrier import Barrier, together

        ranks = Barrier(f"prepare({str(target)!r})") if together() else None
    if ranks is None:
        _ready(target, build, version, scope, limit_s)
        return target
    ranks.arrive()
    try:
        _ready(target, build, version, scope, limit_s)
    except PreparationError as error:
        # The other ranks may have ended, and the store with them. The error to raise is the one of the build.
        with contextlib.suppress(RuntimeError):
            ranks.finish(str(error))
        raise
    ranks.finish()
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
        for_all = scope == "shared" and agent_client.agent_link().has_agent
        right = ClaimRight(target, version) if for_all else LockRight(target)
        while True:
            if right.ask():
                try:
                    # While this is set, the agent lets the build finish when the membership changes.
                    page.building = 1
                    if _build(right, target, build, version):
                        return
                finally:
                    page.building = 0
                    right.release()
            # This process has no right to build, or has lost the right meanwhile. Another process builds.
            if fits(target, version):
                return
            _pause(right, target, time.monotonic() - began, limit_s)
    except OSError as error:
        raise _failed(target, error) from error


def _failed(target: Path, error: OSError) -> PreparationError:
    expected, remedy = "a directory that this user can write to, with room", "Fix it, or prepare the data elsewhere"
    return PreparationError("preparation failed", str(target), got=error, expected=expected, remedy=remedy)


def _pause(right: LockRight | ClaimRight, target: Path, waited_s: float, limit_s: float) -> None:
    """Wait until it is time to ask for the right again, and name the builder every PROGRESS_S.

    Raises PreparationError when `waited_s`, the time since the first question, has reached `limit_s`.
    """
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
    # The data may have been built while this process waited for the right. To publish nothing settles a claim.
    if fits(target, version):
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
    """Run the user's function in the workshop, then write the record and sync. Raises PreparationError."""
    try:
        workshop.mkdir(DIRECTORY_MODE)
        try:
            build(workshop)
        except (Exception, SystemExit) as error:
            got, expected = f"{type(error).__name__}: {error}", "a build without an exception"
            what, remedy = "the build function failed", "Fix it, then start again"
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
    """Put the result in place in one rename. A directory that is there and does not fit is renamed first."""
    if fits(target, version):
        return
    aside = None
    if os.path.lexists(target):
        ours = (target / RECORD).is_file()
        # With a workshop's name: if this process dies now, `sweep` removes the old directory as well.
        aside = workshop.with_name(f"{workshop.name}-old")
        if not ours and any(target.iterdir()):
            # Not a prepared directory. It may be the user's only copy of something, so it is kept.
            aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
            say(f"{target} has no record of its preparation; moved to {aside.name} and prepared again")
        elif ours:
            say(f"{target} is of another version, or files in it have changed; prepared again")
        target.rename(aside)
    workshop.rename(target)
    sync(target.parent)
    if aside is not None and aside.name.startswith("."):
        shutil.rmtree(aside, ignore_errors=True)


def _describe(directory: Path, version: str, shown: str) -> None:
    """Write the record of everything in `directory`, and make all of it durable.

    Raises PreparationError, which names the directory `shown`, when there are no files in it; OSError.
    """
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    if not paths:
        raise PreparationError(
            "the build function created no files", shown, got="an empty directory", expected="some file"
        )
    files = [{**_stamp(path), "path": str(path.relative_to(directory))} for path in paths]
    write_text(directory / RECORD, json.dumps({"format": _FORMAT, "version": version, "files": files}, indent=1) + "\n")
    sync_tree(directory)


def fits(directory: Path, version: str) -> bool:
    """Whether `directory` is there, is of this `version`, and has every file as it was published.

    A file with the size and modification time of the record counts as unchanged, so that a restart does not read all
    data again. A file with another time, as in a copied directory, is compared by its digest.
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
    """Size, modification time and digest of a file. A symbolic link counts as the file that it leads to."""
    status, digest = path.stat(), hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": digest.hexdigest()}


class LockRight:
    """The right to build on this node: a lock on a file beside the directory. The lock ends with its holder.

    The file also tells of a build that has failed, so that no other process of the same start repeats it.

    It is a POSIX record lock, which forks do not inherit, unlike a lock by `flock`. So a DataLoader worker that
    outlives a killed trainer keeps no other process waiting. Record locks do not exclude threads of one process from
    each other; an ordinary `threading.Lock` does. The file stays, because removing a lock file is a race.

    Args:
        target: the directory to build.

    Attributes:
        poll_s: the pause between two attempts to take the right, in seconds.
        holder: the process that builds, in words.
        workshop: a part of the names of the workshops, the private directories that are built in.
    """

    poll_s = 0.1
    holder = "another process of this node"
    workshop = "building"

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name(f".{target.name}.lock")
        self._thread = _threads.setdefault(str(self._path), threading.Lock())
        # "" without an agent: then nothing tells which processes were started together.
        self._start = agent_client.worker_env().nonce
        self._fd = -1

    def ask(self) -> bool:
        """Take the right if it is free, and return whether this process has it.

        Raises PreparationError when the build has failed in another process of this start, OSError.
        """
        if not self._thread.acquire(blocking=False):
            return False
        with contextlib.ExitStack() as stack:
            stack.callback(self.release)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                # Either error means that another process has the lock. That process has written its name to the file.
                self.holder = os.read(self._fd, 100).decode(errors="replace") or self.holder
                return False
            start, pid, error = self._failure()
            if start and start == self._start and pid != str(os.getpid()):
                raise PreparationError(error)
            self._write(f"process {os.getpid()}")
            stack.pop_all()
        return True

    def sweep(self) -> None:
        """Before building: remove the workshops of dead builders. No other builder lives, as this one has the lock."""
        for leftover in self._target.parent.glob(f".{self._target.name}.{self.workshop}-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def failed(self, error: str) -> None:
        """The build has failed with `error`, and so fail all processes of this start that wait for it."""
        self._write(f"{_FAILED} {self._start} {os.getpid()} {error[:_ERROR_CHARS]}")

    def _failure(self) -> tuple[str, str, str]:
        """The start and the process in which the last build has failed, and its error; empty if it has not failed."""
        kind, *fields = os.pread(self._fd, 8 * _ERROR_CHARS, 0).decode(errors="replace").split(" ", 3)
        return (fields[0], fields[1], fields[2]) if kind == _FAILED and len(fields) == 3 else ("", "", "")

    def _write(self, text: str) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def publish(self, put_in_place: Callable[[], None]) -> bool:
        """Put the result in place. Always true: no other process can have taken the lock meanwhile."""
        put_in_place()
        return True

    def release(self) -> None:
        """Give the right back, however the build has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._thread.release()


class ClaimRight:
    """The right to build for all nodes: a claim that this node's agent makes in etcd. It has the methods of LockRight.

    The agent gives its claim to one of its workers. When that worker ends, the claim is free for all.

    Args:
        target: the directory to build, on storage that all nodes share.
        version: the version of the data.
    """

    poll_s = 0.5

    def __init__(self, target: Path, version: str) -> None:
        worker = agent_client.worker_env()
        self._agent = agent_client.agent_link()
        self._target = target
        self._version = version
        self._generation = worker.generation
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:12]
        # Keys in etcd take a limited set of characters. The digest tells apart directories of the same name.
        self._name = re.sub(r"[^A-Za-z0-9._-]", "_", target.name)[:64].lstrip(".") + "-" + digest
        self.holder = "another process of this node"
        self._refusal, self._since = "", 0.0  # The refusal in the last answer, and since when it is the same.
        self.workshop = f"shared-{self._generation}"

    def ask(self) -> bool:
        """Claim, and return whether this process may build.

        Raises PreparationError when the build has failed on another node, or when its result does not become visible
        here.
        """
        reply = self._claim()
        if reply.refusal == "wait":
            self.holder = reply.reason
        if reply.refusal == "failed" and not fits(self._target, self._version):
            raise PreparationError(reply.reason or "the build failed elsewhere")
        if reply.refusal == "done" and time.monotonic() - self._since > _VISIBLE_S:
            got, expected = f"nothing that fits its record for {_VISIBLE_S:.0f} s", "storage that all nodes share"
            what, remedy = (
                "another node has prepared the data, but they are not visible on this node",
                'Use scope="node", or another version',
            )
            raise PreparationError(what, str(self._target), got=got, expected=expected, remedy=remedy)
        return reply.ok

    def sweep(self) -> None:
        """Before building: remove the workshops of earlier generations.

        Those of this generation stay. A builder that has lost its claim may only be paused, and write on later.
        """
        for leftover in self._target.parent.glob(f".{self._target.name}.shared-*"):
            generation = leftover.name.rpartition("shared-")[2].partition("-")[0]
            if generation.isdigit() and int(generation) < self._generation:
                shutil.rmtree(leftover, ignore_errors=True)

    def failed(self, error: str) -> None:
        """The build has failed. All nodes fail with `error`."""
        self._request(lambda number: BuildDone(number, self._name, self._version, error[:_ERROR_CHARS]))

    def publish(self, put_in_place: Callable[[], None]) -> bool:
        """Put the result in place and record that in etcd, if the claim still stands. False when the claim was lost."""
        # A builder keeps its claim, so another ClaimBuild asks whether it still stands.
        while (reply := self._claim()).refusal == "unsure":
            time.sleep(self.poll_s)
        if not reply.ok:
            return False
        put_in_place()
        return self._request(lambda number: BuildDone(number, self._name, self._version)).ok

    def release(self) -> None:
        """Nothing to do: a claim ends when its result or failure is recorded, or with the lease of its builder."""

    def _claim(self) -> Reply:
        """Ask for the claim. After the refusal "unsure" it may stand all the same, and the caller asks again.

        Raises PreparationError when the agent refuses for good, or when etcd has not answered for UNSURE_S.
        """
        reply = self._request(lambda number: ClaimBuild(number, self._name, self._version))
        if reply.refusal != self._refusal:
            self._refusal, self._since = reply.refusal, time.monotonic()
            if reply.refusal == "unsure":
                say(f"{self._target} waits for etcd: {reply.reason}")
        waits = reply.refusal in ("wait", "done", "failed", "unsure")
        if not (reply.ok or waits) or (reply.refusal == "unsure" and time.monotonic() - self._since > UNSURE_S):
            raise PreparationError("the agent refuses the preparation", str(self._target), got=reply.reason)
        return reply

    def _request(self, make: Callable[[int], ClaimBuild | BuildDone]) -> Reply:
        reply = self._agent.request(make, _ANSWER_S)
        if reply is None:
            got = f"nothing in {_ANSWER_S:.0f} s"
            raise PreparationError("no answer from the agent", str(self._target), got=got)
        return reply
