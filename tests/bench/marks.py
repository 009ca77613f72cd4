"""What the workers of a recovery benchmark wrote about themselves, and what follows from it. No clock is read here."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

STEPS_TIMED = 3
"""So many steps of a new world tell what one takes there."""


@dataclass(frozen=True)
class Mark:
    """One line of one worker: at `at` (CLOCK_MONOTONIC, s) it had finished `step`; -1: its process had begun."""

    at: float
    world: int
    restart: int
    rank: int
    size: int
    step: int
    parent: int
    pid: int


class Marks:
    """All lines in a directory; `read` adds what has been written since, and looks only at files that have grown."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[str, int] = {}
        self._over: set[str] = set()
        self.all: list[Mark] = []

    def read(self) -> list[Mark]:
        """Every mark so far, in no particular order. The cut last line of a killed process is left out."""
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name not in self._over and entry.stat().st_size > self._offsets.get(entry.name, 0):
                    self._add(Path(entry.path))
        return self.all

    def forget(self, before: float) -> None:
        """Drop marks from before that time, and never again look at files that have had nothing since."""
        self.all = [mark for mark in self.all if mark.at >= before]
        alive = {f"{mark.parent}-{mark.pid}" for mark in self.all}
        self._over |= set(self._offsets) - alive

    def _add(self, path: Path) -> None:
        offset = self._offsets.get(path.name, 0)
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offsets[path.name] = offset + len(whole)
        parent, pid = map(int, path.name.split("-"))
        for line in whole.splitlines():
            at, *numbers = line.split()
            world, restart, rank, size, step = map(int, numbers)
            self.all.append(Mark(float(at), world, restart, rank, size, step, parent, pid))


@dataclass(frozen=True)
class Recovery:
    """What an event cost.

    Attributes:
        next_step_s: from the event until every rank of the new world had finished a step of it.
        pause_s: from the last step of any earlier world until then; None when there was none (a start).
        new_ground_s: from the event until every rank had finished a step that nobody had finished before it.
        lost: steps that had been finished, and that the new world knew nothing of when it began.
        repeated: steps that were finished once more; as many as lost, when the first attempt succeeds.
        attempts: how often a node had to start its workers (the most of any node).
        two_worlds: another world went on stepping afterwards.
        step_s: what a step takes in the new world, from its first on; None where it was not measured.
    """

    next_step_s: float
    pause_s: float | None
    new_ground_s: float | None
    lost: int
    repeated: int
    attempts: int
    two_worlds: bool
    step_s: float | None = None

    @property
    def beyond_a_step_s(self) -> float | None:
        """What of the pause is not the step at its end."""
        return None if self.pause_s is None or self.step_s is None else self.pause_s - self.step_s


def steps_of(marks: Iterable[Mark]) -> list[Mark]:
    """The marks of steps, without those of processes that began."""
    return [mark for mark in marks if mark.step >= 0]


def worlds(marks: Iterable[Mark]) -> dict[int, list[Mark]]:
    """The steps of each world."""
    found: dict[int, list[Mark]] = defaultdict(list)
    for mark in steps_of(marks):
        found[mark.world].append(mark)
    return found


def stepping(marks: Iterable[Mark], since: float) -> set[int]:
    """The worlds that have finished a step after `since`."""
    return {mark.world for mark in steps_of(marks) if mark.at > since}


def formed(marks: Iterable[Mark], after: float, size: int) -> tuple[int, float] | None:
    """The first world of `size` ranks that began after `after` and of which all have finished a step, and when."""
    found = []
    for world, steps in worlds(marks).items():
        first = _first(steps)
        whole = set(first) == set(range(size)) and steps[0].size == size
        if whole and min(first.values()) > after:
            found.append((max(first.values()), world))
    if not found:
        return None
    at, world = min(found)
    return world, at


def newest_whole(marks: Iterable[Mark], size: int) -> int | None:
    """The world that began last, if it has `size` ranks and all of them have finished a step."""
    found = worlds(marks)
    if not found:
        return None
    world = max(found, key=lambda each: min(mark.at for mark in found[each]))
    whole = set(_first(found[world])) == set(range(size)) and found[world][0].size == size
    return world if whole else None


def new_ground_at(marks: list[Mark], world: int, formed_at: float) -> float | None:
    """When every rank of `world` had finished a step that no world before it had finished; None: not yet."""
    new = [mark for mark in steps_of(marks) if mark.world == world]
    last = _last_before(marks, world, formed_at)
    first = _first(mark for mark in new if mark.step > last)
    return max(first.values()) if new and len(first) == new[0].size else None


def recovery(marks: list[Mark], event_at: float, world: int, formed_at: float) -> Recovery:
    """The cost of an event at `event_at` after which `world` had formed at `formed_at`."""
    new = [mark for mark in steps_of(marks) if mark.world == world]
    stopped_at = max((mark.at for mark in steps_of(marks) if mark.world != world and mark.at < formed_at), default=None)
    last = _last_before(marks, world, formed_at)
    ground_at = new_ground_at(marks, world, formed_at)
    began = [mark for mark in marks if mark.step < 0 and event_at < mark.at <= formed_at]
    return Recovery(
        next_step_s=formed_at - event_at,
        pause_s=None if stopped_at is None else formed_at - stopped_at,
        new_ground_s=None if ground_at is None else ground_at - event_at,
        lost=max(0, last - (min(mark.step for mark in new) - 1)),
        repeated=_repeated(marks, event_at),
        attempts=max(Counter(mark.parent for mark in began).values(), default=0),
        two_worlds=_beside(marks, world, formed_at + 0.2),
        step_s=step_s(marks, world),
    )


def step_s(marks: Iterable[Mark], world: int) -> float | None:
    """What a step of `world` takes: the median of its first STEPS_TIMED after the first; None: not so many yet."""
    steps = worlds(marks)[world]
    finished: dict[int, list[float]] = defaultdict(list)
    for mark in steps:
        finished[mark.step].append(mark.at)
    whole = [max(at) for _, at in sorted(finished.items()) if len(at) == steps[0].size] if steps else []
    spans = [after - before for before, after in itertools.pairwise(whole)][:STEPS_TIMED]
    return statistics.median(spans) if len(spans) == STEPS_TIMED else None


def _beside(marks: list[Mark], world: int, since: float) -> bool:
    """Whether another world has stepped since, and did not only follow this one."""
    found = worlds(marks)
    last = max(mark.at for mark in found[world])
    others = stepping(marks, since) - {world}
    return any(min(mark.at for mark in found[other]) < last - 0.2 for other in others)


def _first(marks: Iterable[Mark]) -> dict[int, float]:
    """When each rank finished its first of these steps."""
    first: dict[int, float] = {}
    for mark in marks:
        first[mark.rank] = min(first.get(mark.rank, mark.at), mark.at)
    return first


def _last_before(marks: Iterable[Mark], world: int, formed_at: float) -> int:
    return max((mark.step for mark in steps_of(marks) if mark.world != world and mark.at < formed_at), default=0)


def _repeated(marks: Iterable[Mark], event_at: float) -> int:
    """How many steps have been finished after the event by a world that was not the first to finish them."""
    earliest: dict[tuple[int, int], float] = {}
    for mark in steps_of(marks):
        key = (mark.step, mark.world)
        earliest[key] = min(earliest.get(key, mark.at), mark.at)
    first_of: dict[int, float] = {}
    for (step, _), at in earliest.items():
        first_of[step] = min(first_of.get(step, at), at)
    return sum(at > event_at and at > first_of[step] for (step, _), at in earliest.items())
