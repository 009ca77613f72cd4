"""The times of events, in seconds since 1970. Pure.

Within one machine they follow its monotonic clock, so they stay in order when the wall clock is set. Machines are
compared by the wall clock that each had at its first event. Where these disagree, generations tell by how much: all
nodes of one begin it, and make its first step, in the same moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median, median_low
from typing import NamedTuple

from elasticrt import events

APART_S = 2.0
"""Wall clocks that differ by less tell more than generations, which a node may begin somewhat later than others."""

_Key = tuple[object, ...]
"""What all nodes tell alike of a generation, and of its first step."""


class _Begun(NamedTuple):
    """A node has begun a generation, stands by, or has made its first step."""

    node: str
    machine: str
    at: float  # By the machine's wall clock.
    nodes: tuple[str, ...]  # Of the generation.


class Clocks:
    """Converts the times of events.

    Args:
        behind: by how many seconds the wall clocks of machines are behind those of most others.
    """

    def __init__(self, behind: Mapping[str, float]) -> None:
        self.machines: dict[str, str] = {}  # By node.
        self._behind = behind
        self._zeros: dict[str, float] = {}  # What each machine's monotonic clock counts from.
        self._newest: dict[str, events.Generation] = {}  # What each agent has told of last, by node.
        self._begun: dict[_Key, list[_Begun]] = {}
        self._heard = False  # Whether another generation was told since `disagree` was asked.

    def when(self, record: events.Record) -> float:
        """When `record` happened. Ask for the records of one node in the order in which they were written."""
        if isinstance(record.event, events.AgentStarted) and record.event.machine:
            self.machines[record.node] = record.event.machine
        machine = self._machine(record.node)
        zero = self._zeros.setdefault(machine, record.time - record.at)
        return zero + record.at + self._behind.get(machine, 0.0)

    def tell(self, record: events.Record) -> None:
        """Take note of `record`, for `disagree`. Its time was asked for before."""
        event, node = record.event, record.node
        if isinstance(event, events.AgentStarted):
            self._newest.pop(node, None)
        elif isinstance(event, events.Generation):
            late = node not in self._newest and isinstance(event, events.StandsBy)  # It has begun before the agent.
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
        """The `behind` of other Clocks, where these turn out to be wrong; None: they are not."""
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
    """Those that have begun the same generation. Where etcd was replaced another one may look like it."""
    most = frozenset(max(begun, key=lambda each: len(each.nodes)).nodes)  # Of a large one most nodes know only some.
    alike = [each for each in begun if most.issuperset(each.nodes[:1])]
    return iter(alike if len({each.node for each in alike}) == len(alike) else ())


def _behind(told: Mapping[str, Mapping[_Key, float]]) -> dict[str, float]:
    """By how many seconds each machine's wall clock is behind those of most, by when each has `told` of what.

    Machines that share no generation, not even with the same third one, are not compared.
    """
    behind, times, left = list[dict[str, float]](), dict[_Key, float](), list(told)
    while left:
        machine = next((each for each in left if not told[each].keys().isdisjoint(times.keys())), left[0])
        left.remove(machine)
        apart = [times[key] - at for key, at in told[machine].items() if key in times]
        if not apart:
            behind.append({})
        # Where one is near, the clocks agree, and a node was late at the others.
        shift = median(apart) if apart and min(map(abs, apart)) > APART_S else 0.0
        behind[-1][machine] = shift
        times |= {key: at + shift for key, at in told[machine].items()}
    found: dict[str, float] = {}
    for shifts in behind:
        middle = median_low(shifts.values())
        found |= {each: by - middle if abs(by - middle) > APART_S else 0.0 for each, by in shifts.items()}
    return found
