"""Notes what a step may change in modules besides their weights, and puts it back.

Also finds the parameters whose weights a step has changed before its optimizer has stepped.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence

import torch
from torch.utils.hooks import RemovableHandle

_Buffers = dict[str, torch.Tensor | None]
# The types of numbers for which torch computes a norm.
_WITH_NORM = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


class ModuleNotes:
    """Buffers, training modes, and which parameters are frozen: noted when a step begins, and put back to undo it.

    Args:
        modules: the modules of the Loop, without their wrappers. They must have their final shape when the first step
            begins: their layers are listed only once.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        # All layers of the modules; None before the first step. `_buffer_dicts` has the dict of buffers of each layer.
        self._layers: list[torch.nn.Module] | None = None
        self._buffer_dicts: list[_Buffers] = []
        self._parameters: list[torch.nn.Parameter] = []
        # The hooks that compare the norms in a backward.
        self._hooks: list[RemovableHandle] = []
        # As noted last: whether each layer is in training mode, and whether each parameter is not frozen.
        self._training_modes: list[bool] = []
        self._requires_grad: list[bool] = []
        # As noted last, for each parameter: torch's count of its changes, and its norm. No norms if it was not noted
        # closely. `_changed_norms` has the numbers of the parameters that were seen with another norm since.
        self._versions: list[int] = []
        self._norms: list[torch.Tensor | None] = []
        self._changed_norms: set[int] = set()
        # As noted last: the buffers of each layer, by name.
        self._noted_buffers: list[_Buffers] = []
        # The buffers and early parameters, and their copies. The memory of the copies is used again at each step.
        self._copied: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []

    def note(self, early: Collection[int], *, closely: bool = False, in_backward: bool = False) -> None:
        """Note the present state of all modules, and copy the weights of the `early` parameters.

        Args:
            early: the numbers of the parameters that the script changes before its optimizer steps.
            closely: whether to find changes by way of `.data` as well, which torch does not count. They are found by
                the norms of all parameters, which takes as long as reading them all.
            in_backward: with `closely`, whether to look in each backward as well. This finds a change that the script
                takes back before its optimizer steps, as adversarial training does.
        """
        if self._layers is None:
            # Done only once, as in DDP: walking through the modules takes longer than all the rest.
            self._layers = [layer for module in self._modules for layer in module.modules()]
            self._buffer_dicts = [layer._buffers for layer in self._layers]
            self._parameters = [each for module in self._modules for each in module.parameters()]
        self._training_modes = [layer.training for layer in self._layers]
        self._requires_grad = [each.requires_grad for each in self._parameters]
        self._versions = [each._version for each in self._parameters]
        self._end_search()
        if closely:
            self._norms = self._compute_norms()
            # One hook per module is enough: on its last parameter that is not frozen.
            for module in self._modules if in_backward else ():
                for each in [each for each in module.parameters() if each.requires_grad][-1:]:
                    self._hooks.append(each.register_post_accumulate_grad_hook(self._compare_norms))  # type: ignore[no-untyped-call]
        self._noted_buffers = [dict(owner.items()) if owner else {} for owner in self._buffer_dicts]
        copied = [each for owner in self._noted_buffers for each in owner.values() if each is not None]
        copied += [self._parameters[number] for number in sorted(early)]
        # New memory only if other tensors are to be copied than at the step before.
        if len(copied) != len(self._copied) or not all(map(operator.is_, copied, self._copied)):
            self._copied, self._copies = copied, [each.detach().clone() for each in copied]
        elif copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, copied)

    def find_changed(self) -> set[int]:
        """The numbers of the parameters whose weights have changed since `note`. Ends the close search."""
        if self._norms:
            self._compare_norms()
        now, moved = [each._version for each in self._parameters], self._changed_norms
        self._end_search()
        if now == self._versions:
            return moved
        pairs = enumerate(zip(self._versions, now, strict=True))
        return moved | {number for number, (before, after) in pairs if before != after}

    def _compare_norms(self, *_: object) -> None:
        """Find the parameters whose norms have changed since `note`."""
        pairs = enumerate(zip(self._norms, self._compute_norms(), strict=True))
        self._changed_norms |= {number for number, (before, now) in pairs if before != now}

    def _end_search(self) -> None:
        if self._norms:
            self._norms, self._changed_norms = [], set()
            while self._hooks:
                self._hooks.pop().remove()

    @torch.no_grad()
    def _compute_norms(self) -> list[torch.Tensor | None]:
        return [
            # A norm in bfloat16 would have only three digits. Whole numbers and floats of eight bits have no norm.
            torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, torch.float32))
            if each.dtype in _WITH_NORM
            else None
            for each in self._parameters
        ]

    def put_back(self) -> None:
        """Put back all that `note` has noted."""
        for owner, noted in zip(self._buffer_dicts, self._noted_buffers, strict=True):
            _bind(owner, noted)
        for layer, trains in zip(self._layers or (), self._training_modes, strict=True):
            if layer.training is not trains:
                layer.training = trains
        for parameter, learns in zip(self._parameters, self._requires_grad, strict=True):
            if parameter.requires_grad is not learns:
                parameter.requires_grad = learns
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copied, self._copies)


def _bind(owner: _Buffers, bound: _Buffers) -> None:
    """Give a layer the buffers that it had, `bound`, by name. `owner` is the layer's dict of buffers.

    A forward may put another tensor in the place of a buffer: `self.mean = 0.9 * self.mean + 0.1 * x.mean()`.
    """
    # `owner.keys()`, because the dict of a ScriptModule is no real one.
    for name in set(owner.keys()).difference(bound):
        del owner[name]
    for name, tensor in bound.items():
        if name not in owner or owner[name] is not tensor:
            owner[name] = tensor
