"""What the workers of a recovery benchmark wrote about themselves, and what follows from it. No clock is read here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


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
    """All lines in a directory; `read` adds what has been written since."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self.all: list[Mark] = []

    def read(self) -> list[Mark]:
        """Every mark so far, in no particular order. The cut last line of a killed process is left out."""
        for path in self._directory.iterdir():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            parent, pid = map(int, path.name.split("-"))
            for line in whole.splitlines():
                at, *numbers = line.split()
                self.all.append(Mark(float(at), *map(int, numbers), parent=parent, pid=pid))
        return self.all


@dataclass(frozen=True)
class Recovery:
    """What an event cost.

    Attributes:
        next_step_s: from the event until every rank of the new world had finished a step of it.
        pause_s: from the last step of any earlier world until then; None when there was none (a start).
        new_ground_s: from the event until a rank had finished a step that nobody had finished before.
        lost: steps that were done again.
        attempts: how often a node had to start its workers (the most of any node).
        two_worlds: another world went on stepping afterwards.
    """

    next_step_s: float
    pause_s: float | None
    new_ground_s: float | None
    lost: int
    attempts: int
    two_worlds: bool


def worlds(marks: Iterable[Mark]) -> dict[int, list[Mark]]:
    """The steps of each world."""
    found: dict[int, list[Mark]] = defaultdict(list)
    for mark in marks:
        if mark.step >= 0:
            found[mark.world].append(mark)
    return found


def stepping(marks: Iterable[Mark], since: float) -> set[int]:
    """The worlds that have finished a step after `since`."""
    return {mark.world for mark in marks if mark.step >= 0 and mark.at > since}


def formed(marks: Iterable[Mark], after: float, size: int) -> tuple[int, float] | None:
    """The first world of `size` ranks that began after `after` and of which all have finished a step, and when."""
    found = []
    for world, steps in worlds(marks).items():
        first: dict[int, float] = {}
        for mark in steps:
            first[mark.rank] = min(first.get(mark.rank, mark.at), mark.at)
        whole = set(first) == set(range(size)) and steps[0].size == size
        if whole and min(first.values()) > after:
            found.append((max(first.values()), world))
    if not found:
        return None
    at, world = min(found)
    return world, at


def recovery(marks: list[Mark], event_at: float, world: int, formed_at: float) -> Recovery:
    """The cost of an event at `event_at` after which `world` had formed at `formed_at`."""
    new = [mark for mark in marks if mark.world == world and mark.step >= 0]
    old = [mark for mark in marks if mark.world != world and mark.step >= 0 and mark.at < formed_at]
    last = max((mark.step for mark in old), default=0)
    stopped_at = max((mark.at for mark in old), default=None)
    first = min(mark.step for mark in new)
    beyond = [mark.at for mark in new if mark.step > last]
    began = [mark for mark in marks if mark.step < 0 and event_at < mark.at <= formed_at]
    attempts = max(Counter(mark.parent for mark in began).values(), default=0)
    others = {mark.world for mark in marks if mark.step >= 0 and mark.at > formed_at + 0.2} - {world}
    return Recovery(
        next_step_s=formed_at - event_at,
        pause_s=None if stopped_at is None else formed_at - stopped_at,
        new_ground_s=min(beyond) - event_at if beyond else None,
        lost=max(0, last - (first - 1)),
        attempts=attempts,
        two_worlds=bool(others),
    )
