"""The etcd of one machine's agents, for runs without `--etcd`: found, or started in a process that outlives them.

The runtime directory holds a record for each run that has such a server. Reading and writing there needs the lock on
the directory itself. The directory holds no secrets, but a user who can write there can send agents to another server,
so it must belong to this user alone.

What a crashed server leaves is removed, and a fresh server with a new identity takes its place. The etcd that pip
installs may lose acknowledged writes in a crash, so its data is never used again.

Each server has a keeper: the process of `embedded_keeper`, which starts it and ends it.
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
"""A keeper that has not answered after this many seconds is killed."""
KILLED_S_MAX = 1.0
"""How many seconds to wait for the end of a keeper that was killed."""

LOCK_S_MAX = 60.0
"""How many seconds to wait for the lock. Any start or stop of a server takes less."""

RUNTIME_PARENT, SESSIONS_PARENT = "/tmp", "/run/user"  # noqa: S108  What is there is checked.
"""The parent of the runtime directory, and the parent of the directories that login sessions have."""

DATA_PREFIX = "elasticrt-etcd-"
"""The prefix of the data directories' names, in the directory for temporary files."""


@dataclass(frozen=True)
class EmbeddedServer:
    """A running embedded server, as its keeper has recorded it.

    Attributes:
        address: where clients reach it.
        keeper_pid: the process that started etcd, and ends it when the run no longer needs it.
        keeper_start: when the keeper started (kernel ticks since boot). It tells the keeper from a later process with
            the same number.
        why_ended: why etcd has ended by itself, in a few words; "" while it runs.
    """

    address: Address
    keeper_pid: int
    keeper_start: int
    why_ended: str = ""

    def is_alive(self) -> bool:
        """Whether etcd still runs: it does not outlive its keeper."""
        return not self.why_ended and start_of(self.keeper_pid) == self.keeper_start


def find(run_id: str) -> EmbeddedServer | None:
    """The server of this run on this machine, if there is one. Looking for it does not keep it alive.

    Raises ConfigError if the runtime directory is unsafe.
    """
    with locked() as (directory, _):
        return _live_server(record_of(directory, run_id))


def find_or_start(run_id: str, *, listen: Address | None = None) -> EmbeddedServer:
    """The server of this run on this machine, started if need be: on a socket of this user's, or at `listen`.

    The server ends when the run has had no member for half a minute (much sooner when the run has its result). Raises
    StoreError if it does not start; ConfigError if there is no etcd to start, `listen` is not ours to serve or the
    runtime directory is unsafe.
    """
    with locked() as (directory, lock_fd):
        record = record_of(directory, run_id)
        if _live_server(record) is None:
            # A keeper that was killed leaves its record behind, and its run may never come back. So records of all runs
            # are looked at.
            for path in directory.glob("*.json"):
                _live_server(path)
            _start(run_id, record, lock_fd, listen)
        served = _live_server(record)
        # The new time of the record tells the keeper to wait for this agent: the keeper compares it before it ends. If
        # etcd has ended by itself, the keeper has removed the record meanwhile.
        with suppress(FileNotFoundError):
            os.utime(record)
            if served is not None:
                return served
        raise StoreError("the embedded etcd ended at once", f"run {run_id}", remedy="Start again")


def has_ended(run_id: str, served: EmbeddedServer) -> tuple[bool, str]:
    """Whether a server of this run has ended, and why; "" if that is not known, or if there is a new one already."""
    try:
        recorded = read_record(record_of(runtime_directory(), run_id))
    except ConfigError:
        recorded = None
    if recorded is None or recorded == served:
        return not served.is_alive(), ""
    return True, recorded.why_ended


def read_record(path: Path) -> EmbeddedServer | None:
    """The server that a keeper has recorded; None if there is no record, or none that can be read."""
    try:
        fields = json.loads(path.read_bytes())
        return EmbeddedServer(**{**fields, "address": Address(**fields["address"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_record(path: Path, served: EmbeddedServer) -> None:
    """Record a server, in one step. Raises StoreError if the record cannot be written.

    The lock must be held, except by the server's own keeper: while that lives, nobody else writes the record.
    """
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
    """Hold the lock of this user's embedded servers. Yields the runtime directory, and the descriptor with the lock.

    A process that inherits the descriptor holds the lock as well, until all of them have closed it. Raises ConfigError
    if the directory is unsafe, StoreError if the lock is not free within a minute.
    """
    directory = runtime_directory()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # A blocking flock has no deadline, and one that hangs would hang every agent of this user. So it is polled.
        deadline = time.monotonic() + LOCK_S_MAX
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                what = "the lock of the embedded etcd stays taken"
                raise StoreError(what, str(directory), got=f"{LOCK_S_MAX:g} s")
            time.sleep(0.002)
        yield directory, fd
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    """Whether the lock could be taken on this descriptor, without waiting."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _live_server(record: Path) -> EmbeddedServer | None:
    """The server of a record. None if its keeper has ended; then the record is removed."""
    served = read_record(record)
    if served is not None and served.is_alive():
        return served
    record.unlink(missing_ok=True)
    return None


def _start(run_id: str, record: Path, lock_fd: int, listen: Address | None) -> None:
    """Start a keeper and wait until its server is recorded."""
    order = {
        "run_id": run_id,
        "record": str(record),
        "binary": str(etcd_server.find_binary()),
        "listen": None
        if listen is None
        else asdict(etcd_server.resolve_listen_address(listen, "--rdzv-endpoint, or SLURM's first node")),
        "lock_fd": lock_fd,
    }
    try:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "elasticrt.store.embedded_keeper", json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Neither a user's file called json.py nor a directory that is to be unmounted is in the way there.
            cwd="/",
            env=_environment(),
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
        # This process will talk to the server, so it loads the client while the server starts.
        import elasticrt.store.etcd  # noqa: F401

        text = _answer_of(keeper)
    except OSError as failure:
        what = "the embedded etcd could not be started"
        raise StoreError(what, sys.executable, got=failure, remedy=etcd_server.REMEDY) from failure
    if not text:
        what = "the keeper of the embedded etcd died or hung while it started"
        raise StoreError(what, sys.executable, remedy="Give --etcd HOST:PORT of a running etcd")
    # The keeper says "" when its server is there, otherwise why it is not.
    if error := json.loads(text):
        raise StoreError(error)


def _answer_of(keeper: subprocess.Popen[bytes]) -> bytes:
    """The answer of a keeper when its server is there, or cannot be. A keeper without a timely answer is killed."""
    try:
        text, _ = keeper.communicate(timeout=START_S_MAX)
    except subprocess.TimeoutExpired:
        # The keeper, or its fork in the same process group, holds the lock that all runs of this user need.
        with suppress(ProcessLookupError):
            os.killpg(keeper.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            keeper.communicate(timeout=KILLED_S_MAX)
        return b""
    return text


def _environment() -> dict[str, str]:
    """This process's environment without etcd's variables, in which the keeper finds this very package.

    The package may not be installed: then its directory is put on PYTHONPATH.
    """
    environment = etcd_server.environment()
    root = str(Path(elasticrt.__file__).parents[1])
    if root in sys.path and not {"site-packages", "dist-packages"} & set(Path(root).parts):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH", ""))))
    return environment


@contextmanager
def new_data_directory() -> Iterator[Path]:
    """A data directory for a server and its socket, removed afterwards; in /tmp if the usual path is too long.

    The directory is locked until this process ends. An unlocked directory was left by a process that was killed, so it
    is removed.
    """
    where = tempfile.gettempdir()
    room = SOCKET_PATH_MAX_BYTES - len(f"/{DATA_PREFIX}12345678/{etcd_server.SOCKET}")
    # /tmp belongs to all users, but `mkdtemp` makes a directory of this user alone.
    where = where if len(os.fsencode(where)) <= room else "/tmp"  # noqa: S108
    for left in Path(where).glob(f"{DATA_PREFIX}*"):
        fd = -1 if what_is_unsafe(left) else _lock_directory(left)
        if fd >= 0:
            shutil.rmtree(left, ignore_errors=True)
            os.close(fd)
    while _lock_directory(data := Path(tempfile.mkdtemp(prefix=DATA_PREFIX, dir=where))) < 0:
        # Another process took the new directory for one that was left, before it was locked here.
        pass
    try:
        yield data
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _lock_directory(data: Path) -> int:
    """Lock a directory. Returns the descriptor that has the lock, -1 if another process holds or has removed it."""
    try:
        fd = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return -1
    # Between `open` and the lock another process may have removed the directory.
    if _try_lock(fd) and data.exists():
        return fd
    os.close(fd)
    return -1


def runtime_directory() -> Path:
    """`/tmp/elasticrt-<uid>`, made if need be; below `$XDG_RUNTIME_DIR` if that is not the login session's.

    A login session's directory does not exist for cron jobs and services, and goes with the session. With it two agents
    of one run would have two servers. So it is used only if another user has taken the name in /tmp.

    Raises ConfigError if the directory is not one that only this user can touch.
    """
    uid = os.getuid()
    session, chosen = Path(SESSIONS_PARENT, str(uid)), Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    directory = Path(RUNTIME_PARENT, f"elasticrt-{uid}")
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
        remedy = "Another user could control it: remove it, or set XDG_RUNTIME_DIR"
        raise ConfigError("unsafe runtime directory", str(directory), got=problem, expected=expected, remedy=remedy)
    return directory


def _is_ours(parent: Path) -> bool:
    """Whether this user can create files in `parent` and no other user can. Others may read it."""
    return os.access(parent, os.W_OK | os.X_OK) and not what_is_unsafe(parent.resolve(), 0o022)


def what_is_unsafe(directory: Path, forbidden: int = 0o077) -> str:
    """Why other users can get at what is in the directory; "" if they cannot, or if there is no directory.

    `forbidden` has the mode bits that let other users in.
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
