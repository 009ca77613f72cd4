"""Gradients of the mean over the global batch, however unevenly it is cut.

DDP averages over ranks; that is the mean over samples only while all ranks hold equally many, in one piece. Here each
backward's contribution to a parameter is multiplied by its share's weight before it is accumulated (a hook on the
parameter), and DDP exchanges gradients only in a rank's last share of a global batch, so that all ranks take part in
the same number of collectives although they differ in their number of shares.

The hooks sit on the parameters rather than on the model's outputs, for three reasons: a gradient that passes through
two models is weighted once; a penalty computed from the parameters themselves is weighted like the rest; and it does
not matter what a model returns. They exist only once a weight other than 1 has been needed. A communication hook is not
used: that one is the user's.

One kind of layer mixes the ranks' gradients before they reach a parameter: SyncBatchNorm. What enters its backward is
therefore weighted already, and what leaves it is divided by the weight again, for the parameters below to multiply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from elasticrt.data.sample_order import WHOLE, BatchSlice
from elasticrt.distributed.wrapping import ddp_layers


class _Divided(torch.autograd.Function):
    """The identity; its gradient is divided by a weight, and nothing at all when that is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return (gradient / ctx.weight if ctx.weight else torch.zeros_like(gradient)), None


class Weighting:
    """Weights for everything that the given objects (modules and optimizers among them) train."""

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = list(objects)
        modules = [each for each in self._objects if isinstance(each, torch.nn.Module)]
        self._parallel = ddp_layers(self._objects)
        self._norms = [
            layer for module in modules for layer in module.modules() if isinstance(layer, torch.nn.SyncBatchNorm)
        ]
        self._handles: dict[int, RemovableHandle] = {}
        self._norm_handles: list[RemovableHandle] = []
        self._factor = 1.0

    @property
    def can_skip_exchange(self) -> bool:
        """Whether there is a DDP module that can be told not to exchange gradients yet."""
        return bool(self._parallel)

    @property
    def meets_in_forward(self) -> bool:
        """Whether ranks exchange something in each forward, so that all must have equally many."""
        return bool(self._norms)

    @property
    def exchanges_always(self) -> bool:
        """Whether a DDP module can't leave an exchange out: with a static graph torch fails when the first one is."""
        return any(layer.static_graph for layer in self._parallel)

    def begin(self, share: BatchSlice) -> None:
        """From here on forward and backward belong to `share`."""
        self._factor = share.weight
        if share.weight != 1.0 and not self._handles:
            self.attach()
        for layer in self._parallel:
            # Read by DDP's forward, which decides there whether the backward after it will exchange.
            # Setting an attribute of a module takes more than a microsecond, looking at it a tenth of that.
            if layer.require_backward_grad_sync is not share.last:
                layer.require_backward_grad_sync = share.last

    def end(self) -> None:
        """No share is being trained: nothing is weighted, DDP is as it was."""
        self.begin(WHOLE)

    def attach(self) -> None:
        """Put hooks on parameters that have none yet; again after layers were added or unfrozen."""
        # The parameters of these layers get gradients that are weighted already.
        weighted = {id(parameter) for norm in self._norms for parameter in norm.parameters()}
        for parameter in self._parameters():
            if parameter.requires_grad and id(parameter) not in weighted | self._handles.keys():
                self._handles[id(parameter)] = self._hook(parameter)
        if not self._norm_handles:
            for norm in self._norms:
                self._norm_handles.append(norm.register_forward_pre_hook(self._before_norm))
                self._norm_handles.append(norm.register_forward_hook(self._after_norm))

    def renew(self) -> None:
        """As `attach`, if there are hooks at all."""
        if self._handles:
            self.attach()

    def detach(self) -> None:
        """Remove every hook."""
        self.end()
        for handle in (*self._handles.values(), *self._norm_handles):
            handle.remove()
        self._handles, self._norm_handles = {}, []

    def _hook(self, parameter: torch.Tensor) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_hook(self._scale)  # type: ignore[no-untyped-call]
        return handle

    def _scale(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._factor == 1.0:
            return None
        # Zeros rather than a product: a borrowed sample must not count even when its gradient is infinite.
        return gradient * self._factor if self._factor else torch.zeros_like(gradient)

    def _before_norm(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._factor == 1.0:
            return None
        return (_Divided.apply(inputs[0], self._factor),)  # type: ignore[no-untyped-call]  # Torch's.

    def _after_norm(self, _: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        if self._factor != 1.0 and output.requires_grad:
            factor = self._factor  # Of this forward, whenever its backward is.
            output.register_hook(  # type: ignore[no-untyped-call]  # Torch's.
                lambda gradient: gradient * factor if factor else torch.zeros_like(gradient)
            )

    def _parameters(self) -> Iterator[torch.Tensor]:
        for each in self._objects:
            if isinstance(each, torch.nn.Module):
                yield from each.parameters()
            elif isinstance(each, torch.optim.Optimizer):
                for group in each.param_groups:
                    yield from group["params"]
