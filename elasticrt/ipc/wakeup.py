"""A bell: it wakes a thread that waits in a selector, for other threads or for signals."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading


class Wakeup:
    """Any thread may ring; one thread waits for it with `select` or a selector, and hears it.

    Raises OSError when there are no descriptors left.
    """

    def __init__(self) -> None:
        self._ear, self._hand = socket.socketpair()
        for end in (self._ear, self._hand):
            end.setblocking(False)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """For `select`: readable after a ring, until it is heard."""
        return self._ear.fileno()

    def ring(self) -> None:
        """Wake the thread that waits, or that will wait next. Never blocks. Nothing happens after `close`."""
        # Without the lock it could be closed just now, and its number be another file's already.
        with self._lock, contextlib.suppress(BlockingIOError):  # Full of rings: it will wake up.
            if self._hand.fileno() >= 0:
                self._hand.send(b"\0")

    def ring_on_signals(self) -> int:
        """Let every signal that has a handler in Python ring. `signal.set_wakeup_fd` with what this returns undoes it.

        Raises ValueError outside of the main thread.
        """
        return signal.set_wakeup_fd(self._hand.fileno(), warn_on_full_buffer=False)

    def heard(self) -> bytes:
        """Take all rings: a byte for each, which is a signal's number, or 0 for `ring`; of too many some are dropped.

        For the thread that waits. Raises OSError after `close`.
        """
        rings = b""
        with contextlib.suppress(BlockingIOError):
            while more := self._ear.recv(4096):
                rings += more
        return rings

    def close(self) -> None:
        """Close both ends. No signal that rings may come from now on: its byte could go to another file."""
        with self._lock:
            self._ear.close()
            self._hand.close()
