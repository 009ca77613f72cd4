"""The runtime directory: where the agents of one machine find each other's embedded etcd, under a lock.

For each run there is a lock file and, while a server serves, a record. Nothing secret is in it, but whoever can write
there can send agents to a server of theirs: so it must be ours alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrt.errors import ConfigError, StoreError, explain
from elasticrt.ipc.proc import start_of
from elasticrt.store.address import SOCKET_PATH_MAX_BYTES
from elasticrt.store.etcd_server import SOCKET

LOCK_S_MAX = 60.0
"""Longer than any start or stop of a server takes."""

DATA_PREFIX = "elasticrt-etcd-"
"""Of the data directories, below the directory for temporary files."""

_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RECORD = {
    "scheme": str,
    "host": str,
    "port": int,
    "keeper_pid": int,
    "keeper_start": int,
    "etcd_pid": int,
    "etcd_start": int,
    "token": str,
    "data": str,
}


def runtime_directory() -> Path:
    """`$XDG_RUNTIME_DIR/elasticrt`, `/run/user/<uid>/elasticrt` or `<temporary>/elasticrt-<uid>`, made if need be.

    Raises ConfigError when it is not a directory of ours that nobody else can touch.
    """
    uid = os.getuid()
    directory = Path(tempfile.gettempdir(), f"elasticrt-{uid}")
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"):
        if _is_private(parent, uid):
            directory = Path(parent, "elasticrt")
            break
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(explain("the runtime directory can't be made", str(directory), got=str(error))) from error
    problem = what_is_unsafe(directory)
    if problem:
        expected = "a directory of this user alone (mode 0700)"
        remedy = "Somebody else may control it: remove it, or set XDG_RUNTIME_DIR"
        message = explain("unsafe runtime directory", str(directory), got=problem, expected=expected, remedy=remedy)
        raise ConfigError(message)
    return directory


@dataclass(frozen=True)
class Lock:
    """The machine's lock of one run, held. Whoever inherits `fd` holds it as well, until all have closed it."""

    directory: Path
    fd: int


@contextmanager
def locked(run_id: str, *, wait: bool = True) -> Iterator[Lock | None]:
    """Hold the machine's lock of this run; yields None when it is taken and we do not `wait`.

    Raises ConfigError, and StoreError when the lock is not to be had within a minute.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigError(explain("a bad run id", "--run-id", got=run_id, expected="1 to 128 of A-Z a-z 0-9 . _ -"))
    deadline = time.monotonic() + LOCK_S_MAX
    while True:
        directory = runtime_directory()
        path = directory / f"{run_id}.lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # The last keeper removed the directory just now.
        try:
            taken = _take(fd, deadline if wait else 0.0)
            if taken and not _still_there(fd, path):
                continue  # It was removed while we waited: another file is the lock now.
            if taken or not wait:
                yield Lock(directory, fd) if taken else None
                return
        finally:
            os.close(fd)
        raise StoreError(explain("the lock of the embedded etcd stays taken", str(path), got=f"{LOCK_S_MAX:g} s"))


def read_record(directory: Path, run_id: str) -> dict[str, Any] | None:
    """What a keeper registered; None when there is nothing, or nothing that makes sense."""
    try:
        record = json.loads((directory / f"{run_id}.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or {name: type(value) for name, value in record.items()} != _RECORD:
        return None
    return record


def write_record(directory: Path, run_id: str, record: dict[str, Any]) -> None:
    """Register, in one step. With the lock held."""
    assert {name: type(value) for name, value in record.items()} == _RECORD, record
    draft = directory / f"{run_id}.json.new"
    draft.write_text(json.dumps(record), encoding="utf-8")
    draft.replace(directory / f"{run_id}.json")


def touch_record(directory: Path, run_id: str) -> None:
    """Say that somebody has found the server: its keeper then waits for them."""
    os.utime(directory / f"{run_id}.json")


def touched_at_ns(directory: Path, run_id: str) -> int:
    """When the record was last written or touched; only for comparison with an earlier value."""
    try:
        return (directory / f"{run_id}.json").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def is_alive(record: dict[str, Any]) -> bool:
    """Whether keeper and server of this record still run (and are not other processes with their numbers)."""
    return all(start_of(record[f"{name}_pid"]) == record[f"{name}_start"] for name in ("keeper", "etcd"))


def remove_record(directory: Path, run_id: str) -> None:
    """Nobody finds the server any more. With the lock held."""
    for name in (f"{run_id}.json", f"{run_id}.json.new"):
        (directory / name).unlink(missing_ok=True)


def clean_up(directory: Path, run_id: str) -> None:
    """Remove what a dead keeper or server left. A keeper that still lives is about to end. With the lock held."""
    record = read_record(directory, run_id)
    if record is not None:
        if record["etcd_start"] and start_of(record["etcd_pid"]) == record["etcd_start"]:
            os.kill(
                record["etcd_pid"], signal.SIGKILL
            )  # The kernel did so when its keeper died; it is not yet through.
        remove_data(Path(record["data"]))
    remove_record(directory, run_id)


def make_data() -> Path:
    """A new data directory, in which a server can have its socket: one whose path is too long for that is in /tmp."""
    where = tempfile.gettempdir()
    room = SOCKET_PATH_MAX_BYTES - len(f"/{DATA_PREFIX}12345678/{SOCKET}")
    return Path(tempfile.mkdtemp(prefix=DATA_PREFIX, dir=where if len(os.fsencode(where)) <= room else "/tmp"))  # noqa: S108  It makes a directory of ours alone.


def remove_data(data: Path) -> None:
    """Remove a server's data directory. What is not one of ours is left alone: the path came from a file."""
    try:
        found = data.lstat()
    except FileNotFoundError:
        return
    if data.name.startswith(DATA_PREFIX) and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        shutil.rmtree(data, ignore_errors=True)


def forget(directory: Path, run_id: str) -> None:
    """Remove the lock file, and the directory when it was the last. With the lock held, as the last act under it.

    Not when somebody is registered: then the lock is needed.
    """
    if (directory / f"{run_id}.json").exists():
        return
    (directory / f"{run_id}.lock").unlink(missing_ok=True)
    with suppress(OSError):  # Not empty: other runs are there.
        directory.rmdir()


def sweep(directory: Path, but: str) -> None:
    """Clean up after dead keepers of other runs, where nobody else is at it."""
    for path in directory.glob("*.json"):
        run_id = path.name[: -len(".json")]
        if run_id == but or not _RUN_ID.fullmatch(run_id):
            continue
        record = read_record(directory, run_id)
        if record is not None and is_alive(record):
            continue
        with locked(run_id, wait=False) as mine:
            if mine is None:
                continue
            record = read_record(directory, run_id)
            if record is None or not is_alive(record):
                clean_up(directory, run_id)
                (directory / f"{run_id}.lock").unlink(missing_ok=True)


def what_is_unsafe(directory: Path) -> str:
    """Why others than this user can get at what is in there; "" when they can't."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return ""  # The last keeper removed it just now; whoever opens a file in it makes it anew.
    if stat.S_ISLNK(found.st_mode):
        return "a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "not a directory"
    if found.st_uid != os.getuid():
        return f"owned by user {found.st_uid}"
    return f"mode {stat.S_IMODE(found.st_mode):04o}" if found.st_mode & 0o077 else ""


def _is_private(parent: str, uid: int) -> bool:
    if not parent or not Path(parent).is_absolute():
        return False
    try:
        found = Path(parent).stat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o022
    return ours and os.access(parent, os.W_OK | os.X_OK)


def _take(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        else:
            return True


def _still_there(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
