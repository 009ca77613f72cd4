"""The world that a Loop's process is in, and its way from one generation into the next."""

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
from elasticrt.train.evaluations import Evaluations
from elasticrt.train.in_place import InPlace
from elasticrt.train.reporting import Reporter
from elasticrt.train.saving import Saving
from elasticrt.train.training_state import TrainingState
from elasticrt.train.undo import Undo

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

END_S_MAX, END_LOOK_S = 5.0, 0.02
"""How long ranks wait for each other at the end, and how often they look: one rank may have more to do than others."""

_SAVED, _SEEN = "elasticrt/saved", "elasticrt/saved/seen"
"""Keys of a generation's store: rank 0 saves the last step, and has done so (`+`); how many others know that."""


@dataclass(frozen=True)
class Change:
    """A change of the world in which this process lives on, or its beginning.

    Attributes:
        generation: the number of the new one, 0 without an agent.
        world_size: processes in it.
        world_size_before: processes in the world that this process was in before, after a start in the one that saved
            the state; 0 for none.
        cause: why, in words such as `node-2 lost`; "" without an agent.
        pause_s: seconds since this process's last step, after a restart since that of its node's workers; None where
            there was none.
        steps_lost: steps that they had finished and that are done again.
    """

    generation: int
    world_size: int
    world_size_before: int
    cause: str = ""
    pause_s: float | None = None
    steps_lost: int = 0


class World:
    """The world of one Loop's process. `objects`: as given to the Loop, by name."""

    def __init__(
        self, objects: Mapping[str, Any], state: TrainingState, saving: Saving, undo: Undo, reporter: Reporter
    ) -> None:
        self._state = state
        self._saving = saving
        self._undo = undo
        self._reporter = reporter
        self._page = agent_client.status_page()
        self._size_before = 0  # Of the world of the last Change.
        self.in_place = InPlace(
            objects.values(), self.hand_over, lambda: undo.in_step and not undo.touched, lambda: bool(self.on_change)
        )
        self.evaluations = Evaluations()
        # The random numbers before evaluations that this rank comes to after others, and those to go on with then.
        self._earlier: dict[str, Any] = {}
        self._numbers: dict[str, Any] = {}
        # `size`: processes in all; `resumed_size`: in the world that began what is left of the epoch.
        self.size = self.resumed_size = 1
        self.moves = 0  # How often this process has got another place.
        self.on_change: list[Callable[[Change], None]] = []

    def enter(self, *, fresh: bool) -> None:
        """Begin the Loop with all ranks, or set up beside the training of others until they let this process in.

        Args:
            fresh: start over, whatever checkpoint there is.
        """
        worker = self.in_place.worker
        if worker.beside:
            self._state.whole = False
            self._saving.set_up_beside()
            self.in_place.set_up_beside(self._state.objects)
            self.go_on()
            self._go_after_others()
            return
        self._page.loop_at_ns = time.monotonic_ns()
        self._state.numbers.compare()
        self._state.compare(worker)
        found = self._saving.checkpointer.begin(fresh=fresh)
        _, self.size = collectives.rank_and_world()
        self.resumed_size = self.size
        if found is not None:
            self._state.restore(found.data)
            self.resumed_size = self._size_before = found.world_size
        self._has_state(self._saving.checkpointer.start)
        if self._page.step_at_ns:  # A second Loop of the script has its beginning, and no cost.
            self._announce_change()
        else:
            self._announce_change(worker.last_step_at_ns, worker.last_step - self._saving.run.total)

    def go_on(self) -> None:
        """Take the seat in the next generation, and get the state that all others have there."""
        self._page.stepping = 0
        stepped_at_ns, steps = self._page.step_at_ns, self._state.position.steps
        arrived, is_newcomer = False, self.in_place.worker.beside
        while not arrived:
            if not self.in_place.wait_for_seat():
                self._reporter.end()
                raise handover.departure(self._state.position.steps)
            meeting = self.in_place.meet(self._state.position.steps)
            if meeting is None:
                continue
            try:
                self._arrive(meeting)
                if self.in_place.worker.waits:  # For a generation with enough nodes.
                    self._saving.while_waiting(handover.staying(self._saving.run.total))
                    continue
                standing = self.evaluations.standing(is_newcomer=is_newcomer)
                again = self.evaluations.meet(meeting.gather("evaluations", standing), is_newcomer=is_newcomer)
                self._announce_change(stepped_at_ns, steps - self._state.position.steps)
                arrived = True
            except regroup.Overtaken:
                continue
            except RuntimeError as error:
                if not self.in_place.lost(error, self._state.position.steps):
                    raise
        self._evaluate_again(again)

    def evaluate(self, call: Callable[[], Result], what: str) -> Result:
        """The result of `call`, which is no step. It is called again in each new world until it ends.

        `what`: its name. Raises what `call` raises, but for the loss of a rank where it can be made again.
        """
        if self.evaluations.next == self.evaluations.rejoined_at:
            self._undo.forget_between()
            self._go_on_with_numbers()
        number = self.evaluations.begin(call)
        try:
            result: Result = self._evaluated(number, what)
        finally:
            self.evaluations.inside = 0
        self.evaluations.end(number, result)
        if number == max(self.evaluations.made_again, default=0):
            self._go_on_with_numbers()
        return result

    def _go_after_others(self) -> None:
        """This newcomer has the others' state, and comes to what they have evaluated since the boundary.

        What the script does on the way is in that state already: so it is noted, and put back where the others are.
        """
        if self.evaluations.awaited:
            self._undo.note_between(whole=False)
            self._numbers = rng_state.note()
            if self._earlier:  # Else the rank that gave its state had not evaluated either.
                self._state.numbers.go_back(self._earlier)

    def _go_on_with_numbers(self) -> None:
        if self._numbers:
            rng_state.restore(self._numbers)
            self._numbers = {}

    def _agreed(self, number: int, result: Any) -> Any:
        """The result of evaluation `number`, which all have made again: that of a rank that had it before, if any.

        Ranks that decide by it must not part, and in another world it may be another one.
        """
        known, kept = self.evaluations.kept(number)
        offers = collectives.gather_bytes(_packed(kept) if known else b"")
        offer = next(filter(None, offers), None)
        if known or offer is None:
            return kept if known else result
        return torch.load(io.BytesIO(offer), weights_only=True)[0]

    def _evaluated(self, number: int, what: str) -> Any:
        repeated = self._undo.outside is not None
        while True:
            self._undo.note(evaluates=True)
            before = collectives.sequence_number()
            try:
                result = self.evaluations.enter(number)()
                if number in self.evaluations.made_again:
                    result = self._agreed(number, result)
                self.in_place.check_results()
                if collectives.sequence_number() != before:
                    self.in_place.check_replaced()
            except Exception as error:
                is_of_peer = self.in_place.is_of_peer(error)
                if is_of_peer:
                    self.undo_step()
                self._undo.open = False
                undone = is_of_peer and self._state.whole
                if not (undone and self.in_place.lost(error, self._state.position.steps, in_step=True)):
                    self.evaluations.at = 0
                    self.leave_state(error, what, repeated=repeated)
                    raise
                error.__traceback__ = None  # It holds the frames of the call, and with them works of the old group.
                self.go_on()
                if not self.evaluations.at:  # There is a newcomer, or another rank was further.
                    self.leave_state(error, what, repeated=repeated)
                    raise
            else:
                self._undo.open, self.evaluations.at = False, 0
                return result

    def _evaluate_again(self, numbers: range) -> None:
        """Take part in evaluations that others make again, and leave no trace of that."""
        at, before = self.evaluations.at, rng_state.note()
        for number in numbers:
            self._evaluated(number, "an evaluation that others make again")
            self._undo.put_back()
        self.evaluations.at = at
        if numbers:
            rng_state.restore(before)

    def ends_with(self, save: Callable[[], object]) -> bool:
        """The last step is done: rank 0 saves, and the others wait for that, so that any of them could do it instead.

        False: the world has changed meanwhile, and all is to be done again there.
        """
        try:
            self._save_last(save)
        except (RuntimeError, OSError) as error:
            if not self._is_overtaken and not self.in_place.lost(error, self._state.position.steps):
                raise
        else:
            if not self._is_overtaken:
                return True
        self.go_on()
        return False

    def _save_last(self, save: Callable[[], object]) -> None:
        # Nobody ends before rank 0: its connections would end with it, and another may be in the last collective still.
        self._page.stepping = 0
        if not self.in_place.possible or collectives.alone():
            save()
        elif self._saving.is_first:
            self._save_for_others(save)
        else:
            since_ns = time.monotonic_ns()
            self._wait_for_save()
            self._page.save_ns += time.monotonic_ns() - since_ns

    @property
    def _is_overtaken(self) -> bool:
        return self.in_place.possible and self.in_place.overtaken

    def _save_for_others(self, save: Callable[[], object]) -> None:
        """Save, and see that those know of it who wait for that: this process may end, and the store with it."""
        store = dist.distributed_c10d._get_default_store()
        store.set(_SAVED, "")
        save()
        store.set(_SAVED, "+")
        until = time.monotonic() + END_S_MAX
        while store.add(_SEEN, 0) < self.size - 1 and not self.in_place.overtaken and time.monotonic() < until:
            time.sleep(END_LOOK_S)

    def _wait_for_save(self) -> None:
        """Wait until rank 0 has saved, if it has come to the end as well."""
        store, saves, until = dist.distributed_c10d._get_default_store(), False, time.monotonic() + END_S_MAX
        while not self.in_place.overtaken and (saves or time.monotonic() < until):
            # An error says that rank 0 is lost: the store is there until all have ended.
            saved = store.get(_SAVED) if store.check([_SAVED]) else None
            if saved:
                store.add(_SEEN, 1)
                return
            saves = saved is not None
            time.sleep(max(END_LOOK_S, self.size / 20_000))

    def undo_step(self) -> None:
        """Go back to where the open step began, as far as that is known."""
        if not self._undo.put_back():
            self._overwritten()

    def _arrive(self, meeting: regroup.Meeting) -> None:
        """All ranks of a new generation have met: get the furthest state."""
        state, worker = self._state, self.in_place.worker
        state.numbers.rank, self.size = collectives.rank_and_world()
        steps = state.position.steps if state.whole else -1
        spare, self.in_place.spare = self.in_place.spare, None
        taken = state_transfer.share(steps, meeting, self._to_others, self._overwritten, spare)
        history = state.ledger.history(state.position.steps)
        state.ledger.close()
        if taken is None:
            state.ledger.restored(history)
        else:
            state.take_over(taken)
            self._earlier = taken[stateful.OURS]["earlier"]
            self.evaluations.forget()
            self._saving.run.total = taken[stateful.OURS]["total"]
        state.whole = True
        self._undo.touched = self._undo.stepped = False
        self.moves += 1
        self.resumed_size = self.size
        self._saving.move(worker)
        self._has_state(worker.nonce)
        state.ledger.renew()

    def _has_state(self, start: str) -> None:
        """The state is that of the generation that begins. `start`: the name of this start in the ledger."""
        self._state.numbers.begin_step(self._state.position)
        self._state.ledger.open(start, self._state.position)
        self._saving.has_state()
        self._reporter.begin(self._saving.run.total)

    def _to_others(self) -> dict[str, Any]:
        """The state as other ranks take it over."""
        state, total = self._state, self._saving.run.total
        settings = {"settings": state.settings(), "batch_size": state.batch_size}
        earlier, before = dict[str, Any](), self.evaluations.numbers_before
        if before is not None:
            now = rng_state.note()
            rng_state.restore(before)
            earlier = rng_state.capture()
            rng_state.restore(now)
        return state.collect(alike=state.numbers.alike, total=total, earlier=earlier, **settings)

    def _overwritten(self) -> None:
        """The state is that of no step: only another rank's can help, and the agent must not count on this one."""
        self._state.whole = False
        self._page.restored_at_ns = 0

    def leave_state(self, error: Exception, doing: str, *, repeated: bool) -> None:
        """Leave the state to the agent if `error`, which ends this process between steps, says that a peer is gone.

        That is told at once as well: how long a process takes to end is not known. `doing`: what the script did there.
        `repeated`: a restart at this position comes there again.
        """
        if not self._undo.in_step and self.in_place.is_of_peer(error):
            if not repeated:
                what = "%r after step %d has lost a worker, and is not done again: the run goes on after it"
                _log.warning(what, doing, self._state.position.steps)
            self.hand_over()
            self.in_place.lost(error, self._state.position.steps)

    def hand_over(self) -> None:
        """Leave the newest finished step to the agent, because this process ends. From any thread."""
        if self._undo.open:
            self.undo_step()
        state = self._undo.state_of_position() if self._state.whole else None
        if state is not None:
            self._saving.hand_over(state)
        elif self._state.whole:
            _log.warning("the newest step is not left to the agent: the script has changed the state since, or left")

    def _announce_change(self, stepped_at_ns: int = 0, steps_lost: int = 0) -> None:
        """Call all of `on_change`. The last step before was made at `stepped_at_ns`, 0: there was none; so many steps
        are done again."""
        worker = self.in_place.worker
        change = Change(
            generation=worker.generation,
            world_size=self.size,
            world_size_before=self._size_before,
            cause=worker.cause,
            pause_s=(time.monotonic_ns() - stepped_at_ns) / 1e9 if stepped_at_ns else None,
            steps_lost=max(0, steps_lost) if stepped_at_ns else 0,
        )
        for call in self.on_change:
            call(change)
        self._size_before = self.size


def plain_result(result: object) -> list[Any] | None:
    """A copy of an evaluation's result, in a list, to be saved or sent; None if it is no numbers, texts and tensors."""
    try:
        whole: list[Any] = plain_copy([result], "result")
    except ConfigError:
        return None
    return whole


def _packed(result: object) -> bytes:
    """The result of an evaluation for other ranks; nothing where it is more than numbers, texts and tensors."""
    whole = plain_result(result)
    if whole is None:
        return b""
    file = io.BytesIO()
    torch.save(whole, file)
    return file.getvalue()
