"""The steps of a run, and the checkpoints that save them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from elasticrt import events
from elasticrt.story.generations import STANDSTILLS_KEPT

POINTS_MAX = 4000
"""How many points the curves of steps and scalars keep."""

WORK_MAX = 400
"""How many values are kept of each rank's own work, and how many checkpoints."""

Value = TypeVar("Value")


class Series(list[Value]):
    """Values in the order of time, evenly thinned out to at most `most`, with the newest always among them.

    Args:
        most: how many values are kept; an even number.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._every, self._count = most, 1, 0

    def add(self, value: Value) -> None:
        """Add the next value. Of each `_every` values in a row the last one is kept."""
        if self._count % self._every:
            self[-1] = value
        else:
            self.append(value)
        self._count += 1
        # When the list is full, drop every second value and keep half as many of those that follow. The newest stays.
        if len(self) > self._most:
            del self[:-1:2]
            self._every *= 2


@dataclass
class Steps:
    """How far a run is."""

    # The highest step so far, and the latest one. The latest is lower while steps are done again.
    highest: int = 0
    newest: int = 0
    first_at: float | None = None  # When the run's first step was made, by its report; None before.
    last_at: float = 0.0  # When the latest step was made, by its report.
    epoch: int = 0  # That of the latest step.
    scalars: Mapping[str, float] = field(default_factory=dict)  # What `loop.report` was given in it, by name.
    # Steps, each with the time of its report.
    points: Series[tuple[float, events.Step]] = field(default_factory=lambda: Series(POINTS_MAX))
    samples: int = 0  # Trained on so far, in all epochs; 0 if not known.
    # By rank: the seconds of the rank's own work in a step, each with the time of its report.
    work: dict[int, Series[tuple[float, float]]] = field(default_factory=dict)

    def made(self, step: int, at: float, *, late: bool) -> None:
        """Note that `step` was made at `at`. A `late` report is one of a generation that is over."""
        self.first_at = at if self.first_at is None else self.first_at
        self.highest = max(self.highest, step)
        # An agent that was frozen tells of its last steps when it wakes up.
        if not late:
            self.newest, self.last_at = step, max(at, self.last_at)

    def reported(self, event: events.Step, at: float) -> None:
        """Note what rank 0 reports of a step."""
        self.epoch, self.scalars = event.epoch, event.scalars
        self.points.add((at, event))

    def progressed(self, event: events.Progress, ranks: Iterable[int], at: float) -> None:
        """Note what a node with these `ranks` reports of its progress, besides its step."""
        self.samples = event.samples or self.samples
        for rank, own_s in zip(ranks, event.own_s, strict=False):
            if own_s:
                self.work.setdefault(rank, Series(WORK_MAX)).add((at, own_s))


@dataclass
class Checkpoints:
    """The checkpoints of a run."""

    newest: int = 0  # The step of the newest one, 0 for none.
    newest_at: float | None = None  # When it was committed.
    count: int = 0  # How many were committed.
    # Checkpoints, each with the time of its commit.
    committed: Series[tuple[float, events.Committed]] = field(default_factory=lambda: Series(WORK_MAX))
    # The newest ones that could not be saved, and the first one that was saved after such, with their times.
    outcomes: deque[tuple[float, events.Unsaved | events.Committed]] = field(
        default_factory=lambda: deque(maxlen=2 * STANDSTILLS_KEPT)
    )

    def fold(self, event: events.Event, at: float) -> None:
        """Fold in an event of any node, which happened at `at`."""
        match event:
            case events.Unsaved():
                self.outcomes.append((at, event))
            case events.Committed():
                if self.unsaved is not None:
                    self.outcomes.append((at, event))
                if event.step >= self.newest:
                    self.newest, self.newest_at = event.step, at
                self.count += 1
                self.committed.add((at, event))

    @property
    def unsaved(self) -> events.Unsaved | None:
        """The newest checkpoint, if it could not be saved; None: it was saved."""
        newest = self.outcomes[-1][1] if self.outcomes else None
        return newest if isinstance(newest, events.Unsaved) else None

    def passed_over(self, resumed_from: int) -> None:
        """Note that those after the step `resumed_from` could not be used."""
        self.newest = min(self.newest, resumed_from)
