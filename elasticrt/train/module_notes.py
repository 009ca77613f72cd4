"""What a step may change of modules besides their weights, as it was when the step began."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch.utils.hooks import RemovableHandle

_Buffers = dict[str, torch.Tensor | None]
_WITH_NORM = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


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
        self._hooks: list[RemovableHandle] = []  # After a backward.
        # As noted last.
        self._trains: list[bool] = []  # Whether each layer is in training mode.
        self._learns: list[bool] = []  # Whether each parameter is not frozen.
        self._versions: list[int] = []  # Torch's counts of the changes of all parameters.
        self._norms: list[torch.Tensor | None] = []  # Those of all parameters; empty if it was not noted closely.
        self._moved: set[int] = set()  # Parameters that were seen with another norm since.
        self._bound: list[_Buffers] = []  # Which buffers each layer had, by name.
        # Buffers and early parameters, and their copies, which are written anew at each step.
        self._copied: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def note(self, early: Collection[int], *, closely: bool = False, taken_back: bool = False) -> None:
        """Note all of it, and the weights of the `early` parameters, by number.

        Torch does not count changes by way of `.data`. With `closely` these are found as well, by the norms of all
        parameters, and with `taken_back` also those that were there in a backward only. That takes as long as reading
        them all.
        """
        if self._layers is None:
            # Once, as in DDP: walking through the modules takes longer than all the rest.
            self._layers = [layer for module in self._modules for layer in module.modules()]
            self._owners = [layer._buffers for layer in self._layers]
            self._parameters = [each for module in self._modules for each in module.parameters()]
        self._trains = [layer.training for layer in self._layers]
        self._learns = [each.requires_grad for each in self._parameters]
        self._versions = [each._version for each in self._parameters]
        self._look_no_more()
        if closely:
            self._norms = self._norms_now()
            for module in self._modules if taken_back else ():
                for each in [each for each in module.parameters() if each.requires_grad][-1:]:
                    self._hooks.append(each.register_post_accumulate_grad_hook(self._look))  # type: ignore[no-untyped-call]
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
        if self._norms:
            self._look()
        now, moved = [each._version for each in self._parameters], self._moved
        self._look_no_more()
        if now == self._versions:
            return moved
        pairs = enumerate(zip(self._versions, now, strict=True))
        return moved | {number for number, (before, after) in pairs if before != after}

    def _look(self, *_: object) -> None:
        pairs = enumerate(zip(self._norms, self._norms_now(), strict=True))
        self._moved |= {number for number, (before, now) in pairs if before != now}

    def _look_no_more(self) -> None:
        if self._norms:
            self._norms, self._moved = [], set()
            while self._hooks:
                self._hooks.pop().remove()

    @torch.no_grad()
    def _norms_now(self) -> list[torch.Tensor | None]:
        return [
            # Those of bfloat16 numbers have three digits; whole numbers and smaller floats have no norm.
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32))
            if each.dtype in _WITH_NORM
            else None
            for each in self._parameters
        ]

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
