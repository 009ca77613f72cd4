"""Frames a script's training loop: counts its steps, saves them, and makes a step again when the membership changes.

The boundary between two steps is where the script asks for the next batch. Only there a step is saved, and only there
all workers stop together when nodes join or leave. A boundary at which nothing is due takes a few microseconds and no
collective: only rank 0 saves, and its state is that of all ranks.

A rank may be lost inside of a step. The block `with loop.step():` then ends at the line whose collective failed. The
step is undone (`undo`), this process goes on in the next generation (`world`), and the loop gives the script the same
batch once more. The gradients of the broken step are worthless: they lack those of the lost rank, and each rank needs
other samples in a world of another size.

A newcomer runs the script from its first line, and comes to the place where the others are in the middle of an epoch.
It runs the head of the epoch's body (the code before `batches`), which the others have passed. What it changes there is
in the state that it gets from them already. So `StepTracker` and `AppliedCode` follow which code runs a second time,
and `Undo.note_for_discard` and `discard_changes` enclose this code and undo it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch

from elasticrt.checkpoint.memory_tier import BUDGET
from elasticrt.data.sample_order import WHOLE, BatchSlice
from elasticrt.data.sampler import ElasticBatchSampler, ElasticDistributedSampler
from elasticrt.distributed import agent_client, collectives, handover, regroup
from elasticrt.distributed.signal_guard import SignalGuard
from elasticrt.errors import ConfigError, Handover, explain, path_of
from elasticrt.ipc.status_page import FIRST_BATCH
from elasticrt.train import generator_exit, validation
from elasticrt.train.batches import Drawing, check_loader, is_stream, length_of, samples_per_batch, stream_resized
from elasticrt.train.reporting import Reporter
from elasticrt.train.saving import Saving
from elasticrt.train.step_tracker import StepTracker
from elasticrt.train.training_state import AppliedCode, TrainingState
from elasticrt.train.undo import Undo
from elasticrt.train.weighting import Weighting
from elasticrt.train.world import Change, World, plain_result

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_running: list[Loop] = []
"""The Loops that are inside of `epochs`, the outermost first. Each has a checkpoint directory of its own."""


class Loop:
    """A training loop that saves its state, resumes from it, and goes on when nodes join, leave or fail.

    Use it as `for epoch in loop.epochs(...)` with `for batch in loop.batches(loader)` inside, or as
    `for step in loop.steps(...)` if the script draws its data itself. Put each step into `with loop.step():`. Then the
    processes that survive the loss of another one go on without a restart.

    Args:
        directory: the directory of the checkpoints, shared by the nodes or each node's own.
        sampler: the ElasticBatchSampler or ElasticDistributedSampler of the loader that `batches` gets. Without a
            sampler, a restart in the middle of an epoch skips as many batches as were trained, whatever samples the
            loader has in them.
        every: how often to save: "30s", "5 min", "200 steps" or "1 epoch".
        keep: how many checkpoints to keep.
        resume: "auto": resume from the newest checkpoint. "fresh": start over. A restart after a failure resumes in
            both cases.
        seed: the seed of the random numbers of each step. With a seed, after any restart at the same world size each
            rank draws the numbers that it would have drawn. With None this holds for rank 0, and on all ranks for those
            generators that the script seeds alike on all ranks.
        memory: the share of the training time that copies of the state in the memory of each node may take, 0.002 by
            default; 0 for no copies. After a failure, training resumes from the newest copy that has survived, else
            from disk.
        ledger: a directory for the ledger, a record of the samples that each step has trained. The command
            `elasticrt ledger check` proves with it that each sample counted once. Needs an ElasticBatchSampler.
        **stateful_objects: everything else to save, by name: model, optimizer, scheduler, scaler and other objects with
            `state_dict()` and `load_state_dict()`. A module in DDP or DataParallel, or a compiled one, is saved without
            its wrapper.

    Raises TypeError, ValueError and ConfigError for arguments that are not allowed.
    """

    # Whether this process has entered any Loop.
    _any_was_entered = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        sampler: ElasticBatchSampler | ElasticDistributedSampler | None = None,
        every: str = "30s",
        keep: int = 3,
        resume: str = "auto",
        seed: int | None = None,
        memory: float = BUDGET,
        ledger: str | os.PathLike[str] | None = None,
        **stateful_objects: Any,
    ) -> None:
        if sampler is not None and not isinstance(sampler, (ElasticBatchSampler, ElasticDistributedSampler)):
            expected = "ElasticBatchSampler, ElasticDistributedSampler or None"
            what, remedy = "not one of our samplers", "Leave it out for another one"
            raise TypeError(explain(what, "Loop(sampler=)", got=sampler, expected=expected, remedy=remedy))
        if resume not in ("auto", "fresh"):
            raise ConfigError("unknown value", "Loop(resume=)", got=resume, expected='"auto" or "fresh"')
        self._shown_directory = path_of(directory, "Loop")
        self._state = TrainingState(stateful_objects, sampler, seed, ledger, self._shown_directory)
        self._reporter = Reporter(stateful_objects.values(), self._state.samples)
        self._saving = Saving(self._state, directory, every=every, keep=keep, memory=memory)
        self._fresh = resume == "fresh"
        self._steps_max: int | None = None
        self._tracker = StepTracker()
        self._weighting = Weighting(stateful_objects.values())
        self._undo = Undo(self._state, seeded=seed is not None)
        self._world = World(stateful_objects, self._state, self._saving, self._undo, self._reporter)
        self._page = agent_client.status_page()
        self._guard = SignalGuard()
        # Whether no other Loop of this process was entered before this one.
        self._is_first_loop = False
        # The loader that the newest call of `batches` got.
        self._loader: object = None
        # The collectives that this rank had begun at the head of the epoch's body, plus those of evaluations in it.
        self._head_collectives = 0

    @property
    def vars(self) -> dict[str, Any]:
        """The script's own plain values by name, such as a best accuracy.

        They are saved, restored and undone with the rest of the state. Lists, dicts, sets and tensors among them stay
        the same objects.
        """
        return self._state.vars

    @vars.setter  # noqa: A003  Scripts know it by this name.
    def vars(self, values: dict[str, Any]) -> None:
        self._state.vars = values

    @property
    def epoch(self) -> int:
        """The number of the present epoch, from 0."""
        return self._state.position.epoch

    @property
    def steps_done(self) -> int:
        """How many steps are done, over all epochs and restarts. After the block of a step, that step is included."""
        self._tracker.note_question()
        return self._state.position.steps + self._tracker.has_uncounted_step

    @property
    def complete(self) -> bool:
        """Whether the present batch completes its global batch. Then it is time for `optimizer.step()`.

        With `micro_batch_size` a step may have several batches, and this is True in the last one only. Without it, this
        is True in every batch.

        After the block of a step: whether the step is done. It is False after a try that was undone because the
        membership has changed: the step is made again, or other ranks had finished it, and this rank has taken over
        their state. There is one exception: if these ranks are in `evaluate` after the step, this is True, so that the
        script follows them into `evaluate`.
        """
        self._tracker.note_question()
        return self._tracker.completes

    # Epochs

    def epochs(self, total: int, *, max_steps: int | None = None) -> Iterator[int]:
        """Iterate over the numbers of the epochs that are still to train, from 0. May be used once per Loop.

        The iteration begins by restoring the newest checkpoint. An epoch whose batches were all trained, but whose body
        had not ended, is entered again, and its `batches` is empty then. When the iteration ends, also by `break` or
        `return`, the state is saved, and all ranks wait for that. After an exception nothing is saved.

        Args:
            total: the number of epochs in all, over all restarts.
            max_steps: end when so many steps are done in all, over all restarts; None: no limit.

        Raises TypeError and ValueError for counts that are not allowed, ConfigError when it is used twice,
        CheckpointError when no checkpoint can be used or the last one could not be saved, DuplicateError (exit code 7)
        when another live run saves to the directory.
        """
        validation.check_counts(total, max_steps, "epochs")
        if self._tracker.stage != "new":
            raise ConfigError("used twice", "epochs", expected="once for each Loop", remedy="Make a new Loop")
        self._steps_max = max_steps
        return self._epochs(total)

    def _epochs(self, total: int) -> Iterator[int]:
        self._enter()
        well = False
        try:
            while not self._state.position.is_over(total, self._steps_max):
                self._state.position = self._state.position._replace(open=True)
                if self._state.sampler is not None:
                    self._state.sampler.set_epoch(self._state.position.epoch)
                entered = self._state.position.epoch
                self._undo.leave_batches(known=True)
                self._enter_head()
                try:
                    yield entered
                except GeneratorExit:
                    # Python closes a generator after `break` and `return`, and also when an exception leaves the body.
                    if generator_exit.on_purpose(sys._getframe().f_back):
                        self._end_batch()
                        # A newcomer that has followed the others to their end: no step comes where it would catch up.
                        if not self._tracker.was_undone:
                            self._undo.discard_changes()
                        # Started again, the training goes on with the batches that are left.
                        self._state.position = self._state.position._replace(left=False)
                        # An exception that is raised while Python closes the generator does not reach the script.
                        with suppress(Handover):
                            self._end_together()
                            well = True
                    raise
                self._tracker.check("epochs")
                self._end_batch()
                # The body has ended without a block for the batches that were passed, so none is to come for them.
                if self._tracker.untrained_batches:
                    self._tracker.untrained_batches = None
                # Other ranks had finished this epoch, and this rank has taken over their state. What the script has
                # done after the batches is in that state already.
                if self._state.position.epoch != entered:
                    self._discard_changes()
                    continue
                # The body may have ended after a step was undone, without making the step again.
                self._tracker.was_undone = False
                self._undo.keep_changes()
                position = self._state.position
                # Whether the limit of steps, and not the end of the data or a `break`, has ended this epoch.
                cut_short = position.limit_reached(self._steps_max) and not position.drained and not self._is_exhausted
                if not cut_short:
                    self._state.ledger.closed(position)
                    self._state.applied = AppliedCode()
                self._state.position = position.closed(cut_short=cut_short)
                self._undo.state_outside_batches = None
                self._pass_boundary()
            self._end_together()
            self._saving.checkpointer.finish()
            well = True
        finally:
            self._leave(well=well)

    def _enter_head(self) -> None:
        """Note that the body of an epoch begins. If the state has its head already, prepare to undo the second run."""
        applied = self._state.applied
        self._tracker.enter_epoch(repeats=applied.has_head)
        if not applied.has_head:
            applied.begin_head(self._state.rng.begin_head() if self._tracker.at_head else {})
        elif self._tracker.at_head:
            self._undo.note_for_discard(whole=False)
            self._state.rng.repeat_head(applied.head_rng[0], self._state.position)
        self._head_collectives = collectives.sequence_number()

    def _end_head(self) -> None:
        """Note that the head of the epoch's body is over. If the state had it already, undo its second run."""
        head_collectives = collectives.sequence_number() - self._head_collectives
        # A newcomer would wait in such a collective for ranks that are in their steps.
        if head_collectives and self._tracker.at_head and self._world.in_place.worker.has_agent:
            _warn_of_head()
        if self._tracker.end_head():
            # A newcomer that still comes to an evaluation of the others is undone once more there, from the same note.
            self._undo.discard_changes(keeps_note=bool(self._world.evaluations.awaited))
        self._state.applied.has_head = True

    def _end_together(self) -> None:
        """Save the last step, and wait on all ranks until that is done."""
        self._reporter.end()
        validation.check_not_awaited(is_awaited=bool(self._world.evaluations.awaited), step=self._state.position.steps)
        # Once more in each generation that begins meanwhile.
        while not self._world.save_last_together(lambda: self._saving.save_last(self._undo.state_before_break())):
            pass

    def _enter(self) -> None:
        place = self._saving.checkpointer.place
        if any(other._saving.checkpointer.place == place for other in _running):
            raise ConfigError(
                "another Loop is running in this directory", self._shown_directory, remedy="Finish one before the next"
            )
        # A newcomer runs the script from its first line, and would wait to be let in at the outermost Loop while the
        # others are in this one. So no Loop around this one goes on in place any more.
        for other in _running:
            other._world.in_place.disable()
        self._resume_training()
        self._is_first_loop = not Loop._any_was_entered
        Loop._any_was_entered = True
        self._world.enter(fresh=self._fresh)
        self._saving.begin()
        self._undo.watch(self._before_optimizer)
        self._tracker.stage = "running"
        self._guard.install()
        _running.append(self)

    def _leave(self, *, well: bool) -> None:
        """Clean up, because the loop is over. With `well` it has ended in order, otherwise by an exception."""
        self._world.in_place.disable()
        self._undo.unwatch()
        self._guard.remove(obeys=well)
        self._weighting.detach()
        self._page.stepping = 0
        self._state.ledger.close()
        self._tracker.stage, self._tracker.slice = "over", None
        _running.remove(self)
        if not _running:
            self._page.over, self._page.pausing_ns = 1, time.monotonic_ns()

    def _resume_training(self) -> None:
        """Note that steps are to be expected again, if a Loop before this one was over."""
        if self._page.over:
            since_ns, self._page.pausing_ns, self._page.over = self._page.pausing_ns, 0, 0
            self._page.pause_ns += time.monotonic_ns() - since_ns

    @property
    def _is_exhausted(self) -> bool:
        """Whether the sampler has nothing left in this epoch."""
        return self._state.sampler is not None and self._state.sampler.remaining == 0

    # Batches

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate over the batches of this epoch that are not trained yet.

        The step of a batch counts when the script asks for the next batch. After `break` it counts if the optimizer has
        stepped, or if the script has asked behind the block for `steps_done` or `complete`. Otherwise it is undone.
        After an exception it does not count. So ask for a batch only when the one before is trained. To
        read ahead, let the loader do so (`num_workers`, `prefetch_factor`).

        A step that was undone gives the script the same batch again, or with a sampler this rank's part of the same
        global batch in the new world.

        Args:
            loader: the DataLoader of the Loop's sampler, or a class around it that yields the same batches in the same
                order. Without a sampler any iterable.

        Raises TypeError for a loader that is not iterable, ConfigError for one that does not belong to the sampler,
        ReadAheadError when a batch is asked for inside of a step, or when the first step comes after batches that were
        not trained, CheckpointError when an epoch of an IterableDataset would go on at another world size.
        """
        self._tracker.check("batches")
        validation.check_not_paused("batches", is_paused=bool(self._page.pausing_ns))
        check_loader(loader, self._state.sampler)
        self._end_batch()
        self._end_head()
        if self._tracker.has_left:  # The script draws from the same epoch once more.
            self._state.position, self._tracker.has_left = self._state.position._replace(left=False), False
        if isinstance(self._state.sampler, ElasticDistributedSampler):
            self._set_batch_size(samples_per_batch(loader))
        elif self._state.sampler is None:
            self._set_length(length_of(loader))
        micro = self._state.sampler.micro_batch_size if isinstance(self._state.sampler, ElasticBatchSampler) else None
        if micro is not None:
            self._weighting.check_micro_batches(micro, self._world.size)
        if not self._state.position.batches:
            self._state.begun_by = self._world.size
        elif self._is_resized_stream(loader):
            raise stream_resized(self._state.begun_by, self._world.size)
        self._weighting.renew()
        self._state.ledger.renew()
        self._tracker.batches_calls += 1
        self._loader = loader
        return self._batches(loader, self._tracker.batches_calls)

    def _is_resized_stream(self, loader: Iterable[Any]) -> bool:
        """Whether nobody can say which samples of this epoch are left: see `is_stream`."""
        return self._state.begun_by != self._world.size and is_stream(loader, self._state.sampler)

    def _set_batch_size(self, size: int) -> None:
        """Note how many samples a batch of the loader has, where the sampler does not know it.

        The ranks compare the sizes of their first loaders: with different ones they would train different samples.
        """
        if not self._tracker.batches_calls and self._world.seat_changes:
            self._state.check_batch_size(size)
        elif not self._tracker.batches_calls and self._state.sampler_settings():
            self._state.compare_samplers(self._world.in_place.worker, batch_size=size)
        self._state.batch_size = size

    def _set_length(self, length: int | None) -> None:
        """Note how many batches an epoch of the loader has, where no sampler of ours says which are left."""
        if not self._tracker.batches_calls and self._world.seat_changes:
            self._state.check_length(length)
        self._state.length = length

    def _batches(self, loader: Iterable[Any], number: int) -> Iterator[Any]:
        state, world, tracker = self._state, self._world, self._tracker
        resumed = (number == 1 and state.position.batches > 0) or state.begun_elsewhere
        state.begun_epoch, state.begun_elsewhere = state.position.epoch, False
        beginning = state.rng.beginning(resumed=resumed)
        if state.position.drained or state.position.left or self._is_exhausted:
            tracker.has_left = state.position.left
            # What the head has drawn once more does not count.
            with beginning:
                return
        drawing = Drawing(loader, state.sampler, state.position.batches, (world.size, state.rng.rank), beginning)
        epoch, seat_changes = state.position.epoch, world.seat_changes
        # If this rank has taken over the state of ranks in a later epoch, the batches of this epoch are over.
        while state.position.epoch == epoch and not state.position.limit_reached(self._steps_max):
            if seat_changes != world.seat_changes:
                state.begun_by = state.begun_by if state.position.batches else world.size
                if self._is_resized_stream(loader):
                    if world.save_last_together(self._saving.save_last):
                        raise stream_resized(state.begun_by, world.size)
                    continue
                seat_changes = world.seat_changes
                drawing.move((world.size, state.rng.rank), state.position.batches)
            # What the loader draws here once more comes before the script's code, which draws as the first time.
            again = state.rng.present() if state.applied.has_body and not self._undo.open else {}
            batch, share = self._draw(drawing)
            state.rng.go_on(again)
            tracker.was_undone = False
            if share is None:
                state.position = state.position._replace(drained=True)
                break
            self._give_batch(share)
            try:
                yield batch
                tracker.has_batch = False
                tracker.check_left(self.steps_done + 1)
            except GeneratorExit:
                tracker.has_batch = False
                self._page.stepping = 0
                self._leave_batches_early(sys._getframe().f_back)
                raise
            if tracker.batches_calls != number:
                what, expected = "two batches() of one epoch at the same time", "one to end before the next begins"
                raise ConfigError(what, "batches", expected=expected)
            if tracker.was_undone:
                self._discard_changes()
                continue
            tracker.request_batch(in_step=self._undo.in_step, has_stepped=self._undo.has_stepped)
            self._end_batch(passed=True)
            # Between two micro-batches the state is that of no step, so nothing is saved there.
            if share.last:
                self._pass_boundary()
        tracker.was_undone = False
        self._page.stepping = 0
        if self._undo.state_outside_batches is None:
            self._undo.leave_batches(known=True)

    def _give_batch(self, share: BatchSlice) -> None:
        """Note that the script gets a batch, whose part of the global batch is `share`."""
        # The effects of the body before its block are in the state already, and this body runs once more.
        if self._state.applied.has_body and not self._undo.open:
            self._undo.note_for_discard(whole=False)
        # A script that makes its steps without blocks has nothing to undo.
        if not self._undo.open and (self._tracker.uses_blocks or self._tracker.untrained_batches is not None):
            self._undo.begin_body()
        self._begin_batch(share)
        self._tracker.has_batch = True

    def _draw(self, drawing: Drawing) -> tuple[Any, BatchSlice | None]:
        """The next batch of `drawing` and its slice; (None, None) at the end of the loader."""
        page = self._page
        page.drawing_ns = since_ns = time.monotonic_ns()
        # The agent is to notice a loader that hangs. But after a restart the first batch may be preceded by many that
        # are skipped, and how long these take says nothing about a hang.
        page.stepping = page.stepping or (0 if drawing.skips else FIRST_BATCH)
        try:
            return drawing.draw(self._state.position.batches)
        finally:
            # In this order the agent never counts the wait twice.
            page.drawing_ns = 0
            page.data_ns += time.monotonic_ns() - since_ns

    def _leave_batches_early(self, caller: FrameType | None) -> None:
        """Note that the script has left `batches` early. `caller` is the frame that has let go of the generator."""
        on_purpose = generator_exit.on_purpose(caller)
        if on_purpose:
            self._end_batch()
        else:
            self._break_off_batch()
        # A restart, or a newcomer, comes to the code that follows the batches, and not to those that are left over.
        if on_purpose:
            self._state.position = self._state.position._replace(left=True)
            self._tracker.has_left = True
            self._world.evaluations.pass_boundary()
        self._undo.leave_batches(known=on_purpose)
        if generator_exit.by_an_iterator(caller):
            self._tracker.stage = "cut short"

    def steps(self, total: int) -> Iterator[int]:
        """Iterate over the steps that are still to do, for a script that draws its data itself.

        Use it as `for step in loop.steps(1000):` with one `with loop.step():` in the body. It yields the number of the
        steps that are done, from 0. If the membership changes in the block, the step is undone and the same number
        comes again. It restores, saves and ends as `epochs` does, and may be used once per Loop, instead of `epochs`.

        Args:
            total: the number of steps in all, over all restarts.

        Raises what `epochs` raises, and ConfigError when the body has made no step.
        """
        validation.check_counts(total, None, "steps")
        tracker, evaluations = self._tracker, self._world.evaluations
        tracker.draws_itself = True
        for _ in self.epochs(1, max_steps=total):
            while not self._state.position.limit_reached(total):
                has_begun, others_evaluate = self._state.applied.has_body, bool(evaluations.awaited)
                if tracker.give_number(has_begun=has_begun, others_evaluate=others_evaluate):
                    # The effects of the body before its block are in the state already. This second run of that code is
                    # undone where the block begins.
                    self._undo.note_for_discard(whole=False)
                    evaluations.replay_from_boundary()
                else:
                    evaluations.pass_boundary()
                counted = self._state.position.steps
                self._undo.begin_body()
                yield counted
                tracker.check_left(self.steps_done + 1)
                tracker.check_body(has_counted=self._state.position.steps > counted)
                if tracker.was_undone:
                    self._discard_changes()
                self._end_body()

    def report(self, **scalars: float | torch.Tensor) -> None:
        """Report numbers of this step to the terminal, the dashboard and the event log, as in `loop.report(loss=loss)`.

        Args:
            **scalars: numbers or tensors of one element, by name. A tensor is kept detached, and read at most once a
                second, because reading a tensor on a GPU waits for the GPU's work.

        Raises TypeError for anything else, ConfigError outside of `epochs` and `steps`.
        """
        self._tracker.check("report")
        self._reporter.keep_scalars(scalars)

    def on_change(self, call: Callable[[Change], None]) -> None:
        """Register a function that is called when the first epoch begins, and after each change of the membership.

        It is called on every rank, also on newcomers. The process group is there, and all ranks have the state of the
        same step. So this is the place to make subgroups, or to adapt the learning rate to the world size.

        Args:
            call: a function of one argument, a `Change` with the attributes `generation` (its number), `cause` (why
                the membership has changed, in words), `world_size`, `world_size_before` (0 if there was no world
                before), `pause_s` (seconds since the last step, or None) and `steps_lost` (steps that are made again).

        Raises TypeError if `call` can't be called.
        """
        if not callable(call):
            raise TypeError(explain("not a function", "on_change", got=repr(call), expected="a function of one Change"))
        self._world.on_change.append(call)

    def step(self) -> AbstractContextManager[None]:
        """A block for one step, or for one micro-batch of a step: `with loop.step(): ...`.

        With this block a process survives the loss of another one. When a rank is lost, the block ends at the line that
        failed, and its effects are undone. This process goes on in the next generation, and the loop gives the script
        the same batch, or the same number, again.

        Put everything that belongs to the step inside: forward, backward, `optimizer.step()`, `zero_grad()` and
        `scheduler.step()`. Code after the block, in the loop's body, also runs after a try that was undone. Guard it by
        `if loop.complete:`.

        Raises ConfigError outside of `epochs` and `steps`, for a block inside of a block, for a second block with the
        same batch, and when an optimizer steps outside of the block; RuntimeError when an optimizer steps before the
        global batch is complete. If an exception has left the block, and the script goes on, `batches` and `steps`
        raise RuntimeError.
        """
        self._tracker.request_block()
        return _StepBlock(self)

    def _enter_block(self) -> None:
        """Enter the block of a step, and note the state to which the step can be undone."""
        tracker, takes_over = self._tracker, bool(self._world.seat_changes)
        if tracker.untrained_batches and not takes_over:
            self._state.ledger.take_back()
        is_paused = bool(self._page.pausing_ns)
        tracker.enter_block(in_step=self._undo.in_step, is_paused=is_paused, takes_over=takes_over)
        validation.check_not_awaited(is_awaited=bool(self._world.evaluations.awaited), step=self._state.position.steps)
        if not tracker.has_batch:
            self._begin_batch(WHOLE)
        # What the script has changed on the way from an undone try to here does not count.
        self._undo.discard_changes()
        # A newcomer could not know which of several Loops the others are in. So only the first one goes on in place.
        if self._is_first_loop:
            self._world.in_place.enable(self._loader if tracker.has_batch else None, self._state.sampler)
        self._undo.in_step = tracker.uses_blocks = True
        tracker.was_undone = tracker.body_repeats = False
        # If a step is open, this is another micro-batch of it. A step is undone as a whole, with all of its batches.
        if not self._undo.open:
            self._state.applied.has_body = True
            self._undo.note()

    def _end_body(self) -> None:
        """Note that the script asks `steps` for the next number: the step before is finished."""
        if self._tracker.slice is not None:
            self._end_step()
        if self._tracker.awaits_boundary:
            self._tracker.awaits_boundary = False
            self._pass_boundary()

    def _exit_block(self, error: BaseException | None) -> bool:
        """End the block of a step. Returns whether `error` is swallowed, because the step is undone and made again.

        Args:
            error: the exception that has left the block, if any.
        """
        self._undo.in_step = False
        tracker, part = self._tracker, self._tracker.slice
        assert part is not None, "a step has begun"
        # Where an optimizer has stepped, `_before_optimizer` has looked already.
        if error is None and part.last and not self._undo.has_stepped:
            error = self._find_caught_error()
        if error is None:
            if part.last:
                self._undo.end_step()
            if tracker.leave_block(has_stepped=self._undo.has_stepped, has_optimizer=self._undo.has_optimizer):
                self._end_step()
            return False
        running = tracker.stage == "running"
        if not running or not self._world.in_place.report_if_lost(error, self._state.position.steps, in_step=True):
            self._break_off_batch()
            tracker.error = error
            return False
        # The error comes from a lost peer. Undo the step before the ranks meet, because each of them says there which
        # step it has finished and whether its state is valid.
        self._weighting.end()
        tracker.undo()
        self._world.undo_step()
        self._world.evaluations.replay_from_first()
        # The traceback holds the frames of the step, and with them works of the old group.
        error.__traceback__ = None
        self._world.go_on()
        # Other ranks have finished the step, and are in an evaluation. This rank's script goes on as after the step, so
        # that it comes to them.
        tracker.completed = bool(self._world.evaluations.awaited)
        # Noted after `go_on`: what is put back at the next try is the state that all ranks have now.
        self._undo.note_for_discard(whole=tracker.completed, with_rng=True)
        return True

    def _discard_changes(self) -> None:
        """Undo what the script has changed since the last try of a step.

        Not while other ranks are in an evaluation that this rank still comes to: that is undone there.
        """
        if not self._world.evaluations.awaited:
            self._undo.discard_changes()

    def _find_caught_error(self) -> BaseException | None:
        """Find the error of a collective that the script has caught in a step without an optimizer's step.

        Returns None if there is none.
        """
        try:
            if self._undo.has_optimizer:
                self._world.in_place.check_connections()
            self._world.in_place.check_results()
        except RuntimeError as error:
            return error
        return None

    @contextmanager
    def pause(self, why: str) -> Iterator[None]:
        """A block for a part of the script that is no training: `with loop.pause("export"): ...`.

        A pause is never taken for a hang: after `--hang-timeout` the agent prints where each rank stands, and waits on.
        Gradients are not weighted in the block.

        When a collective in the block loses a rank, the error leaves the block, and ends this process. Before that the
        process hands its newest step over, as the state was when the pause began. Neither the rest of the pause nor
        what follows it in the loop's body is made again, unless the pause lies before or after the batches of an epoch.
        For collectives use `evaluate`, in which the process lives on.

        Args:
            why: what the script does in the block, in a word or two. Lines about the pause show this.

        Raises ConfigError outside of `epochs` and `steps`.
        """
        self._tracker.check("pause")
        # A pause in a pause is a part of the outer one.
        if self._page.pausing_ns:
            yield
            return
        self._end_finished_step()
        # Before and after an epoch's batches the state of the position is noted already: a restart comes here again.
        repeated = self._undo.state_outside_batches is not None
        # Between two steps it is noted here. What the block changes must not be handed over: the weights may be those
        # of an average until the block ends.
        among = not repeated and self._is_between_steps
        if among:
            self._undo.leave_batches(known=True)
        try:
            with self._pausing():
                yield
        except Exception as error:
            self._world.hand_over_if_lost(error, why, repeated=repeated)
            raise
        finally:
            if among:
                self._undo.state_outside_batches = None

    @contextmanager
    def _pausing(self) -> Iterator[None]:
        """Tell the agent to expect no steps in this block, and weight no gradients in it."""
        self._weighting.end()
        self._page.stepping = 0
        self._page.pausing_ns = time.monotonic_ns()
        try:
            yield
        finally:
            since_ns, self._page.pausing_ns = self._page.pausing_ns, 0
            self._page.pause_ns += time.monotonic_ns() - since_ns
            if self._tracker.slice is not None:
                self._weighting.begin(self._tracker.slice)
                self._page.stepping = 1

    def evaluate(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call `function(*args, **kwargs)`, which is no training, and return its result.

        Use it as `loss = loop.evaluate(validate, model, loader)`, after the block of a step or after the batches of an
        epoch. When a collective in the function loses a rank, the processes that survive undo the call, and call the
        function again, all together in the new world. Ranks that had their result already take part as well. All ranks
        get one result: that of a rank that had it before, if any.

        So the function and its calls must be such that:

        - All ranks call it after the same step: decide by `loop.steps_done` and `loop.complete`.
        - It begins anew when it is called again: give it a loader, not an iterator.
        - It changes nothing for good, except by its result.
        - Its result is the same on all ranks, and has only numbers, texts and tensors, and lists, tuples or dicts of
          them. Any other result is not given to other ranks.

        It can't be undone if it exchanges the weights of the model for the time of the call, as for those of an
        average, nor before the first step, nor in a script that can't go on in place. Then the loss of a rank ends this
        process as in `pause`. As a pause it is never taken for a hang.

        After a step that was undone and will be made again, this does not call the function. It returns what it
        returned after the step before. At the head of an epoch's body, before `batches`, it does not call the function
        either if the epoch is entered in its middle, by a newcomer or after a restart. It returns what it returned when
        the epoch began. After a restart it calls the function all the same if the result could not be saved, because it
        has other parts than those above.

        Args:
            function: what to call.
            *args: the function's arguments.
            **kwargs: the function's named arguments.

        Raises what `function` raises; TypeError if it can't be called; ConfigError outside of `epochs` and `steps`, in
        the block of a step, after a step that was undone if it was not called after the step before, and at the head of
        an epoch's body on a newcomer if the result can't be sent to it.
        """
        self._tracker.check("evaluate")
        validation.check_evaluation(in_step=self._undo.in_step, function=function)
        at_head = self._tracker.at_head and not self._page.pausing_ns
        known: list[Result] | None = self._replay_result(at_head=at_head)
        if known is not None:
            return known[0]
        self._end_finished_step()
        before = collectives.sequence_number()
        result = self._evaluate(partial(function, *args, **kwargs), getattr(function, "__name__", "evaluate"))
        if at_head:
            self._head_collectives += collectives.sequence_number() - before
            states = self._state.rng.pass_evaluation(self._tracker.head_evaluations, self._state.position)
            self._tracker.head_evaluations += 1
            # In a head that has run before, the state has its results already, as far as they can be saved.
            if not self._tracker.head_repeats:
                self._state.applied.add_result(plain_result(result), states)
        return result

    def _replay_result(self, *, at_head: bool) -> list[Any] | None:
        """Find the result of an evaluation that must not be called now.

        Returns it in a list; None if the evaluation is to be called.

        Args:
            at_head: whether the script is at the head of an epoch's body.
        """
        tracker, evaluations = self._tracker, self._world.evaluations
        # Before the first step of an epoch the other ranks make the evaluations of its head again with a newcomer.
        made_again = not self._state.position.batches and evaluations.next_number in evaluations.made_again
        # The other ranks have passed this head, or all had before the restart: its evaluations return what they
        # returned then. If one is awaited, it stands behind the batches.
        if at_head and tracker.head_repeats and not made_again:
            number, applied = tracker.head_evaluations, self._state.applied
            kept = applied.head_result(number)
            if kept is not None:
                tracker.head_evaluations += 1
                self._state.rng.skip_evaluation(number, applied.head_rng[number + 1], self._state.position)
            validation.check_head_result(comes_alone=kept is None and bool(self._world.seat_changes))
            return kept
        if evaluations.awaited:
            tracker.follow_others()
        # After a step that was undone, and in the second run of a body before its block, other ranks may be in the step
        # already. They would miss the collectives of a call. If no rank has a result, as after a restart, all call it.
        elif tracker.was_undone or (tracker.body_repeats and not self._page.pausing_ns):
            known, found = evaluations.replay()
            validation.check_replayed(known=known or tracker.body_repeats)
            return [found] if known else None
        return None

    def _evaluate(self, call: Callable[[], Result], what: str) -> Result:
        # Where it could not be made again, it is a pause.
        if not (self._is_between_steps and self._world.in_place.possible) or self._page.pausing_ns:
            with self.pause(what):
                return call()
        result: Result = self._world.evaluate(partial(self._call_paused, call), what)
        return result

    def _end_finished_step(self) -> None:
        """Count the step whose block has ended, if any, because the body goes on behind that block.

        So no `break` has left the block, and the step counts whether an optimizer has stepped or not.
        """
        if self._tracker.has_uncounted_step and not self._undo.in_step:
            self._end_step()

    def _end_step(self) -> None:
        """Count the step of the block. In `steps` the boundary after it is still to come."""
        self._end_batch(passed=True)
        self._tracker.awaits_boundary = not self._tracker.has_batch

    @property
    def _is_between_steps(self) -> bool:
        """Whether the state is that of the position: no batch is being trained."""
        return self._tracker.slice is None and not self._undo.open

    def _call_paused(self, call: Callable[[], Result]) -> Result:
        """The result of `call`, made as in a pause."""
        with self._pausing():
            return call()

    # The boundary

    def _begin_batch(self, share: BatchSlice) -> None:
        """Begin a batch, whose part of the global batch is `share`."""
        self._tracker.begin_batch(share)
        self._undo.has_stepped = False
        self._undo.state_outside_batches = None
        self._weighting.begin(share)
        self._page.stepping = 1
        # Noted before the forward. If the step is undone, this entry is written anew.
        if self._state.ledger.writes:
            self._state.ledger.begin(self._state.position.steps + 1, self._state.position.epoch, share)

    def _end_batch(self, *, passed: bool = False) -> None:
        """End the present batch, if any. Its step counts if an optimizer has stepped, or with `passed`.

        A step that does not count is undone, because the start after a `break` makes it again. It counts if it cannot
        be undone.

        Args:
            passed: whether the script has gone on behind the batch, and has not left it by `break`.
        """
        passed = passed or self._tracker.is_behind_block
        part = self._tracker.end_batch()
        ends = part is not None and part.last
        if part is not None:
            self._weighting.end()
        if ends and (passed or self._undo.has_stepped):
            self._count_step()
        elif self._undo.open and not passed:
            if ends and not self._undo.is_undoable():
                self._count_step()
            else:
                self._undo.undo()

    def _count_step(self) -> None:
        """Count the finished step in the position, in the sampler and on the status page.

        Nothing here can fail or wait, so no step is ever half counted.
        """
        if isinstance(self._state.sampler, ElasticBatchSampler):
            self._state.sampler.advance()
        elif self._state.sampler is not None:
            assert self._state.batch_size is not None, "batches() has looked at the loader"
            self._state.sampler.advance(self._state.batch_size * self._world.size)
        self._state.position, self._state.applied.has_body = self._state.position.stepped(), False
        self._undo.open = False
        self._world.evaluations.forget()
        self._saving.run.total += 1
        self._reporter.report_step(self._saving.run.total, self._state.position.epoch)

    def _pass_boundary(self) -> None:
        """Save what is due between two steps, and stop if the agents have agreed that all workers stop here."""
        self._world.evaluations.pass_boundary()
        # A script that has an optimizer and has passed batches without a step may have read them ahead. Nothing is
        # saved then, because the position counts steps that nobody has trained. A run that waits saves in its own way.
        if not (self._tracker.untrained_batches and self._undo.has_optimizer) and not self._world.waits:
            self._saving.save_due()
        self._guard.obey(self._world.hand_over)
        regroup.release_retired()
        total = self._saving.run.total
        # A rank was lost, and this one was in no collective to notice that.
        if self._world.in_place.has_seat:
            self._world.go_on()
        elif self._world.waits:
            self._world.wait_for_nodes()
        elif self._page.stop and handover.must_leave(self._page, total):
            self._hand_over(total)
        else:
            self._state.rng.begin_step(self._state.position)

    def _hand_over(self, total: int) -> None:
        """Stop with all workers after this step: go on in place, or leave the state to the agent and end.

        Args:
            total: the number of the step.

        Raises Handover where this process ends.
        """
        in_place = self._world.in_place
        # The agents ask for a checkpoint where too few nodes are left for the run to train on.
        if self._page.save:
            self._saving.save_last()
        if in_place.possible:
            # Once the agent knows that this process has stopped, its group may be cut at any time.
            in_place.wait_for_collectives()
            handover.make_stop_report(total)()
            self._world.go_on()
            return
        if in_place.worker.local_rank == 0:
            self._saving.hand_over(self._state.collect())
        raise handover.leave(total)

    def _break_off_batch(self) -> None:
        """Note that an exception has left the batch.

        Its step does not count. If an optimizer has stepped in that step, the Loop is broken.
        """
        self._weighting.end()
        self._tracker.break_off(has_stepped=self._undo.has_stepped)
        if self._undo.open and not self._undo.has_stepped:
            self._undo.abandon_step()

    def _before_optimizer(self, *_: Any) -> None:
        """Check that an optimizer may step now. An error that is raised here prevents that."""
        # An optimizer must not use the result of a collective that has failed. A second optimizer of the step is let
        # through if nothing was exchanged since the first: between the two the state is that of no step, and ending
        # there would leave this rank without one.
        if self._undo.has_communicated:
            if self._undo.in_step:
                self._world.in_place.check_connections()
            self._world.in_place.check_results()
        validation.check_optimizer(
            outside=self._tracker.uses_blocks and not self._undo.in_step,
            completes=self._tracker.slice is None or self._tracker.slice.last,
            step=self.steps_done + 1,
        )
        self._undo.before_optimizer()


@cache
def _warn_of_head() -> None:
    """Once in a process."""
    if collectives.rank_and_world()[0] == 0:
        what = "a collective before loop.batches in the body of loop.epochs: a newcomer would wait there for ever. %s"
        _log.warning(what, "Put it into loop.evaluate(...) or loop.on_change(...)")


class _StepBlock:
    """The block of one step."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop._enter_block()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        return self._loop._exit_block(error)
