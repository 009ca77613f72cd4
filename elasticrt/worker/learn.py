"""Learnt preloading: what the script's workers have imported is there before the next fork.

A worker tells its parent, when it meets its process group and again when it ends, which modules of a short list of
well-known libraries it has that the parent has not. Once training has gone on quietly for a while, the parent imports
them: first in a fork, a trial, that is thrown away; then those that passed, a few at a time between its other duties.
A worker that starts or ends puts all that off.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from elasticrt.contract.messages import Learnt
from elasticrt.worker import footprint, sessions, trial

QUIET_S = 2.0
"""Training counts as steady when no worker has started or ended, and none has told anything, for this long."""

MOMENT_S = 0.05
"""The parent imports for so long at a stretch, or for as long as one module takes: a recovery may be waiting."""

TRIAL_MAX_S = 60.0
TRIALS_MAX = 20
"""Each trial ends with the first module that must not be imported. After so many, the rest is left alone."""

_SHORT_LIST = ("numpy", "scipy", "PIL", "einops", "safetensors")
_TOLD_AT_ONCE = 100
"""Modules in one message. All of them may be more than a socket takes at once."""
_TOLD_MAX_BYTES = 1 << 20


def is_listed(name: str) -> bool:
    """Whether a module belongs to a library that may be learnt: torch, torchvision and so on, and the short list."""
    root = name.partition(".")[0]
    return root.startswith("torch") or root in _SHORT_LIST


def imported_since(marker: str) -> list[str]:
    """The modules that were imported after the one called `marker`, in that order.

    From the end: touching every module's name would copy, in a fork, all the pages that the names are in.
    """
    found = []
    for name in reversed(list(sys.modules) if threading.active_count() > 1 else sys.modules):
        if name == marker:
            break
        found.append(name)
    return found[::-1]


class Telling:
    """A worker's side: each call tells the parent what is new since the last; the first, also that nothing is.

    New means listed modules with the file of each, but for those from beside the script: they are the user's, may
    change, and may do anything while they are imported.
    """

    def __init__(self, teller: socket.socket, directory: str) -> None:
        self._teller = teller
        self._socket = os.fstat(teller.fileno())
        self._directory = directory
        self._marker = next(reversed(sys.modules))
        self._has_told = False

    def __call__(self) -> None:
        """Tell it. The parent may be gone, or busy for long: then it does not learn this, and nothing else happens."""
        names = imported_since(self._marker)
        found = self._listed(names)
        if self._has_told and not found:
            return
        self._has_told, self._marker = True, names[-1] if names else self._marker
        with contextlib.suppress(OSError):
            # A script may close all that it has not opened, and open something else under that number.
            if os.path.samestat(os.fstat(self._teller.fileno()), self._socket):
                for start in range(0, len(found) or 1, _TOLD_AT_ONCE):
                    self._teller.send(json.dumps(dict(list(found.items())[start : start + _TOLD_AT_ONCE])).encode())

    def _listed(self, names: list[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        local: dict[str, bool] = {}
        for name in filter(is_listed, names):
            origin = trial.origin_of(sys.modules.get(name), name)
            root = name.partition(".")[0]
            if root not in local:
                local[root] = trial.is_local(sys.modules.get(root), root, self._directory)
            if origin and not local[root]:
                found[name] = origin
        return found


def read(data: bytes) -> dict[str, str]:
    """What a worker has told: names and files. Nothing, if it is not of that form: scripts can write there as well."""
    try:
        told = json.loads(data)
    except ValueError:
        return {}
    if not isinstance(told, dict):
        return {}
    return {name: origin for name, origin in told.items() if isinstance(origin, str) and is_listed(name)}


@dataclass
class _Trial:
    pid: int
    reader: int
    ends_at: float
    names: list[str]
    lines: bytes = b""

    def last(self) -> list[str]:
        """The last line of its report. One that has said nothing has failed with its first module."""
        whole = self.lines.split(b"\n")[:-1]
        return list(map(str, json.loads(whole[-1]))) if whole else self.names[:1]


@dataclass
class Learner:
    """The parent's side. `turn` does what is due, and waits for nothing.

    Attributes:
        directory: what the script has first on its path.
        forget: what a fork has to close that only the parent may hold.
        unsafe: why the parent cannot be forked any more, for all that the trials have said; "" as a rule.
    """

    directory: str
    forget: Callable[[], None]
    unsafe: str = ""
    _told: dict[str, str] = field(default_factory=dict)
    _left_out: dict[str, str] = field(default_factory=dict)
    _passed: list[str] = field(default_factory=list)
    _learnt: list[str] = field(default_factory=list)
    _import_s: float = 0.0
    _trial: _Trial | None = None
    _trials: int = 0
    _quiet_since: float | None = None  # None: there is nothing to do.
    _has_reported: bool = False

    def __post_init__(self) -> None:
        self._inbox, self.teller = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._inbox.setblocking(False)
        self.teller.setblocking(False)

    def filenos(self) -> list[int]:
        """What to wait for, besides `due_in_s`."""
        return [self._inbox.fileno(), *([self._trial.reader] if self._trial else [])]

    def due_in_s(self, now: float) -> float | None:
        """For how long there is nothing to do while training goes on and nothing happens; None: for ever."""
        if self._trial is not None:
            return max(0.0, self._trial.ends_at - now)
        return None if self._quiet_since is None else max(0.0, self._quiet_since + QUIET_S - now)

    def close_inbox(self) -> None:
        """In a fork: this end is the parent's."""
        self._inbox.close()
        if self._trial is not None:
            os.close(self._trial.reader)

    def disturbed(self, now: float) -> None:
        """A worker starts or has ended: whatever is under way waits, a trial is stopped."""
        if self._trial is not None:
            self._stop(self._trial)
        if self._quiet_since is not None:
            self._quiet_since = now

    def reaping(self, pid: int) -> None:
        """A child has ended and still has its number: if it was a trial, what that has started goes as well."""
        if self._trial is not None and pid == self._trial.pid:
            sessions.kill_sessions([pid], signal.SIGKILL)
            self._trial.pid = 0

    def turn(self, now: float, *, training: bool) -> Learnt | None:
        """Do what is due; what there is to tell the agent. `training`: workers run, and none of them is ending."""
        self._listen(now)
        if self._trial is not None:
            self._follow(self._trial, now)
        elif training and self._quiet_since is not None and now >= self._quiet_since + QUIET_S:
            names = self._untried()
            if names:
                self._try(names, now)
            elif self._passed:
                self._import_some()
            else:
                return self._report()
        return None

    def _listen(self, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            told = read(self._inbox.recv(_TOLD_MAX_BYTES))
            new = {name: origin for name, origin in told.items() if name not in self._told and name not in sys.modules}
            self._told |= new
            if new or not self._has_reported:
                self._quiet_since = now

    def _untried(self) -> list[str]:
        done = {*self._left_out, *self._passed}
        return [name for name in self._told if name not in done and name not in sys.modules]

    def _try(self, names: list[str], now: float) -> None:
        self._trials += 1
        if self._trials > TRIALS_MAX:
            self._left_out |= dict.fromkeys(names, f"not tried any more after {TRIALS_MAX} trials")
            return
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        me = os.getpid()
        # No signal may reach the fork while it still has this process's handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                self._be_the_trial({name: self._told[name] for name in names}, writer, me)
        except OSError as error:
            self._left_out |= dict.fromkeys(names, f"cannot be tried: {error}")
            os.close(reader)
        else:
            self._trial = _Trial(pid, reader, now + TRIAL_MAX_S, names)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            os.close(writer)

    def _be_the_trial(self, origins: Mapping[str, str], writer: int, parent_pid: int) -> NoReturn:
        try:
            os.setsid()
            sessions.die_with_parent(parent_pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            self.forget()
            self.teller.close()
            trial.run(origins, self.directory, writer)
        finally:
            os._exit(1)

    def _follow(self, running: _Trial, now: float) -> None:
        try:
            data = os.read(running.reader, 1 << 16)
        except BlockingIOError:
            if now >= running.ends_at:
                self._left_out[running.last()[0]] = f"takes more than {TRIAL_MAX_S:.0f} s to import"
                self._stop(running)
            return
        if data:
            running.lines += data
            return
        self._stop(running)
        last = running.last()
        if not last:
            self._passed = running.names
        else:
            self._left_out[last[0]] = last[1] if len(last) > 1 else "ends the process that imports it"

    def _stop(self, running: _Trial) -> None:
        if running.pid:  # It has not been reaped, so nobody else can have its number.
            sessions.kill_sessions([running.pid], signal.SIGKILL)
            sessions.kill(running.pid, signal.SIGKILL)
        os.close(running.reader)
        self._trial = None

    def _import_some(self) -> None:
        """Import modules that have passed, for a moment; the rest waits for another turn."""
        before_s, sockets_before = time.monotonic(), trial.sockets()
        with trial.first_on_path(self.directory):
            while self._passed and time.monotonic() < before_s + MOMENT_S:
                name = self._passed.pop(0)
                try:
                    importlib.import_module(name)
                    self._learnt.append(name)
                except Exception as error:  # noqa: BLE001  A library may raise anything. In a worker it is seen.
                    self._left_out[name] = trial.cannot(error)
        why = trial.why_unsafe(sockets_before)
        if why:
            self.unsafe = f"a learnt module, up to {name!r}, {why}"
            self._passed.clear()
        self._import_s += time.monotonic() - before_s

    def _report(self) -> Learnt:
        """What has been learnt since the last report, and what this process costs while workers share its memory."""
        if self._learnt:
            from elasticrt.worker import preload

            preload.freeze()
        resident, shared = footprint.resident_and_shared()
        report = Learnt(os.getpid(), self._learnt, dict(self._left_out), self.unsafe, self._import_s, resident, shared)
        self._has_reported, self._quiet_since, self._learnt, self._import_s = True, None, [], 0.0
        return report
