"""The owner of a checkpoint directory: one run saves to it at a time.

The owner, an agent or a process without one, writes a record into the directory and touches it every two seconds.
Another process on the same machine checks whether the owner's process lives. One on another machine waits until the
record is touched or too old; its age is measured by the directory's own clock. A file lock is no alternative: NFS may
grant it twice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from elasticrt.ipc.file_modes import FILE_MODE
from elasticrt.ipc.proc import machine, start_of
from elasticrt.ipc.typed import typed

NAME = ".owner"
BEAT_S = 2.0
STALE_S = 10.0
"""An older record has no owner. It is five beats, because a disk or a process may stand still for a while."""

LOOK_AGAIN_S = 0.5
_BYTES_MAX = 4096


@dataclass(frozen=True)
class Owner:
    """A record.

    Attributes:
        run: its run id, "" without an agent.
        store: the identity of its store, "" without one.
        node: its node's name, or its host's without an agent.
        machine: the boot and the process namespace in which `pid` counts.
        pid: of the agent, or of the process without one.
        started: when that process started, in ticks since boot.
        token: new each time that the directory is taken.
        meeting: where the agents of this machine find their store, also a fresh one in its place; "" without one.
    """

    run: str
    store: str
    node: str
    machine: str
    pid: int
    started: int
    token: str
    meeting: str = ""

    @classmethod
    def here(cls, run: str, store: str, node: str, meeting: str = "") -> Owner:
        """The record of this process."""
        return cls(run, store, node, machine(), os.getpid(), start_of(os.getpid()), secrets.token_hex(8), meeting)

    @classmethod
    def from_json(cls, text: bytes) -> Owner | None:
        """The record in `text`; None if it is none."""
        try:
            return typed(cls, json.loads(text))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def __str__(self) -> str:
        who = f"run {self.run}, " if self.run else ""
        return f"{who}process {self.pid} on {self.node}"


Verdict = Literal["free", "ours", "taken", "unsure"]


def judge(found: Owner | None, me: Owner, *, runs: bool, age_s: float) -> Verdict:
    """Whether `me` may save to a directory with the record `found`. Pure.

    Args:
        found: the record; None if there is none, or it cannot be read.
        me: the process that wants to save.
        runs: whether this machine has the process of the record.
        age_s: seconds since the record was touched, by the directory's clock.
    """
    if found is None:
        return "free"
    same_machine = found.machine == me.machine
    if same_machine and (found.pid, found.started) == (me.pid, me.started):
        return "ours"
    same_store = found.store == me.store or (same_machine and found.meeting == me.meeting)
    if found.run and found.run == me.run and same_store:
        return "ours"  # Another node of the same run: its commits are fenced by the store.
    if same_machine:
        return "taken" if runs else "free"
    return "free" if age_s > STALE_S else "unsure"


class Holding:
    """One owner's hold on one directory, kept by a thread that touches the record.

    Args:
        directory: the checkpoint directory; it exists.
        owner: its record.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._path = directory / NAME
        self._draft = directory / f"{NAME}.{owner.token}"
        self._owner = owner
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def take(self) -> Owner | None:
        """Become the owner. Returns the record of another live owner, if there is one. Raises OSError.

        If that owner is on another machine, this takes up to STALE_S.
        """
        before: tuple[Owner | None, int] | None = None
        while True:
            with self._drafted() as now_ns:
                found, touched_ns = self._read()
                runs = found is not None and start_of(found.pid) == found.started > 0
                verdict = judge(found, self._owner, runs=runs, age_s=(now_ns - touched_ns) / 1e9)
                if verdict in ("free", "ours"):
                    self._publish()
                    return None
            record = (found, touched_ns)
            if verdict == "taken" or before not in (None, record):  # It was touched meanwhile.
                return found
            before = record
            time.sleep(LOOK_AGAIN_S)

    def lost(self) -> Owner | None:
        """The owner that has taken the directory since; None without one. A deleted record is written again."""
        try:
            found, _ = self._read()
            if found is None:
                with self._drafted():
                    self._publish()
        except OSError:
            return None  # The next checkpoint cannot be written either, and that is reported.
        return None if judge(found, self._owner, runs=True, age_s=0.0) in ("free", "ours") else found

    def release(self) -> None:
        """Remove the record, if it is still ours. A fork of the owner does nothing."""
        if self._pid != os.getpid():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    @contextlib.contextmanager
    def _drafted(self) -> Iterator[int]:
        """A context in which the record is there as a file of its own. Yields the directory's time, in nanoseconds."""
        fd = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            text = json.dumps(asdict(self._owner)).encode()
            if os.write(fd, text) < len(text):  # A part of a record would keep nobody out.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # As the next write would.
            os.utime(fd)
            yield os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._draft.unlink(missing_ok=True)

    def _publish(self) -> None:
        self._draft.replace(self._path)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="elasticrt-owner", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self._is_mine():
                    os.utime(self._path)

    def _is_mine(self) -> bool:
        found, _ = self._read()
        return found is not None and found.token == self._owner.token

    def _read(self) -> tuple[Owner | None, int]:
        """The record, and when it was touched by the directory's clock, in nanoseconds. Raises OSError."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None, 0
        try:
            return Owner.from_json(os.read(fd, _BYTES_MAX)), os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
