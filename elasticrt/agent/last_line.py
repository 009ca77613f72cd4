"""The last line of a terminal, which changes while other output scrolls by above it.

Its text comes from `story.sentences`. It has no thread: its owner draws it, and every writer to the terminal removes it
meanwhile (`ipc.std_streams.turn`). An unfinished line of a worker, such as a progress bar's, takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from elasticrt.ipc.std_streams import emit, held

FLOOD_S = 0.05
"""Output that comes faster than this is printed without the line, which returns when it is drawn next."""


def fits(stream: TextIO | None, env: Mapping[str, str]) -> bool:
    """Whether `stream` is a terminal that can erase a line."""
    return stream is not None and stream.isatty() and env.get("TERM", "") not in ("", "dumb", "unknown")


class LastLine:
    """The last line of the terminal `stream`. `draw` belongs to one thread, `aside` to all."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console  # 0.1 s: only where there is a terminal.

        self._stream = stream
        self._rich = Console(file=stream, highlight=False, soft_wrap=False)
        self._text = ""
        self._there = self._unfinished = False
        self._drawn_at = 0.0

    def draw(self, text: str) -> None:
        """Show `text` from now on; "": no line."""
        with held():
            if text != self._text or not self._there:
                self._text = text
                self._show()

    @contextmanager
    def aside(self, ends_line: bool) -> Iterator[None]:
        """Remove the line while something else is written to the terminal, in this context. The lock is held."""
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
        # A line that fills the last column would begin another one.
        width = max(1, self._rich.width - 1)
        with self._rich.capture() as drawn:
            self._rich.print(
                self._text, style="bold", markup=False, no_wrap=True, overflow="ellipsis", width=width, end=""
            )
        self._put("\r" + drawn.get() + "\x1b[K")

    def _put(self, text: str) -> None:
        try:
            emit(self._stream, text)
        except (OSError, ValueError):  # The terminal was closed. The next real output reports that.
            self._text = ""
