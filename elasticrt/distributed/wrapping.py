"""Finds the module inside of DDP, DataParallel and torch.compile, and the wrappers around it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from elasticrt.errors import explain


def is_parallel(model: torch.nn.Module) -> bool:
    """Whether `model` is wrapped in DataParallel or DistributedDataParallel, compiled or not.

    Raises TypeError if `model` is not a module.
    """
    return any(isinstance(layer, (DataParallel, DistributedDataParallel)) for layer in wrappers(model))


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside of all wrappers (DataParallel, DistributedDataParallel, torch.compile); `model` if it has none.

    Raises TypeError if `model` is not a module.
    """
    *_, innermost = wrappers(model)
    return innermost


def ddp_layers(objects: Iterable[object]) -> list[DistributedDataParallel]:
    """The DDP modules among `objects`, and those inside of compiled modules. Other objects are skipped."""
    layers = (layer for each in objects if isinstance(each, torch.nn.Module) for layer in wrappers(each))
    return [each for each in layers if isinstance(each, DistributedDataParallel)]


def wrappers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules from the outermost wrapper to the bare module, both included.

    Raises TypeError if `model` is not a module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(explain("not a module", "unwrap", got=type(model).__name__, expected="torch.nn.Module"))
    while True:
        yield model
        inner: Any = None
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        # The wrapper of torch.compile, recognised by its name: importing its class loads dynamo.
        elif type(model).__name__ == "OptimizedModule":
            inner = model._orig_mod
        if inner is None:
            return
        model = inner
