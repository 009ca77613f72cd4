"""When copies of the state are taken into memory, and when not."""

from __future__ import annotations

import pytest

from elasticrt.errors import ConfigError
from elasticrt.train.copies import Copies, lacks_room, next_at
from elasticrt.train.loop import Loop
from elasticrt.train.room import available_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("cost_s", "budget", "expected"), [(0.001, 0.01, 100.1), (0.4, 0.01, 140.0), (0.5, 0.5, 101.0)]
)
def test_the_cost_of_a_copy_sets_when_the_next_is_taken(cost_s: float, budget: float, expected: float) -> None:
    """Copies take the share of the time that was granted, whatever the size of the state."""
    assert next_at(100.0, cost_s, budget) == pytest.approx(expected)


@pytest.mark.parametrize(("taken", "more"), [(0, 4), (1, 2), (2, 1), (3, 1), (1000, 1)])
def test_what_is_still_to_come_must_fit(taken: int, more: int) -> None:
    """Four copies are held at once: on the host, being written, and two by the agent. Those that are there take no room
    again; a state for which the memory does not suffice is left to the disk, and the reason has both numbers."""
    assert lacks_room(100 * MIB, more * 100 * MIB + 1, taken) == ""
    assert lacks_room(100 * MIB, more * 100 * MIB, taken) == (
        f"no room for {more} of 100 MiB each, {more * 100} MiB are free"
    )


def test_memory_that_is_just_enough_stays_enough() -> None:
    """Copies that have once been begun are not given up for the room that they take themselves."""
    size, free = 100 * MIB, 401 * MIB
    for taken, held in enumerate((0, 2, 3, 3, 3)):
        assert not lacks_room(size, free - held * size, taken)


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
