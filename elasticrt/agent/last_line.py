"""Draws the last line of a terminal, which changes while other output scrolls by above it.

The text comes from `story.sentences`. The line has no thread: its owner draws it, and every writer to the terminal
removes it while it writes (`ipc.std_streams.turn`). An unfinished line of a worker, such as a progress bar, takes its
place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from elasticrt.ipc.std_streams import emit, held
from elasticrt.text import plain

FLOOD_S = 0.05
"""While output comes at shorter intervals than this, the line is not drawn again after each piece. It returns when its
owner draws it next."""


def fits(stream: TextIO | None, env: Mapping[str, str]) -> bool:
    """Whether `stream` is a terminal that can erase a line."""
    return stream is not None and stream.isatty() and env.get("TERM", "") not in ("", "dumb", "unknown")


class LastLine:
    """The last line of the terminal `stream`. One thread calls `draw`; any thread may use `aside`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._there = self._unfinished = False
        self._drawn_at = 0.0

    def draw(self, text: str) -> None:
        """Show `text` from now on; "" for no line."""
        with held():
            if text != self._text or not self._there:
                self._text = text
                self._show()

    @contextmanager
    def aside(self, ends_line: bool) -> Iterator[None]:
        """A context without the line, for writing something else to the terminal. The caller holds the terminal's lock.

        `ends_line`: whether that output ends with a line end. Otherwise the line stays away.
        """
        if self._there:
            self._there = False
            self._put("\r\x1b[K")
        try:
            yield
        finally:
            self._unfinished = not ends_line
            if time.monotonic() - self._drawn_at >= FLOOD_S:
                self._show()

    def _show(self) -> None:
        if self._unfinished or not (self._text or self._there):
            return
        self._there, self._drawn_at = bool(self._text), time.monotonic()
        # Without its wrapping (DECAWM) the terminal itself cuts a line that is longer than its row.
        self._put("\r\x1b[K" + (f"\x1b[?7l\x1b[1m{plain(self._text)}\x1b[0m\x1b[?7h" if self._text else ""))

    def _put(self, text: str) -> None:
        try:
            emit(self._stream, text)
        # The terminal was closed. The next real output reports that.
        except (OSError, ValueError):
            self._text = ""
