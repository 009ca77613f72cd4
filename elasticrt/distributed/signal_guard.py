"""Guards a worker against signals that are meant for its agent, while a Loop runs.

The guarded signals are SIGTERM and the others that make an agent leave. Some schedulers, such as SLURM, send a signal
to every process of a job at once. The agent then wants all workers to stop together at an agreed step, which dead
workers cannot do. So the agent announces its own SIGTERM on the status page, and that one ends this process as usual.
Any other signal is not obeyed at once. If the agent does not get the same signal within OBEY_S, the signal was meant
for this process alone: the process leaves its state to the agent and dies at its next step boundary, or dies where the
loop ends. A handler that the script has set stays, and decides.
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
"""How long, in seconds, the agent may take to get the same signal. Usually that takes milliseconds."""


class SignalGuard:
    """The guard of one Loop, installed while the Loop runs.

    Attributes:
        received_at: when a signal came that the agent had not announced (`time.monotonic`); None before.
    """

    def __init__(self) -> None:
        self._page = agent_client.status_page()
        self.received_at: float | None = None
        self._received_number = signal.SIGTERM
        self._before: dict[signal.Signals, Any] = {}  # The handler that each guarded signal had.

    def install(self) -> None:
        """Guard from now on. Does nothing without an agent and outside of the main thread.

        A signal for which the script has a handler is left alone.
        """
        if not agent_client.worker_env().has_agent or threading.current_thread() is not threading.main_thread():
            return
        for each in _handled():
            if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):
                self._before[each] = signal.signal(each, self._received)

    def remove(self, *, obeys: bool) -> None:
        """Stop guarding. With `obeys`, a signal that has not been acted upon ends this process now.

        Without `obeys` an exception has ended the loop. The exception ends the process anyway, and is to be reported.
        """
        while self._before:
            each, before = self._before.popitem()
            # The script may have set a handler of its own meanwhile.
            if signal.getsignal(each) == self._received:
                signal.signal(each, before)
        if obeys and self.received_at is not None and not self._agent_leaves:
            _die(self._received_number)

    def obey(self, leave: Callable[[], object]) -> None:
        """At a step boundary: die of a signal that came more than OBEY_S ago.

        Does nothing if the agent has got the signal as well, or has asked for a handover. `leave` is called first, to
        give the state to the agent.
        """
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
    """The guarded signals: SIGTERM, and the signals that make the agent leave."""
    named = agent_client.worker_env().signals.split(",")
    return {signal.SIGTERM, *(signal.Signals[each] for each in named if each in signal.Signals.__members__)}


def _die(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


_sheltered: weakref.WeakSet[Any] = weakref.WeakSet()
"""Child processes that do not see the guarded signals, see `sheltered`. The set is weak, so that an ended process is
released, with its two descriptors."""


@contextmanager
def sheltered() -> Iterator[None]:
    """Block the guarded signals in processes that are started in this block.

    A DataLoader worker would die of such a signal, and fail the training. When this process ends, multiprocessing sends
    SIGTERM to its children, and then waits for them without a limit. It would wait for ever for sheltered children, so
    these get SIGKILL before that.
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
        # Exit hooks run in reverse order of registration: this one before multiprocessing's own hook, which was
        # registered when multiprocessing was imported.
        atexit.unregister(_end_sheltered)
        atexit.register(_end_sheltered, os.getpid())
        _sheltered.update(set(multiprocessing.active_children()) - others)


def _end_sheltered(owner: int) -> None:
    """Kill the sheltered processes that are left, in the process with the id `owner`, which has started them."""
    # A forked child inherits the exit hook.
    if os.getpid() != owner:
        return
    left = [child for child in _sheltered.intersection(multiprocessing.active_children()) if child.daemon]
    if left and threading.current_thread() is threading.main_thread():
        # The SIGCHLD handler of torch's DataLoader raises for a child that was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in left:
        child.kill()
