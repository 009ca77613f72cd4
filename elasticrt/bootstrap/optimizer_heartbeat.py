"""What an agent can see of a script that knows nothing of it: each step of an optimizer is a beat on the status page.

What `torch.load` reads before the first of them is taken for the snapshot that the script goes on from.

Beats that stand still are a reason to ask the other nodes whether they live, so that a machine without power is found
before its lease ends. No more than that: such a script may well evaluate for an hour between two steps.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import time
from typing import Any

from elasticrt.distributed import agent_client

_CLOCK_OF_FILES = 5
"""CLOCK_REALTIME_COARSE, by which files are stamped: `time.time` is ahead of it, and so of a file written after."""


def begin() -> None:
    """From now on every `step` of an optimizer of this process beats: a microsecond or so each, no tensor is read.

    Before the first of them `torch.load` notes when what it has read was written.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    page, me, torch_load = agent_client.status_page(), os.getpid(), torch.load
    begun_ns = time.clock_gettime_ns(_CLOCK_OF_FILES)
    agent_client.show_stacks()
    page.begun_at_ns = time.monotonic_ns()

    def beat(*_: object) -> None:
        if os.getpid() == me:  # What the script forks has a life of its own.
            now_ns, beats = time.monotonic_ns(), page.beats
            if not beats:
                page.first_beat_at_ns = now_ns
            page.beat_at_ns = now_ns
            page.beats = beats + 1

    @functools.wraps(torch_load)
    def load(*args: Any, **kwargs: Any) -> Any:
        read = torch_load(*args, **kwargs)
        if os.getpid() == me and not page.beats:
            with contextlib.suppress(Exception):  # Anything may be read from, and some of it is in no directory.
                page.loaded = max(page.loaded, _written_us(args[0] if args else kwargs["f"], begun_ns))
        return read

    register_optimizer_step_post_hook(beat)
    torch.load = torch.serialization.load = load  # Both: a function is pickled by the name of its module.


def _written_us(file: Any, before_ns: int) -> int:
    """When a file was last written, in microseconds since the epoch; 0 where that was not `before_ns`.

    What this life has written itself, or fetched from elsewhere, is new each time, and shows no progress.
    """
    found = os.stat(file if isinstance(file, str | os.PathLike) else file.name)  # noqa: PTH116  Or a descriptor.
    old = stat.S_ISREG(found.st_mode) and found.st_mtime_ns < before_ns
    return found.st_mtime_ns // 1000 if old else 0
