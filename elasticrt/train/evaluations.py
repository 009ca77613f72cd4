"""Evaluations that are made again when they lose a rank, by all ranks together.

Ranks of a script evaluate alike, so the n-th evaluation since a step is the same on all of them. When they meet in
another world each says how many it has begun, and which one it is in. From the first that somebody is in all make them
again, also those that had ended it: its collectives need every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from elasticrt.checkpoint import rng_state


class Evaluation(NamedTuple):
    """One evaluation: `call` makes it, and `numbers` are the generators' states when it began for the first time."""

    call: Callable[[], Any]
    numbers: dict[str, Any]


class Evaluations:
    """Those that this process has begun since its last step. They are numbered from 1.

    Attributes:
        at: the number of the one that it is in; 0 for none.
    """

    def __init__(self) -> None:
        self._begun: list[Evaluation] = []
        self.at = 0

    def begin(self, call: Callable[[], Any]) -> int:
        """Another one begins: its number."""
        self._begun.append(Evaluation(call, rng_state.note()))
        return len(self._begun)

    def enter(self, number: int) -> Callable[[], Any]:
        """What makes evaluation `number`, which begins, with the random numbers that it began with at first."""
        self.at = number
        call, numbers = self._begun[number - 1]
        rng_state.restore(numbers)
        return call

    def forget(self) -> None:
        """Another step is done, or another rank's state was taken over."""
        self._begun.clear()
        self.at = 0

    def standing(self) -> str:
        """What this rank says of itself when it meets the others."""
        return json.dumps([len(self._begun), self.at])

    def meet(self, standings: Iterable[str]) -> range:
        """All ranks have said their `standing`. The evaluations that this one has ended, and makes again.

        None can be made again where a rank has not come to it: it is a newcomer, or has taken over the step before.
        """
        said = [tuple(json.loads(each)) for each in standings]
        first = min((at for _, at in said if at), default=0)
        if any(begun < first for begun, _ in said):
            self.forget()
            return range(0)
        return range(first, self.at or len(self._begun) + 1) if first else range(0)
