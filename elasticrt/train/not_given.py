"""Finds objects that belong to a Loop's modules and were not given to the Loop.

Checkpoints lack their state, and so do newcomers, which would go on with a fresh optimizer or scheduler.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it DDP.
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

_SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
_MARK = "elasticrt's mark"


def not_given(given: Sequence[object], layers: Iterable[object]) -> str:
    """A DDP module, an optimizer or a scheduler that was not given to the Loop, in words; "" if there is none.

    Only an optimizer of the given modules' parameters counts, and only a scheduler of a given optimizer. An object
    inside of a given one counts as given if the given one saves its state: a scheduler in a SequentialLR, for example.

    Args:
        given: the objects given to the Loop.
        layers: the DDP modules among them.
    """
    known, alive = [id(each) for each in layers], _alive()
    if any(issubclass(type(each), DDP) and id(each) not in known for each in alive):
        return "there is a DDP module that was not given to the Loop"
    found = _find_not_given(given, alive)
    if found:
        # The script may have let go of the object, and only a cycle of references keeps it until the next collection.
        del alive
        gc.collect()
        found = _find_not_given(given, _alive())
    return f"{found} was not given to the Loop: give it, or newcomers and checkpoints lack its state" if found else ""


def _alive() -> list[object]:
    """All DDP modules, optimizers and schedulers of this process."""
    # `isinstance` asks an object for its `__class__`. Some of a process's objects run code when they are asked for it.
    return [each for each in gc.get_objects() if issubclass(type(each), (DDP, torch.optim.Optimizer, *_SCHEDULERS))]


def _find_not_given(given: Sequence[object], alive: Sequence[object]) -> str:
    """Find an optimizer or a scheduler among the objects that are `alive` that was not given: in words, "" if none."""
    modules = [each for each in given if isinstance(each, torch.nn.Module)]
    parameters = {id(each) for module in modules for each in module.parameters()}
    # All objects that were given, or are inside of a given one at any depth.
    known: set[int] = set()
    to_see = list(given)
    while to_see:
        each = to_see.pop()
        if id(each) not in known:
            known.add(id(each))
            to_see += [part for part in _parts(each) if id(part) not in known and _saves(each, part)]
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
    """The schedulers in a given scheduler. In any other object, such as a class around an optimizer, both kinds."""
    if isinstance(holder, _SCHEDULERS):
        return _attributes(holder, _SCHEDULERS)
    return _attributes(holder, (torch.optim.Optimizer, *_SCHEDULERS))


def optimizers_in(holder: object) -> list[Any]:
    """The optimizers that are attributes of `holder`."""
    return _attributes(holder, (torch.optim.Optimizer,))


def _attributes(holder: object, kinds: tuple[type, ...]) -> list[object]:
    values = getattr(holder, "__dict__", {}).values()
    parts = (part for each in values for part in (each if isinstance(each, (list, tuple)) else [each]))
    return [part for part in parts if issubclass(type(part), kinds)]


def _saves(holder: Any, part: Any) -> bool:
    """Whether the `state_dict` of `holder` has the state of its attribute `part`.

    An optimizer around another one often saves its own state only (SAM), and that of the inner one is empty before the
    first step. So a mark is put into the part's state for a moment, and looked for in what `holder` saves.
    """
    with _marked(part):
        try:
            return _holds_mark(holder.state_dict())
        except Exception:  # noqa: BLE001  It is the script's own code, and was not made for an unknown entry.
            return False


@contextmanager
def _marked(part: Any) -> Iterator[None]:
    if isinstance(part, _SCHEDULERS):
        vars(part)[_MARK] = True
        try:
            yield
        finally:
            del vars(part)[_MARK]
        return
    parameter = next((each for group in part.param_groups for each in group["params"]), None)
    before = part.state.get(parameter)
    part.state[parameter] = {**(before or {}), _MARK: torch.zeros(())}
    try:
        yield
    finally:
        if before is None:
            del part.state[parameter]
        else:
            part.state[parameter] = before


def _holds_mark(state: object) -> bool:
    if isinstance(state, dict):
        return _MARK in state or any(map(_holds_mark, state.values()))
    return isinstance(state, (list, tuple)) and any(map(_holds_mark, state))
