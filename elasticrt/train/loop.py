"""The training loop's frame: where training stands, what counts as a step, and when it is saved.

Asking for the next batch is the boundary between two steps. Only there a step is counted, reported and saved. A
boundary at which nothing is due takes a few microseconds and no collective: only rank 0 saves, and what it saves is the
same on all ranks.
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
from elasticrt.train.batches import check_loader, feed, is_stream, rest_unknown, samples_per_batch
from elasticrt.train.reporting import Reporter
from elasticrt.train.saving import Saving
from elasticrt.train.step_tracker import StepTracker
from elasticrt.train.training_state import Passed, TrainingState
from elasticrt.train.undo import Undo
from elasticrt.train.weighting import Weighting
from elasticrt.train.world import Change, World, plain_result

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_running: list[Loop] = []
"""The loops that are inside `epochs`, the outermost first. Each has its own checkpoint directory."""


class Loop:
    """A training loop that goes on where the newest checkpoint is.

    Args:
        directory: for checkpoints.
        sampler: ElasticBatchSampler or ElasticDistributedSampler of the loader that `batches` gets. Without one a
            restart in the middle of an epoch skips as many batches as were done, whatever the loader has in them.
        every: how often to save: "30s", "5 min", "200 steps" or "1 epoch".
        keep: how many checkpoints to keep.
        resume: "auto": go on from the newest checkpoint; "fresh": start over (a restart after a failure goes on).
        seed: of the random numbers of each step, rank by rank: after any restart at the same world size each rank draws
            what it would have drawn. None: only rank 0 does, and of generators that the script seeds alike all ranks.
        memory: the share of the time, 0.002 by default, that copies of the state in the memory of each node may take; 0
            for none. After a failure training goes on from the newest of them that has survived, else from disk.
        ledger: a directory to note in which samples each step has trained, for `elasticrt ledger check`.
        **stateful_objects: everything else to save, by name: model, optimizer, scheduler, scaler, ... with state_dict()
            and load_state_dict(). DDP, DataParallel and compiled modules are saved bare.

    Raises TypeError, ValueError and ConfigError for arguments that can't be.
    """

    _any_was_entered = False  # In this process.

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
            raise ConfigError("no such way", "Loop(resume=)", got=resume, expected='"auto" or "fresh"')
        self._shown = path_of(directory, "Loop")
        self._state = TrainingState(stateful_objects, sampler, seed, ledger, self._shown)
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
        self._is_only = False  # Whether no other Loop was entered before.
        self._loader: object = None  # That of the newest `batches`.
        self._head_collectives = 0  # Begun before the head of the epoch's body, and in its evaluations.

    @property
    def vars(self) -> dict[str, Any]:
        """The user's own plain values; saved and restored, in place, with the rest."""
        return self._state.vars

    @vars.setter  # noqa: A003  Scripts know it by this name.
    def vars(self, values: dict[str, Any]) -> None:
        self._state.vars = values

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._state.position.epoch

    @property
    def steps_done(self) -> int:
        """Steps that are done, over all epochs and restarts. After a block that is the step of the block, too."""
        return self._state.position.steps + self._tracker.is_finished

    @property
    def complete(self) -> bool:
        """Whether the present batch completes its global batch: the moment for `optimizer.step()`.

        After a block that was left because the membership has changed it is false, as that step is done again: but for
        a step that other ranks have finished, and after which they are in `evaluate`, where this rank follows them.
        """
        return self._tracker.completes

    # Epochs

    def epochs(self, total: int, *, max_steps: int | None = None) -> Iterator[int]:
        """The epochs still to train, by number from 0. Once per Loop.

        The first use restores the newest checkpoint. An epoch whose batches were all trained, but whose body had not
        ended, is entered again with an empty `batches`. Leaving, unless by an exception, saves and waits for the save.

        Args:
            total: epochs in all, over all restarts.
            max_steps: end early after so many steps in all; None: no limit.

        Raises TypeError and ValueError for counts that can't be, ConfigError when it is used twice, CheckpointError
        when no checkpoint can be used or the last one could not be saved, DuplicateError (exit code 7) when another
        live run saves to the directory.
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
                self._leave_batches(known=True)
                self._enter_head()
                try:
                    yield entered
                except GeneratorExit:
                    if generator_exit.on_purpose(sys._getframe().f_back):
                        self._settle()
                        with suppress(Handover):  # Nothing can be raised where a generator is closed.
                            self._end_together()
                            well = True
                    raise
                self._tracker.check("epochs")
                self._settle()
                if self._tracker.untrained:
                    self._tracker.untrained = None  # Its body has made no step of them, so none is to come.
                if self._state.position.epoch != entered:
                    # The others were further: they had finished this epoch, and their state has what came after it.
                    self._forget_between()
                    continue
                self._tracker.repeats = False  # A step of this epoch that was undone, and not made again by the script.
                self._undo.keep_between()
                position = self._state.position
                # Whether the limit of steps, and not the end of the data or a `break`, ended this epoch.
                cut_short = position.limit_reached(self._steps_max) and not position.drained and not self._is_exhausted
                if not cut_short:
                    self._state.ledger.closed(position)
                    self._state.passed = Passed()
                self._state.position = position.closed(cut_short=cut_short)
                self._undo.outside = None
                self._boundary()
            self._end_together()
            self._saving.checkpointer.finish()
            well = True
        finally:
            self._leave(well=well)

    def _enter_head(self) -> None:
        """The body of an epoch begins. What the state has of its head is not to count twice."""
        passed = self._state.passed
        self._tracker.enter_epoch(repeats=passed.head)
        if not passed.head:
            passed.results.clear()
        elif self._tracker.at_head:
            self._undo.note_between(whole=False)
        self._head_collectives = collectives.sequence_number()

    def _pass_head(self) -> None:
        """The body comes to its batches."""
        head_collectives = collectives.sequence_number() - self._head_collectives
        # A newcomer would wait in one for ranks that are in their steps.
        if head_collectives and self._tracker.at_head and self._world.in_place.worker.has_agent:
            _warn_of_head()
        if self._tracker.pass_head():
            self._undo.forget_between(again=bool(self._world.evaluations.awaited))
        self._state.passed.head = True

    def _end_together(self) -> None:
        """The last step is done: save it, and wait until that is done."""
        self._reporter.end()
        validation.check_evaluated(is_awaited=bool(self._world.evaluations.awaited), step=self._state.position.steps)
        while not self._world.ends_with(self._saving.last):
            pass

    def _enter(self) -> None:
        place = self._saving.checkpointer.place
        if any(other._saving.checkpointer.place == place for other in _running):
            raise ConfigError(
                "another Loop is running in this directory", self._shown, remedy="Finish one before the next"
            )
        # A newcomer enters the outermost loop, and could not know that the others are in this one.
        for other in _running:
            other._world.in_place.end()
        self._is_only = not Loop._any_was_entered
        Loop._any_was_entered = True
        self._world.enter(fresh=self._fresh)
        self._saving.begin()
        self._undo.watch(self._before_optimizer)
        self._tracker.stage = "running"
        self._guard.raise_()
        _running.append(self)

    def _leave(self, *, well: bool) -> None:
        """The loop is over, by an exception if not `well`."""
        self._world.in_place.end()
        self._undo.unwatch()
        self._guard.lower(obeys=well)
        self._weighting.detach()
        self._page.stepping = 0
        self._state.ledger.close()
        self._tracker.stage, self._tracker.slice = "over", None
        _running.remove(self)

    @property
    def _is_exhausted(self) -> bool:
        """Whether the sampler has nothing left in this epoch."""
        return self._state.sampler is not None and self._state.sampler.remaining == 0

    # Batches

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of this epoch that are not trained yet.

        A step counts when the next batch is asked for, after `break` if the optimizer has stepped, and after an
        exception never. So ask for one when the one before is trained: read ahead in the loader.

        Raises ConfigError for a loader that does not belong to the sampler, ReadAheadError when a batch is asked for
        inside of a step, or the first step comes after batches without one.
        """
        self._tracker.check("batches")
        validation.check_not_paused("batches", is_paused=bool(self._page.pausing_ns))
        check_loader(loader, self._state.sampler)
        self._settle()
        self._pass_head()
        if isinstance(self._state.sampler, ElasticDistributedSampler):
            self._know_batch_size(samples_per_batch(loader))
        micro = self._state.sampler.micro_batch_size if isinstance(self._state.sampler, ElasticBatchSampler) else None
        if micro is not None:
            self._weighting.check_micro_batches(micro, self._world.size)
        before, now = self._world.resumed_size, self._world.size
        if before != now and self._state.position.batches and is_stream(loader, self._state.sampler):
            raise rest_unknown(before, now)
        self._weighting.renew()
        self._state.ledger.renew()
        self._tracker.passes += 1
        self._loader = loader
        return self._batches(loader, self._tracker.passes)

    def _know_batch_size(self, size: int) -> None:
        """That of the loader, whose sampler does not know it. Ranks compare that of their first loaders."""
        if not self._tracker.passes and self._world.moves:
            self._state.check_batches(size)
        elif not self._tracker.passes and self._state.settings():
            self._state.compare(self._world.in_place.worker, batch_size=size)
        self._state.batch_size = size

    def _batches(self, loader: Iterable[Any], number: int) -> Iterator[Any]:
        state, world, tracker = self._state, self._world, self._tracker
        resumed = (number == 1 and state.position.batches > 0) or state.begins_late
        state.begun, state.begins_late = state.position.epoch, False
        if state.position.drained or self._is_exhausted:
            return
        skip = state.position.batches if state.sampler is None else 0
        beginning = state.numbers.beginning(state.position, resumed=resumed)
        drawn: Any = feed(loader, state.sampler, skip, beginning)
        epoch, moves, size = state.position.epoch, world.moves, world.size
        batch, share, at_hand = None, None, state.position.batches - 1  # The number of the batch at hand.
        # Where the others were in another epoch, and this rank has taken over their state, this one's batches are over.
        while state.position.epoch == epoch and not state.position.limit_reached(self._steps_max):
            if moves != world.moves and state.position.batches and is_stream(loader, state.sampler):
                if world.ends_with(self._saving.last):
                    raise rest_unknown(size, world.size)
                continue
            if moves != world.moves and state.sampler is not None:
                # In another place this rank has other samples. Beginning anew leaves no trace in the random numbers.
                drawn.close()
                drawn = feed(loader, state.sampler, 0, torch.random.fork_rng(devices=[]))
            moves = world.moves
            # Without a sampler a step is done again with the batch at hand; one that others have finished is passed.
            for _ in range(state.position.batches - at_hand if state.sampler is None else 1):
                batch, share = self._draw(drawn, expected=not skip)
            at_hand, tracker.repeats = state.position.batches, False
            if share is None:
                state.position = state.position._replace(drained=True)
                break
            self._give(share)
            try:
                yield batch
                tracker.has_batch = False
                tracker.check_left(self.steps_done + 1)
            except GeneratorExit:
                tracker.has_batch = False
                self._page.stepping = 0
                self._batch_left(sys._getframe().f_back)
                raise
            if tracker.passes != number:
                raise ConfigError("left behind", "batches", got="a later batches() in the same epoch")
            if tracker.repeats:
                self._forget_between()
                continue
            tracker.pass_batch(in_step=self._undo.in_step, stepped=self._undo.stepped)
            self._settle(passed=True)
            # Between two micro-batches the state is that of no step, so nothing is saved there.
            if share.last:
                self._boundary()
        tracker.repeats = False
        self._page.stepping = 0
        if self._undo.outside is None:
            self._leave_batches(known=True)

    def _give(self, share: BatchSlice) -> None:
        """The script gets a batch."""
        if self._state.passed.body and not self._undo.open:  # As far as its block the body runs once more.
            self._undo.note_between(whole=False)
        self._begin(share)
        self._tracker.has_batch = True

    def _draw(self, drawn: Iterator[tuple[Any, BatchSlice]], *, expected: bool) -> tuple[Any, BatchSlice | None]:
        """The next batch with its slice; the slice is None at the end. `expected`: a loader that hangs is noticed."""
        since_ns = time.monotonic_ns()
        # How long it takes to draw the batches that are skipped says nothing about a hang.
        self._page.stepping = self._page.stepping or (FIRST_BATCH if expected else 0)
        found = next(drawn, (None, None))
        self._page.data_ns += time.monotonic_ns() - since_ns
        return found

    def _batch_left(self, caller: FrameType | None) -> None:
        """The script has left `batches`; `caller` is the frame that let go of it."""
        on_purpose = generator_exit.on_purpose(caller)
        if on_purpose:
            self._settle()
        else:
            self._interrupted()
        # Else a restart at this position begins with another batch, and not with what follows.
        has_no_more = self._state.position.limit_reached(self._steps_max) or self._is_exhausted
        self._leave_batches(known=on_purpose and has_no_more)
        if generator_exit.by_an_iterator(caller):
            self._tracker.stage = "cut short"

    def _leave_batches(self, *, known: bool) -> None:
        """What follows lies outside of the batches. `known`: a restart at this position begins with it."""
        if self._world.in_place.possible:  # Else this process hands over at boundaries only.
            self._undo.leave_batches(known=known)

    def steps(self, total: int) -> Iterator[int]:
        """The steps still to do, of `total`, for a script that draws its data itself: `for step in loop.steps(1000):`.

        Gives the number of steps that are done, from 0. The body has one `with loop.step():`. When the membership has
        changed in it, the same number comes again. Restores, saves, leaves and raises as `epochs` does; once per Loop.
        Raises ConfigError when the body has made no step.
        """
        validation.check_counts(total, None, "steps")
        tracker, evaluations = self._tracker, self._world.evaluations
        tracker.draws_itself = True
        for _ in self.epochs(1, max_steps=total):
            while not self._state.position.limit_reached(total):
                has_begun, others_evaluate = self._state.passed.body, bool(evaluations.awaited)
                if tracker.give_number(has_begun=has_begun, others_evaluate=others_evaluate):
                    # What stands before the block has been done, and is undone where that begins.
                    self._undo.note_between(whole=False)
                    evaluations.repeat_from_boundary()
                else:
                    evaluations.pass_boundary()
                counted = self._state.position.steps
                yield counted
                tracker.check_left(self.steps_done + 1)
                tracker.check_body(has_counted=self._state.position.steps > counted)
                if tracker.repeats:
                    self._forget_between()
                self._pass_on()

    def report(self, **scalars: float | torch.Tensor) -> None:
        """Report numbers of this step to the terminal, the dashboard and the event log: `loop.report(loss=loss)`.

        Args:
            **scalars: numbers, or tensors of one element. These are kept detached, and read at most once a second.

        Raises TypeError for anything else, ConfigError outside of `epochs`.
        """
        self._tracker.check("report")
        self._reporter.keep(scalars)

    def on_change(self, call: Callable[[Change], None]) -> None:
        """Have `call(Change)` called when the first epoch begins, and whenever the membership has changed.

        Args:
            call: gets the generation's number and cause, its world size and the one before (0 at first), and what it
                has cost. It is called on every rank, newcomers too, with the process group there and the state that of
                the same step: the place to make subgroups, or to adapt a learning rate.

        Raises TypeError for what can't be called.
        """
        if not callable(call):
            raise TypeError(explain("not a function", "on_change", got=repr(call), expected="a function of one Change"))
        self._world.on_change.append(call)

    def step(self) -> AbstractContextManager[None]:
        """One step, or one micro-batch of it: `with loop.step(): ...`. This is what lets a process live on.

        When the membership changes in the middle of it, the block is left at the line that failed, what it did is
        undone, and the step is done again in the new world: the loop gives its batch, or its number, once more.
        Put all that belongs to the step inside. Code between this block and the loop's end runs after a try that is
        undone, too; `loop.complete` is false there.

        Raises ConfigError outside of `epochs`, for a block in a block, for a second block with the same batch, and when
        an optimizer steps outside of the block; RuntimeError when one steps before the global batch is complete. After
        an exception that has left the block `batches` and `steps` raise RuntimeError when the script goes on.
        """
        self._tracker.request()
        return _Step(self)

    def _step_begins(self) -> None:
        tracker, takes_over = self._tracker, bool(self._world.moves)
        if tracker.untrained and not takes_over:
            self._state.ledger.take_back()
        is_paused = bool(self._page.pausing_ns)
        tracker.enter(in_step=self._undo.in_step, is_paused=is_paused, takes_over=takes_over)
        validation.check_evaluated(is_awaited=bool(self._world.evaluations.awaited), step=self._state.position.steps)
        if not tracker.has_batch:
            self._begin(WHOLE)
        self._undo.forget_between()
        if self._is_only:  # A newcomer could not know which of several loops the others are in.
            self._world.in_place.begin(self._loader if tracker.has_batch else None, self._state.sampler)
        self._undo.in_step = tracker.uses_blocks = True
        tracker.repeats = tracker.number_repeats = False
        if not self._undo.open:  # Else this is another micro-batch of it.
            self._state.passed.body = True
            self._undo.note()

    def _pass_on(self) -> None:
        """The script asks for another step and draws its data itself: the step before is finished."""
        if self._tracker.slice is not None:
            self._pass_step()
        if self._tracker.awaits_boundary:
            self._tracker.awaits_boundary = False
            self._boundary()

    def _step_ends(self, error: BaseException | None) -> bool:
        """End the block. Returns whether `error` is swallowed, because the step will be done again."""
        self._undo.in_step = False
        tracker, part = self._tracker, self._tracker.slice
        assert part is not None, "a step has begun"
        if error is None and part.last and not self._undo.stepped:
            error = self._unconfirmed()
        if error is None:
            if part.last:
                self._undo.step_ends()
            if tracker.leave(stepped=self._undo.stepped, sees_optimizers=self._undo.sees):
                self._pass_step()
            return False
        running = tracker.stage == "running"
        if not running or not self._world.in_place.lost(error, self._state.position.steps, in_step=True):
            self._interrupted()
            tracker.error = error
            return False
        self._weighting.end()
        tracker.undo()
        self._world.undo_step()
        self._world.evaluations.repeat_from_first()
        error.__traceback__ = None  # It holds the frames of the step, and with them the works of the old group.
        self._world.go_on()
        # Others have finished the step, and evaluate: this rank goes on as if it had, until it comes to them there.
        tracker.completed = bool(self._world.evaluations.awaited)
        # After that, because what goes back at the next try is the state that all ranks have now.
        self._undo.note_between(whole=tracker.completed)
        return True

    def _forget_between(self) -> None:
        """Another try begins, unless others are in an evaluation that this rank has not come to."""
        if not self._world.evaluations.awaited:
            self._undo.forget_between()

    def _unconfirmed(self) -> BaseException | None:
        """Why a step without an optimizer's step cannot be trusted; None if it can."""
        try:
            if self._undo.sees:
                self._world.in_place.check_caught()
            self._world.in_place.check_results()
        except RuntimeError as error:
            return error
        return None

    @contextmanager
    def pause(self, why: str) -> Iterator[None]:
        """A part of the script that is no training: `with loop.pause("export"): ...`. Nothing in it is weighted.

        Args:
            why: what the script does in it, in a word or two.

        It is never taken for a hang: after --hang-timeout the agent prints where each rank stands, and waits on.
        When a collective in it loses a peer, the error leaves the block, and this process hands over its newest step
        before it ends. `evaluate` does not end then.

        Raises ConfigError outside of `epochs`.
        """
        self._tracker.check("pause")
        if self._page.pausing_ns:  # It is a part of the pause around it.
            yield
            return
        self._pass_block()
        # What the block changes is not handed over: weights may be those of an average, for as long as it lasts.
        repeated = self._undo.outside is not None
        among = not repeated and self._is_between
        if among:
            self._leave_batches(known=True)
        try:
            with self._pausing():
                yield
        except Exception as error:
            self._world.leave_state(error, why, repeated=repeated)
            raise
        finally:
            if among:
                self._undo.outside = None

    @contextmanager
    def _pausing(self) -> Iterator[None]:
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
        """The result of `function(*args, **kwargs)`, which is no training: `loss = loop.evaluate(validate, model)`.

        When a collective in it loses a peer, the survivors call it again, all together in the new world: also those
        that had their result already, which all get then. So all ranks must call it after the same step, it must begin
        anew when it is called again (give it a loader, not an iterator), change nothing for good but by its result, and
        have the same result on all ranks. Weights that it exchanges for the time of the call, as for those of an
        average, hinder that: then and before the first step it is as in `pause`, of which all else holds as well. After
        a try that is done again it calls nothing, and returns what it has returned after the step before.

        Args:
            function: what to call, outside of a step: after it, or after the batches of an epoch.
            *args: for it.
            **kwargs: for it.

        Raises what `function` raises; TypeError if it is none; ConfigError outside of `epochs`, in the block of a step,
        and after a try that is done again where it was not called after the step before.
        """
        self._tracker.check("evaluate")
        validation.check_outside(in_step=self._undo.in_step, function=function)
        at_head = self._tracker.at_head and not self._page.pausing_ns
        known: list[Result] | None = self._known_result(at_head=at_head)
        if known is not None:
            return known[0]
        self._pass_block()
        before = collectives.sequence_number()
        result = self._evaluated(partial(function, *args, **kwargs), getattr(function, "__name__", "evaluate"))
        if at_head:
            self._head_collectives += collectives.sequence_number() - before
            self._state.passed.results.append(plain_result(result))
        return result

    def _known_result(self, *, at_head: bool) -> list[Any] | None:
        """The result, in a list, of an evaluation that is not to be called again; None of one that is to be called."""
        tracker, evaluations = self._tracker, self._world.evaluations
        if evaluations.awaited:
            tracker.follow_others()
        elif at_head and tracker.head_repeats:
            kept = self._state.passed.result(tracker.next_of_head())
            validation.check_at_head(comes_alone=kept is None and bool(self._world.moves))
            return kept
        elif tracker.repeats or (tracker.number_repeats and not self._page.pausing_ns):
            known, found = evaluations.repeat()
            validation.check_known(known=known or tracker.number_repeats)
            return [found] if known else None
        return None

    def _evaluated(self, call: Callable[[], Result], what: str) -> Result:
        if not (self._is_between and self._world.in_place.possible) or self._page.pausing_ns:
            with self.pause(what):
                return call()
        result: Result = self._world.evaluate(partial(self._aside, call), what)
        return result

    def _pass_block(self) -> None:
        """The body goes on behind the block of a step, so no `break` has left that: its step counts, as when the
        next one is asked for, whether an optimizer has stepped or not."""
        if self._tracker.is_finished and not self._undo.in_step:
            self._pass_step()

    def _pass_step(self) -> None:
        """The step of the block counts. In `steps` the boundary after it is still to come."""
        self._settle(passed=True)
        self._tracker.awaits_boundary = not self._tracker.has_batch

    @property
    def _is_between(self) -> bool:
        """Whether the state is that of the position: no batch is being trained."""
        return self._tracker.slice is None and not self._undo.open

    def _aside(self, call: Callable[[], Result]) -> Result:
        with self._pausing():
            return call()

    # The boundary

    def _begin(self, share: BatchSlice) -> None:
        self._tracker.begin(share)
        self._undo.stepped = False
        self._undo.outside = None
        self._weighting.begin(share)
        self._page.stepping = 1
        if self._state.ledger.writes:
            self._state.ledger.begin(self._state.position.steps + 1, self._state.position.epoch, share)

    def _settle(self, *, passed: bool = False) -> None:
        """End the present batch, if any. Its step counts if the next one is asked for, or the optimizer has stepped."""
        part = self._tracker.end()
        if part is not None:
            self._weighting.end()
        if part is not None and part.last and (passed or self._undo.stepped):
            self._count()
        elif self._undo.open and not passed:
            self._undo.put_back_gradients()

    def _count(self) -> None:
        """Count the finished step: position, sampler, report. Nothing here can fail or wait."""
        if isinstance(self._state.sampler, ElasticBatchSampler):
            self._state.sampler.advance()
        elif self._state.sampler is not None:
            assert self._state.batch_size is not None, "batches() has looked at the loader"
            self._state.sampler.advance(self._state.batch_size * self._world.size)
        self._state.position, self._state.passed.body = self._state.position.stepped(), False
        self._undo.open = False
        self._world.evaluations.forget()
        self._saving.run.total += 1
        self._reporter.finished(self._saving.run.total, self._state.position.epoch)

    def _boundary(self) -> None:
        """Between two steps: save if it is due, and leave the group if the agents have agreed on that."""
        self._world.evaluations.pass_boundary()
        # Not before a script with an optimizer has made a step: what it has passed it may have read ahead.
        if not (self._tracker.untrained and self._undo.sees):
            self._saving.between_steps()
        self._guard.obey(self._world.hand_over)
        regroup.tidy()
        total = self._saving.run.total
        if self._world.in_place.has_seat:
            self._world.go_on()
        elif self._page.stop and handover.must_leave(self._page, total):
            self._hand_over(total)
        else:
            self._state.numbers.begin_step(self._state.position)

    def _hand_over(self, total: int) -> None:
        """All workers stop after this step: go on in place, or leave the state to the agent and end."""
        in_place = self._world.in_place
        if self._page.save:
            self._saving.last()
        if in_place.possible:
            in_place.settle()
            handover.staying(total)()
            self._world.go_on()
            return
        if in_place.worker.local_rank == 0:
            self._saving.hand_over(self._state.collect())
        raise handover.leave(total)

    def _interrupted(self) -> None:
        """An exception has left the batch: its step does not count, and if it was half made, the Loop is broken."""
        self._weighting.end()
        self._tracker.break_off(stepped=self._undo.stepped)
        if self._undo.open and not self._undo.stepped:
            self._undo.put_back_gradients()

    def _before_optimizer(self, *_: Any) -> None:
        # Between two optimizers the state is that of no step. If nothing was exchanged since the first, the second one
        # needs no peer any more.
        if self._undo.has_communicated:
            if self._undo.in_step:
                self._world.in_place.check_caught()
            self._world.in_place.check_results()
        validation.check_optimizer(
            outside=self._tracker.uses_blocks and not self._undo.in_step,
            completes=self._tracker.slice is None or self._tracker.slice.last,
            step=self.steps_done + 1,
        )
        self._undo.optimizer_begins()


@cache
def _warn_of_head() -> None:
    """Once in a process."""
    if collectives.rank_and_world()[0] == 0:
        what = "a collective before loop.batches in the body of loop.epochs: a newcomer would wait there for ever. %s"
        _log.warning(what, "Put it into loop.evaluate(...) or loop.on_change(...)")


class _Step:
    """The block of one step."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop._step_begins()

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        return self._loop._step_ends(error)
