"""The owner of a checkpoint directory: one run saves to it at a time.

The owner, which is an agent or a process without one, writes a record into the directory and touches it every two
seconds. Another process on the same machine checks whether the owner's process lives. A process on another machine
waits until the record is touched, or too old by the directory's own clock, so that no two clocks are compared. A file
lock is no alternative: NFS may grant it twice.
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
# How often the owner touches its record.
BEAT_S = 2.0
STALE_S = 10.0
"""A record that was not touched for so long has no owner. It is five beats, because a disk or a process may stand still
for a while."""

# How often a process waits between two looks at an owner on another machine.
LOOK_AGAIN_S = 0.5
_BYTES_MAX = 4096


@dataclass(frozen=True)
class Owner:
    """The record of an owner.

    Attributes:
        run: the run's id; "" without an agent.
        store: the identity of the run's etcd; "" without one.
        node: the node's name, or the host's without an agent.
        machine: the boot and the process namespace in which `pid` is valid.
        pid: process id of the agent, or of the process without one.
        started: when that process started, in ticks since boot: pids are used again.
        token: new each time that the directory is taken.
        meeting: where the agents of this machine find their etcd, the same for one that replaces it; "" without one.
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
        """A new record of this process."""
        return cls(run, store, node, machine(), os.getpid(), start_of(os.getpid()), secrets.token_hex(8), meeting)

    @classmethod
    def from_json(cls, text: bytes) -> Owner | None:
        """The record in `text`; None if it is not one."""
        try:
            return typed(cls, json.loads(text))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None

    def __str__(self) -> str:
        who = f"run {self.run}, " if self.run else ""
        return f"{who}process {self.pid} on {self.node}"


# Of `judge`. "unsure": the owner is on another machine; look again whether it touches its record.
Verdict = Literal["free", "ours", "taken", "unsure"]


def judge(found: Owner | None, me: Owner, *, runs: bool, age_s: float) -> Verdict:
    """Whether `me` may save to a directory with the record `found`. Pure.

    Args:
        found: the record; None if there is none, or if it cannot be read.
        me: the process that wants to save.
        runs: whether the process of the record runs on this machine.
        age_s: seconds since the record was touched, by the directory's clock.
    """
    if found is None:
        return "free"
    same_machine = found.machine == me.machine
    if same_machine and (found.pid, found.started) == (me.pid, me.started):
        return "ours"
    same_store = found.store == me.store or (same_machine and found.meeting == me.meeting)
    # Another node of the same run may save as well: its commits are fenced by etcd.
    if found.run and found.run == me.run and same_store:
        return "ours"
    if same_machine:
        return "taken" if runs else "free"
    return "free" if age_s > STALE_S else "unsure"


class Holding:
    """One owner's hold on one directory, kept by a thread that touches the record.

    Args:
        directory: the checkpoint directory, which exists.
        owner: the owner's record.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._path = directory / NAME
        self._draft = directory / f"{NAME}.{owner.token}"
        self._owner = owner
        self._ended = threading.Event()
        # A fork must not release what its parent holds.
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def take(self) -> Owner | None:
        """Become the owner. Returns the record of another live owner instead, if there is one. Raises OSError.

        If the other owner is on another machine, this takes up to STALE_S.
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
            # A record that has changed between two looks was touched, so its owner lives.
            if verdict == "taken" or before not in (None, record):
                return found
            before = record
            time.sleep(LOOK_AGAIN_S)

    def lost(self) -> Owner | None:
        """The owner that has taken the directory since; None if there is none. A deleted record is written again."""
        try:
            found, _ = self._read()
            if found is None:
                with self._drafted():
                    self._publish()
        # The next checkpoint cannot be written either, and reports why.
        except OSError:
            return None
        return None if judge(found, self._owner, runs=True, age_s=0.0) in ("free", "ours") else found

    def release(self) -> None:
        """Remove the record if it is still this owner's. A fork of the owner does nothing."""
        if self._pid != os.getpid():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    @contextlib.contextmanager
    def _drafted(self) -> Iterator[int]:
        """A context in which the record is a draft, a file of its own. Yields the directory's time, in nanoseconds."""
        fd = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            text = json.dumps(asdict(self._owner)).encode()
            # Half a record could not be read, and would keep nobody out. The next write would raise this error.
            if os.write(fd, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.utime(fd)
            yield os.fstat(fd).st_mtime_ns
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._draft.unlink(missing_ok=True)

    def _publish(self) -> None:
        # A rename is atomic: others see the old record or the whole new one.
        self._draft.replace(self._path)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="elasticrt-owner", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                if self._is_mine():
                    # The whole record stays as it is: only its time changes.
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
