"""The etcd of one machine's agents, for runs without `--etcd`: found, or started in a process that outlives them.

The runtime directory holds a record for each run that has such a server. Reading and writing there needs the lock on
the directory itself. It holds no secrets, but a user who can write there can send agents to another server, so it must
be this user's alone. What a crashed server leaves is removed, and a fresh one with a new identity takes its place: the
version that pip installs may lose acknowledged writes in a crash, so its data is never used again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import elasticrt
from elasticrt.errors import ConfigError, StoreError
from elasticrt.ipc.proc import start_of
from elasticrt.store import etcd_server
from elasticrt.store.address import SOCKET_PATH_MAX_BYTES
from elasticrt.store.protocol import Address

START_S_MAX = 40.0
"""A keeper that has not answered by then is killed."""
KILLED_S_MAX = 1.0

LOCK_S_MAX = 60.0
"""Longer than any start or stop of a server takes."""

PLACE, SESSIONS = "/tmp", "/run/user"  # noqa: S108  What is there is checked.
"""Where the runtime directory is, and where login sessions have directories of their own."""

DATA_PREFIX = "elasticrt-etcd-"
"""Of the data directories, below the directory for temporary files."""


@dataclass(frozen=True)
class Served:
    """A running embedded server, as its keeper has recorded it.

    Attributes:
        address: where clients reach it.
        keeper_pid: the process that started etcd, and ends it when the run no longer needs it.
        keeper_start: tells the keeper from a later process with the same number (kernel ticks since boot).
    """

    address: Address
    keeper_pid: int
    keeper_start: int

    def lives(self) -> bool:
        """Whether its keeper still runs; etcd does not outlive it."""
        return start_of(self.keeper_pid) == self.keeper_start


def find(run_id: str) -> Served | None:
    """The server of this run on this machine, if there is one. Looking for it does not keep it alive.

    Raises ConfigError when the runtime directory is unsafe.
    """
    with locked() as (directory, _):
        return _living(record_of(directory, run_id))


def find_or_start(run_id: str, *, listen: Address | None = None) -> Served:
    """The server of this run on this machine, started if need be: on a socket of this user's, or at `listen`.

    It ends when no member of the run has been there for half a minute (much sooner when the run has its result).
    Raises StoreError when it does not start; ConfigError when there is no etcd to start, `listen` is not ours to serve
    or the runtime directory is unsafe.
    """
    with locked() as (directory, lock_fd):
        record = record_of(directory, run_id)
        if _living(record) is None:
            # No keeper that was killed removes its own record, and its run may never come back.
            for path in directory.glob("*.json"):
                _living(path)
            _start(run_id, record, lock_fd, listen)
        served = _living(record)
        # The keeper waits for the agent that has found its server: it compares this time before it ends. Where etcd has
        # ended by itself it removes its record meanwhile.
        with suppress(FileNotFoundError):
            os.utime(record)
            if served is not None:
                return served
        raise StoreError("the embedded etcd ended at once", f"run {run_id}", remedy="Start again")


def read_record(path: Path) -> Served | None:
    """What a keeper registered; None when there is nothing, or nothing that makes sense."""
    try:
        fields = json.loads(path.read_bytes())
        return Served(**{**fields, "address": Address(**fields["address"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_record(path: Path, served: Served) -> None:
    """Register a server, in one step. With the lock held. Raises StoreError where that cannot be written."""
    draft = path.with_suffix(".new")
    try:
        draft.write_text(json.dumps(asdict(served)), encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        what, remedy = "the embedded etcd can't be registered", "Make room there, or set XDG_RUNTIME_DIR"
        raise StoreError(what, str(path.parent), got=error.strerror, remedy=remedy) from error


def record_of(directory: Path, run_id: str) -> Path:
    """The path of a run's record. Options have checked that a run id can be a file name."""
    assert run_id == Path(run_id).name, run_id
    return directory / f"{run_id}.json"


@contextmanager
def locked() -> Iterator[tuple[Path, int]]:
    """Hold the lock of this user's embedded servers; yields the runtime directory, and the descriptor with the lock.

    A process that inherits the descriptor holds the lock as well, until all have closed it. Raises ConfigError when the
    directory is unsafe, StoreError when the lock is not to be had in a minute.
    """
    directory = runtime_directory()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # A blocking flock has no deadline, and one that hangs would hang every agent of this user.
        deadline = time.monotonic() + LOCK_S_MAX
        while not _locks(fd):
            if time.monotonic() >= deadline:
                what = "the lock of the embedded etcd stays taken"
                raise StoreError(what, str(directory), got=f"{LOCK_S_MAX:g} s")
            time.sleep(0.002)
        yield directory, fd
    finally:
        os.close(fd)


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _living(record: Path) -> Served | None:
    """The server of a record; None when its keeper has ended, and then the record is removed."""
    served = read_record(record)
    if served is not None and served.lives():
        return served
    record.unlink(missing_ok=True)
    return None


def _start(run_id: str, record: Path, lock_fd: int, listen: Address | None) -> None:
    """Start a keeper and wait until its server is registered."""
    order = {
        "run_id": run_id,
        "record": str(record),
        "binary": str(etcd_server.find_binary()),
        "listen": None
        if listen is None
        else asdict(etcd_server.claim(listen, "--rdzv-endpoint, or SLURM's first node")),
        "lock_fd": lock_fd,
    }
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "elasticrt.store.embedded_supervisor", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",  # Neither a user's file called json.py nor a directory to be unmounted is in the way.
            env=_environment(),
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
        # This process will talk to the server: load the client while it starts.
        import elasticrt.store.etcd  # noqa: F401

        text = _said(keeper)
    except OSError as failure:
        got, remedy = etcd_server.in_our_words(str(failure))
        what = "the embedded etcd could not be started"
        raise StoreError(what, sys.executable, got=got, remedy=remedy) from failure
    if not text:
        what = "the keeper of the embedded etcd died or hung while it started"
        raise StoreError(what, sys.executable, remedy="Give --etcd HOST:PORT of a running etcd")
    # The keeper has said "" if its server is there, else why it is not.
    if error := json.loads(text):
        raise StoreError(error)


def _said(keeper: subprocess.Popen[bytes]) -> bytes:
    """What a keeper says when its server is there, or cannot be. One that says nothing in time is killed."""
    try:
        text, _ = keeper.communicate(timeout=START_S_MAX)
    except subprocess.TimeoutExpired:
        # It holds the lock of all of this user's runs, or its fork does, which is in its process group.
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            keeper.communicate(timeout=KILLED_S_MAX)
        return b""
    return text


def _environment() -> dict[str, str]:
    """Ours, without etcd's variables, and so that the keeper finds this very package when it is not installed."""
    environment = etcd_server.environment()
    root = str(Path(elasticrt.__file__).parents[1])
    if root in sys.path and not {"site-packages", "dist-packages"} & set(Path(root).parts):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
    return environment


@contextmanager
def new_data() -> Iterator[Path]:
    """A data directory, removed afterwards, in which a server can have its socket: if the path is too long, in /tmp.

    It is locked until this process ends. A directory that is not locked was left by a process that was killed: it is
    removed.
    """
    where = tempfile.gettempdir()
    room = SOCKET_PATH_MAX_BYTES - len(f"/{DATA_PREFIX}12345678/{etcd_server.SOCKET}")
    where = where if len(os.fsencode(where)) <= room else "/tmp"  # noqa: S108  It makes a directory of ours alone.
    for left in Path(where).glob(f"{DATA_PREFIX}*"):
        fd = -1 if what_is_unsafe(left) else _hold(left)
        if fd >= 0:
            shutil.rmtree(left, ignore_errors=True)
            os.close(fd)
    while _hold(data := Path(tempfile.mkdtemp(prefix=DATA_PREFIX, dir=where))) < 0:
        pass  # Another process has taken it for one that was left.
    try:
        yield data
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _hold(data: Path) -> int:
    """Lock a directory; the descriptor that has the lock, -1 where another process holds or has removed it."""
    try:
        fd = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return -1
    if _locks(fd) and data.exists():
        return fd
    os.close(fd)
    return -1


def runtime_directory() -> Path:
    """`/tmp/elasticrt-<uid>`, made if need be; below `$XDG_RUNTIME_DIR` where that is not the login session's.

    A login session's is not there for cron and services, and goes with the session: two agents of one run would have
    two servers. It is used where another user has taken the name in /tmp.

    Raises ConfigError when it is not a directory that only this user can touch.
    """
    uid = os.getuid()
    session, chosen = Path(SESSIONS, str(uid)), Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    directory = Path(PLACE, f"elasticrt-{uid}")
    if chosen.is_absolute() and chosen.resolve() != session.resolve() and _is_ours(chosen):
        directory = chosen / "elasticrt"
    elif what_is_unsafe(directory) and _is_ours(session):
        directory = session / "elasticrt"
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        remedy = "Set XDG_RUNTIME_DIR to a directory of this user alone"
        raise ConfigError("the runtime directory can't be made", str(directory), got=error, remedy=remedy) from error
    problem = what_is_unsafe(directory)
    if problem:
        expected = "a directory of this user alone (mode 0700)"
        remedy = "Somebody else may control it: remove it, or set XDG_RUNTIME_DIR"
        raise ConfigError("unsafe runtime directory", str(directory), got=problem, expected=expected, remedy=remedy)
    return directory


def _is_ours(parent: Path) -> bool:
    """Whether this user can make something there, and no other can. Others may look into it."""
    return os.access(parent, os.W_OK | os.X_OK) and not what_is_unsafe(parent.resolve(), 0o022)


def what_is_unsafe(directory: Path, forbidden: int = 0o077) -> str:
    """Why others than this user can get at what is in there; "" when they can't, and when there is nothing.

    `forbidden`: the bits of its mode that let others in.
    """
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(found.st_mode):
        return "a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "not a directory"
    if found.st_uid != os.getuid():
        return f"owned by user {found.st_uid}"
    return f"mode {stat.S_IMODE(found.st_mode):04o}" if found.st_mode & forbidden else ""
