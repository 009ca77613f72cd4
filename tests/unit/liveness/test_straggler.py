"""Which node is slow, from how long each rank waits for the others."""

from __future__ import annotations

import random

import pytest

from elasticrt.liveness.straggler import LOOKS_MIN, slowest
from tests.bench.straggler import drawn


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


def test_stragglers_are_found_and_others_are_not() -> None:
    """W18: of 200 runs with a node that takes twice as long each is found; of 200 without one none is."""
    draw = random.Random(5)
    found = [drawn(draw, draw.randint(2, 8), 2.0, LOOKS_MIN + 1) for _ in range(200)]
    assert all(each.certain is not None and each.certain.node == "n0" for each in found)
    assert not any(drawn(draw, draw.randint(2, 8), 1.0, LOOKS_MIN + 1).certain for _ in range(200))
    assert not drawn(draw, 4, 2.0, LOOKS_MIN - 1).certain, "it is told after several looks"


def test_a_look_without_a_measurement_changes_nothing() -> None:
    """DDP measures one step in many: what was found holds until there is more."""
    found = drawn(random.Random(1), 3, 2.0, 4)
    assert found.looked(found.own_s, 900).found == found.found
