"""Decides which evaluations all ranks make again after one has lost a rank.

All ranks of a script make the same evaluations, so the n-th evaluation since the last step is the same on each of them.
When an evaluation loses a rank, the ranks meet in the next world, and each says how many evaluations it has begun and
which one it is in. Let evaluation k be the first that any rank is in. All ranks make the evaluations from k on again:

- A rank that is in evaluation k calls its function again.
- A rank that has ended evaluation k makes it once more, because its collectives need every rank. The script of this
  rank does not notice: the rank keeps its first result.
- A rank that has not come to evaluation k goes on with its script, which comes to evaluation k as well. Mostly such a
  rank was in the step before. That step was undone, and the rank has taken over the state of one that had finished it.

A newcomer gets the state of a rank that lives on, but its script begins at the boundary after the last step. It comes
to every evaluation behind that boundary: at the top of the body of `Loop.steps`, or after the batches of an epoch. So
where a newcomer comes in, all ranks make the evaluations behind the boundary again, from the first one. An evaluation
before the boundary, behind the block of the step, cannot be made with a newcomer, because its script never comes there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from elasticrt.checkpoint import rng_state
from elasticrt.train.undo import clone


class Evaluation(NamedTuple):
    """One evaluation.

    Attributes:
        call: makes the evaluation.
        numbers: the states of the random number generators when the evaluation began for the first time. Each further
            try draws the same numbers.
    """

    call: Callable[[], Any]
    numbers: dict[str, Any]


_EARLIER = Evaluation(bool, {})
"""Stands for an evaluation that was over before this newcomer came, so that the numbers of later ones are right. A
newcomer never makes it."""


class Evaluations:
    """The evaluations that this process has begun since its last step, numbered from 1.

    Attributes:
        at: the number of the evaluation that this process is making; 0 for none.
        inside: the number of the evaluation that the script has called and not left; 0 for none. From there the process
            may be making an earlier one again, so `at` may be less.
        awaited: the number of an evaluation that other ranks are in and this process has not come to yet; 0 for none.
        made_again: the numbers of the evaluations that all ranks make in this generation because they were broken off.
            The ranks agree on one result for each of them.
        rejoined_at: the number of the evaluation at which a rank that comes after the others has caught up with them.
            The script's changes on the way are in the state of the others already, and are undone there. 0: the rank
            catches up at the block of the next step.
    """

    def __init__(self) -> None:
        self._begun: list[Evaluation] = []
        self.at = self.inside = self.awaited = self.rejoined_at = 0
        self.made_again = range(0)
        # The results of the evaluations that have ended, by number.
        self._results: dict[int, Any] = {}
        # How many of them the script has come to once more, see `repeat`.
        self._repeated = 0
        # How many evaluations had begun at the boundary after the step; -1 until this process is there.
        self._passed = -1

    def begin(self, call: Callable[[], Any]) -> int:
        """Note that the script begins another evaluation. Returns its number.

        Args:
            call: makes the evaluation.
        """
        self._begun.append(Evaluation(call, rng_state.capture_raw()))
        if len(self._begun) == self.awaited:
            self.awaited = 0
        self.inside = len(self._begun)
        return self.inside

    def enter(self, number: int) -> Callable[[], Any]:
        """Begin a try of evaluation `number`, with the random numbers of its first one. Returns what makes it."""
        self.at = number
        call, numbers = self._begun[number - 1]
        rng_state.restore(numbers)
        return call

    @property
    def next(self) -> int:
        """The number of the evaluation that begins next."""
        return len(self._begun) + 1

    def kept(self, number: int) -> tuple[bool, Any]:
        """Whether evaluation `number` has its result here, and a copy of the result, which the script may change."""
        return number in self._results, clone(self._results.get(number))

    def end(self, number: int, result: Any) -> None:
        """Keep the `result` of evaluation `number`."""
        # A copy, because the script may change what it has got.
        self._results[number] = clone(result)

    def repeat_from_first(self) -> None:
        """Note that a step was undone: the script may come once more to the evaluations since the step before."""
        self._repeated = 0

    def repeat_from_boundary(self) -> None:
        """Note that the script may come once more to the evaluations since the boundary, and to no earlier ones."""
        # The boundary is not known where the state was restored, or comes from another rank.
        if self._passed < 0:
            self.pass_boundary()
        self._repeated = self._passed

    def repeat(self) -> tuple[bool, Any]:
        """Whether the next evaluation that the script comes to once more has its result here, and a copy of the result.

        That evaluation must not be called: other ranks may be in the step already, and would miss its collectives.
        """
        self._repeated += 1
        return self.kept(self._repeated)

    @property
    def numbers_before(self) -> dict[str, Any] | None:
        """The generators' states from before the evaluations that a newcomer, which gets the state now, will come to.

        These are the evaluations behind the boundary. None if there are none.
        """
        coming = self._begun[max(self._passed, 0) :]
        return coming[0].numbers if coming else None

    def pass_boundary(self) -> None:
        """Note that the script is at the boundary after the step."""
        self._passed = len(self._begun)

    def forget(self) -> None:
        """Forget all evaluations, because another step is done, or another rank's state was taken over."""
        self._begun.clear()
        self._results.clear()
        self.at = self.inside = self.awaited = self.rejoined_at = 0
        self.made_again = range(0)
        self._passed = -1

    def standing(self, *, is_newcomer: bool) -> str:
        """What this rank says of itself when it meets the others, as JSON for `meet`.

        Args:
            is_newcomer: whether this rank has made no step with the others.
        """
        return json.dumps([len(self._begun), self.at, self.inside, self._passed, is_newcomer])

    def meet(self, standings: Iterable[str], *, is_newcomer: bool) -> range:
        """Decide what is made again. Returns the numbers of the evaluations that this rank makes again at once.

        These are ended here. The one that this rank is in, if any, it makes again after them.

        Where there is a newcomer, and a rank is in an evaluation from before the boundary, no evaluation can be made
        again. All are forgotten then, so that `at` is 0 afterwards.

        Args:
            standings: what each rank has said, see `standing`. All ranks get the same, and so decide alike.
            is_newcomer: whether this rank is a newcomer.
        """
        said = [tuple(json.loads(each)) for each in standings]
        # The first evaluation that a rank is in, 0 for none; and how many the rank that is furthest has begun.
        first, most = min((at for _, at, *_ in said if at), default=0), max(begun for begun, *_ in said)
        if any(comes for *_, comes in said):
            # A rank that has not come to the boundary says -1, so the largest number is right if any rank was there.
            passed = max(each for *_, each, _ in said)
            if first and (passed < 0 or first <= passed):
                self.forget()
                return range(0)
            passed = max(passed, 0)
            # Even if no rank is in an evaluation: the newcomer's script comes to those that have ended.
            first = passed + 1 if most > passed else 0
            if is_newcomer:
                self._begun, self._passed = [_EARLIER] * passed, passed
        self.made_again = range(first, most + 1) if first else range(0)
        # If a script is in the last evaluation, a rank that follows has caught up there, else at the next step's block.
        self.rejoined_at = most if any(inside == most for _, _, inside, *_ in said) else 0
        self.awaited = first if len(self._begun) < first else 0
        return range(first, self.at or len(self._begun) + 1) if first else range(0)
