"""A thread that waits for files and times: what it does in which order, and how it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from elasticrt.ipc.selector_thread import READ, SelectorThread


class Busy:
    """A thread that is held up until `go`, and what it has done since then."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.thread = SelectorThread("elasticrt-test", partial(self.done.append, "ending"))
        self._free = threading.Event()
        self.pipes = [os.pipe(), os.pipe()]
        watched = threading.Event()
        for index, (reader, _) in enumerate(self.pipes):
            self.thread.call(partial(self.thread.watch, reader, READ, partial(self._read, index)))
        self.thread.call(watched.set)
        self.thread.call(partial(self._free.wait, 20))
        assert watched.wait(20)

    def _read(self, index: int) -> None:
        """One of the pipes: both are watched no more."""
        self.done.append(f"read {index}")
        for reader, _ in self.pipes:
            self.thread.forget(reader)

    def go(self) -> list[str]:
        """What is done until all is."""
        self._free.set()
        self.thread.close(20)
        return self.done


@pytest.fixture
def busy() -> Iterator[Busy]:
    """One."""
    one = Busy()
    yield one
    one.go()
    for pipe in one.pipes:
        for fd in pipe:
            os.close(fd)


def test_calls_come_before_what_is_read(busy: Busy) -> None:
    """What can be read may follow from what was called for, so that is done first; the ending is the last of all."""
    os.write(busy.pipes[0][1], b"x")
    busy.thread.call(partial(busy.done.append, "called"))
    assert busy.go() == ["called", "read 0", "ending"]


def test_an_action_makes_another_void(busy: Busy) -> None:
    """Of two files that can be read at once the second is left alone when the first one's action forgets it."""
    for _, writer in busy.pipes:
        os.write(writer, b"x")
    done = busy.go()
    assert done in (["read 0", "ending"], ["read 1", "ending"])


def test_times_come_in_their_order(busy: Busy) -> None:
    """Of two times the earlier one comes first, whichever was set first."""
    both = threading.Event()
    busy.thread.call(partial(busy.thread.after, 0.02, both.set))
    busy.thread.call(partial(busy.thread.after, 0.02, partial(busy.done.append, "second")))
    busy.thread.call(partial(busy.thread.after, 0.01, partial(busy.done.append, "first")))
    busy._free.set()
    assert both.wait(20)
    assert busy.go()[0] == "first"


def test_an_error_ends_the_thread(busy: Busy, monkeypatch: pytest.MonkeyPatch) -> None:
    """An action that raises ends the thread, after its ending; who waits for an action then does it alone."""
    heard: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    busy.thread.call(lambda: 1 // 0)
    assert busy.go() == ["ending"]
    assert heard[0].exc_type is ZeroDivisionError
    busy.thread.wait_for(partial(busy.done.append, "alone"), 20)
    assert busy.done == ["ending", "alone"]


def test_a_call_after_the_end_reaches_no_other_file(busy: Busy) -> None:
    """The thread's own descriptor is closed with it; a late call writes nothing to the file that has its number now."""
    busy.go()
    reader, writer = os.pipe2(os.O_NONBLOCK)
    busy.thread.call(partial(busy.done.append, "late"))
    busy.thread.close(20)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    for fd in (reader, writer):
        os.close(fd)
    assert busy.done == ["ending"]


def test_many_calls_never_block(busy: Busy) -> None:
    """A thread that is held up takes any number of calls, and makes all of them."""
    for _ in range(100_000):
        busy.thread.call(lambda: None)
    assert busy.go() == ["ending"]
