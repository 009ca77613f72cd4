"""Keeps a reference to every process group until the process ends, because destroying a group can deadlock.

Torch destroys a gloo group with the last reference to it, which is often held by a DistributedDataParallel in a local
variable. The destructor joins gloo's threads while it holds the interpreter's lock (torch 2.13). A thread that drops
the last result of a collective at that moment needs the same lock. `destroy_process_group` still shuts a group down.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

_kept: list[Any] = []


class _Kept(dict[Any, Any]):
    """Torch's map of the groups that it knows. Torch removes a destroyed group; `_kept` keeps it."""

    def __setitem__(self, group: Any, about: Any) -> None:
        _kept.append(group)
        super().__setitem__(group, about)


def release(groups: Iterable[object]) -> None:
    """Release groups whose threads have no work left, and which are therefore safe to destroy."""
    for group in groups:
        _kept[:] = [each for each in _kept if each is not group]


def keep() -> None:
    """Keep every process group that is made from now on. Does nothing if torch has no such map."""
    module = importlib.import_module("torch.distributed.distributed_c10d")
    known = getattr(module, "_pg_map", None)
    if type(known) is dict:
        module._pg_map = _Kept(known)  # type: ignore[attr-defined]  # Torch has no hook for a group's birth or end.
