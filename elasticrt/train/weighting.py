"""Weights gradients so that they are those of the mean over the global batch, however unevenly the ranks share it.

A hook for each parameter multiplies the gradient of a backward by the weight of this rank's slice (`sample_order`). DDP
exchanges gradients only in a rank's last slice of a global batch. So ranks with different numbers of slices make the
same number of collectives.

The hooks act where a gradient is added to `grad`, and not on outputs. So a gradient through two models is weighted
once, a penalty that is computed from the parameters is weighted like the rest, and models may return anything. What
`torch.autograd.grad` returns is not weighted: the script may compute with it, as in an inner step of meta-learning, and
then the backward through the result is weighted.

SyncBatchNorm is an exception: it mixes the gradients of all ranks before they reach a parameter. So a gradient is
weighted before it enters the backward of such a layer, and divided by the weight when it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from elasticrt.data.sample_order import WHOLE, BatchSlice
from elasticrt.distributed.wrapping import ddp_layers
from elasticrt.errors import ConfigError


class _Divided(torch.autograd.Function):
    """The identity, with a gradient that is divided by a weight. With weight 0 the gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return (gradient / ctx.weight if ctx.weight else torch.zeros_like(gradient)), None


def _times(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """`gradient` times `factor`."""
    # With factor 0, zeros and not a product: a borrowed sample must not count even if its gradient is infinite.
    return gradient * factor if factor else torch.zeros_like(gradient)


def _accumulation_of(parameter: torch.Tensor) -> Node:
    """The node of the autograd graph that adds to the `grad` of `parameter`."""
    learns = parameter.requires_grad
    # A frozen parameter has no such node, but keeps one that was made before it was frozen.
    parameter.requires_grad_()
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    parameter.requires_grad_(learns)
    assert view.grad_fn is not None, "it requires a gradient"
    node = view.grad_fn.next_functions[0][0]
    assert node is not None, "the parameter is a leaf of the graph"
    return node


class Weighting:
    """Weights the gradients of all parameters that a Loop trains.

    Args:
        objects: the objects given to the Loop. The parameters are those of modules and optimizers among them.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._objects = list(objects)
        modules = [each for each in self._objects if isinstance(each, torch.nn.Module)]
        self._ddp_modules = ddp_layers(self._objects)
        self._sync_norms = [
            layer for module in modules for layer in module.modules() if isinstance(layer, torch.nn.SyncBatchNorm)
        ]
        # By the `id` of each parameter the node that adds to its `grad`, and the hook. Torch keeps that node only while
        # somebody else does. The node keeps the parameter, so no other one can get this `id`.
        self._handles: dict[int, tuple[Node, RemovableHandle]] = {}
        self._norm_handles: list[RemovableHandle] = []
        self._factor = 1.0

    def check_micro_batches(self, size: int, world_size: int) -> None:
        """Raise ConfigError for models that can't have micro-batches of `size`.

        Ranks may have different numbers of micro-batches, so a forward or backward must not need the other ranks.
        """
        got = f"micro_batch_size={size}"
        if self._sync_norms:
            # Refused at any world size, also at 1: otherwise the run would end when a node comes or goes.
            what = "SyncBatchNorm can't be used with micro-batches"
            expected = "equally many forwards on all ranks, which SyncBatchNorm waits for"
            remedy = "Leave micro_batch_size out, or use a norm that needs no other samples (GroupNorm, LayerNorm)"
            raise ConfigError(what, "batches", got=got, expected=expected, remedy=remedy)
        if any(layer.static_graph for layer in self._ddp_modules):
            # DDP with a static graph fails if the first exchange of gradients is left out.
            what = "DDP(static_graph=True) can't be used with micro-batches"
            expected = "a DDP module that can leave an exchange of gradients out"
            remedy = "Leave out static_graph or micro_batch_size"
            raise ConfigError(what, "batches", got=got, expected=expected, remedy=remedy)
        if world_size > 1 and not self._ddp_modules:
            got = f"world size {world_size} and no DistributedDataParallel among Loop's objects"
            remedy = "Give Loop the wrapped model: Loop(..., model=DDP(net))"
            raise ConfigError("micro-batches need the DDP module", "batches", got=got, remedy=remedy)

    def begin(self, share: BatchSlice) -> None:
        """Weight each forward and backward from here on as a part of `share`."""
        self._factor = share.weight
        if share.weight != 1.0 and not self._handles:
            self.attach()
        for layer in self._ddp_modules:
            # DDP's forward reads this attribute, and decides whether the backward after it exchanges gradients. It is
            # set only where it differs, because setting an attribute of a module takes ten times as long as reading it.
            if layer.require_backward_grad_sync is not share.last:
                layer.require_backward_grad_sync = share.last

    def end(self) -> None:
        """Weight nothing from here on, and let DDP exchange gradients in each backward: no slice is being trained."""
        self.begin(WHOLE)

    def attach(self) -> None:
        """Put hooks on all parameters that have none yet, such as those of layers that were added.

        Frozen parameters get hooks as well, because the script may unfreeze them in the middle of a step.
        """
        # The parameters of SyncBatchNorm get gradients that are weighted already.
        weighted = {id(parameter) for norm in self._sync_norms for parameter in norm.parameters()}
        present = {id(parameter): parameter for parameter in self._parameters()}
        for gone in self._handles.keys() - present.keys():
            self._handles.pop(gone)[1].remove()
        for number, parameter in present.items():
            can_learn = parameter.is_floating_point() or parameter.is_complex()
            if can_learn and number not in weighted and number not in self._handles:
                node = _accumulation_of(parameter)
                self._handles[number] = node, node.register_prehook(self._scale)
        if not self._norm_handles:
            for norm in self._sync_norms:
                self._norm_handles.append(norm.register_forward_pre_hook(self._before_norm))
                self._norm_handles.append(norm.register_forward_hook(self._after_norm))

    def renew(self) -> None:
        """Put hooks on parameters that were added since. Does nothing while no weight was needed yet."""
        if self._handles:
            self.attach()

    def detach(self) -> None:
        """Remove every hook."""
        self.end()
        for handle in (*(hook for _, hook in self._handles.values()), *self._norm_handles):
            handle.remove()
        self._handles.clear()
        self._norm_handles.clear()

    def _scale(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...] | None:
        (gradient,) = gradients
        return None if self._factor == 1.0 or gradient is None else (_times(gradient, self._factor),)

    def _before_norm(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._factor == 1.0:
            return None
        return (_Divided.apply(inputs[0], self._factor),)  # type: ignore[no-untyped-call]  # Torch's.

    def _after_norm(self, _: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
        if self._factor != 1.0 and output.requires_grad:
            # The backward of this forward may come after the next batch has begun, which has another weight.
            factor = self._factor
            output.register_hook(lambda gradient: _times(gradient, factor))  # type: ignore[no-untyped-call]

    def _parameters(self) -> Iterator[torch.Tensor]:
        for each in self._objects:
            if isinstance(each, torch.nn.Module):
                yield from each.parameters()
            elif isinstance(each, torch.optim.Optimizer):
                for group in each.param_groups:
                    yield from group["params"]
