"""Undoes a step: what it changes is noted when it begins, and put back when it is to be done again."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from elasticrt.checkpoint import rng_state, stateful
from elasticrt.checkpoint.state_copy import Note
from elasticrt.distributed import collectives
from elasticrt.errors import ConfigError
from elasticrt.train.module_notes import ModuleNotes
from elasticrt.train.not_given import optimizers_in
from elasticrt.train.training_state import TrainingState

# Objects that only an optimizer's step changes, and what belongs to it.
LARGE = (torch.nn.Module, torch.optim.Optimizer)

CLOSELY = 3
"""So many first steps of a process, and those whose number is a power of two, are searched for writes by `.data`."""

_Named = dict[str, Any]
_REMEDY = "Wrap the model in DistributedDataParallel, or add the gradients of all ranks"
_log = logging.getLogger(__name__)


class _Beginning(NamedTuple):
    """Where a step, or an evaluation, has begun: what it may change besides modules."""

    evaluates: bool
    numbers: _Named | None  # Random numbers; None where they follow from a seed.
    vars: tuple[_Named, _Named]  # The objects, and copies of them.
    scales: tuple[tuple[torch.Tensor | None, ...], ...]
    objects: _Named  # The states of other objects, or their Notes.
    # Where gradients of earlier steps count.
    gradients: tuple[tuple[torch.Tensor, torch.Tensor | None], ...] | None


class Undo:
    """The open step of one Loop, and the way back to where it began.

    Buffers, gradients, random numbers, variables, and what is frozen or in training mode are noted when a step begins.
    Values of parameters and optimizers are not: a rank whose optimizer has stepped in an undone step gets the state of
    another rank. They are copied only in scripts whose steps communicate in or after an optimizer's step (a closure,
    two models in turn, a sum of the losses at the end), because there all ranks can be in that state at once. What a
    script changes before its optimizer steps is noted as well: states of its own objects at once, parameters (an
    average of the weights) and large tensors of these objects once a step has changed them there. That step itself
    cannot be undone. Changes by way of `.data` are looked for in some steps only, and in evaluations.

    `seeded`: random numbers follow from the step's number, so they need no note.
    """

    def __init__(self, state: TrainingState, *, seeded: bool) -> None:
        self._training = state
        self._seeded = seeded
        objects = state.objects.values()
        self._modules = ModuleNotes([each for each in objects if isinstance(each, torch.nn.Module)])
        self._optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        # One that is disabled has no scale.
        self._scalers = [each for each in objects if isinstance(each, torch.amp.GradScaler) and each.is_enabled()]
        # Not a GradScaler's state_dict, which waits for the GPU.
        others = (*LARGE, torch.amp.GradScaler)
        self._noted = {name: each for name, each in state.objects.items() if not isinstance(each, others)}
        self._beginning = _Beginning(False, None, ({}, {}), (), {}, None)
        self._state: _Named | None = None  # That before the optimizer's step, in scripts that need it.
        self._between: tuple[_Named, tuple[_Named, _Named], _Named | None] | None = None
        # Whether this step was the first that has changed something before its optimizer.
        self._unknown = False
        # What has happened since.
        self._handles: list[RemovableHandle] = []
        self._collectives = 0  # Begun before the first optimizer of the step began.
        self._at_first: int | None = None  # Begun before the first step of this process.
        self._is_first = True  # Whether no optimizer has stepped yet.
        self._noted_steps = 0
        self.in_step = False  # Whether a block of a step is open.
        self.open = False  # Whether a step is noted that does not count yet.
        self.stepped = False  # Whether an optimizer has stepped in the present batch.
        self._moved: set[int] = set()  # Which have stepped in the present step, by id.
        # Whether one has begun to step in the present step, so that the state may be that of no step.
        self.touched = False
        # The state of the position while the script runs code before or after the batches of an epoch, which is run
        # again at that position; None among the batches.
        self.outside: Note | None = None

    @property
    def sees(self) -> bool:
        """Whether there is an optimizer to watch."""
        return bool(self._handles)

    def watch(self, before: Callable[..., None]) -> None:
        """Watch the optimizers. `before` is called before one steps; an exception of it prevents the step."""
        # Only the hooks hold `before`, so that a Loop that is over is freed at once, with its loader's workers.
        watched = [inner for each in self._optimizers for inner in _with_hooks(each)]
        self._handles = [each.register_step_pre_hook(before) for each in watched]
        self._handles += [each.register_step_post_hook(self._has_stepped) for each in watched]

    @property
    def has_communicated(self) -> bool:
        """Whether an optimizer that steps now may lack a peer: collectives have begun since the one before, if any."""
        return not self.touched or collectives.sequence_number() != self._collectives

    def unwatch(self) -> None:
        """Stop watching."""
        while self._handles:
            self._handles.pop().remove()

    def optimizer_begins(self) -> None:
        """An optimizer is about to step. Copy all of the state if the step will communicate afterwards."""
        if not self.touched:
            self._learn()
            # Before the step: the collectives of a closure (LBFGS) are inside of it, and leave all ranks there at once.
            self._collectives = collectives.sequence_number()
            if self._training.habits.communicates_late:
                self._state = copy.deepcopy(stateful.collect(self._training.objects))
        self.touched = True

    def step_ends(self) -> None:
        """The whole step is done: note whether it had collectives since its first optimizer began."""
        if self.stepped and self._is_first:
            self._is_first = False
            if collectives.sequence_number() == self._at_first and not collectives.alone():
                _log.warning("the first step has exchanged nothing: each rank trains a model of its own. %s", _REMEDY)
        # An optimizer that has not stepped may have to add up more: the gradients of all are kept then.
        self._training.accumulates = len(self._moved) < max(1, len(self._optimizers))
        if not self.touched:
            self._learn()
        if self.stepped and collectives.sequence_number() != self._collectives:
            self._training.habits.communicates_late = True

    def _has_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.stepped = True
        self._moved.add(id(optimizer))

    def _learn(self) -> None:
        """The optimizer begins, or the step ends without one: copy in all further steps what has changed by now."""
        habits, objects = self._training.habits, self._beginning.objects
        new = self._modules.changed() - habits.early_parameters
        large = {name for name, noted in objects.items() if isinstance(noted, Note) and noted.state is None}
        self._unknown = self._unknown or bool(new or large)
        if not self._beginning.evaluates:
            habits.early_parameters |= new
            habits.early_objects |= large

    def _rates(self) -> list[dict[str, Any]]:
        """All of the optimizers but their tensors and states: a scheduler writes the learning rate to its optimizer."""
        return [
            # Most of it are numbers, at every step.
            {name: each if type(each) in _ATOMS else clone(each) for name, each in group.items() if name != "params"}
            for group in self._groups()
        ]

    def note(self, *, evaluates: bool = False) -> None:
        """The step begins: note everything that it may change, but for parameters and optimizers.

        `evaluates`: an evaluation begins. Of one that has changed parameters when it fails the beginning is not known.
        """
        training, habits, named = self._training, self._training.habits, self._training.vars
        self._state = None
        self.open = True
        self.touched = self._unknown = False
        self._at_first = collectives.sequence_number() if self._at_first is None else self._at_first
        self._moved.clear()
        self._noted_steps += not evaluates
        few = self._noted_steps <= CLOSELY or self._noted_steps.bit_count() == 1
        self._modules.note(habits.early_parameters, closely=evaluates or few, taken_back=few and not evaluates)
        objects = {
            name: copy.deepcopy(each.state_dict()) if name in habits.early_objects else Note(each.state_dict())
            for name, each in self._noted.items()
        }
        self._beginning = _Beginning(
            evaluates=evaluates,
            numbers=None if self._seeded else rng_state.note(),
            vars=(dict(named), {name: clone(each) for name, each in named.items()}),
            scales=tuple(tuple(map(clone, (each._scale, each._growth_tracker))) for each in self._scalers),
            objects={**objects, stateful.OURS: self._rates()},
            gradients=self._gradients() if training.accumulates else None,
        )

    def _gradients(self) -> tuple[tuple[torch.Tensor, torch.Tensor | None], ...] | None:
        owners = self._training.parameters()
        if all(each.grad is None for each in owners):
            return None
        return tuple((each, None if each.grad is None else each.grad.detach().clone()) for each in owners)

    def put_back(self) -> bool:
        """Go back to the beginning of the step. False: the state before its optimizer's step is not known."""
        if not self.touched:
            self._learn()
        known = not self._unknown and (not self.touched or self._state is not None)
        if known and self._state is not None:
            stateful.put_back(self._training.objects, self._state, "the beginning of the step")
        self._state = None
        self._modules.put_back()
        states = {
            name: noted.state if isinstance(noted, Note) else noted for name, noted in self._beginning.objects.items()
        }
        self._load({name: state for name, state in states.items() if state is not None})
        self.put_back_gradients()
        self._put_back_scalers()
        if self._beginning.numbers is not None:
            rng_state.restore(self._beginning.numbers)
        self._training.put_vars(*self._beginning.vars)
        return known

    def put_back_gradients(self) -> None:
        """The step does not count, nor does what it has added up."""
        self.open = False
        gradients = self._beginning.gradients
        self._training.accumulates = gradients is not None
        self._training.drop_gradients()
        for owner, gradient in gradients or ():
            owner.grad = gradient

    def _put_back_scalers(self) -> None:
        """Make each GradScaler forget what it has seen: gradients that an aborted collective left may overflow."""
        for scaler, scale in zip(self._scalers, self._beginning.scales, strict=True):
            scaler._scale, scaler._growth_tracker = scale
            scaler._per_optimizer_states.clear()  # It would refuse to unscale or step twice in one step.
        for optimizer in self._optimizers if self._scalers else ():
            # It tells a fused optimizer its scale by these, and multiplies what it finds there with the next.
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    def leave_batches(self, *, known: bool) -> None:
        """Code outside of the batches follows. `known`: whether a restart at this position begins with it."""
        self.outside = Note(self._training.collect() if known else None)

    def state_of_position(self) -> dict[str, Any] | None:
        """The state that belongs to the position, as `TrainingState.collect` gives it; None if it is not known."""
        return self._training.collect() if self.outside is None else self.outside.state

    def note_between(self, *, whole: bool) -> None:
        """The step is undone: note what the script may change between this and the next try.

        `whole`: it goes on as after a step that was done, and may change parameters, optimizers and random numbers.
        """
        objects = self._training.objects.items()
        noted = {name: each for name, each in objects if whole or not isinstance(each, LARGE)}
        states = {**stateful.collect(noted), stateful.OURS: self._rates()}
        named = dict(self._training.vars)
        self._between = copy.deepcopy(states), (named, copy.deepcopy(named)), rng_state.note() if whole else None

    def forget_between(self, *, again: bool = False) -> None:
        """The next try begins: undo what the script has changed since `note_between`.

        `again`: keep the note, as what follows is to be undone as well.
        """
        if self._between is None:
            return
        states, kept, numbers = copy.deepcopy(self._between) if again else self._between
        self._between = self._between if again else None
        self._load(states)
        self._training.put_vars(*kept)
        if numbers is not None:
            rng_state.restore(numbers)

    def keep_between(self) -> None:
        """What the script has changed since `note_between` stays: no other try of that step follows."""
        self._between = None

    def _groups(self) -> list[dict[str, Any]]:
        return [group for each in self._optimizers for group in each.param_groups]

    def _load(self, states: dict[str, Any]) -> None:
        """Put back states of objects by name, and `_rates`."""
        objects = {name: self._training.objects[name] for name in states if name != stateful.OURS}
        stateful.put_back(objects, states, "the beginning of the step")
        for group, values in zip(self._groups(), states.get(stateful.OURS, ()), strict=False):
            group.update(values)  # The script may have added a group since, which has none.


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


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})


def clone(value: Any) -> Any:
    """A copy of what a step may change in place: of lists, dicts, sets and tensors, and of such ones in them."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list):  # A long one of numbers is copied at each step.
        return value.copy() if _ATOMS.issuperset(map(type, value)) else [clone(each) for each in value]
    if isinstance(value, dict):
        copied = copy.copy(value)  # Perhaps an OrderedDict, or a defaultdict.
        copied.update((name, clone(each)) for name, each in value.items())
        return copied
    return value.copy() if isinstance(value, set) else value
