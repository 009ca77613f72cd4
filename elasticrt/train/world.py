"""Takes a Loop's process from one generation into the next, and makes its evaluations.

When a rank is lost, the survivors keep their processes. Each one undoes its open step, waits for its seat in the next
generation, meets the others in a new process group, and says which step it has finished. Ranks that are behind, and
newcomers, receive the state of a rank that is furthest (`state_transfer`). Then all make the open step again, each with
the samples that are its own in the new world.

A newcomer sets up alone, beside the training, and takes the same way when the others let it in. An evaluation that
loses a rank is made again in the same way as a step (`evaluations`).
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from elasticrt.checkpoint import rng_state, state_transfer, stateful
from elasticrt.checkpoint.state_copy import plain_copy
from elasticrt.distributed import agent_client, collectives, handover, regroup
from elasticrt.errors import ConfigError
from elasticrt.train.evaluations import Evaluations, Standing
from elasticrt.train.in_place import InPlace
from elasticrt.train.reporting import Reporter
from elasticrt.train.saving import Saving
from elasticrt.train.training_state import TrainingState
from elasticrt.train.undo import Undo

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

END_S_MAX, END_LOOK_S = 5.0, 0.02
"""How long ranks wait for each other at the end of the loop, at most, and how often they look, in seconds. A rank may
come to the end later, because its script has more to do there."""

_SAVED, _SEEN = "elasticrt/saved", "elasticrt/saved/seen"
"""Keys in a generation's store. _SAVED is "" while rank 0 saves the last step, and "+" when that is done. _SEEN counts
the other ranks that have seen the "+"."""


@dataclass(frozen=True)
class Change:
    """A change of the membership, or the beginning of the loop, as the functions given to `Loop.on_change` get it.

    Attributes:
        generation: the number of the new generation; 0 without an agent.
        world_size: the number of processes in the new generation.
        world_size_before: the number of processes in the world that the state comes from: before the change, on a
            newcomer too; after a restart in the world that saved the state. 0 if there was no world before.
        cause: why the membership has changed, in words such as `node-2 lost`; "" without an agent.
        pause_s: seconds since the last step of this process; after a restart, since the last step of the workers of
            this node. None if there was no step.
        steps_lost: how many steps this process had finished that are made again; after a restart, how many steps of the
            workers of this node.
    """

    generation: int
    world_size: int
    world_size_before: int
    cause: str = ""
    pause_s: float | None = None
    steps_lost: int = 0


class World:
    """The world that one Loop's process is in.

    Args:
        objects: the script's objects by name, as given to the Loop.
        state: the state of the Loop.
        saving: the saves of the Loop.
        undo: the Loop's open step.
        reporter: reports the steps to the agent.

    Attributes:
        in_place: this process's way from group to group.
        evaluations: the evaluations since the last step.
        size: the number of processes in the present world.
        seat_changes: how often this process has taken a new seat.
        waits: whether there are too few nodes for a step. Only evaluations that have begun are made then.
        on_change: the functions that the script has given to `Loop.on_change`.
    """

    def __init__(
        self, objects: Mapping[str, Any], state: TrainingState, saving: Saving, undo: Undo, reporter: Reporter
    ) -> None:
        self._state = state
        self._saving = saving
        self._undo = undo
        self._reporter = reporter
        self._page = agent_client.status_page()
        # The world size of the last Change, and when the last step before the present generation ended.
        self._size_before = self._stepped_at_ns = 0
        # A step is ended early for a new seat only until an optimizer has begun. After that its state would be that of
        # no step, so the step is rather finished.
        self.in_place = InPlace(
            objects.values(),
            self.hand_over,
            lambda: undo.in_step and not undo.optimizer_has_begun,
            lambda: bool(self.on_change),
        )
        self.evaluations = Evaluations()
        # For a newcomer that still comes to evaluations behind the boundary. `_rng_before_evaluations`: the generators'
        # states from before these, with which it makes them. `_received_rng`: those of the state that it got, with
        # which it goes on.
        self._rng_before_evaluations: dict[str, Any] = {}
        self._received_rng: dict[str, Any] = {}
        self.size = 1
        self.seat_changes = 0
        self.waits = False
        self.on_change: list[Callable[[Change], None]] = []

    def enter(self, *, fresh: bool) -> None:
        """Begin the Loop with all ranks. A newcomer sets up beside the training instead, until the others let it in.

        Args:
            fresh: start over, whatever checkpoint there is.
        """
        worker = self.in_place.worker
        if worker.beside:
            # This process has no state of any step, so it will receive one, whatever step the others have finished.
            self._state.is_valid = False
            self._saving.set_up_beside()
            self.in_place.set_up_beside(self._state.objects)
            self.go_on()
            self._prepare_to_catch_up()
            return
        self._page.loop_at_ns = time.monotonic_ns()
        # Before the restore, which has to know which generators all ranks have in the same state.
        self._state.rng.compare()
        self._state.compare_samplers(worker)
        found = self._saving.checkpointer.begin(fresh=fresh)
        _, self.size = collectives.rank_and_world()
        if found is not None:
            self._state.restore(found.data)
            self._size_before = found.world_size
        self._begin_generation(self._saving.checkpointer.start)
        # A second Loop of the script begins as well, but no change of the membership has cost anything.
        if self._page.step_at_ns:
            self._announce_change()
        else:
            self._announce_change(worker.last_step_at_ns, worker.last_step - self._saving.run.total)

    def go_on(self) -> None:
        """Take the seat in the next generation, meet the other ranks there, and get the state that all have.

        If another rank is lost meanwhile, or the agents agree on yet another generation, this goes on to that one.
        Raises Handover when this process has no seat, and must end.
        """
        self._page.stepping = 0
        # The page forgets the time at the meeting. Without a step since, it is that of the generation before.
        stepped_at_ns = self._stepped_at_ns = self._page.step_at_ns or self._stepped_at_ns
        steps = self._state.position.steps
        # Asked before the first seat is taken, after which this process is no newcomer any more.
        arrived, is_newcomer = False, self.in_place.worker.beside
        while not arrived:
            if not self.in_place.wait_for_seat():
                self._reporter.end()
                raise handover.handover_exception(self._state.position.steps)
            meeting = self.in_place.meet(self._state.position.steps)
            if meeting is None:
                continue
            try:
                standings = self._arrive(meeting, is_newcomer=is_newcomer)
                self.waits = self.in_place.worker.waits
                if self.waits and not self.evaluations.is_before_boundary(standings):
                    self._report_waiting()
                    continue
                again = self.evaluations.decide(standings, is_newcomer=is_newcomer)
                self._announce_change(stepped_at_ns, steps - self._state.position.steps)
                arrived = True
            except regroup.Overtaken:
                continue
            except RuntimeError as error:
                if not self.in_place.report_if_lost(error, self._state.position.steps):
                    raise
        self._evaluate_again(again)
        # This rank has come to the boundary already. Others may still have to.
        if self.waits and not (self.evaluations.current or self.evaluations.awaited):
            self.wait_for_nodes()

    def wait_for_nodes(self) -> None:
        """Wait with the state of a finished step, because there are too few nodes for another one. Then go on."""
        self._report_waiting()
        self.go_on()

    def _report_waiting(self) -> None:
        """Tell the agent that this process makes no step, as soon as the state that it waits with is saved."""
        # A restart from this save runs the code before or after the batches again, which this process has begun to run.
        self._saving.save_while_waiting(handover.make_stop_report(self._saving.run.total), self._undo.noted_state)

    def evaluate(self, call: Callable[[], Result], what: str) -> Result:
        """Make an evaluation, again in each new generation until it ends without the loss of a rank.

        Args:
            call: makes the evaluation, and returns its result.
            what: the evaluation's name, for a warning.

        Raises what `call` raises, except for the loss of a rank after which it can be made again.
        """
        # Here this rank has caught up with the others. What its script has changed on the way is in their state.
        if self.evaluations.next_number == self.evaluations.caught_up_at:
            self._undo.discard_changes()
            self._restore_received_rng()
        number = self.evaluations.begin(call)
        try:
            result: Result = self._evaluate_until_done(number, what)
        finally:
            self.evaluations.called = 0
        self.evaluations.end(number, result)
        if number == max(self.evaluations.made_again, default=0):
            self._restore_received_rng()
        return result

    def _prepare_to_catch_up(self) -> None:
        """Prepare a newcomer, which has just got the others' state, for the evaluations since the boundary.

        The effects of what its script does on the way to them are in that state already. So the state is noted here,
        and put back where the newcomer has caught up with the others.
        """
        if self.evaluations.awaited:
            self._undo.note_for_discard(whole=False)
            # Where the others begin the body of a step once more, this script draws from there on what they draw.
            if self._state.applied.has_body:
                return
            self._received_rng = rng_state.capture_raw()
            # The others are in the head of an epoch's body, from which this rank's script begins. Else it comes to the
            # evaluations first of all. The rank that gave its state may not have come to these evaluations either.
            applied = self._state.applied
            in_head = applied.head_rng[:1] if not applied.has_head else []
            self._state.rng.go_back(in_head[0] if in_head else self._rng_before_evaluations)

    def _restore_received_rng(self) -> None:
        """Go on with the random numbers of the state that this newcomer got. Does nothing on other ranks."""
        if self._received_rng:
            self._state.rng.take(self._received_rng)
            self._received_rng = {}

    def _agree_on_result(self, number: int, result: Any) -> Any:
        """The one result of an evaluation that all ranks have made again. Collective.

        A result that a rank had before, if any, wins over the new ones. That rank's script may have decided by its
        result already, and in another world the result may be another one. Ranks that decide differently would part.

        Args:
            number: the number of the evaluation.
            result: the result of this rank's newest try.
        """
        known, kept = self.evaluations.result_of(number)
        offers = collectives.gather_bytes(_packed(kept) if known else b"")
        offer = next(filter(None, offers), None)
        if known or offer is None:
            return kept if known else result
        return torch.load(io.BytesIO(offer), weights_only=True)[0]

    def _evaluate_until_done(self, number: int, what: str) -> Any:
        """Make evaluation `number` until it ends. Returns its result.

        If it can't be made again after the loss of a rank, this process ends as in a pause: it leaves its state to the
        agent, and the error leaves the evaluation.
        """
        repeated = self._undo.state_outside_batches is not None
        while True:
            self._undo.note(evaluates=True)
            before = collectives.sequence_number()
            try:
                result = self.evaluations.begin_try(number)()
                if number in self.evaluations.made_again:
                    result = self._agree_on_result(number, result)
                self.in_place.check_results()
                # The function may have caught the error of a collective, and its result is wrong then.
                if collectives.sequence_number() != before:
                    self.in_place.check_generation()
            except Exception as error:
                is_from_lost_peer = self.in_place.is_from_lost_peer(error)
                if is_from_lost_peer:
                    self.undo_step()
                self._undo.open = False
                # Not valid: the evaluation has changed weights, as for an average, and there is no copy of them.
                undone = is_from_lost_peer and self._state.is_valid
                if not (undone and self.in_place.report_if_lost(error, self._state.position.steps, in_step=True)):
                    self.evaluations.current = 0
                    self.hand_over_if_lost(error, what, repeated=repeated)
                    raise
                # The traceback holds the frames of the call, and with them works of the old group.
                error.__traceback__ = None
                self.go_on()
                # The evaluations were forgotten on the way: this rank has taken over the state of one that was further,
                # or there is a newcomer whose script does not come to this evaluation.
                if not self.evaluations.current:
                    self.hand_over_if_lost(error, what, repeated=repeated)
                    raise
            else:
                self._undo.open, self.evaluations.current = False, 0
                return result

    def _evaluate_again(self, numbers: range) -> None:
        """Take part in evaluations that have ended here and are made again by all, and leave no trace of that.

        Args:
            numbers: the numbers of these evaluations.
        """
        # This may run inside of a later evaluation of the script, whose own try follows.
        current, before = self.evaluations.current, rng_state.capture_raw()
        for number in numbers:
            self._evaluate_until_done(number, "an evaluation that others make again")
            self._undo.undo()
        self.evaluations.current = current
        if numbers:
            rng_state.restore(before)

    def save_last_together(self, save: Callable[[], object]) -> bool:
        """Have rank 0 save the last step, and wait on the other ranks until that is done. Collective.

        The others wait because each of them could save instead if rank 0 is lost. Returns False if the membership has
        changed meanwhile: this process is in the next generation then, and has to call this once more.

        Args:
            save: saves, and waits for the save. Called on rank 0, and where this process can't go on in place.
        """
        try:
            self._save_last(save)
        except (RuntimeError, OSError) as error:
            if not self._is_overtaken and not self.in_place.report_if_lost(error, self._state.position.steps):
                raise
        else:
            if not self._is_overtaken:
                return True
        self.go_on()
        return False

    def _save_last(self, save: Callable[[], object]) -> None:
        # No rank ends before rank 0 has saved. The connections of a rank end with its process, and another rank may
        # still be in the last collective.
        self._page.stepping = 0
        if not self.in_place.possible or collectives.alone():
            save()
        elif self._saving.is_first:
            self._save_for_others(save)
        else:
            with self._page.halted():
                self._wait_for_save()

    @property
    def _is_overtaken(self) -> bool:
        return self.in_place.possible and self.in_place.overtaken

    def _save_for_others(self, save: Callable[[], object]) -> None:
        """Save, and wait until the other ranks know it. This process serves the store, which may end with it."""
        store = dist.distributed_c10d._get_default_store()
        store.set(_SAVED, "")
        save()
        store.set(_SAVED, "+")
        until = time.monotonic() + END_S_MAX
        while store.add(_SEEN, 0) < self.size - 1 and not self.in_place.overtaken and time.monotonic() < until:
            time.sleep(END_LOOK_S)

    def _wait_for_save(self) -> None:
        """Wait until rank 0 has saved. If rank 0 has not come to its end within END_S_MAX, do not wait any longer."""
        store, saves, until = dist.distributed_c10d._get_default_store(), False, time.monotonic() + END_S_MAX
        # There is no limit for the save itself.
        while not self.in_place.overtaken and (saves or time.monotonic() < until):
            # An error here says that rank 0 is lost: its process serves the store until all have seen the save.
            saved = store.get(_SAVED) if store.check([_SAVED]) else None
            if saved:
                store.add(_SEEN, 1)
                return
            saves = saved is not None
            # In a large world less often, so that rank 0 gets at most 20,000 such looks a second.
            time.sleep(max(END_LOOK_S, self.size / 20_000))

    def undo_step(self) -> None:
        """Go back to where the open step or evaluation began. If that is not known, this rank has no state to give."""
        if not self._undo.undo():
            self._invalidate_state()

    def _arrive(self, meeting: regroup.Meeting, *, is_newcomer: bool) -> list[Standing]:
        """Agree with the ranks of a new generation on the furthest state, and go on from there. Collective.

        Returns how far each rank is with the evaluations since the last step.

        Args:
            meeting: where the ranks have met.
            is_newcomer: whether this rank has made no step with the others.
        """
        state, worker = self._state, self.in_place.worker
        state.rng.rank, self.size = collectives.rank_and_world()
        # -1 means that this rank has the state of no step, and needs another rank's.
        steps = state.position.steps if state.is_valid else -1
        spare, self.in_place.spare = self.in_place.spare, None
        taken, said = state_transfer.transfer_state(
            steps,
            meeting,
            self._state_for_others,
            self._invalidate_state,
            spare,
            says=[self.evaluations.standing(is_newcomer=is_newcomer), state.var_digests()],
        )
        furthest = max(step for step, _ in said)
        if state.rng.rank == 0:
            state.warn_of_own_vars([digests for step, (_, digests) in said if step == furthest])
        # The ledger's files belong to one generation each.
        history = state.ledger.history(state.position.steps)
        state.ledger.close()
        if taken is None:
            state.ledger.restored(history)
        else:
            state.take_over(taken)
            if state.position.steps != steps:
                # What was noted outside of the batches is of the older position.
                self._undo.state_outside_batches = None
            self._rng_before_evaluations = taken[stateful.LOOP_KEY]["rng_before"]
            self.evaluations.forget()
            self._saving.run.total = taken[stateful.LOOP_KEY]["total"]
            # What the script has scaled by the world size belongs to the state.
            self._size_before = taken[stateful.LOOP_KEY]["size_before"]
        state.is_valid = True
        self._undo.optimizer_has_begun = self._undo.has_stepped = False
        self.seat_changes += 1
        self._saving.move(worker)
        self._begin_generation(worker.nonce)
        state.ledger.renew()
        ranks = [(step, Standing(*standing)) for step, (standing, _) in said]
        # A rank that was behind has taken over the state of another one, and forgotten its own evaluations.
        return [each if step == furthest else Standing(is_newcomer=each.is_newcomer) for step, each in ranks]

    def _begin_generation(self, start: str) -> None:
        """Begin the steps of a generation with its state.

        Args:
            start: the name of this start in the ledger.
        """
        self._state.rng.begin_step(self._state.position)
        self._state.ledger.open(start, self._state.position)
        self._saving.begin_generation()
        self._reporter.begin(self._saving.run.total)

    def _state_for_others(self) -> dict[str, Any]:
        """The state as other ranks take it over, with what a newcomer needs besides."""
        state, total = self._state, self._saving.run.total
        settings = {"settings": state.sampler_settings(), "batch_size": state.batch_size, "length": state.length}
        rng_before, noted = dict[str, Any](), self.evaluations.rng_for_newcomer
        # `rng_for_newcomer` is a note, which cannot be sent. Only `capture` makes plain values, and only of the present
        # states of the generators.
        if noted is not None:
            now = rng_state.capture_raw()
            rng_state.restore(noted)
            rng_before = rng_state.capture()
            rng_state.restore(now)
        size = self._size_before
        return state.collect(alike=state.rng.alike, total=total, rng_before=rng_before, size_before=size, **settings)

    def _invalidate_state(self) -> None:
        """Note that the state is that of no step. Only another rank's state can help."""
        self._state.is_valid = False
        # This tells the agent not to count on this worker for a state.
        self._page.restored_at_ns = 0

    def hand_over_if_lost(self, error: Exception, doing: str, *, repeated: bool) -> None:
        """Leave the state to the agent if `error` says that a peer is gone. The error ends this process between steps.

        The loss is reported to the agent at once as well, because nobody knows how long this process takes to end.

        Args:
            error: the error.
            doing: what the script did, for a warning.
            repeated: whether a restart at this position comes to the same place again.
        """
        if not self._undo.in_step and self.in_place.is_from_lost_peer(error):
            if not repeated:
                what = "%r after step %d failed with a lost worker, and is not repeated: the run goes on after it"
                _log.warning(what, doing, self._state.position.steps)
            self.hand_over()
            self.in_place.report_if_lost(error, self._state.position.steps)

    def hand_over(self) -> None:
        """Leave the newest finished step to the agent, because this process ends. May be called from any thread."""
        if self._undo.open:
            self.undo_step()
        state = self._undo.state_of_position() if self._state.is_valid else None
        if state is not None:
            self._saving.hand_over(state)
        elif self._state.is_valid:
            _log.warning("the agent does not get the newest step: the script has changed the state since, or left")

    def _announce_change(self, stepped_at_ns: int = 0, steps_lost: int = 0) -> None:
        """Call all functions of `on_change`.

        Args:
            stepped_at_ns: when the last step before the change ended (`time.monotonic_ns`); 0 if there was none.
            steps_lost: how many steps are made again.
        """
        worker = self.in_place.worker
        change = Change(
            generation=worker.generation,
            world_size=self.size,
            world_size_before=self._size_before,
            cause=worker.cause,
            pause_s=(time.monotonic_ns() - stepped_at_ns) / 1e9 if stepped_at_ns else None,
            steps_lost=max(0, steps_lost) if stepped_at_ns else 0,
        )
        # What is drawn there must not shift the numbers of the steps, of which an undisturbed run has no fewer.
        states = rng_state.capture_raw() if self.on_change else {}
        for call in self.on_change:
            call(change)
        if states:
            rng_state.restore(states)
        self._size_before = self.size


def plain_result(result: object) -> list[Any] | None:
    """A copy of an evaluation's result, in a list, to be saved or sent.

    None for a result with other parts than numbers, texts and tensors in lists, tuples, dicts or sets.
    """
    try:
        whole: list[Any] = plain_copy([result], "result")
    except ConfigError:
        return None
    return whole


def _packed(result: object) -> bytes:
    """The result of an evaluation as bytes for other ranks; no bytes if it can't be sent, see `plain_result`."""
    whole = plain_result(result)
    if whole is None:
        return b""
    file = io.BytesIO()
    torch.save(whole, file)
    return file.getvalue()
