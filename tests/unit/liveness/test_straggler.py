"""Which node is slow, from how long each rank waits for the others."""

from __future__ import annotations

import random

import pytest

from elasticrt.liveness.straggler import LOOKS_MIN, Comparison, Waits, slowest


@pytest.mark.parametrize(
    ("own_ms", "node"),
    [
        ({}, None),
        ({"a": 50.0}, None),
        ({"a": 10.0, "b": 10.0, "c": 14.0}, None),
        ({"a": 10.0, "b": 10.0, "c": 16.0}, "c"),
        ({"a": 10.0, "b": 31.0}, "b"),
        ({"a": 1.0, "b": 1.0, "c": 2.5}, None),
        ({"a": 10.0, "b": 40.0, "c": 40.0, "d": 40.0}, None),
    ],
)
def test_the_slowest_node(own_ms: dict[str, float], node: str | None) -> None:
    """Half as long again as the others' median, and 2 ms more: less is nobody's fault."""
    found = slowest({name: own / 1e3 for name, own in own_ms.items()})
    assert (found.node if found else None) == node


def _run(draw: random.Random, nodes: int, slow: float, looks: int) -> Comparison:
    """Ranks whose own work varies by a tenth; that of node 0 takes `slow` times as long. Two ranks a node."""
    comparison, totals = Comparison(), {rank: Waits(f"n{rank // 2}", 0, 0) for rank in range(2 * nodes)}
    for look in range(looks + 1):
        waited = dict.fromkeys(totals, 0.0)
        for _ in range(3):
            own = [draw.gauss(0.1, 0.01) * (slow if rank < 2 else 1.0) for rank in totals]
            waited = {rank: waited[rank] + max(own) - own[rank] for rank in totals}
        totals = {
            rank: Waits(now.node, now.waited_ns + int(waited[rank] * 1e9), now.samples + 3)
            for rank, now in totals.items()
        }
        comparison = comparison.looked(totals, 100 * look, max(0.115, 0.1 * slow + 0.01))
    return comparison


def test_stragglers_are_found_and_others_are_not() -> None:
    """W18: of 200 runs with a node that takes twice as long each is found; of 200 without one none is."""
    draw = random.Random(5)
    found = [_run(draw, draw.randint(2, 8), 2.0, LOOKS_MIN + 1) for _ in range(200)]
    assert all(each.is_certain and each.found is not None and each.found.node == "n0" for each in found)
    assert not any(_run(draw, draw.randint(2, 8), 1.0, LOOKS_MIN + 1).is_certain for _ in range(200))
    assert not _run(draw, 4, 2.0, LOOKS_MIN - 1).is_certain, "it is told after several looks"


def test_a_look_without_a_measurement_changes_nothing() -> None:
    """DDP measures one step in many: what was found holds until there is more."""
    found = _run(random.Random(1), 3, 2.0, 4)
    assert found.looked(found.totals, 900, 0.2).found == found.found
