"""The worker's half of a handover: all workers stop after the same step, which is agreed on without a collective.

At the end of step s a worker writes `entered` = s + 1 on its status page, and *then* reads `stop`. If `stop` is set,
the worker holds. The agents read every `entered`, agree on the largest value, T, and write T as `go`. A worker behind T
trains on to T, because the collectives of the others need it; after T all workers leave. No worker can be past T,
because it writes `entered` before it looks at `stop`. Where processes end, local rank 0 of each node first gives its
agent a copy of the state (`memory_tier`).
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
from elasticrt.ipc.messages import LeftGeneration
from elasticrt.ipc.status_page import StatusPage

_log = logging.getLogger(__name__)

has_left = False
"""Whether this process has left its loop because the membership changes. Its state is not lost: other processes have
it, or the agent reports what no process has."""

POLL_S = 0.0005
HOLD_S_MAX = 120.0
"""An agent that asks for a hold, and is then silent for so many seconds, has lost track of this worker. The worker goes
on. If that is wrong, the agent ends the worker."""


def must_leave(page: StatusPage, step: int) -> bool:
    """Whether all workers leave after `step`, which this worker has finished. False: train on.

    Called between two steps. While the agents ask for a hold, this waits until they have agreed on a step, or have
    given the handover up.

    Args:
        page: this process's status page, with `entered` written already.
        step: the global step that was finished last.
    """
    deadline = time.monotonic() + HOLD_S_MAX
    while page.stop:
        go = page.go
        if go:
            return step >= go
        if time.monotonic() > deadline:
            _log.warning("held after step %d for %.0f s, and the agent did not answer; going on", step, HOLD_S_MAX)
            return False
        time.sleep(POLL_S)
    return False


def make_stop_report(step: int) -> Callable[[], object]:
    """A function that tells the agent: this process has stopped after `step`, and waits for a seat.

    Any thread may call that function. Its report is for the generation in which `make_stop_report` was called, even if
    this process has another seat by then.
    """
    return partial(agent_client.agent_link().send, LeftGeneration(agent_client.worker_env().generation, step))


def leave(step: int) -> Handover:
    """Report that this process has stopped after `step`, as agreed. Returns the exception that ends its loop."""
    make_stop_report(step)()
    return handover_exception(step)


def handover_exception(step: int) -> Handover:
    """The exception that ends the loop of a process without a seat in the next generation. It is not printed."""
    global has_left
    has_left, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, Handover):
            before(kind, error, trace)

    # Where the script runs in an interpreter of its own (not a fork), an uncaught Handover would print a traceback,
    # although it is no error.
    sys.excepthook = hook
    return Handover(f"the membership changes: this process stops after step {step}")
