"""Time as an argument: who decides by a clock, or waits by one, is given it. The module `time` is one."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, and how to wait by it."""

    def monotonic(self) -> float:
        """The time in seconds, from an unknown beginning."""

    def monotonic_ns(self) -> int:
        """The same time in nanoseconds."""

    def sleep(self, seconds: float, /) -> None:
        """Let this thread wait."""
