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
If nodes are missing for a step, the survivors make it alone, before they wait for newcomers at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from elasticrt.checkpoint import rng_state
from elasticrt.train.undo import clone


class Evaluation(NamedTuple):
    """One evaluation.

    Attributes:
        call: makes the evaluation.
        rng_states: the states of the random number generators when the evaluation began for the first time. Each
            further try draws the same numbers.
    """

    call: Callable[[], Any]
    rng_states: dict[str, Any]


class Standing(NamedTuple):
    """What a rank says of itself when it meets the others. By default: a rank that has taken over another one's state.

    Attributes:
        begun: how many evaluations it has begun.
        current: see `Evaluations`.
        called: see `Evaluations`.
        begun_at_boundary: how many it had begun at the boundary after the step; -1 if it has not come to the boundary.
        is_newcomer: whether it has made no step with the others.
    """

    begun: int = 0
    current: int = 0
    called: int = 0
    begun_at_boundary: int = -1
    is_newcomer: bool = False


_BEFORE_NEWCOMER = Evaluation(bool, {})
"""Stands for an evaluation that was over before this newcomer came, so that the numbers of later ones are right. A
newcomer never makes it."""


class Evaluations:
    """The evaluations that this process has begun since its last step, numbered from 1.

    Attributes:
        current: the number of the evaluation that this process is making; 0 for none.
        called: the number of the evaluation that the script has called and not left; 0 for none. From there the process
            may be making an earlier one again, so `current` may be less.
        awaited: the number of an evaluation that other ranks are in and this process has not come to yet; 0 for none.
        made_again: the numbers of the evaluations that all ranks make in this generation because they were broken off.
            The ranks agree on one result for each of them.
        caught_up_at: the number of the evaluation at which a rank that comes after the others has caught up with them.
            The script's changes on the way are in the state of the others already, and are undone there. 0: the rank
            catches up at the block of the next step.
    """

    def __init__(self) -> None:
        self._begun: list[Evaluation] = []
        self.current = self.called = self.awaited = self.caught_up_at = 0
        self.made_again = range(0)
        # The results of the evaluations that have ended, by number, and the generators' states behind them.
        self._results: dict[int, Any] = {}
        self._rng_behind: dict[int, dict[str, Any]] = {}
        # How many of them the script has come to once more, see `replay`.
        self._replayed = 0
        # How many evaluations had begun at the boundary after the step; -1 until this process is there.
        self._begun_at_boundary = -1

    def begin(self, call: Callable[[], Any]) -> int:
        """Note that the script begins another evaluation. Returns its number.

        Args:
            call: makes the evaluation.
        """
        self._begun.append(Evaluation(call, rng_state.capture_raw()))
        if len(self._begun) == self.awaited:
            self.awaited = 0
        self.called = len(self._begun)
        return self.called

    def begin_try(self, number: int) -> Callable[[], Any]:
        """Begin a try of evaluation `number`, with the random numbers of its first one. Returns what makes it."""
        self.current = number
        call, rng_states = self._begun[number - 1]
        rng_state.restore(rng_states)
        return call

    @property
    def next_number(self) -> int:
        """The number of the evaluation that begins next."""
        return len(self._begun) + 1

    def result_of(self, number: int) -> tuple[bool, Any]:
        """Whether evaluation `number` has its result here, and a copy of the result, which the script may change."""
        return number in self._results, clone(self._results.get(number))

    def end(self, number: int, result: Any) -> None:
        """Keep the `result` of evaluation `number`, which has just ended."""
        # A copy, because the script may change what it has got.
        self._results[number], self._rng_behind[number] = clone(result), rng_state.capture_raw()

    def replay_from_first(self) -> None:
        """Note that a step was undone: the script may come once more to the evaluations since the step before."""
        self._replayed = 0

    def replay_from_boundary(self) -> None:
        """Note that the script may come once more to the evaluations since the boundary, and to no earlier ones."""
        # The boundary is not known where the state was restored, or comes from another rank.
        if self._begun_at_boundary < 0:
            self.pass_boundary()
        self._replayed = self._begun_at_boundary

    def replay(self) -> tuple[bool, Any]:
        """Whether the next evaluation that the script comes to once more has its result here, and a copy of the result.

        That evaluation must not be called: other ranks may be in the step already, and would miss its collectives. The
        random numbers go on as behind it.
        """
        self._replayed += 1
        if self._replayed in self._rng_behind:
            rng_state.restore(self._rng_behind[self._replayed])
        return self.result_of(self._replayed)

    @property
    def rng_for_newcomer(self) -> dict[str, Any] | None:
        """The generators' states from before the evaluations that a newcomer, which gets the state now, will come to.

        These are the evaluations behind the boundary. None if there are none.
        """
        coming = self._begun[max(self._begun_at_boundary, 0) :]
        return coming[0].rng_states if coming else None

    def pass_boundary(self) -> None:
        """Note that the script is at the boundary after the step."""
        self._begun_at_boundary = len(self._begun)

    def forget(self) -> None:
        """Forget all evaluations, because another step is done, or another rank's state was taken over."""
        self._begun.clear()
        self._results.clear()
        self._rng_behind.clear()
        self.current = self.called = self.awaited = self.caught_up_at = 0
        self.made_again = range(0)
        self._begun_at_boundary = -1

    def standing(self, *, is_newcomer: bool) -> Standing:
        """What this rank says of itself when it meets the others.

        Args:
            is_newcomer: whether this rank has made no step with the others.
        """
        return Standing(len(self._begun), self.current, self.called, self._begun_at_boundary, is_newcomer)

    @staticmethod
    def is_before_boundary(ranks: Sequence[Standing]) -> bool:
        """Whether one of `ranks` is in an evaluation from before the boundary, which only survivors can make again."""
        at_boundary = max(rank.begun_at_boundary for rank in ranks)
        # A rank that has not come to the boundary says -1, so the largest number is right if any rank was there.
        return any(rank.current and (at_boundary < 0 or rank.current <= at_boundary) for rank in ranks)

    def decide(self, ranks: Sequence[Standing], *, is_newcomer: bool) -> range:
        """Decide what is made again. Returns the numbers of the evaluations that this rank makes again at once.

        These are ended here. The one that this rank is in, if any, it makes again after them.

        Where there is a newcomer, and a rank is in an evaluation from before the boundary, no evaluation can be made
        again. All are forgotten then, so that `current` is 0 afterwards.

        Args:
            ranks: what each rank has said. All ranks get the same, and so decide alike.
            is_newcomer: whether this rank is a newcomer.
        """
        # The first evaluation that a rank is in, 0 for none; and how many the rank that is furthest has begun.
        first = min((rank.current for rank in ranks if rank.current), default=0)
        most = max(rank.begun for rank in ranks)
        if any(rank.is_newcomer for rank in ranks):
            if self.is_before_boundary(ranks):
                self.forget()
                return range(0)
            at_boundary = max(0, *(rank.begun_at_boundary for rank in ranks))
            # Even if no rank is in an evaluation: the newcomer's script comes to those that have ended.
            first = at_boundary + 1 if most > at_boundary else 0
            if is_newcomer:
                self._begun, self._begun_at_boundary = [_BEFORE_NEWCOMER] * at_boundary, at_boundary
        self.made_again = range(first, most + 1) if first else range(0)
        # If a script is in the last evaluation, a rank that follows has caught up there, else at the next step's block.
        self.caught_up_at = most if any(rank.called == most for rank in ranks) else 0
        self.awaited = first if len(self._begun) < first else 0
        return range(first, self.current or len(self._begun) + 1) if first else range(0)
