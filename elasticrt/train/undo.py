"""Undoes a step: notes what the step may change when it begins, and puts that back when the step is to be made again.

A step in which a rank is lost cannot be finished: its collectives fail, so the gradients are not those of the global
batch. The survivors make the step again in the next world. For that, every rank must stand where the step began, or the
step would count twice: in the statistics of batch norm, in accumulated gradients, in the numbers that dropout draws.

Copying all of the state at each step would cost too much. The weights and the optimizer's state change only when an
optimizer steps, and most scripts make no collective after that. So when a collective fails, at least one rank usually
still has the state of a finished step. A rank whose optimizer has stepped halfway gets that state (`train.world`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from elasticrt.checkpoint import rng_state, stateful
from elasticrt.checkpoint.state_copy import WatchedState
from elasticrt.distributed import collectives
from elasticrt.errors import ConfigError
from elasticrt.train.module_notes import ModuleNotes
from elasticrt.train.not_given import optimizers_in
from elasticrt.train.training_state import TrainingState

# The kinds of objects whose states are large. In a step, only the optimizer's step and what belongs to it change them.
LARGE = (torch.nn.Module, torch.optim.Optimizer)

SEARCHED_STEPS = 3
"""The number of first steps of a process that are searched for writes by way of `.data`. After them each step whose
number is a power of two is searched. The search reads all parameters, which is too slow for every step."""

_Named = dict[str, Any]
_REMEDY = "Wrap the model in DistributedDataParallel, or add the gradients of all ranks"
_log = logging.getLogger(__name__)


class _Beginning(NamedTuple):
    """The state in which a step or an evaluation has begun, without the modules (see `ModuleNotes`).

    Attributes:
        evaluates: whether an evaluation has begun.
        rng_states: the states of the random number generators; None where they follow from a seed.
        vars: the objects in `loop.vars`, and copies of them.
        scales: for each GradScaler its scale and growth tracker.
        objects: the states of the script's other objects by name: copies, or WatchedStates.
        gradients: each parameter with a copy of its gradient, where gradients of earlier steps count; else None.
    """

    evaluates: bool
    rng_states: _Named | None
    vars: tuple[_Named, _Named]
    scales: tuple[tuple[torch.Tensor | None, ...], ...]
    objects: _Named
    gradients: tuple[tuple[torch.Tensor, torch.Tensor | None], ...] | None


class Undo:
    """The open step of one Loop, and the way back to where the step began.

    Noted at the beginning of each step: buffers, gradients, `loop.vars`, the states of the script's own objects, and
    which modules are in training mode or frozen. Random numbers are noted where the script's code for the step begins,
    which may be before the block.

    Not noted: the values of parameters, and the states of optimizers. A rank whose optimizer has stepped in an undone
    step gets them from another rank. There are two exceptions:

    - The script's steps communicate in or after an optimizer's step (a closure, two models in turn, a sum of the losses
      at the end). There all ranks can have stepped when a collective fails, and no rank could help. So everything is
      copied just before the optimizer steps.
    - The script changes parameters (an average of the weights), or large tensors of its own objects, before its
      optimizer steps. From the next step on these are copied as well. The first step that does so cannot be undone.

    Torch does not count changes by way of `.data`. They are looked for in some steps (`SEARCHED_STEPS`), and in
    evaluations.

    Args:
        state: the state of the Loop.
        seeded: whether random numbers follow from the step's number, so that they need no note.

    Attributes:
        in_step: whether the block of a step is open.
        open: whether a step is noted that does not count yet. With micro-batches it may be between two blocks.
        has_stepped: whether an optimizer has stepped in the present batch.
        optimizer_has_begun: whether an optimizer has begun to step in the present step. The state may then be that of
            no step.
        state_outside_batches: the state of the position, noted when the script left the batches of an epoch, while it
            runs code before or after them. A restart at this position runs that code again. None among the batches.
    """

    def __init__(self, state: TrainingState, *, seeded: bool) -> None:
        self._training = state
        self._seeded = seeded
        objects = state.objects.values()
        self._modules = ModuleNotes([each for each in objects if isinstance(each, torch.nn.Module)])
        self._optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        # A disabled GradScaler has no scale.
        self._scalers = [each for each in objects if isinstance(each, torch.amp.GradScaler) and each.is_enabled()]
        # The objects that are noted by their `state_dict`. That of a GradScaler would wait for the GPU at each step.
        others = (*LARGE, torch.amp.GradScaler)
        self._noted = {name: each for name, each in state.objects.items() if not isinstance(each, others)}
        self._beginning = _Beginning(False, None, ({}, {}), (), {}, None)
        self._body_rng_states: _Named | None = None
        # The objects' state before the first optimizer of the step began, in scripts that communicate late.
        self._state_before_optimizer: _Named | None = None
        # What `note_for_discard` has noted: the states of objects, `loop.vars` (objects and copies), random numbers.
        self._discard_note: tuple[_Named, tuple[_Named, _Named], _Named | None] | None = None
        # Whether this step has changed something of which there is no copy. It can't be undone then.
        self._has_uncopied_changes = False
        # The hooks on the optimizers.
        self._handles: list[RemovableHandle] = []
        # How many collectives had begun before the first optimizer of the step, or the first step of this process.
        self._optimizer_began_at = 0
        self._first_step_began_at: int | None = None
        # Whether no step with an optimizer has ended yet.
        self._is_first_step = True
        self._noted_steps = 0
        self.in_step = False
        self.open = False
        self.has_stepped = False
        # The optimizers that have stepped in the present step, by id.
        self._stepped_ids: set[int] = set()
        self.optimizer_has_begun = False
        self.state_outside_batches: WatchedState | None = None

    @property
    def has_optimizer(self) -> bool:
        """Whether the Loop has an optimizer to watch."""
        return bool(self._handles)

    def watch(self, before: Callable[..., None]) -> None:
        """Watch the optimizers.

        Args:
            before: called before an optimizer steps. An exception from it prevents the step.
        """
        # Only the hooks hold `before`, a method of the Loop. So a Loop that is over is freed at once, and with it the
        # worker processes of its loader.
        watched = [inner for each in self._optimizers for inner in _with_hooks(each)]
        self._handles = [each.register_step_pre_hook(before) for each in watched]
        self._handles += [each.register_step_post_hook(self._after_optimizer) for each in watched]

    @property
    def has_communicated(self) -> bool:
        """Whether an optimizer that steps now may use the result of a collective that has lost a peer.

        Not so for a second optimizer of the step, if no collective has begun since the first one began.
        """
        return not self.optimizer_has_begun or collectives.sequence_number() != self._optimizer_began_at

    def unwatch(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def before_optimizer(self) -> None:
        """Note that an optimizer is about to step. Copy all of the state if the step will communicate afterwards."""
        if not self.optimizer_has_begun:
            self._learn_early_changes()
            # Counted before the optimizer steps: the collectives of a closure (LBFGS) are inside of its step. If one of
            # these fails, all ranks have stepped in part.
            self._optimizer_began_at = collectives.sequence_number()
            if self._training.traits.communicates_late:
                self._state_before_optimizer = copy.deepcopy(stateful.collect(self._training.objects))
        self.optimizer_has_begun = True

    def end_step(self) -> None:
        """Note that the step is done, and whether it has begun collectives since its first optimizer began."""
        if self.has_stepped and self._is_first_step:
            self._is_first_step = False
            # DDP exchanges gradients by collectives. A first step without any means that the model is not in DDP, and
            # that the ranks train apart.
            if collectives.sequence_number() == self._first_step_began_at and not collectives.alone():
                what = "the first step exchanged nothing between ranks: each rank trains a model of its own. %s"
                _log.warning(what, _REMEDY)
        # An optimizer that has not stepped may be adding up gradients over several steps. Those of all parameters are
        # kept then.
        self._training.accumulates = len(self._stepped_ids) < max(1, len(self._optimizers))
        if not self.optimizer_has_begun:
            self._learn_early_changes()
        if self.has_stepped and collectives.sequence_number() != self._optimizer_began_at:
            self._training.traits.communicates_late = True

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.has_stepped = True
        self._stepped_ids.add(id(optimizer))

    def _learn_early_changes(self) -> None:
        """Learn what the script changes before its optimizer steps: all further steps copy that when they begin.

        Called when the first optimizer of the step begins, or at the end of a step without one.
        """
        traits, objects = self._training.traits, self._beginning.objects
        new = self._modules.find_changed() - traits.early_parameters
        # A WatchedState has lost its state if one of the large tensors in it, which it does not copy, has changed.
        large = {name for name, noted in objects.items() if isinstance(noted, WatchedState) and noted.state is None}
        self._has_uncopied_changes = self._has_uncopied_changes or bool(new or large)
        if not self._beginning.evaluates:
            traits.early_parameters |= new
            traits.early_objects |= large

    def _group_settings(self) -> list[dict[str, Any]]:
        """The settings in the optimizers' parameter groups: a scheduler writes the learning rate to its optimizer."""
        return [
            # Nearly all settings are plain numbers, and this runs at every step: they need no copy.
            {name: each if type(each) in _ATOMS else clone(each) for name, each in group.items() if name != "params"}
            for group in self._groups()
        ]

    def begin_body(self) -> None:
        """Note the random numbers where the script's code for the step begins: undone, it draws them once more."""
        self._body_rng_states = None if self._seeded else rng_state.capture_raw()

    def note(self, *, evaluates: bool = False) -> None:
        """Note everything that the step which begins may change, except for parameters and optimizers.

        Args:
            evaluates: whether an evaluation begins instead of a step. If it has changed parameters when it fails, such
                as by exchanging the weights for an average, it can't be undone, and later steps copy no more for that.
        """
        training, traits, named = self._training, self._training.traits, self._training.vars
        self._state_before_optimizer = None
        self.open = True
        self.optimizer_has_begun = self._has_uncopied_changes = False
        if self._first_step_began_at is None:
            self._first_step_began_at = collectives.sequence_number()
        self._stepped_ids.clear()
        self._noted_steps += not evaluates
        # The number of a step is a power of two if one bit of it is set.
        is_searched = self._noted_steps <= SEARCHED_STEPS or self._noted_steps.bit_count() == 1
        self._modules.note(
            traits.early_parameters, closely=evaluates or is_searched, in_backward=is_searched and not evaluates
        )
        objects = {
            name: copy.deepcopy(each.state_dict()) if name in traits.early_objects else WatchedState(each.state_dict())
            for name, each in self._noted.items()
        }
        self._beginning = _Beginning(
            evaluates=evaluates,
            rng_states=rng_state.capture_raw() if evaluates and not self._seeded else self._body_rng_states,
            vars=(dict(named), {name: clone(each) for name, each in named.items()}),
            scales=tuple(tuple(map(clone, (each._scale, each._growth_tracker))) for each in self._scalers),
            objects={**objects, stateful.LOOP_KEY: self._group_settings()},
            gradients=self._gradients() if training.accumulates else None,
        )

    def _gradients(self) -> tuple[tuple[torch.Tensor, torch.Tensor | None], ...] | None:
        """Each parameter with a copy of its gradient; None if no parameter has a gradient."""
        owners = self._training.parameters()
        if all(each.grad is None for each in owners):
            return None
        return tuple((each, None if each.grad is None else each.grad.detach().clone()) for each in owners)

    def is_undoable(self) -> bool:
        """Whether `undo` can go back in full."""
        if not self.optimizer_has_begun:
            self._learn_early_changes()
        copied = not self.optimizer_has_begun or self._state_before_optimizer is not None
        return copied and not self._has_uncopied_changes

    def undo(self) -> bool:
        """Go back to where the step began.

        Returns False if that is not possible in full: an optimizer has begun to step and nothing was copied before, or
        the script has changed something of which there is no copy. This rank then needs the state of another one.
        """
        known, before = self.is_undoable(), self._state_before_optimizer
        if known and before is not None:
            stateful.put_back(self._training.objects, before, "the beginning of the step")
        self._state_before_optimizer = None
        # Put back even if the state is not known: what another rank sends does not hold all of this, such as training
        # modes.
        self._modules.put_back()
        states = {
            name: noted.state if isinstance(noted, WatchedState) else noted
            for name, noted in self._beginning.objects.items()
        }
        self._load({name: state for name, state in states.items() if state is not None})
        self.abandon_step()
        self._put_back_scalers()
        if self._beginning.rng_states is not None:
            rng_state.restore(self._beginning.rng_states)
        self._training.put_vars(*self._beginning.vars)
        return known

    def abandon_step(self) -> None:
        """End the step without counting it, and drop the gradients that it has added up."""
        self.open = False
        gradients = self._beginning.gradients
        self._training.accumulates = gradients is not None
        self._training.drop_gradients()
        for owner, gradient in gradients or ():
            owner.grad = gradient

    def _put_back_scalers(self) -> None:
        """Make each GradScaler forget what it has seen in the step.

        The gradients that an aborted collective has left may overflow, and the scaler would lower its scale for that.
        """
        for scaler, scale in zip(self._scalers, self._beginning.scales, strict=True):
            scaler._scale, scaler._growth_tracker = scale
            # Otherwise the scaler refuses to unscale or to step a second time in one step.
            scaler._per_optimizer_states.clear()
        for optimizer in self._optimizers if self._scalers else ():
            # A GradScaler passes its scale to a fused optimizer in these attributes. If it finds a scale there the next
            # time, it multiplies that with the new one.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def leave_batches(self, *, known: bool) -> None:
        """Note the state of the position, because the script goes on with code outside of the batches.

        A process that is lost there hands this state over, and not the present one: its successor runs that code again.

        Args:
            known: whether a restart at this position begins with that code. If the script has left the batches early, a
                restart would go on with the next batch instead. Then no state is noted, and none is handed over.
        """
        self.state_outside_batches = WatchedState(self._training.collect() if known else None)

    @property
    def noted_state(self) -> dict[str, Any] | None:
        """The state of the position, if it was noted outside of the batches and is still known; else None."""
        return None if self.state_outside_batches is None else self.state_outside_batches.state

    def state_of_position(self) -> dict[str, Any] | None:
        """The state that belongs to the position, as `TrainingState.collect` gives it; None if it is not known.

        It is not known outside of the batches if the script has changed large tensors since.
        """
        return self._training.collect() if self.state_outside_batches is None else self.state_outside_batches.state

    def state_before_break(self) -> dict[str, Any] | None:
        """The state to save after the script has left its epochs by `break`; None for the present one.

        A restart enters the epoch again. What the script has done there before or after the batches is done again, so
        it must not be in the state. A restart goes on with the batches that are left.
        """
        noted = self.noted_state
        if noted is not None:
            noted[stateful.LOOP_KEY]["position"]["left"] = False
        return noted

    def note_for_discard(self, *, whole: bool, with_rng: bool = False) -> None:
        """Note what the script may change until the next try of the step begins, or until it meets the other ranks.

        Called where the script is about to run code whose effects must not count: after a step was undone, and before
        code that has run already.

        Args:
            whole: whether the script goes on as after a finished step. It may then change parameters and optimizers as
                well.
            with_rng: whether to note random numbers.
        """
        objects = self._training.objects.items()
        noted = {name: each for name, each in objects if whole or not isinstance(each, LARGE)}
        states = {**stateful.collect(noted), stateful.LOOP_KEY: self._group_settings()}
        named = dict(self._training.vars)
        # Copied in full, not by a WatchedState: this is done once for each change, and the script may change anything.
        rng_states = rng_state.capture_raw() if with_rng else None
        self._discard_note = copy.deepcopy(states), (named, copy.deepcopy(named)), rng_states

    def discard_changes(self, *, keeps_note: bool = False) -> None:
        """Undo what the script has changed since `note_for_discard`. Does nothing if that was not called.

        Args:
            keeps_note: keep the note, because what the script does next is to be undone as well.
        """
        if self._discard_note is None:
            return
        states, (named, values), rng_states = self._discard_note
        if keeps_note:
            # What is put back may be changed in place. The variables stay the same objects, which the script may hold.
            states, values = copy.deepcopy(states), copy.deepcopy(values)
        else:
            self._discard_note = None
        self._load(states)
        self._training.put_vars(named, values)
        if rng_states is not None:
            rng_state.restore(rng_states)

    def keep_changes(self) -> None:
        """Keep what the script has changed since `note_for_discard`: no other try of that step follows."""
        self._discard_note = None

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]

    def _load(self, states: dict[str, Any]) -> None:
        """Put back the states of objects by name, and a result of `_group_settings` under LOOP_KEY."""
        objects = {name: self._training.objects[name] for name in states if name != stateful.LOOP_KEY}
        stateful.put_back(objects, states, "the beginning of the step")
        # Not strict: a parameter group that the script has added since has no values here.
        for group, values in zip(self._groups(), states.get(stateful.LOOP_KEY, ()), strict=False):
            group.update(values)


def _with_hooks(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """`optimizer`, or those that it is around if it cannot have hooks. Raises ConfigError if there are none."""
    if "_optimizer_step_pre_hooks" in vars(optimizer):
        return [optimizer]
    inner = [each for part in optimizers_in(optimizer) for each in _with_hooks(part)]
    if not inner:
        what, got = "an optimizer that torch has not set up", type(optimizer).__name__
        remedy = "Call super().__init__(params, defaults) in its __init__"
        raise ConfigError(what, "Loop", got=got, expected="one with hooks around its steps", remedy=remedy)
    return inner


# The types of values that cannot change in place, so that they need no copy.
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})


def clone(value: Any) -> Any:
    """A copy of `value` in all that a step may change in place: lists, dicts, sets and tensors, also inside of others.

    Values of other types are not copied.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        # This runs at each step, and `loop.vars` may hold a long list of numbers: one `copy` is fastest.
        return value.copy() if _ATOMS.issuperset(map(type, value)) else [clone(each) for each in value]
    if isinstance(value, dict):
        # `copy` keeps the type, such as OrderedDict or defaultdict.
        copied = copy.copy(value)
        copied.update((name, clone(each)) for name, each in value.items())
        return copied
    return value.copy() if isinstance(value, set) else value
