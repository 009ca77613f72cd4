"""What belongs to a Loop's modules and was not given to it, so that newcomers would have another one."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)


def not_given(given: Sequence[object], layers: Iterable[object]) -> str:
    """A DDP module, an optimizer or a scheduler that is not among the `given` objects, in words; "": there is none.

    `layers`: the DDP modules among them. What is inside of a given object, as a scheduler in a SequentialLR, is known.
    """
    known, alive = [id(each) for each in layers], _alive()
    if any(issubclass(type(each), DDP) and id(each) not in known for each in alive):
        return "there is a DDP module that was not given to the Loop"
    found = _stranger(given, alive)
    if found:
        del alive
        gc.collect()  # It may be one that the script has let go of, in a cycle.
        found = _stranger(given, _alive())
    return f"{found} was not given to the Loop: give it, or newcomers and checkpoints lack its state" if found else ""


def _alive() -> list[object]:
    """All DDP modules, optimizers and schedulers of this process."""
    # Not by `isinstance`: objects of all sorts are looked at, and some of them do things when they are asked.
    return [each for each in gc.get_objects() if issubclass(type(each), (DDP, torch.optim.Optimizer, *_SCHEDULERS))]


def _stranger(given: Sequence[object], alive: Sequence[object]) -> str:
    modules = [each for each in given if isinstance(each, torch.nn.Module)]
    parameters = {id(each) for module in modules for each in module.parameters()}
    known: set[int] = set()
    to_see = list(given)
    while to_see:
        each = to_see.pop()
        if id(each) not in known:
            known.add(id(each))
            to_see += _parts(each)
    for each in alive:
        if issubclass(type(each), torch.optim.Optimizer) and id(each) not in known:
            groups = vars(each).get("param_groups", ())
            if any(id(parameter) in parameters for group in groups for parameter in group["params"]):
                return f"an optimizer of its parameters ({type(each).__name__})"
    for each in alive:
        if issubclass(type(each), _SCHEDULERS) and id(each) not in known and id(vars(each).get("optimizer")) in known:
            return f"a scheduler of its optimizer ({type(each).__name__})"
    return ""


def _parts(holder: object) -> list[object]:
    """The schedulers in a given scheduler, and both kinds in any other object, such as one around an optimizer."""
    kinds = _SCHEDULERS if isinstance(holder, _SCHEDULERS) else (torch.optim.Optimizer, *_SCHEDULERS)
    values = getattr(holder, "__dict__", {}).values()
    parts = (part for each in values for part in (each if isinstance(each, (list, tuple)) else [each]))
    return [part for part in parts if issubclass(type(part), kinds)]
