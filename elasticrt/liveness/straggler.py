"""Finds a node that is slower than the others: the straggler waits least for the others' gradients. Pure.

All nodes take equally long for a step, because they wait for each other. A rank's own work is the time of a step
without its wait for the all-reduce of gradients. Torch's DDP measures this wait in some steps, and the status pages
have it as running totals. A node is a straggler if its own work takes much longer than that of the others in several
looks in a row. `elasticrt drain` takes the node out.
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
class GradientWaits:
    """One rank's running totals.

    Attributes:
        node: the node of the rank.
        waited_ns: nanoseconds of waiting for gradients, in all measured steps.
        samples: the number of measured steps.
    """

    node: str
    waited_ns: int
    samples: int


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
    """A comparison of all ranks of a generation, over several looks.

    Attributes:
        totals: the totals of each rank at the last look.
        found: the straggler of the last look; None without one.
        looks: the number of looks in a row that have found the same node.
        since: the step at the look before the first of these.
        step: the last step at the last look.
    """

    totals: Mapping[int, GradientWaits] = field(default_factory=dict)
    found: Straggler | None = None
    looks: int = 0
    since: int = 0
    step: int = 0

    def looked(self, totals: Mapping[int, GradientWaits], step: int, step_s: float) -> Comparison:
        """Return the comparison after another look.

        Args:
            totals: the totals of each rank.
            step: the last step.
            step_s: the seconds that a step takes.
        """
        own: dict[str, float] = {}
        for rank, now in totals.items():
            before = self.totals.get(rank)
            # Without a new measurement nothing is known of this rank's last steps.
            if before is None or before.node != now.node or now.samples <= before.samples:
                continue
            waited_s = (now.waited_ns - before.waited_ns) / (now.samples - before.samples) / 1e9
            own[now.node] = max(own.get(now.node, 0.0), min(step_s, max(0.0, step_s - waited_s)))
        found = slowest(own)
        if found is None:
            # Without any new measurement the last finding still holds. With new ones the row of looks ends.
            return replace(self, totals=totals, step=step) if not own else Comparison(totals, step=step)
        same = self.found is not None and self.found.node == found.node
        return Comparison(totals, found, self.looks + 1 if same else 1, self.since if same else self.step, step)

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
