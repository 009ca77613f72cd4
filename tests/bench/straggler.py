"""How surely is a slow node named? `python -m tests.bench.straggler [--runs N]`: precision and recall on drawn runs.

Two to eight nodes of two ranks. Their own work in a step varies by a tenth, or by three; that of one node takes so many
times as long. What DDP would measure of their waits is drawn, and compared five times: in each run the node that is
named, if one is, is the slow one or another. It measures the comparison, not DDP's timers.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

from elasticrt.liveness.straggler import Comparison

STEP_S = 0.1
SLOW, VARY = (1.0, 1.3, 1.5, 2.0, 3.0), (0.1, 0.3)
LOOKS = 5


def drawn(draw: random.Random, nodes: int, slow: float, looks: int, vary: float = 0.1) -> Comparison:
    """What is known after so many looks at nodes of two ranks, where node 0 is `slow` times as slow as the others."""
    comparison, step_s = Comparison(), STEP_S * (slow + vary)
    for look in range(looks + 1):
        waited = [0.0] * 2 * nodes
        for _ in range(3):
            own = [draw.gauss(STEP_S, vary * STEP_S) * (slow if rank < 2 else 1.0) for rank in range(2 * nodes)]
            waited = [before + max(own) - mine for before, mine in zip(waited, own, strict=True)]
        took = [min(step_s, max(0.0, step_s - each / 3)) for each in waited]
        by_node = {f"n{node}": max(took[2 * node : 2 * node + 2]) for node in range(nodes)}
        comparison = comparison.looked(by_node, 100 * look)
    return comparison


def named(draw: random.Random, slow: float, vary: float) -> str:
    """Of one run: "right", "wrong" or "nobody"."""
    found = drawn(draw, draw.randint(2, 8), slow, LOOKS, vary)
    if found.certain is None:
        return "nobody"
    return "right" if found.certain.node == "n0" and slow > 1 else "wrong"


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    runs, draw = parser.parse_args().runs, random.Random(1)
    print("| its work takes | steps vary by | runs | named | another named | nobody named |\n|---|---|---|---|---|---|")
    wrong, by_slow = 0, Counter[float]()
    for vary in VARY:
        for slow in SLOW:
            count = Counter(named(draw, slow, vary) for _ in range(runs))
            wrong += count["wrong"]
            by_slow[slow] += count["right"]
            told = f"{count['right']} | {count['wrong']} | {count['nobody']}"
            print(f"| {slow:g} times as long | {vary:.0%} | {runs} | {told} |")
    right = sum(by_slow.values())
    recall = sum(by_slow[slow] for slow in SLOW if slow >= 2) / (2 * runs * len([slow for slow in SLOW if slow >= 2]))
    print(f"\nprecision {right / max(1, right + wrong):.1%}; recall of nodes twice as slow or slower {recall:.1%}")


if __name__ == "__main__":
    main()
