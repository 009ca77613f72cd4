"""Signs of life of a script without `Loop`: each step of an optimizer is a beat on the status page.

When beats stand still, the agents ask each other whether they live, and so find a machine without power before its
lease ends. Nothing more follows, because such a script may evaluate for an hour between two steps.
"""

from __future__ import annotations

import os
import time

from elasticrt.distributed import agent_client


def begin() -> None:
    """From now on each optimizer step in this process is a beat. It takes about a microsecond and reads no tensor."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    page, me = agent_client.status_page(), os.getpid()
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

    register_optimizer_step_post_hook(beat)
