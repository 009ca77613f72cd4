"""When copies of the state are taken into memory, and when not."""

from __future__ import annotations

import pytest

from elasticrt.errors import ConfigError
from elasticrt.train.copies import Copies, available_bytes, lacks_room, next_at
from elasticrt.train.loop import Loop

MIB = 2**20


@pytest.mark.parametrize(
    ("cost_s", "budget", "expected"), [(0.001, 0.01, 100.1), (0.4, 0.01, 140.0), (0.5, 0.5, 101.0)]
)
def test_the_cost_of_a_copy_sets_when_the_next_is_taken(cost_s: float, budget: float, expected: float) -> None:
    """Copies take the share of the time that was granted, whatever the size of the state."""
    assert next_at(100.0, cost_s, budget) == pytest.approx(expected)


@pytest.mark.parametrize(("size", "free", "fits"), [(100 * MIB, 401 * MIB, True), (100 * MIB, 400 * MIB, False)])
def test_four_copies_must_fit(size: int, free: int, fits: bool) -> None:
    """A state for whose copies the memory does not suffice is left to the disk, and the reason has both numbers."""
    problem = lacks_room(size, free)
    assert (problem == "") == fits
    assert fits or problem == "4 copies need 400 MiB, 400 MiB are free"


def test_the_memory_that_is_left_is_known() -> None:
    """It is some part of what the machine has."""
    assert 0 < available_bytes() < 2**50


def test_without_an_agent_none_are_taken() -> None:
    """A script that runs by itself has nobody to keep its copies."""
    copies = Copies(None, 0.01)
    copies.begin()
    assert not copies.due(1e12)
    copies.wait()


@pytest.mark.parametrize("share", [-0.1, 1.0, True, "1%"])
def test_a_share_that_cannot_be_is_refused(share: object, tmp_path: object) -> None:
    """`Loop(memory=)` takes a share of the time."""
    with pytest.raises(ConfigError, match="memory"):
        Loop(str(tmp_path), memory=share)  # type: ignore[arg-type]  # That is the point.
