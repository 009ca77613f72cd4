"""A thread that waits for files and times, and calls the action that belongs to each."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Action = Callable[[], object]
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

# How long `close` and `wait_for` wait for the thread. A turn of it takes milliseconds.
CLOSE_S = 2.0

SHORT_S = 0.05
"""How long a listening socket rests when the process has no free descriptor. Accepting again at once would fail again,
and keep a processor busy."""


class SelectorThread:
    """One thread with a selector. It runs from its construction until `close`.

    Other threads use `call`, `wait_for` and `close`. All other methods belong to the thread itself, which runs every
    action. An action that raises ends the thread with its error.

    Args:
        name: the thread's name.
        ending: the thread's last call, after `close` and after an error.

    Raises OSError when there are no descriptors left.
    """

    def __init__(self, name: str, ending: Action = lambda: None) -> None:
        self._ending = ending
        self._calls: deque[Action] = deque()
        # A heap of (time, serial number, action).
        self._timers: list[tuple[float, int, Action]] = []
        self._serial = itertools.count()  # Orders timers of the same time.
        self._watched: dict[Any, Action] = {}
        # The listening sockets at which a connection could not be accepted lately. It is warned of once.
        self._short: set[socket.socket] = set()
        self._closing = False
        # An eventfd that ends the thread's wait.
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ended = False
        # Guards `_wakeup`: once that is closed, its number may be another file's.
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self.watch(self._wakeup, READ, lambda: os.eventfd_read(self._wakeup))
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, action: Action) -> None:
        """Call `action` soon, on the thread. Calls after `close` are dropped."""
        self._calls.append(action)
        self._wake()

    def wait_for(self, action: Action, timeout_s: float = CLOSE_S) -> None:
        """Call `action` on the thread and wait for it, at most `timeout_s`. If the thread has ended, call it here."""
        if not self._thread.is_alive():
            action()
            return
        done = threading.Event()
        self.call(action)
        self.call(done.set)
        done.wait(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End the thread after its pending calls and one last read of its files. Waits at most `timeout_s`."""
        self._closing = True
        self._wake()
        self._thread.join(timeout_s)

    def watch(self, file: Any, events: int, action: Action) -> None:
        """Call `action` whenever `file` can be read or written.

        A second call for the same file replaces its events and action.

        Args:
            file: a descriptor, or an object that has one.
            events: READ, WRITE or both.
            action: what to call.
        """
        how = self._selector.modify if file in self._watched else self._selector.register
        self._watched[file] = action
        how(file, events, action)

    def forget(self, file: Any) -> None:
        """Stop watching `file`, if it is watched. The file may be closed already."""
        if self._watched.pop(file, None) is not None:
            self._selector.unregister(file)

    def accept(self, listener: socket.socket) -> socket.socket | None:
        """Accept a connection at `listener`, which is watched. None: the client is gone, or no descriptor is free.

        Without a free descriptor `listener` rests for SHORT_S.
        """
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError as error:
            if listener not in self._short:
                port = listener.getsockname()[1]
                log.warning("no connection can be accepted at port %d: %s; trying again", port, error)
            self._short.add(listener)
            action = self._watched[listener]
            self.forget(listener)
            self.after(SHORT_S, lambda: self.watch(listener, READ, action) if listener.fileno() >= 0 else None)
            return None
        self._short.discard(listener)
        return connection

    def watches(self, file: Any) -> bool:
        """Whether `file` is watched."""
        return file in self._watched

    def after(self, seconds: float, action: Action) -> None:
        """Call `action` once, `seconds` from now."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._serial), action))

    def _work(self) -> None:
        try:
            while not self._closing:
                self._turn(max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None)
            # What was written just before `close` is still in the pipes.
            self._turn(0.0)
        finally:
            self._ending()
            self._watched.clear()
            self._selector.close()
            with self._lock:
                self._ended = True
                os.close(self._wakeup)

    def _wake(self) -> None:
        with self._lock:
            if not self._ended:
                os.eventfd_write(self._wakeup, 1)

    def _turn(self, timeout_s: float | None) -> None:
        ready = self._selector.select(timeout_s)
        # Calls come first: what can be read may be the answer to one.
        while self._calls:
            self._calls.popleft()()
        for key, _ in ready:
            action = self._watched.get(key.fileobj)
            # An earlier action may have replaced or forgotten this one.
            if action is not None and action is key.data:
                action()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
