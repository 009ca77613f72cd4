"""Which node is slow, from how long each rank waits for the others."""

from __future__ import annotations

import random

import pytest

from elasticrt.liveness.straggler import LOOKS_MIN, slowest, successor
from elasticrt.rendezvous.records import Member
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
    assert all(each.is_certain and each.found is not None and each.found.node == "n0" for each in found)
    assert not any(drawn(draw, draw.randint(2, 8), 1.0, LOOKS_MIN + 1).is_certain for _ in range(200))
    assert not drawn(draw, 4, 2.0, LOOKS_MIN - 1).is_certain, "it is told after several looks"


def test_a_look_without_a_measurement_changes_nothing() -> None:
    """DDP measures one step in many: what was found holds until there is more."""
    found = drawn(random.Random(1), 3, 2.0, 4)
    assert found.looked(found.totals, 900, 0.2).found == found.found


@pytest.mark.parametrize(
    ("looks", "wanted", "node"),
    [
        pytest.param(4, 0, "", id="never, without the option"),
        pytest.param(LOOKS_MIN - 1, 1, "", id="not before it is certain"),
        pytest.param(4, 5, "", id="not yet"),
        pytest.param(4, 4, "n0", id="often enough"),
        pytest.param(6, 4, "n0", id="and still"),
    ],
)
def test_a_node_that_was_slow_for_long_is_to_go(looks: int, wanted: int, node: str) -> None:
    """After so many comparisons, one after the other, as the option says."""
    assert drawn(random.Random(3), 3, 2.0, looks).is_to_go(wanted) == node


def _member(node: str, *, workers: int = 2, warm: bool = True, draining: bool = False) -> Member:
    return Member(
        node=node, incarnation="0" * 16, address="10.0.0.1", pid=1, workers=workers, probe_port=1, port=1,
        warm=warm, draining=draining,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("others", "follows"),
    [
        pytest.param([], "", id="nobody stands by"),
        pytest.param([_member("c")], "c", id="one stands by"),
        pytest.param([_member("d"), _member("c")], "c", id="two do"),
        pytest.param([_member("c", warm=False)], "", id="it has not imported torch so far"),
        pytest.param([_member("c", workers=1)], "", id="it has fewer workers"),
        pytest.param([_member("c", draining=True)], "", id="it leaves"),
        pytest.param([_member("spared")], "", id="it was slow itself"),
        pytest.param([_member("c"), _member("b", draining=True)], "", id="another change is under way"),
    ],
)
def test_who_takes_the_place_of_a_slow_node(others: list[Member], follows: str) -> None:
    """A node that stands by with as many workers, and was not slow before."""
    members = [_member("slow"), _member("a"), *others]
    assert successor("slow", members, seated=["slow", "a", "b"], spared=["spared"]) == follows
    assert successor("gone", members, seated=["a"], spared=[]) == ""
