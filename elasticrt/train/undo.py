"""What a step may have changed: noted when it begins, and put back when it is to be done again."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elasticrt.checkpoint import rng_state, stateful
from elasticrt.distributed import regroup

LARGE = (torch.nn.Module, torch.optim.Optimizer)
"""Objects that only an optimizer's step changes, and what belongs to it."""


class Undo:
    """What a step may have changed before its optimizer stepped: noted when it begins, put back when it is to be
    redone.

    Parameters and optimizers are among it only where a step goes on to communicate after an optimizer has stepped (two
    models in turn, a sum of the losses at the end): there all ranks can be in that state at once. Otherwise a rank that
    has stepped without ending its step gets the state of another.

    Args:
        modules: the Loop's.
        scalers: the Loop's.
        seeded: each step has random numbers of its own, which begin anew with it.

    Attributes:
        in_step: whether a step is open.
        accumulates: whether gradients of steps before count, as no optimizer has stepped since.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], scalers: Sequence[torch.amp.GradScaler], seeded: bool
    ) -> None:
        self._modules = list(modules)
        self._owners: list[dict[str, torch.Tensor | None]] | None = None
        self._scalers = list(scalers)
        self._state: dict[str, Any] | None = None
        self._between: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._seeded = seeded
        self._buffers: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None
        self._numbers: Callable[[], dict[str, Any]] | None = None
        self._vars: dict[str, Any] = {}
        self.in_step = False
        self.accumulates = False

    def note(self, variables: Mapping[str, Any]) -> None:
        """The step begins.

        The modules are walked through once, as DDP does it: that takes longer than all the rest.
        """
        self._state = None
        if self._owners is None:
            layers = [layer for module in self._modules for layer in module.modules()]
            self._owners = [layer._buffers for layer in layers]
        buffers = [each for owner in self._owners for each in owner.values() if each is not None]
        if len(buffers) != len(self._buffers) or not all(map(operator.is_, buffers, self._buffers)):
            self._buffers, self._kept = buffers, [each.detach().clone() for each in buffers]
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, buffers)
        self._numbers = None if self._seeded else rng_state.note()
        self._vars = dict(variables)
        self._gradients = None
        if self.accumulates:
            owners = [each for module in self._modules for each in module.parameters()]
            if any(each.grad is not None for each in owners):
                self._gradients = [(each, None if each.grad is None else each.grad.detach().clone()) for each in owners]

    def put_back(self, variables: dict[str, Any]) -> None:
        """The step is to be done again."""
        with torch.no_grad():
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._kept)
        regroup.drop_gradients(self._modules)
        for owner, gradient in self._gradients or ():
            owner.grad = gradient
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()  # It would refuse to unscale or step twice in one step.
        if self._numbers is not None:
            rng_state.restore(self._numbers())
        variables.clear()
        variables.update(self._vars)

    def note_state(self, state: dict[str, Any]) -> None:
        """An optimizer is about to step, and the step will communicate after it: keep all of the state."""
        self._state = copy.deepcopy(state)

    def put_back_state(self, objects: Mapping[str, Any]) -> bool:
        """An optimizer has stepped in the step that is to be done again. False: what was before is not known."""
        state, self._state = self._state, None
        if state is None:
            return False
        stateful.put_back(objects, state, "the beginning of the step")
        return True

    def note_between(self, objects: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
        """The step is undone. What the script does between this and the next try must not count either."""
        plain = {name: each for name, each in objects.items() if not isinstance(each, LARGE)}
        self._between = copy.deepcopy((stateful.collect(plain), dict(variables)))

    def forget_between(self, objects: Mapping[str, Any], variables: dict[str, Any]) -> None:
        """The next try begins."""
        if self._between is None:
            return
        (states, kept), self._between = self._between, None
        stateful.put_back({name: objects[name] for name in states}, states, "the beginning of the step")
        variables.clear()
        variables.update(kept)

    def gradients(self) -> list[torch.Tensor | None]:
        """Those that count: of all modules' parameters, in order; empty when none do."""
        return [each.grad for module in self._modules for each in module.parameters()] if self.accumulates else []

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The reverse; none given: forget them."""
        self.accumulates = any(each is not None for each in gradients)
        regroup.drop_gradients(self._modules)
        owners = [each for module in self._modules for each in module.parameters()] if gradients else []
        for owner, gradient in zip(owners, gradients, strict=True):
            owner.grad = gradient
