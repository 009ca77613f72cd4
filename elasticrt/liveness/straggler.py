"""Finds a node that is slower than the others: the straggler waits least for the others' gradients. Pure.

All nodes take equally long for a step, because they wait for each other. So each agent measures its workers' own work
(`progress.OwnWork`), and the agent of rank 0 compares the nodes. A node is a straggler if its own work takes much
longer than that of the others in several looks in a row. `elasticrt drain` takes the node out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# The own work of a straggler takes at least RATIO times as long as that of the others, and at least LEAST_S longer.
RATIO = 1.5
LEAST_S = 0.002
# A straggler is reported after so many steps and so many looks.
STEPS_MIN, LOOKS_MIN = 20, 3


@dataclass(frozen=True)
class Straggler:
    """A slow node.

    Attributes:
        node: its name.
        own_s: the seconds of its own work in a step.
        others_s: the median of the other nodes' own work, in seconds.
    """

    node: str
    own_s: float
    others_s: float


@dataclass(frozen=True)
class Comparison:
    """A comparison of all nodes of a generation, over several looks.

    Attributes:
        own_s: the seconds of each node's own work in a step, at the last look.
        found: the straggler of the last look; None without one.
        looks: the number of looks in a row that have found the same node.
        since: the step at the look before the first of these.
        step: the last step at the last look.
    """

    own_s: Mapping[str, float] = field(default_factory=dict)
    found: Straggler | None = None
    looks: int = 0
    since: int = 0
    step: int = 0

    def looked(self, own_s: Mapping[str, float], step: int) -> Comparison:
        """Return the comparison after another look, which saw these seconds of own work after `step`."""
        # DDP measures one step in many. Without any new measurement the last finding still holds.
        if own_s == self.own_s:
            return replace(self, step=step)
        # The first look does not count: it covers the first steps of a generation, which are slow for other reasons.
        found = slowest(own_s) if self.own_s else None
        if found is None:
            return Comparison(own_s, step=step)
        same = self.found is not None and self.found.node == found.node
        return Comparison(own_s, found, self.looks + 1 if same else 1, self.since if same else self.step, step)

    @property
    def certain(self) -> Straggler | None:
        """The straggler, if it has been the same node for LOOKS_MIN looks and STEPS_MIN steps; else None."""
        return self.found if self.looks >= LOOKS_MIN and self.step >= self.since + STEPS_MIN else None


def slowest(own_s: Mapping[str, float]) -> Straggler | None:
    """The straggler among the nodes, by the seconds of each node's own work in a step; None without one."""
    if len(own_s) < 2:
        return None
    node = max(own_s, key=lambda each: own_s[each])
    others_s = statistics.median(took for each, took in own_s.items() if each != node)
    found = Straggler(node, own_s[node], others_s)
    return found if found.own_s >= RATIO * others_s and found.own_s - others_s >= LEAST_S else None
