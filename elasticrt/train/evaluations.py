"""Evaluations that are made again when they lose a rank, by all ranks together.

Ranks of a script evaluate alike, so the n-th evaluation since a step is the same on all of them. When they meet in
another world each says how many it has begun, and which one it is in. From the first that somebody is in all make them
again, also those that had ended it: its collectives need every rank. A rank that has not come to it goes on with the
script, which calls it there, too: that was in the step before, and has taken it over.

A newcomer enters the script at the boundary after the step, and comes to what is evaluated behind that (at the top of
the body of `steps`, after the batches of an epoch). So all make those evaluations with it, from the first one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from elasticrt.checkpoint import rng_state
from elasticrt.train.undo import clone


class Evaluation(NamedTuple):
    """One evaluation: `call` makes it, and `numbers` are the generators' states when it began for the first time."""

    call: Callable[[], Any]
    numbers: dict[str, Any]


_EARLIER = Evaluation(bool, {})
"""One from before a newcomer came: it never makes that."""


class Evaluations:
    """Those that this process has begun since its last step. They are numbered from 1.

    Attributes:
        at: the number of the one that it makes; 0 for none.
        inside: the number of the one that the script is in, from where it may make earlier ones again; 0 for none.
        awaited: the number of one that others are in, to which this process has not come yet; 0 for none.
        made_again: the numbers of those that all make since they have met; then they agree on one result of each.
        rejoined_at: the number of one before which whoever comes to it has the others' state; 0: before the next step.
    """

    def __init__(self) -> None:
        self._begun: list[Evaluation] = []
        self.at = self.inside = self.awaited = self.rejoined_at = 0
        self.made_again = range(0)
        self._results: dict[int, Any] = {}
        self._repeated = 0
        self._passed = -1  # How many had begun at the boundary after the step; -1 before that.

    def begin(self, call: Callable[[], Any]) -> int:
        """Another one begins: its number."""
        self._begun.append(Evaluation(call, rng_state.note()))
        if len(self._begun) == self.awaited:
            self.awaited = 0
        self.inside = len(self._begun)
        return self.inside

    def enter(self, number: int) -> Callable[[], Any]:
        """What makes evaluation `number`, which begins, with the random numbers that it began with at first."""
        self.at = number
        call, numbers = self._begun[number - 1]
        rng_state.restore(numbers)
        return call

    @property
    def next(self) -> int:
        """The number of the one that begins next."""
        return len(self._begun) + 1

    def kept(self, number: int) -> tuple[bool, Any]:
        """Whether evaluation `number` has its result here, and a copy of that, which the script may change."""
        return number in self._results, clone(self._results.get(number))

    def end(self, number: int, result: Any) -> None:
        """Evaluation `number` has its result."""
        self._results[number] = clone(result)

    def repeat_from_first(self) -> None:
        """A step was undone: the script may come once more to what it has evaluated since the step before."""
        self._repeated = 0

    def repeat_from_boundary(self) -> None:
        """The same with what it has evaluated since the boundary."""
        if self._passed < 0:  # The state is that of another rank, or was restored.
            self.pass_boundary()
        self._repeated = self._passed

    def repeat(self) -> tuple[bool, Any]:
        """Whether the next of these has its result, and that. It is not called: others may be in the step already."""
        self._repeated += 1
        return self.kept(self._repeated)

    @property
    def numbers_before(self) -> dict[str, Any] | None:
        """The generators' states before those that whoever gets the state now comes to; None: there are none."""
        coming = self._begun[max(self._passed, 0) :]
        return coming[0].numbers if coming else None

    def pass_boundary(self) -> None:
        """The boundary after the step is here."""
        self._passed = len(self._begun)

    def forget(self) -> None:
        """Another step is done, or another rank's state was taken over."""
        self._begun.clear()
        self._results.clear()
        self.at = self.inside = self.awaited = self.rejoined_at = 0
        self.made_again = range(0)
        self._passed = -1

    def standing(self, *, is_newcomer: bool) -> str:
        """What this rank says of itself when it meets the others. `is_newcomer`: it has made no step with them."""
        return json.dumps([len(self._begun), self.at, self.inside, self._passed, is_newcomer])

    def meet(self, standings: Iterable[str], *, is_newcomer: bool) -> range:
        """All ranks have said their `standing`. The evaluations that this one has ended, and makes again.

        None can be made again where there is a newcomer, and a rank is in one from before the boundary.
        """
        said = [tuple(json.loads(each)) for each in standings]
        first, most = min((at for _, at, *_ in said if at), default=0), max(begun for begun, *_ in said)
        if any(comes for *_, comes in said):
            passed = max(each for *_, each, _ in said)
            if first and (passed < 0 or first <= passed):
                self.forget()
                return range(0)
            passed = max(passed, 0)
            first = passed + 1 if most > passed else 0
            if is_newcomer:
                self._begun, self._passed = [_EARLIER] * passed, passed
        self.made_again = range(first, most + 1) if first else range(0)
        self.rejoined_at = most if any(inside == most for _, _, inside, *_ in said) else 0
        self.awaited = first if len(self._begun) < first else 0
        return range(first, self.at or len(self._begun) + 1) if first else range(0)
