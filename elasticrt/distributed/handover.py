"""Stopping together at an agreed step, without a collective: the worker's half of a handover.

At the end of step s the worker writes `entered` = s + 1 on its page, and *then* reads `stop`. If that is set, it holds.
The agents read every `entered`, agree on the largest, T, and write it as `go`. A worker behind T trains on to T,
because the others' collectives need it; after T all leave. No worker can be past T: it writes `entered` before it looks
at `stop`. Where processes end, local rank 0 of each node first gives its agent a copy of the state (`memory_tier`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType

from elasticrt.distributed import agent_client
from elasticrt.errors import Handover
from elasticrt.ipc.messages import Left
from elasticrt.ipc.status_page import StatusPage

_log = logging.getLogger(__name__)

left = False
"""Whether this process has left its loop because the membership changes: others have the state, or its agent tells
what nobody has."""

POLL_S = 0.0005
HOLD_S_MAX = 120.0
"""An agent that asks to hold and is silent for so long has lost track of this worker, which goes on. If that is wrong,
the agent ends it."""


def must_leave(page: StatusPage, step: int) -> bool:
    """Called between `step`, which is finished, and the next. True: all leave after this step; False: train on.

    Holds until the agents have agreed, or have given the handover up.
    """
    deadline = time.monotonic() + HOLD_S_MAX
    while page.stop:
        go = page.go
        if go:
            return step >= go
        if time.monotonic() > deadline:
            _log.warning("held after step %d for %.0f s without a word from the agent; going on", step, HOLD_S_MAX)
            return False
        time.sleep(POLL_S)
    return False


def staying(step: int) -> Callable[[], object]:
    """What reports that this process has stopped after `step`, and waits for its seat in the next generation.

    It reports that of the present generation, even if this process has another seat by then. From any thread.
    """
    return partial(agent_client.agent_link().say, Left(agent_client.worker_env().generation, step))


def leave(step: int) -> Handover:
    """Report that this process has stopped after `step`, as agreed, and ends. Returns what leaves the loop."""
    staying(step)()
    return departure(step)


def departure(step: int) -> Handover:
    """What leaves the loop of a process that has no seat in the next generation. It is not printed."""
    global left
    left, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, Handover):
            before(kind, error, trace)

    # Where the script has an interpreter of its own, that would print a traceback, although this is no error.
    sys.excepthook = hook
    return Handover(f"the membership changes: this process stops after step {step}")
