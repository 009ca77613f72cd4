"""Tracks which step a script is in, and which calls of its Loop it may make there. Pure.

A step trains one global batch. On one rank that takes one batch, or with micro-batches several: each is a slice of the
rank's part of the global batch. The script trains each batch in a block, `with loop.step():`. It gets the batch from
`Loop.batches`, or draws the batch itself in the body of `Loop.steps`.

A step may be undone, and is then made again. And a script may run code a second time whose effects are in the state
already: the head of an epoch's body (the code before `batches`), or the body of `Loop.steps` before its block. A worker
does that after a restart, and a newcomer when the other ranks let it in. The tracker tells these passes apart, so that
nothing counts twice.
"""

from __future__ import annotations

from typing import Literal

from elasticrt.data.sample_order import BatchSlice
from elasticrt.train import validation

Stage = Literal["new", "running", "over", "broken", "cut short"]


class StepTracker:
    """The place of a script in its training, as the calls of one Loop show it.

    Attributes:
        stage: the stage of the Loop. "broken": an exception has left a step in which an optimizer had stepped. "cut
            short": an iterator around `batches`, such as `islice`, has ended the batches.
        slice: the part of the global batch that the script trains now; None between two batches.
        completed: whether the batch before `slice` completed its global batch.
        draws_itself: whether the script uses `steps`, and draws its data itself.
        has_batch: whether the script holds a batch of `batches`.
        batches_calls: how often the script has called `batches`.
        untrained_batches: how many batches the script has passed before its first step; None from that step on.
        uses_blocks: whether the script has entered a block.
        was_undone: whether the last step was undone, and the next try has not begun.
        body_repeats: whether the body of `steps` runs once more as far as its block.
        at_head: whether the script is in the head of an epoch's body.
        head_repeats: whether that head has run before. Its effects are in the state then.
        head_evaluations: how many evaluations the script has passed in that head.
        awaits_boundary: whether the step of `steps` counts already, and the boundary behind it is still to come.
        is_behind_block: whether the script has asked behind the block of a step that does not count yet how many steps
            are done. So the block has ended in order, and not by a `break` inside of it.
        error: the exception that has left the last block, and ended its step; None if there was none.
    """

    def __init__(self) -> None:
        self.stage: Stage = "new"
        self.slice: BatchSlice | None = None
        self.completed = True
        self.draws_itself = False
        self.has_batch = False
        self.batches_calls = 0
        self.untrained_batches: int | None = 0
        self.uses_blocks = False
        self.was_undone = False
        self.body_repeats = False
        self.at_head = self.head_repeats = False
        self.head_evaluations = 0
        # Whether the script has been at the end of the epoch's batches that a `break` has made.
        self.has_left = False
        self.awaits_boundary = False
        self.is_behind_block = False
        self.error: BaseException | None = None
        # Whether `step()` has returned a block that no `with` has entered.
        self._requested = False
        # Whether the block of the present batch has ended without an exception.
        self._block_ended = False

    @property
    def completes(self) -> bool:
        """Whether the present batch completes its global batch. Between two batches: whether the last one did."""
        return self.completed if self.slice is None else self.slice.last

    @property
    def has_uncounted_step(self) -> bool:
        """Whether the last block of a step has ended, and the step does not count yet."""
        return self._block_ended and self.slice is not None and self.slice.last

    def note_question(self) -> None:
        """Note that the script asks how far it is."""
        self.is_behind_block = self.has_uncounted_step

    def check(self, where: str) -> None:
        """Raise ConfigError if the Loop is not inside its epochs. `where` is the name of the script's call."""
        validation.check_stage(self.stage, where)

    # Batches

    def begin_batch(self, part: BatchSlice) -> None:
        """Note that the script gets a batch, or enters the block in which it draws one.

        Args:
            part: the part of the global batch that the batch is.
        """
        self.slice = part
        self._block_ended = self.is_behind_block = False

    def end_batch(self) -> BatchSlice | None:
        """Note that the batch is over. Returns the slice of the batch; None between two batches."""
        ended, self.slice = self.slice, None
        if ended is not None:
            self.completed = ended.last
        return ended

    def request_batch(self, *, in_step: bool, has_stepped: bool) -> None:
        """Note that the script asks `batches` for the next batch. Raises ReadAheadError inside of a block.

        Args:
            in_step: whether a block is open.
            has_stepped: whether an optimizer has stepped with the present batch.
        """
        validation.check_no_read_ahead(in_step=in_step)
        # `list(loop.batches(loader))` passes batches that no step has trained. Only the first block shows that they
        # were read ahead: in a script without blocks, and without an optimizer in the Loop, training leaves no sign.
        if self.untrained_batches is not None:
            self.untrained_batches = None if has_stepped else self.untrained_batches + 1

    def give_number(self, *, has_begun: bool, others_evaluate: bool) -> bool:
        """Note that `steps` gives a number. Returns whether the body has run before as far as its block.

        Args:
            has_begun: whether the effects of the body before its block are in the state.
            others_evaluate: whether other ranks are in an evaluation that this rank's script still comes to. The script
                must make that evaluation, so the body does not count as one that has run before.
        """
        self.body_repeats, self.was_undone = has_begun and not others_evaluate, False
        return self.body_repeats

    def enter_epoch(self, *, repeats: bool) -> None:
        """Note that the script enters the body of an epoch.

        Args:
            repeats: whether the head of that body has run before, and its effects are in the state.
        """
        # With `steps` the only epoch is the Loop's own, and no code of the script stands in its head.
        self.at_head, self.head_repeats, self.head_evaluations = not self.draws_itself, repeats, 0
        self.has_left = False

    def end_head(self) -> bool:
        """Note that the head of the epoch's body is over. Returns whether that head had run before."""
        repeats, self.at_head = self.at_head and self.head_repeats, False
        return repeats

    def check_body(self, *, has_counted: bool) -> None:
        """Raise ConfigError if the body of `steps` has ended without a block.

        Args:
            has_counted: whether the step of this body counts already.
        """
        validation.check_has_step(self.was_undone or self.slice is not None or has_counted)

    # Blocks

    def request_block(self) -> None:
        """Note that the script calls `step()`.

        Raises ConfigError outside of the epochs, and if the script has not entered the block that it got before.
        """
        self.check("step")
        validation.check_entered(requested=self._requested)
        self._requested = True

    def enter_block(self, *, in_step: bool, is_paused: bool, takes_over: bool) -> None:
        """Note that the script enters the block of a step.

        Args:
            in_step: whether another block is open.
            is_paused: whether the script is in `pause` or `evaluate`.
            takes_over: whether this process has been through a change of the membership. It may have taken over the
                state of another rank, which has trained the batches that were passed here.

        Raises ConfigError for a block that is not allowed there, ReadAheadError after batches that were not trained.
        """
        self._requested, self.error = False, None
        self.check("step")
        validation.check_not_paused("step", is_paused=is_paused)
        # A batch of `batches` has its slice before the block. In `steps` the block itself makes the slice, so a slice
        # that is there, or a step that counts already, belongs to an earlier block in the same body.
        second = self.slice is None if self.has_batch else self.slice is not None or self.awaits_boundary
        validation.check_only_block(in_step=in_step, second=second)
        if self.untrained_batches and not takes_over:
            validation.check_no_read_ahead(passed=self.untrained_batches)
        self.untrained_batches = None
        validation.check_has_batch(has_batch=self.has_batch or self.draws_itself, has_drawn=bool(self.batches_calls))

    def leave_block(self, *, has_stepped: bool, has_optimizer: bool) -> bool:
        """Note that the block has ended without an exception. Returns whether the batch is over with its block.

        Usually the batch is over. One case waits until the script asks for the next batch: the last batch of a step in
        which no optimizer has stepped. The script may have left such a block by `break`, and then the step must not
        count.

        Args:
            has_stepped: whether an optimizer has stepped with the present batch.
            has_optimizer: whether the Loop has an optimizer. In `steps` without one, the end of the block is enough.
        """
        assert self.slice is not None, "a step has begun"
        self._block_ended = True
        return has_stepped or not self.slice.last or not (self.has_batch or has_optimizer)

    def undo(self) -> None:
        """Note that the step is undone, and will be made again."""
        self.slice, self.completed, self.was_undone = None, False, True

    def follow_others(self) -> None:
        """Note that the script goes on as after a finished step, although the step was undone here.

        Other ranks have finished that step, and this rank has taken over their state.
        """
        self.awaits_boundary = self.awaits_boundary or (self.was_undone and not self.has_batch)
        self.was_undone = False

    def break_off(self, *, has_stepped: bool) -> None:
        """Note that an exception has left the batch. Its step does not count.

        Args:
            has_stepped: whether an optimizer had stepped. The weights then have a step that no position counts, so the
                Loop cannot go on.
        """
        self.slice = None
        if has_stepped:
            self.stage = "broken"

    def check_left(self, step: int) -> None:
        """Check that the script may go on behind the block of `step`, which counts from 1.

        Raises ConfigError when the block was requested and not entered, RuntimeError when an exception has left it.
        """
        validation.check_entered(requested=self._requested)
        validation.check_left(self.error, step)
