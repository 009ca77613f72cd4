"""The workers of one node, as those see them that watch over their progress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from elasticrt.event_log import EventLog
from elasticrt.ipc.status_page import StatusPage
from elasticrt.liveness.stacks import Stacks
from elasticrt.settings import Settings
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.group_state import GroupState


@dataclass(frozen=True)
class WatchedWorkers:
    """What is known of the workers, and where findings go.

    Attributes:
        settings: the agent's.
        event_log: takes events.
        say: prints a line for the user.
        put: takes `Stacks`, on another thread.
        group: the workers.
        state: tells what they are in.
        look: returns the pages of all that run, by local rank.
        take: asks workers for their stacks, as `stacks.take`.
        state_of: the kernel's letter for the state of a process, as `proc.state_of`.
        cpu_s: the processor time of sessions, as `proc.cpu_s`.
    """

    settings: Settings
    event_log: EventLog
    say: Callable[[str], None]
    put: Callable[[Any], None]
    group: WorkerGroup
    state: Callable[[], GroupState]
    look: Callable[[], Sequence[StatusPage]]
    take: Callable[..., None]
    state_of: Callable[[int], str]
    cpu_s: Callable[[Iterable[int]], float]

    def ask(self, blank: Stacks, local_ranks: Collection[int] = ()) -> None:
        """Ask all workers of a generation, or `local_ranks`, for their stacks. `blank`: the answer without lines."""
        group, generation, pids = self.group, blank.generation, self.group.pids(blank.generation)
        workers = {rank: (pids[rank], group.page(rank, generation)) for rank in local_ranks or pids if rank in pids}

        def signal(number: int, ranks: Sequence[int]) -> None:
            group.signal(number, generation, ranks)

        self.take(workers, partial(group.look, generation), signal, self.put, blank)
