"""Process groups live as long as their process: what destroys one may wait for ever.

Torch destroys a gloo group where the last reference to it goes, which is often a DistributedDataParallel in a local
variable. The destructor joins gloo's threads while its own thread holds the interpreter lock (torch 2.13). A thread of
gloo's that drops the last result of a collective just then needs the same lock. So a reference to each group is kept
until the process ends. `destroy_process_group` still shuts a group down.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

_kept: list[Any] = []


class _Kept(dict[Any, Any]):
    """Torch's map of the groups that it knows. It forgets a group that is destroyed; we do not."""

    def __setitem__(self, group: Any, about: Any) -> None:
        _kept.append(group)
        super().__setitem__(group, about)


def release(groups: Iterable[object]) -> None:
    """Let go of groups that have nothing to do any more, and no thread of theirs either: destroying those is safe."""
    for group in groups:
        _kept[:] = [each for each in _kept if each is not group]


def keep() -> None:
    """Keep every process group that is made from now on. Nothing changes where torch has no such map."""
    module = importlib.import_module("torch.distributed.distributed_c10d")
    known = getattr(module, "_pg_map", None)
    if type(known) is dict:
        module._pg_map = _Kept(known)  # type: ignore[attr-defined]  # Torch has no hook for a group's birth or end.
