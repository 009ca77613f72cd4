"""Computes when events happened, in seconds since 1970. Pure.

Within one machine, times follow the monotonic clock, so they stay in order when the wall clock is set. Machines are
compared by the wall clock that each had at its first event. If the wall clocks of machines disagree, generations show
by how much: all nodes of a generation begin it, and make its first step, at almost the same moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median, median_low
from typing import NamedTuple

from elasticrt import events

APART_S = 2.0
"""Differences of wall clocks below this are not corrected: a node may begin a generation somewhat later than the
others."""

_Key = tuple[object, ...]
"""What all nodes write alike about a generation, and about its first step: it tells which events belong together."""


class _Begun(NamedTuple):
    """An event that all nodes have: this node begins a generation, stands by, or has made its first step."""

    node: str
    machine: str
    at: float  # By the machine's wall clock.
    nodes: tuple[str, ...]  # The generation's nodes.


class Clocks:
    """Converts the times of events to seconds since 1970.

    Args:
        behind: by machine, how many seconds its wall clock is behind those of most others.
    """

    def __init__(self, behind: Mapping[str, float]) -> None:
        self.machines: dict[str, str] = {}  # By node.
        self._behind = behind
        # By machine, the wall clock's time at which its monotonic clock was 0.
        self._zeros: dict[str, float] = {}
        # By node, the newest generation that its agent has written of.
        self._newest: dict[str, events.Generation] = {}
        self._begun: dict[_Key, list[_Begun]] = {}
        # Whether a generation was noted since `disagree` was last called.
        self._heard = False

    def when(self, record: events.Record) -> float:
        """When `record` happened. Ask for a node's records in the order in which they were written."""
        if isinstance(record.event, events.AgentStarted) and record.event.machine:
            self.machines[record.node] = record.event.machine
        machine = self._machine(record.node)
        zero = self._zeros.setdefault(machine, record.time - record.at)
        return zero + record.at + self._behind.get(machine, 0.0)

    def fold(self, record: events.Record) -> None:
        """Note what `record` says about clocks, for `disagree`. Call `when` for the record first."""
        event, node = record.event, record.node
        if isinstance(event, events.AgentStarted):
            self._newest.pop(node, None)
        elif isinstance(event, events.Generation):
            # A standby agent first writes of a generation that had begun before the agent started.
            late = node not in self._newest and isinstance(event, events.StandsBy)
            self._newest[node] = event
            if not late:
                self._note(event, record)
        elif isinstance(event, events.FirstStep) and node in self._newest:
            self._note(self._newest[node], record, event.step)

    def _note(self, generation: events.Generation, record: events.Record, step: int | None = None) -> None:
        told, machine = generation, self._machine(record.node)
        key = (told.number, told.cause, told.kind, told.world_size, told.restarts, told.resume_step, step)
        begun = _Begun(record.node, machine, self._zeros[machine] + record.at, told.nodes)
        self._begun.setdefault(key, []).append(begun)
        self._heard = True

    def disagree(self) -> Mapping[str, float] | None:
        """The `behind` of Clocks that fit the events better than these; None: these fit."""
        if not self._heard or len(self._zeros) == 1:
            return None
        self._heard = False
        told: dict[str, dict[_Key, float]] = {machine: {} for machine in self._zeros}
        for key, begun in self._begun.items():
            for each in _one_generation(begun):
                told[each.machine][key] = min(each.at, told[each.machine].get(key, each.at))
        found = _behind(told)
        wrong = any(abs(found[each] - self._behind.get(each, 0.0)) > APART_S for each in found)
        return found if wrong else None

    def _machine(self, node: str) -> str:
        return self.machines.get(node) or f"the machine of {node}"


def _one_generation(begun: list[_Begun]) -> Iterator[_Begun]:
    """The events of one generation; none if two generations look alike, as after a loss of etcd."""
    # In a large generation most nodes know only some of its nodes, so take the longest list.
    most = frozenset(max(begun, key=lambda each: len(each.nodes)).nodes)
    alike = [each for each in begun if most.issuperset(each.nodes[:1])]
    return iter(alike if len({each.node for each in alike}) == len(alike) else ())


def _behind(told: Mapping[str, Mapping[_Key, float]]) -> dict[str, float]:
    """How many seconds each machine's wall clock is behind those of most machines.

    The idea: machines join a group one after the other, each shifted so that the events it shares with the group
    coincide in the median. Within a group, the median of the shifts is the truth. Machines that share no generation,
    not even by way of a third machine, are not compared.

    Args:
        told: by machine, the wall-clock time of each event.
    """
    behind, times, left = list[dict[str, float]](), dict[_Key, float](), list(told)
    while left:
        machine = next((each for each in left if not told[each].keys().isdisjoint(times.keys())), left[0])
        left.remove(machine)
        apart = [times[key] - at for key, at in told[machine].items() if key in times]
        if not apart:
            behind.append({})
        # If one shared event is nearly simultaneous, the clocks agree, and the node was merely late at the other
        # events.
        shift = median(apart) if apart and min(map(abs, apart)) > APART_S else 0.0
        behind[-1][machine] = shift
        times |= {key: at + shift for key, at in told[machine].items()}
    found: dict[str, float] = {}
    for shifts in behind:
        middle = median_low(shifts.values())
        found |= {each: by - middle if abs(by - middle) > APART_S else 0.0 for each, by in shifts.items()}
    return found
