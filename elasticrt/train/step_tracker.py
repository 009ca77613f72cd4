"""Which step a script is in, and which calls of its Loop it may make there. Pure.

A step has one or several batches: with micro-batches, each is a slice of this rank's part of the global batch. The
script trains each batch in a block, `with loop.step():`. A batch comes from the loader of `Loop.batches`, or the script
draws it itself in the body of `Loop.steps`.
"""

from __future__ import annotations

from typing import Literal

from elasticrt.data.sample_order import BatchSlice
from elasticrt.train import validation

Stage = Literal["new", "running", "over", "broken", "cut short"]


class StepTracker:
    """The state of a script between the calls of one Loop, and its changes.

    Attributes:
        stage: of the Loop. "broken": an exception has left a step that an optimizer had taken. "cut short": an iterator
            around `batches` has ended it.
        slice: what is trained of the global batch; None between two batches.
        completed: whether the batch before `slice` completed its global batch.
        draws_itself: whether the script is in `steps`.
        has_batch: whether the script has a batch of `batches`.
        passes: how often `batches` was called.
        untrained: batches that the script has passed before its first step; None from that step on.
        uses_blocks: whether the script has entered a block.
        repeats: whether the last step was undone, and is made again.
        number_repeats: whether the body of `steps` runs again as far as its block.
        at_head: whether the script is in the head of an epoch's body, before `batches`.
        head_repeats: whether that head has run before, and what it has changed is in the state.
        awaits_boundary: whether the step of `steps` counts, and the boundary behind it is still to come.
        error: the exception that has left the last block, and ended its step.
    """

    def __init__(self) -> None:
        self.stage: Stage = "new"
        self.slice: BatchSlice | None = None
        self.completed = True
        self.draws_itself = False
        self.has_batch = False
        self.passes = 0
        self.untrained: int | None = 0
        self.uses_blocks = False
        self.repeats = False
        self.number_repeats = False
        self.at_head = self.head_repeats = False
        self.awaits_boundary = False
        self.error: BaseException | None = None
        self._in_head = 0  # Evaluations of the head that have given their result once more.
        self._requested = False  # Whether `step()` has returned a block that no `with` has entered.
        self._block_ended = False  # Whether the block of the present batch has ended without an exception.

    @property
    def completes(self) -> bool:
        """Whether the present batch, or between two batches the last one, completes its global batch."""
        return self.completed if self.slice is None else self.slice.last

    @property
    def is_finished(self) -> bool:
        """Whether the block of a step has ended, and the step does not count yet."""
        return self._block_ended and self.slice is not None and self.slice.last

    def check(self, where: str) -> None:
        """Raises ConfigError when the Loop is not inside its epochs. `where`: the call of the script."""
        validation.check_stage(self.stage, where)

    # Batches

    def begin(self, part: BatchSlice) -> None:
        """The script gets a batch, which is this part of a global batch, or enters the block in which it draws one."""
        self.slice = part
        self._block_ended = False

    def end(self) -> BatchSlice | None:
        """The batch is over. Returns its slice, None between two batches."""
        ended, self.slice = self.slice, None
        if ended is not None:
            self.completed = ended.last
        return ended

    def pass_batch(self, *, in_step: bool, stepped: bool) -> None:
        """The script asks `batches` for another one. Raises ReadAheadError inside of a step.

        Args:
            in_step: whether a block is open.
            stepped: whether an optimizer has stepped with the present batch.
        """
        validation.check_not_ahead(in_step=in_step)
        if self.untrained is not None:
            self.untrained = None if stepped else self.untrained + 1

    def give_number(self, *, has_begun: bool, others_evaluate: bool) -> bool:
        """`steps` gives a number. Returns whether its body has run before as far as the block.

        Args:
            has_begun: whether what it has changed there is in the state.
            others_evaluate: whether other ranks are in an evaluation that the script comes to.
        """
        self.number_repeats, self.repeats = has_begun and not others_evaluate, False
        return self.number_repeats

    def enter_epoch(self, *, repeats: bool) -> None:
        """The script enters the body of an epoch. `repeats`: its head has run before."""
        self.at_head, self.head_repeats, self._in_head = not self.draws_itself, repeats, 0

    def next_of_head(self) -> int:
        """The script comes once more to an evaluation in the head. Returns its number, from 0."""
        self._in_head += 1
        return self._in_head - 1

    def pass_head(self) -> bool:
        """The head of the epoch's body is over. Returns whether it has run before."""
        repeats, self.at_head = self.at_head and self.head_repeats, False
        return repeats

    def check_body(self, *, has_counted: bool) -> None:
        """The body of `steps` has ended. Raises ConfigError if it had no block. `has_counted`: its step counts."""
        validation.check_has_step(self.repeats or self.slice is not None or has_counted)

    # Blocks

    def request(self) -> None:
        """The script calls `step()`. Raises ConfigError where no step can be, or the last one was not entered."""
        self.check("step")
        validation.check_entered(requested=self._requested)
        self._requested = True

    def enter(self, *, in_step: bool, is_paused: bool, takes_over: bool) -> None:
        """The script enters the block of a step.

        Args:
            in_step: whether a block is open.
            is_paused: whether the script is in `pause` or `evaluate`.
            takes_over: whether this process has its state from other ranks, which have trained what it has passed.

        Raises ConfigError for a block that can't be there, ReadAheadError after batches that were not trained.
        """
        self._requested, self.error = False, None
        self.check("step")
        validation.check_not_paused("step", is_paused=is_paused)
        second = self.slice is None if self.has_batch else self.slice is not None or self.awaits_boundary
        validation.check_alone(in_step=in_step, second=second)
        if self.untrained and not takes_over:
            validation.check_not_ahead(passed=self.untrained)
        self.untrained = None
        validation.check_fed(has_batch=self.has_batch or self.draws_itself, has_drawn=bool(self.passes))

    def leave(self, *, stepped: bool, sees_optimizers: bool) -> bool:
        """The block has ended without an exception. Returns whether its step counts at once.

        Where an optimizer could have stepped and has not, the script may have left the step by `break`: then it counts
        when the script asks for the next one.

        Args:
            stepped: whether an optimizer has stepped with the present batch.
            sees_optimizers: whether the Loop has one.
        """
        assert self.slice is not None, "a step has begun"
        self._block_ended = True
        return stepped or not self.slice.last or not (self.has_batch or sees_optimizers)

    def undo(self) -> None:
        """The step is undone, and will be made again."""
        self.slice, self.completed, self.repeats = None, False, True

    def follow_others(self) -> None:
        """Other ranks have made the step that was undone here: this rank's script goes on as if it had, too."""
        self.awaits_boundary = self.awaits_boundary or (self.repeats and not self.has_batch)
        self.repeats = False

    def break_off(self, *, stepped: bool) -> None:
        """An exception has left the batch, and its step does not count. `stepped`: an optimizer had taken it."""
        self.slice = None
        if stepped:
            self.stage = "broken"

    def check_left(self, step: int) -> None:
        """The script goes on behind the block of `step`, from 1.

        Raises ConfigError when the block was requested and not entered, RuntimeError when an exception has left it.
        """
        validation.check_entered(requested=self._requested)
        validation.check_left(self.error, step)
