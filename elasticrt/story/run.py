"""The run as a whole: its name, its limits, its etcd, and how it ended. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elasticrt import events


@dataclass
class Run:
    """What is known of the run as a whole."""

    # Its id and directory, by the first agent that started, and the address of its newest etcd; "" before.
    run_id: str = ""
    run_dir: str = ""
    etcd: str = ""
    fresh_at: float = -math.inf  # When another etcd took the place of one that had died.
    min_nodes: int = 1  # It waits while it has fewer nodes.
    max_nodes: int = 1  # At most so many nodes train.
    result: events.Result | None = None  # How it ended; None: it goes on.
    ended_at: float = math.inf  # When the last node told the result.
    text: str = ""  # The report of a failed run.

    def fold(self, event: events.Event, at: float) -> None:
        """Fold in an event of any node, which happened at `at`."""
        match event:
            case events.AgentStarted():
                if not self.run_dir:
                    self.run_id, self.run_dir = event.run_id, event.run_dir
                self.min_nodes, self.max_nodes = event.min_nodes, event.max_nodes
                # A run that goes on later may meet in another etcd. A result was an earlier attempt's.
                self.etcd, self.result, self.ended_at = event.etcd, None, math.inf
            case events.Resized():
                self.min_nodes, self.max_nodes = event.min_nodes, event.max_nodes
            case events.EtcdAway() if event.fresh:
                self.fresh_at, self.etcd = at, event.etcd or self.etcd
            case events.Failure():
                self.text = event.text
            case events.Result():
                self.result, self.ended_at = event, at

    def note_id(self, run_id: str) -> None:
        """Note the run's id, as known from elsewhere, if no agent has told it."""
        self.run_id = self.run_id or run_id

    @property
    def succeeded(self) -> bool:
        """Whether the run has a result, and it is success."""
        return self.result is not None and self.result.status == "succeeded"
