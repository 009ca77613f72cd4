"""What a step may change of modules besides their weights, as it was when the step began."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch

_Buffers = dict[str, torch.Tensor | None]


class ModuleNotes:
    """Buffers, training modes, and which parameters are frozen: noted at each step, and put back.

    Args:
        modules: without their wrappers. They have their final shape when the first step begins.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._layers: list[torch.nn.Module] | None = None  # None before the first step.
        self._owners: list[_Buffers] = []  # Their dicts of buffers.
        self._parameters: list[torch.nn.Parameter] = []
        # As noted last.
        self._trains: list[bool] = []  # Whether each layer is in training mode.
        self._learns: list[bool] = []  # Whether each parameter is not frozen.
        self._versions: list[int] = []  # Torch's counts of the changes of all parameters.
        self._bound: list[_Buffers] = []  # Which buffers each layer had, by name.
        # Buffers and early parameters, and their copies, which are written anew at each step.
        self._copied: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def note(self, early: Collection[int]) -> None:
        """Note all of it, and the weights of the `early` parameters, by number."""
        if self._layers is None:
            # Once, as in DDP: walking through the modules takes longer than all the rest.
            self._layers = [layer for module in self._modules for layer in module.modules()]
            self._owners = [layer._buffers for layer in self._layers]
            self._parameters = [each for module in self._modules for each in module.parameters()]
        self._trains = [layer.training for layer in self._layers]
        self._learns = [each.requires_grad for each in self._parameters]
        self._versions = [each._version for each in self._parameters]
        self._bound = [dict(owner.items()) if owner else {} for owner in self._owners]
        copied = [each for owner in self._bound for each in owner.values() if each is not None]
        copied += [self._parameters[number] for number in sorted(early)]
        if len(copied) != len(self._copied) or not all(map(operator.is_, copied, self._copied)):
            self._copied, self._copies = copied, [each.detach().clone() for each in copied]
        elif copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, copied)

    def changed(self) -> set[int]:
        """The numbers of the parameters whose weights have changed since."""
        now = [each._version for each in self._parameters]
        if now == self._versions:
            return set()
        pairs = enumerate(zip(self._versions, now, strict=True))
        return {number for number, (before, after) in pairs if before != after}

    def put_back(self) -> None:
        """Go back to what was noted."""
        for owner, bound in zip(self._owners, self._bound, strict=True):
            _bind(owner, bound)
        for layer, trains in zip(self._layers or (), self._trains, strict=True):
            if layer.training is not trains:
                layer.training = trains
        for parameter, learns in zip(self._parameters, self._learns, strict=True):
            if parameter.requires_grad is not learns:
                parameter.requires_grad = learns
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copied, self._copies)


def _bind(owner: _Buffers, bound: _Buffers) -> None:
    """Give a layer the buffers again that it had: a forward may do `self.mean = 0.9 * self.mean + 0.1 * x.mean()`."""
    for name in set(owner.keys()).difference(bound):  # A ScriptModule's is no dict.
        del owner[name]
    for name, tensor in bound.items():
        if name not in owner or owner[name] is not tensor:
            owner[name] = tensor
