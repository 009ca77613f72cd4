"""SIGTERM while a Loop runs: the agent's own ends this process as ever, one from elsewhere is left to the agent.

Some schedulers send SIGTERM to every process of a job at the same instant (SLURM does). The agent then wants all to
stop together at an agreed step, which dead workers cannot do. So a SIGTERM that the agent has not announced on the page
is not obeyed at once. If the agent asks for nothing within a while, it was meant for this process alone: it dies of it
at its next step boundary, or where the loop ends. A handler that the script has of its own stays, and decides.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from elasticrt.distributed import agent_client
from elasticrt.ipc.status_page import StatusPage

OBEY_S = 2.0
"""How long an agent may take to hear of the same signal and to ask for a handover; it takes milliseconds."""


class SigtermGuard:
    """Up while a Loop runs. `received_at`: when a SIGTERM came that the agent had not announced."""

    def __init__(self, page: StatusPage | None) -> None:
        self._page = page
        self._up = False
        self.received_at: float | None = None

    def raise_(self) -> None:
        """From now on. Nothing happens outside a run, outside the main thread, and where the script has a handler."""
        if self._page is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._received)
            self._up = True

    def lower(self) -> None:
        """No longer. A signal that nobody has acted upon is obeyed now, unless an exception ends the loop anyway."""
        if self._up and signal.getsignal(signal.SIGTERM) == self._received:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._up = False
        if self.received_at is not None and sys.exc_info()[0] is None:
            assert self._page is not None, "without a page there is no shield"
            if not self._page.stop:
                self._die()

    def obey(self) -> None:
        """At a step boundary, after a signal: die of it unless the agent does something about it."""
        if self.received_at is not None and time.monotonic() - self.received_at > OBEY_S:
            assert self._page is not None, "without a page there is no shield"
            if not self._page.stop:
                self._die()

    def _received(self, _number: int, _frame: FrameType | None) -> None:
        assert self._page is not None, "without a page there is no shield"
        if self._page.ending:
            self._die()
        self.received_at = time.monotonic()

    def _die(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


_sheltered: set[Any] = set()
"""Processes that never see SIGTERM: see `sheltered`."""


@contextmanager
def sheltered() -> Iterator[None]:
    """Block SIGTERM in processes that are started here: a DataLoader worker would die of it and fail the training.

    When this process ends, multiprocessing ends its children with SIGTERM and then waits for them without a limit. It
    would wait for ever for these, so they get SIGKILL before that.
    """
    if agent_client.worker_env() is None:
        yield
        return
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not _sheltered:
            # Hooks run in reverse order: this one before multiprocessing's own, which was registered at its import.
            atexit.register(_end_sheltered, os.getpid())
        _sheltered.update(set(multiprocessing.active_children()) - others)


def _end_sheltered(owner: int) -> None:
    """Kill what is left of the sheltered processes, in the process (`owner`) that has started them."""
    if os.getpid() != owner:
        return
    for child in _sheltered.intersection(multiprocessing.active_children()):
        if child.daemon:
            child.kill()
