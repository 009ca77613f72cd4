"""Signs of life of a script without `Loop`: each step of an optimizer is a beat on the status page.

The newest file that `torch.load` reads before the first beat is taken for the snapshot that the script goes on from.

When beats stand still, the agents ask each other whether they live, and so find a machine without power before its
lease ends. Nothing more follows, because such a script may evaluate for an hour between two steps.
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
"""CLOCK_REALTIME_COARSE, by which Linux stamps files. `time.time` is ahead of it, and so even of a file that is written
afterwards."""


def begin() -> None:
    """From now on each optimizer step in this process is a beat, which takes about a microsecond and reads no tensor.

    Before the first beat, `torch.load` notes when the file that it reads was written.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    page, me, torch_load = agent_client.status_page(), os.getpid(), torch.load
    begun_ns = time.clock_gettime_ns(_CLOCK_OF_FILES)
    agent_client.show_stacks()
    page.begun_at_ns = time.monotonic_ns()

    def beat(*_: object) -> None:
        # Not in a process that the script has forked.
        if os.getpid() == me:
            now_ns, beats = time.monotonic_ns(), page.beats
            # The first beat is announced by `beats`, so its time is written before.
            if not beats:
                page.first_beat_at_ns = now_ns
            page.beat_at_ns = now_ns
            page.beats = beats + 1

    @functools.wraps(torch_load)
    def load(*args: Any, **kwargs: Any) -> Any:
        read = torch_load(*args, **kwargs)
        if os.getpid() == me and not page.beats:
            # The script may read from anything, also from what is no file.
            with contextlib.suppress(Exception):
                page.loaded = max(page.loaded, _written_us(args[0] if args else kwargs["f"], begun_ns))
        return read

    register_optimizer_step_post_hook(beat)
    # In both modules, because a function is pickled by the name of its module.
    torch.load = torch.serialization.load = load


def _written_us(file: Any, before_ns: int) -> int:
    """When a file was last written, in microseconds since the epoch; 0 if it was not written before `before_ns`.

    A file that this process has written or fetched itself is new after each start, and shows no progress.
    """
    found = os.stat(file if isinstance(file, str | os.PathLike) else file.name)  # noqa: PTH116  Or a descriptor.
    old = stat.S_ISREG(found.st_mode) and found.st_mtime_ns < before_ns
    return found.st_mtime_ns // 1000 if old else 0
