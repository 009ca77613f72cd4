"""What the present step has done: noted while it is made, and undone when it is to be made again."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from elasticrt.checkpoint import rng_state, stateful
from elasticrt.distributed import collectives, regroup
from elasticrt.train.training_state import TrainingState

LARGE = (torch.nn.Module, torch.optim.Optimizer)
"""Objects that only an optimizer's step changes, and what belongs to it."""


class Undo:
    """The step of one Loop, and the way back to where it began.

    Buffers, gradients, random numbers and variables are noted when a step begins. Parameters and optimizers are noted
    only where a step goes on to communicate after an optimizer has stepped (two models in turn, a sum of the losses at
    the end): there all ranks can be in that state at once. Otherwise a rank that has stepped without ending its step
    gets the state of another.

    Args:
        state: the Loop's.
        seeded: each step has random numbers of its own, which begin anew with it.

    Attributes:
        in_step: whether a step is open.
        accumulates: whether gradients of steps before count, as no optimizer has stepped since.
        stepped: an optimizer has stepped in the present batch.
        touched: one has begun to step in the present step: the state may be that of no step.
    """

    def __init__(self, state: TrainingState, *, seeded: bool) -> None:
        self._training = state
        self._seeded = seeded
        objects = state.objects.values()
        self._modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        self._optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        self._scalers = [each for each in objects if isinstance(each, torch.amp.GradScaler)]
        # As it was when the step began.
        self._owners: list[dict[str, torch.Tensor | None]] | None = None
        self._buffers: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None
        self._numbers: dict[str, Any] | None = None
        self._vars: dict[str, Any] = {}
        self._state: dict[str, Any] | None = None
        self._between: tuple[dict[str, Any], dict[str, Any]] | None = None
        # What has happened in it.
        self._handles: list[RemovableHandle] = []
        self._collectives = 0  # Begun before the first optimizer of the step.
        self._communicates_late = False  # Steps of this script go on with collectives after an optimizer.
        self.in_step = False
        self.accumulates = False
        self.stepped = False
        self.touched = False

    # The script's optimizers.

    @property
    def sees(self) -> bool:
        """Whether there is an optimizer to watch."""
        return bool(self._handles)

    def watch(self, before: Callable[..., None]) -> None:
        """Watch the optimizers. `before` is called before one steps; what it raises keeps it from stepping."""
        # Only the hooks hold it: a Loop that is over is freed at once, and its loader's workers with it.
        self._handles = [each.register_step_pre_hook(before) for each in self._optimizers]
        self._handles += [each.register_step_post_hook(self._has_stepped) for each in self._optimizers]

    def unwatch(self) -> None:
        """Watch them no more."""
        while self._handles:
            self._handles.pop().remove()

    def optimizer_begins(self) -> None:
        """An optimizer is about to step. Where the step will communicate after it, keep all of the state."""
        if not self.touched and self._communicates_late:
            self._state = copy.deepcopy(stateful.collect(self._training.objects))
        self.touched = True

    def step_ends(self) -> None:
        """All of a step is done: note whether it had collectives after its optimizer."""
        self.accumulates = not self.stepped
        if self.stepped and collectives.sequence_number() != self._collectives:
            self._communicates_late = True

    def _has_stepped(self, *_: Any) -> None:
        if not self.stepped:
            self._collectives = collectives.sequence_number()
        self.stepped = True

    # There and back.

    def note(self) -> None:
        """The step begins.

        The modules are walked through once, as DDP does it: that takes longer than all the rest.
        """
        self._state = None
        self.touched = False
        if self._owners is None:
            layers = [layer for module in self._modules for layer in module.modules()]
            self._owners = [layer._buffers for layer in layers]
        buffers = [each for owner in self._owners for each in owner.values() if each is not None]
        if len(buffers) != len(self._buffers) or not all(map(operator.is_, buffers, self._buffers)):
            self._buffers, self._kept = buffers, [each.detach().clone() for each in buffers]
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, buffers)
        self._numbers = None if self._seeded else rng_state.capture()
        self._vars = dict(self._training.vars)
        self._gradients = None
        if self.accumulates:
            owners = self._parameters()
            if any(each.grad is not None for each in owners):
                self._gradients = [(each, None if each.grad is None else each.grad.detach().clone()) for each in owners]

    def put_back(self) -> bool:
        """The step is to be done again. False: the state from before an optimizer's step is not known."""
        known = not self.touched or self._put_back_state()
        with torch.no_grad():
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._kept)
        regroup.drop_gradients(self._modules)
        for owner, gradient in self._gradients or ():
            owner.grad = gradient
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()  # It would refuse to unscale or step twice in one step.
        if self._numbers is not None:
            rng_state.restore(self._numbers)
        self._set_vars(self._vars)
        return known

    def _put_back_state(self) -> bool:
        state, self._state = self._state, None
        if state is None:
            return False
        stateful.put_back(self._training.objects, state, "the beginning of the step")
        return True

    def note_between(self) -> None:
        """The step is undone. What the script does between this and the next try must not count either."""
        plain = {name: each for name, each in self._training.objects.items() if not isinstance(each, LARGE)}
        self._between = copy.deepcopy((stateful.collect(plain), dict(self._training.vars)))

    def forget_between(self) -> None:
        """The next try begins."""
        if self._between is None:
            return
        (states, kept), self._between = self._between, None
        objects = {name: self._training.objects[name] for name in states}
        stateful.put_back(objects, states, "the beginning of the step")
        self._set_vars(kept)

    def _set_vars(self, values: dict[str, Any]) -> None:
        self._training.vars.clear()
        self._training.vars.update(values)

    # Gradients that count.

    def gradients(self) -> list[torch.Tensor | None]:
        """Those that count: of all modules' parameters, in order; empty when none do."""
        return [each.grad for each in self._parameters()] if self.accumulates else []

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The reverse; none given: forget them."""
        self.accumulates = any(each is not None for each in gradients)
        regroup.drop_gradients(self._modules)
        for owner, gradient in zip(self._parameters() if gradients else [], gradients, strict=True):
            owner.grad = gradient

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [each for module in self._modules for each in module.parameters()]
