"""Prints the lines of a simulation, each with the tag of its node; in colour only on a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TextIO

from elasticrt.ipc.std_streams import write
from elasticrt.playground.narration import Line

COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red: distinct on dark and on light.
BOLD, DIM = 1, 2
_OWN = {"--": BOLD, "!!": BOLD, "tr": BOLD, "..": DIM}


class Screen:
    """Prints lines to `out`. `broken`: whether the reader of `out` has closed it."""

    def __init__(self, out: TextIO, env: Mapping[str, str]) -> None:
        self._out = out
        # NO_COLOR counts when it is there and not empty, see no-color.org.
        self._colour = out.isatty() and not env.get("NO_COLOR")
        self.broken = False

    def show(self, line: Line) -> None:
        """Print one line, at once."""
        if self.broken:
            return
        self.broken = not write(self._out, self._format(line) + "\n")

    def _format(self, line: Line) -> str:
        if not line.node:
            return self._paint(line.text, _OWN.get(line.text[:2], 0))
        number = re.search(r"[0-9]+$", line.node)
        colour = COLOURS[int(number[0]) % len(COLOURS)] if number else COLOURS[0]
        # A carriage return would let one node's progress bar write over another's tag.
        return f"{self._paint(line.node, colour)} | " + line.text.rstrip("\r").replace("\r", " ")

    def _paint(self, text: str, code: int) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour and code else text
