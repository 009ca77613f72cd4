"""The failures of a run, its standstills whose reason is known, and its slow nodes. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from elasticrt import events
from elasticrt.story.generations import LATE_S, STANDSTILLS_KEPT, Chapter, Standstill

SILENT = "(no answer"
"""The evidence against a node that was taken out because it did not answer contains these words."""


@dataclass(frozen=True)
class RunFailure:
    """A failure."""

    at: float  # When.
    node: str  # The node where it was; "": not known.
    what: str  # A description, for people.
    generation: int  # The generation in which it was.
    # Whether steps stood still. All nodes report such a failure, and it is counted once.
    hang: bool = False


class Failures:
    """What failed, whom steps waited for, and who was slow."""

    def __init__(self) -> None:
        self.all: list[RunFailure] = []  # The failures, in the order of time.
        # The newest findings about slow nodes, each with its time.
        self.straggler_findings: deque[tuple[float, events.Straggler]] = deque(maxlen=STANDSTILLS_KEPT)

    def take_back(self, loss: RunFailure | None) -> None:
        """Note that the node of `loss` had left of its own accord: that is no failure, unless it stopped answering."""
        if loss in self.all and SILENT not in loss.what:
            self.all.remove(loss)

    def hung(self, chapter: Chapter, *, has_step_numbers: bool) -> None:
        """Note the hang that ends `chapter`, if there is one, by what is known now.

        It counts as one failure of each node that is waited for, whichever node has reported it first.
        """
        # Without stacks the worker's own end is the failure that is told.
        if chapter.hung is None or not chapter.hung[1].stacks:
            return
        (at, hung), stand = chapter.hung, chapter.standstill
        nodes: tuple[str, ...] = ("",)
        what = f"no progress for {hung.age_s:.0f} s" + (f" after step {hung.step:,}" if has_step_numbers else "")
        # The finding may be one step behind: see `Chapter.stood_still`.
        if stand is not None and stand.is_explained and abs(hung.step - stand.culprit.step) <= 1:
            what, nodes = f"{what}: {stand.culprit.reason}", stand.culprit.nodes or nodes
        self.add_hang(at, what, hung.generation, nodes, since=at - hung.age_s)

    def add_hang(self, at: float, what: str, generation: int, nodes: Iterable[str], *, since: float) -> None:
        """Note a hang as a failure of each of these `nodes`, "" if none is known.

        Earlier failures of the same hang, those from `since` on, are replaced: it may go on in generations that come to
        no step.
        """
        self.all = [each for each in self.all if not (each.hang and each.at >= since)]
        self.all += [RunFailure(at, each, what, generation, hang=True) for each in nodes]


def explained(chapters: Iterable[Chapter], last: float) -> list[Standstill]:
    """The standstills in `chapters` whose reason was found, each with its end.

    One that outlives its generation is told once, with its newest reason. One that still lasts ends at `last`.
    """
    before = -math.inf
    found: dict[float, Standstill] = {}
    for stand, end in ((stand, chapter.end) for chapter in chapters for stand in chapter.standstills):
        if stand.is_explained:
            # A standstill that goes on in the next generation has the same beginning, to within the delay of reports.
            before = before if abs(stand.since - before) < LATE_S else stand.since
            # No shorter than the finding says: the others may have gone on without the node that reports it.
            until = max(min(stand.until, end, last), stand.since + stand.culprit.age_s)
            found[before] = Standstill(before, until, stand.culprit)
    return list(found.values())[-STANDSTILLS_KEPT:]
