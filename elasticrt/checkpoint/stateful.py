"""Saves and restores the user's objects by `state_dict` and `load_state_dict`, and refuses what cannot be saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch.utils.data import DataLoader

from elasticrt.checkpoint.state_copy import is_sharded, plain_copy, tensors_of
from elasticrt.distributed.wrapping import unwrap
from elasticrt.errors import CheckpointError, ConfigError, explain

# The name under which a Loop's checkpoint holds elasticrt's own part: position, sampler, random numbers, variables.
LOOP_KEY = "elasticrt"


# The other arguments of `Loop`, for a mistyped one, which it takes for an object to save.
_ARGUMENTS = ("sampler", "every", "keep", "resume", "seed", "memory", "ledger")


def checked(objects: Mapping[str, object]) -> dict[str, Any]:
    """The objects to save, by name, modules without their wrappers.

    Raises TypeError and ConfigError for an object that can't be saved.
    """
    for name, each in objects.items():
        where, kind = f"Loop({name}=)", type(each).__name__
        if name == LOOP_KEY:
            raise ConfigError("this name is taken", where, remedy="Use another one")
        if isinstance(each, DataLoader):
            what, remedy = "a loader's own state can't be saved", "Give Loop(sampler=...) an ElasticBatchSampler"
            expected = "the sampler: a loader's state is that of one rank, and includes batches read ahead"
            raise ConfigError(what, where, got=kind, expected=expected, remedy=remedy)
        # The methods of a class need an object, so a class in place of one is a mistake.
        has_state = all(callable(getattr(each, method, None)) for method in ("state_dict", "load_state_dict"))
        if not has_state or isinstance(each, type):
            expected = "state_dict() and load_state_dict(), as modules, optimizers and schedulers have"
            near = get_close_matches(name, _ARGUMENTS, 1)
            remedy = "Leave it out" if each is None else "Keep plain values in loop.vars"
            remedy = (
                f"Did you mean {near[0]}?" if near else "Make an object of it" if isinstance(each, type) else remedy
            )
            raise TypeError(explain("not stateful", where, got=kind, expected=expected, remedy=remedy))
        if isinstance(each, torch.nn.Module) and any(is_sharded(p) for p in each.parameters()):
            expected = "whole parameters, as DDP has them"
            raise ConfigError("sharded state (FSDP)", where, got=kind, expected=expected)
        # By the name of the class: importing it takes longer than all of these checks.
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(each).__mro__):
            expected, remedy = "an optimizer whose state is whole on each rank", "Use the optimizer that it wraps"
            what = "sharded state (ZeroRedundancyOptimizer)"
            raise ConfigError(what, where, got=kind, expected=expected, remedy=remedy)
    return {name: unwrap(each) if isinstance(each, torch.nn.Module) else each for name, each in objects.items()}


def collect(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each object by name."""
    return {name: each.state_dict() for name, each in objects.items()}


def shapes(objects: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """By name what a state must fit: of modules the names in their `states`, of optimizers the number of groups."""
    modules = {name: set(states[name]) for name, each in objects.items() if isinstance(each, torch.nn.Module)}
    optimizers = ((name, each) for name, each in objects.items() if isinstance(each, torch.optim.Optimizer))
    return {**modules, **{name: len(each.param_groups) for name, each in optimizers}}


def put_back(objects: Mapping[str, Any], data: Mapping[str, Any], where: str, *, shared: bool = False) -> None:
    """Load each object's state from `data`.

    Args:
        objects: the objects by name.
        data: their states by name.
        where: the name of `data` in errors.
        shared: whether the tensors of `data` lie in memory that all ranks of this machine share. Then no object keeps
            such a tensor.

    Raises CheckpointError when `data` does not fit the objects.
    """
    saved, present = set(data) - {LOOP_KEY}, set(objects)
    if saved != present:
        got, expected = f"in the checkpoint {sorted(saved)}", f"as given to Loop {sorted(present)}"
        raise CheckpointError("the checkpoint holds other objects than the script", where, got=got, expected=expected)
    parts = _shared_parts(objects.values())
    modules = [(each, data[name]) for name, each in objects.items() if isinstance(each, torch.nn.Module)]
    alike = all(_types(each.state_dict()) == _types(there) for each, there in modules)
    for name, each in objects.items():
        settings = _settings(each)
        try:
            # A module copies what it loads. Any other object may keep the tensors that it gets.
            copied = shared and not isinstance(each, torch.nn.Module)
            each.load_state_dict(plain_copy(data[name], name) if copied else data[name])
            if isinstance(each, torch.optim.Optimizer):
                if alike:
                    _keep_types(each, data[name])
                _check_kind(each, settings)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            # Torch's message begins with a line that only names the module's class.
            said = str(error).partition(":\n\t")[2] or str(error)
            remedy = f"load_state_dict() said: {type(error).__name__}: {' '.join(said.split())[:600]}"
            raise CheckpointError(f"the checkpoint does not fit {name!r}", where, remedy=remedy) from error
    for holder, part, first in parts:
        setattr(holder, part, getattr(first, part))


def _shared_parts(objects: Iterable[object]) -> list[tuple[object, str, object]]:
    """What an optimizer around another one (SAM, Lookahead) shares with it: holder, name of the part, other holder.

    When an optimizer loads a state, torch gives it new parts, and a scheduler would then write its learning rate to the
    groups of one of the two only.
    """
    found, firsts = [], dict[int, object]()
    for each in objects:
        for part in ("param_groups", "state"):
            held = getattr(each, "__dict__", {}).get(part)
            if isinstance(held, (list, dict)) and firsts.setdefault(id(held), each) is not each:
                found.append((each, part, firsts[id(held)]))
    return found


def _types(state: Any) -> list[torch.dtype]:
    return [each.dtype for each in tensors_of(state)]


def _keep_types(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Give an optimizer's tensors the types that they had when they were saved.

    When an optimizer loads a state, torch converts most tensors to the types of the parameters. Call this only if the
    model has the types of the saved one; otherwise the script trains with another precision now.
    """
    # A class of optimizers may have a state of its own form.
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        return
    # A saved state numbers the parameters in the order of the groups.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        now = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(number, {}).items():
            loaded = now.get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and value.dtype != loaded.dtype:
                now[name] = value.detach().to(loaded.device, copy=True)


def _settings(each: object) -> list[set[str]]:
    """The names of an optimizer's settings, for each of its groups; empty for another object."""
    # `defaults` alone does not tell: loading a state adds names to it (torch 2.13: `differentiable`) that the groups
    # never have.
    if not isinstance(each, torch.optim.Optimizer):
        return []
    return [set(each.defaults).intersection(group) for group in each.param_groups]


def _check_kind(optimizer: torch.optim.Optimizer, before: list[set[str]]) -> None:
    """Raise ValueError if an optimizer has loaded the state of another kind of optimizer.

    Torch loads such a state without an error, and fails at the next step. `before` is the result of `_settings` before
    the load.
    """
    groups = zip(before, optimizer.param_groups, strict=True)
    lacks = sorted({name for settings, group in groups for name in settings.difference(group)})
    if lacks:
        raise ValueError(f"another optimizer's state, without {', '.join(lacks)}")
