"""A bell wakes who waits for it: for other threads, for signals, and never at anybody's cost."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Iterator

import pytest

from elasticrt.ipc.wakeup import Wakeup

LONG_S = 30.0


@pytest.fixture
def bell() -> Iterator[Wakeup]:
    """A bell, closed at the end."""
    each = Wakeup()
    yield each
    each.close()


def _rung(bell: Wakeup, timeout_s: float = 0.0) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(bell, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def test_a_ring_from_another_thread_wakes_a_selector(bell: Wakeup) -> None:
    """Whoever waits is woken by a ring; what was heard wakes nobody again."""
    assert not _rung(bell)
    thread = threading.Thread(target=bell.ring)
    thread.start()
    assert _rung(bell, LONG_S)
    thread.join(LONG_S)
    assert bell.heard() == b"\0"
    assert not _rung(bell)
    assert bell.heard() == b""


def test_many_rings_never_block_and_are_heard_at_once(bell: Wakeup) -> None:
    """A bell that nobody hears takes any number of rings, and one hearing is enough for all of them."""
    for _ in range(100_000):
        bell.ring()
    assert _rung(bell)
    assert 1 <= len(bell.heard()) < 100_000  # Its room is limited: otherwise this test would show nothing.
    assert not _rung(bell)
    bell.ring()
    assert bell.heard() == b"\0"


def test_a_closed_bell_may_be_rung_and_closed_again(bell: Wakeup) -> None:
    """A ring that comes too late does nothing, not even to a file that has got the bell's number since."""
    bell.close()
    reader, writer = os.pipe2(os.O_NONBLOCK)  # The lowest free numbers: those of the bell.
    try:
        bell.ring()
        bell.close()
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        bell.heard()


def test_closing_while_others_ring(bell: Wakeup) -> None:
    """Threads that ring all the time, while the bell is closed, meet no error."""
    errors = []

    def ring() -> None:
        try:
            for _ in range(10_000):
                bell.ring()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=ring) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert _rung(bell, LONG_S)
    bell.close()
    for thread in threads:
        thread.join(LONG_S)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_signals_ring_with_their_numbers(bell: Wakeup) -> None:
    """A signal with a handler wakes who waits and is heard by its number, beside the rings of threads, until undone."""
    handler = signal.signal(signal.SIGUSR1, lambda *_: None)
    before = bell.ring_on_signals()
    try:
        bell.ring()
        signal.raise_signal(signal.SIGUSR1)
        assert _rung(bell)
        assert bell.heard() == bytes([0, signal.SIGUSR1])
        signal.set_wakeup_fd(before)
        signal.raise_signal(signal.SIGUSR1)
        assert not _rung(bell)
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR1, handler)
