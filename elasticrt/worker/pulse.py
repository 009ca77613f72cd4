"""What an agent can see of a script that knows nothing of it: each step of an optimizer is a beat on the status page.

Beats that stand still are a reason to ask the other nodes whether they live, so that a machine without power is found
before its lease ends. No more than that: such a script may well evaluate for an hour between two steps.
"""

from __future__ import annotations

import faulthandler
import os
import time

from elasticrt.contract.env import WorkerEnv
from elasticrt.contract.page import PAGE_BYTES, STACKS_SIGNAL, Page


def begin(worker: WorkerEnv) -> None:
    """From now on every `step` of an optimizer of this process beats: a microsecond or so each, no tensor is read."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if worker.page_fd < 0:
        return
    page, me = Page(worker.page_fd), os.getpid()
    os.lseek(worker.page_fd, PAGE_BYTES, os.SEEK_SET)
    faulthandler.register(STACKS_SIGNAL, worker.page_fd, all_threads=True, chain=False)
    page.begun_at_ns = time.monotonic_ns()

    def beat(*_: object) -> None:
        if os.getpid() == me:  # What the script forks has a life of its own.
            now_ns, beats = time.monotonic_ns(), page.beats
            if not beats:
                page.first_beat_at_ns = now_ns
            page.beat_at_ns = now_ns
            page.beats = beats + 1

    register_optimizer_step_post_hook(beat)
