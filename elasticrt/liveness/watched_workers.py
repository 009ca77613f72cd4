"""Bundles what the monitors of a node's workers need: how to look at the workers, and where findings go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from elasticrt.event_log import EventLog
from elasticrt.ipc.status_page import StatusPage
from elasticrt.liveness.stacks import Stacks
from elasticrt.settings import Settings
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.group_state import GroupState


@dataclass(frozen=True)
class WatchedWorkers:
    """The workers of one node, as `HangMonitor`, `StepWatch` and `CulpritSearch` see them.

    Attributes:
        settings: the agent's settings.
        event_log: takes events.
        say: prints a line for the user.
        put: takes `Stacks`, on another thread.
        group: the worker processes.
        state: returns the state of the workers: their generation, seats and ranks.
        pages: returns the status pages of all workers that run, in the order of local ranks.
        take_stacks: asks workers for their stacks, as `stacks.take` does.
        state_of: returns the kernel's letter for the state of a process, as `proc.state_of` does.
        cpu_s: returns the seconds of processor time of whole sessions, as `proc.cpu_s` does.
    """

    settings: Settings
    event_log: EventLog
    say: Callable[[str], None]
    put: Callable[[Any], None]
    group: WorkerGroup
    state: Callable[[], GroupState]
    pages: Callable[[], Sequence[StatusPage]]
    take_stacks: Callable[..., None]
    state_of: Callable[[int], str]
    cpu_s: Callable[[Iterable[int]], float]

    def ask_for_stacks(self, blank: Stacks, local_ranks: Collection[int] = ()) -> None:
        """Ask the workers of a generation for their stacks, which go to `put`.

        Args:
            blank, local_ranks: as for `stacks.take`.
        """
        self.take_stacks(self.group, self.put, blank, local_ranks)
