"""Which node is slow: the one that waits least for the others' gradients. Pure.

All nodes take equally long for a step, because they wait for each other. A rank's own work is the time of a step
without its wait for the sum of gradients. Torch's DDP measures this wait in some steps, and the status pages have it as
running totals. A node is a straggler when its own work takes much longer than that of the others, in several looks in a
row. `elasticrt drain` takes it out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# The own work of a slow node takes at least RATIO times as long as that of the others, and LEAST_S longer.
RATIO = 1.5
LEAST_S = 0.002
# The number of steps and looks after which a straggler is reported.
STEPS_MIN, LOOKS_MIN = 20, 3


@dataclass(frozen=True)
class Waits:
    """One rank's running totals: nanoseconds of waiting in `samples` measured steps, and its node."""

    node: str
    waited_ns: int
    samples: int


@dataclass(frozen=True)
class Straggler:
    """A slow node."""

    node: str  # Its name.
    # `own_s`: seconds of its own work in a step; `others_s`: the median of the others.
    own_s: float
    others_s: float


@dataclass(frozen=True)
class Comparison:
    """A comparison of all ranks of a generation, over several looks."""

    totals: Mapping[int, Waits] = field(default_factory=dict)  # Each rank's, at the last look.
    found: Straggler | None = None  # The straggler of the last look; None without one.
    # `looks`: the number of looks in a row that found the same node; `since`: the step before the first of them.
    looks: int = 0
    since: int = 0
    step: int = 0  # The last step at the last look.

    def looked(self, totals: Mapping[int, Waits], step: int, step_s: float) -> Comparison:
        """The comparison after another look, with these totals by rank, at `step`. A step takes `step_s` seconds."""
        own: dict[str, float] = {}
        for rank, now in totals.items():
            before = self.totals.get(rank)
            if before is None or before.node != now.node or now.samples <= before.samples:
                continue
            waited_s = (now.waited_ns - before.waited_ns) / (now.samples - before.samples) / 1e9
            own[now.node] = max(own.get(now.node, 0.0), min(step_s, max(0.0, step_s - waited_s)))
        found = slowest(own)
        if found is None:
            # Without a new measurement the last finding still holds.
            return replace(self, totals=totals, step=step) if not own else Comparison(totals, step=step)
        same = self.found is not None and self.found.node == found.node
        return Comparison(totals, found, self.looks + 1 if same else 1, self.since if same else self.step, step)

    @property
    def certain(self) -> Straggler | None:
        """The straggler, if it has been the same node for long enough."""
        return self.found if self.looks >= LOOKS_MIN and self.step >= self.since + STEPS_MIN else None


def slowest(own_s: Mapping[str, float]) -> Straggler | None:
    """The straggler, from the seconds of own work by node; None without one."""
    if len(own_s) < 2:
        return None
    node = max(own_s, key=lambda each: own_s[each])
    others_s = statistics.median(took for each, took in own_s.items() if each != node)
    found = Straggler(node, own_s[node], others_s)
    return found if found.own_s >= RATIO * others_s and found.own_s - others_s >= LEAST_S else None
