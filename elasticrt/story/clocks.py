"""Computes when events happened, in seconds since 1970. Pure.

Within one machine, times follow the monotonic clock, so they stay in order when the wall clock is set. Machines are
compared by the wall clock that each had at its first event.
"""

from __future__ import annotations

from elasticrt import events


class Clocks:
    """Converts the times of events to seconds since 1970."""

    def __init__(self) -> None:
        self.machines: dict[str, str] = {}  # By node.
        # By machine, the wall clock's time at which its monotonic clock was 0.
        self._zeros: dict[str, float] = {}

    def when(self, record: events.Record) -> float:
        """When `record` happened. Ask for a node's records in the order in which they were written."""
        if isinstance(record.event, events.AgentStarted) and record.event.machine:
            self.machines[record.node] = record.event.machine
        machine = self.machines.get(record.node) or f"the machine of {record.node}"
        return self._zeros.setdefault(machine, record.time - record.at) + record.at
