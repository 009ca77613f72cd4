"""A thread that waits for files and for times, and calls what is to be done then."""

from __future__ import annotations

import heapq
import itertools
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from elasticrt.ipc.wakeup import Wakeup

Action = Callable[[], object]
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class SelectorThread:
    """One thread with a selector, from when it is made until `close`.

    `call`, `wait_for` and `close` are for other threads; all else is for the thread itself, where every action runs.
    An action that raises ends the thread with that error.

    Args:
        name: the thread's name.
        ending: called on the thread as its last, after `close` and after an error.

    Raises OSError when there are no descriptors left.
    """

    def __init__(self, name: str, ending: Action = lambda: None) -> None:
        self._ending = ending
        self._calls: deque[Action] = deque()
        self._timers: list[tuple[float, int, Action]] = []
        self._serial = itertools.count()  # Orders timers of the same time.
        self._watched: dict[Any, Action] = {}
        self._closing = False
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self.watch(self._wakeup, READ, self._wakeup.heard)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, action: Action) -> None:
        """Have `action` called soon. After `close` nothing is called any more."""
        self._calls.append(action)
        self._wakeup.ring()

    def wait_for(self, action: Action, timeout_s: float) -> None:
        """Have `action` called, and wait for that, at most `timeout_s`. Where the thread has ended, call it here."""
        if not self._thread.is_alive():
            action()
            return
        done = threading.Event()
        self.call(action)
        self.call(done.set)
        done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the thread, after all that it was called for and that there was to read; waits at most `timeout_s`."""
        self._closing = True
        self._wakeup.ring()
        self._thread.join(timeout_s)

    def watch(self, file: Any, events: int, action: Action) -> None:
        """Call `action` whenever `file` (a descriptor, or an object that has one) can be read or written (`events`).

        Of a file that is watched already, the events and the action are replaced.
        """
        how = self._selector.modify if file in self._watched else self._selector.register
        self._watched[file] = action
        how(file, events, action)

    def forget(self, file: Any) -> None:
        """Watch a file no more, if it is watched. It may have been closed."""
        if self._watched.pop(file, None) is not None:
            self._selector.unregister(file)

    def watches(self, file: Any) -> bool:
        """Whether a file is watched."""
        return file in self._watched

    def after(self, seconds: float, action: Action) -> None:
        """Call `action` once, in so many seconds."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._serial), action))

    def _work(self) -> None:
        try:
            while not self._closing:
                self._turn(max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None)
            self._turn(0.0)
        finally:
            self._ending()
            self._watched.clear()
            self._selector.close()
            self._wakeup.close()

    def _turn(self, timeout_s: float | None) -> None:
        ready = self._selector.select(timeout_s)
        while self._calls:  # First: what is read may follow from what was called for.
            self._calls.popleft()()
        for key, _ in ready:
            action = self._watched.get(key.fileobj)
            if action is not None and action is key.data:  # Else an action before it has made that void.
                action()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
