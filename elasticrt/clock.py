"""The clock as an argument, so that tests can simulate time. The module `time` fits."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, with a way to wait by it."""

    def monotonic(self) -> float:
        """The time in seconds, since an unspecified moment."""

    def monotonic_ns(self) -> int:
        """The same time in nanoseconds."""

    def sleep(self, seconds: float, /) -> None:
        """Block this thread for `seconds`."""
