"""SIGTERM, and what else makes an agent leave, while a Loop runs: the agent's own SIGTERM ends this process as usual, a
signal from elsewhere is left to the agent.

Some schedulers send a signal to every process of a job at once (SLURM does). The agent then wants all workers to stop
together at an agreed step, which dead workers cannot do. So a signal that the agent has not announced on the page is
not obeyed at once. If the agent does not get one within OBEY_S, it was meant for this process alone. It leaves its
state to the agent and dies at its next step boundary, or dies where the loop ends. A handler of the script's own stays,
and decides.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from elasticrt.distributed import agent_client

OBEY_S = 2.0
"""How long an agent may take to get the same signal; it takes milliseconds."""


class SignalGuard:
    """Up while a Loop runs. `received_at`: when a signal came that the agent had not announced."""

    def __init__(self) -> None:
        self._page = agent_client.status_page()
        self.received_at: float | None = None
        self._received_number = signal.SIGTERM
        self._before: dict[signal.Signals, Any] = {}  # What each guarded signal did.

    def raise_(self) -> None:
        """Guard from now on. Does nothing outside a run, outside the main thread, or if the script has a handler."""
        if not agent_client.worker_env().has_agent or threading.current_thread() is not threading.main_thread():
            return
        for each in _handled():
            if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[each] = signal.signal(each, self._received)

    def lower(self, *, obeys: bool) -> None:
        """Stop guarding. A signal that was not acted upon is obeyed now if this process `obeys`.

        It does not where an exception has ended the loop, which ends the process anyway, and is to be reported.
        """
        while self._before:
            each, before = self._before.popitem()
            if signal.getsignal(each) == self._received:
                signal.signal(each, before)
        if obeys and self.received_at is not None and not self._agent_leaves:
            _die(self._received_number)

    def obey(self, leave: Callable[[], object]) -> None:
        """At a step boundary after a signal: `leave` the state and die, unless the agent has asked for a handover."""
        if self.received_at is not None and time.monotonic() - self.received_at > OBEY_S and not self._agent_leaves:
            leave()
            _die(self._received_number)

    @property
    def _agent_leaves(self) -> bool:
        """Whether the agent has got the signal as well, or has already asked for a handover."""
        return bool(self._page.leaves or self._page.stop)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        self._received_number = signal.Signals(number)
        if number == signal.SIGTERM and self._page.ending:
            _die(self._received_number)
        self.received_at = time.monotonic()


def _handled() -> set[signal.Signals]:
    """SIGTERM, and the signals that make the agent leave."""
    named = agent_client.worker_env().signals.split(",")
    return {signal.SIGTERM, *(signal.Signals[each] for each in named if each in signal.Signals.__members__)}


def _die(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


_sheltered: weakref.WeakSet[Any] = weakref.WeakSet()
"""Processes that never see these signals: see `sheltered`. One that has ended is let go, with its two descriptors."""


@contextmanager
def sheltered() -> Iterator[None]:
    """Block them in processes that are started here: a DataLoader worker would die of one and fail the training.

    When this process ends, multiprocessing ends its children with SIGTERM and then waits for them without a limit. It
    would wait for ever for these, so they get SIGKILL before that.
    """
    if not agent_client.worker_env().has_agent:
        yield
        return
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _handled())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Hooks run in reverse order: this one before multiprocessing's own, which was registered at its import.
        atexit.unregister(_end_sheltered)
        atexit.register(_end_sheltered, os.getpid())
        _sheltered.update(set(multiprocessing.active_children()) - others)


def _end_sheltered(owner: int) -> None:
    """Kill what is left of the sheltered processes, in the process (`owner`) that has started them."""
    if os.getpid() != owner:
        return
    left = [child for child in _sheltered.intersection(multiprocessing.active_children()) if child.daemon]
    if left and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # That of torch's DataLoader raises for a child that was killed.
    for child in left:
        child.kill()
