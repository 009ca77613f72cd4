"""What is saved comes back to the last bit: over disk, over memory, to more and to fewer processes."""

from __future__ import annotations

import itertools

import pytest
from ranks import run

STEPS = 5
PER_EPOCH = 7
LAST = 2 * PER_EPOCH + 2
KINDS = {"model", "optimizer", "schedule", "scaler", "ema"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What the ranks of each phase return, all of it from one interpreter: starting it is most of the time."""
    numbers = "tiers.numbers"
    phases = {
        "left": (2, "tiers.leave_behind", {"steps": STEPS}),
        "disk, one process": (1, "tiers.from_disk", {"name": "one"}),
        "disk, three processes": (3, "tiers.from_disk", {"name": "three"}),
        "memory, one process": (1, "tiers.from_copy", {}),
        "memory, three processes": (3, "tiers.from_copy", {}),
        "disk, damaged": (3, "tiers.from_disk", {"name": "damaged", "damaged": 1}),
        "memory, damaged": (3, "tiers.from_copy", {"damaged": 1}),
        "alone": (2, numbers, {"steps": LAST, "name": "alone"}),
        "to 3": (2, numbers, {"steps": 3, "name": "to-3"}),
        "from 3": (2, numbers, {"steps": LAST, "name": "from-3", "begins_as": "to-3"}),
        "from 3 again": (2, numbers, {"steps": LAST, "name": "again", "begins_as": "to-3"}),
        f"to {PER_EPOCH}": (2, numbers, {"steps": PER_EPOCH, "name": "to-end"}),
        f"from {PER_EPOCH}": (2, numbers, {"steps": LAST, "name": "from-end", "begins_as": "to-end"}),
    }
    return dict(zip(phases, run(tmp_path_factory.mktemp("tiers"), *phases.values()), strict=True))


@pytest.mark.parametrize("how", ["disk", "memory"])
@pytest.mark.parametrize("world", ["one process", "three processes"])
def test_everything_comes_back_to_the_last_bit(results: dict[str, list], how: str, world: str) -> None:
    """S6: model, optimizer, schedule, GradScaler and averaged model, on every rank, at another world size. In the
    memory tier all ranks but one have nothing: they get the copy over the process group."""
    left = results["left"][0]
    assert set(left) == KINDS
    for found in results[f"{how}, {world}"]:
        assert found["prints"] == left
        assert found["steps"] == STEPS
        assert found["scale"] == 2.0 ** (10 + STEPS // 2)


@pytest.mark.parametrize("how", ["disk", "memory"])
def test_what_arrives_damaged_is_refused(results: dict[str, list], how: str) -> None:
    """S7: who gets the state over the process group holds it against its digest before it makes anything of it."""
    well, damaged, also_well = results[f"{how}, damaged"]
    assert well == also_well
    assert well["prints"] == results["left"][0]
    assert damaged["refused"].startswith("RuntimeError: the state has changed on its way to this rank")


@pytest.mark.parametrize("cut", [3, PER_EPOCH])
def test_rank_0_draws_what_it_would_have_drawn(results: dict[str, list], cut: int) -> None:
    """S6: python's, numpy's and torch's generators go on where they were: in an epoch, at its end, in later ones."""
    assert results[f"to {cut}"][0] + results[f"from {cut}"][0] == results["alone"][0]


def test_other_ranks_draw_the_same_in_every_restart(results: dict[str, list]) -> None:
    """Two restarts from one checkpoint are the same run; and no rank draws the numbers of another, or of before."""
    assert results["from 3"] == results["from 3 again"]
    after = itertools.chain.from_iterable(itertools.chain(*results["from 3"]))
    drawn = [*after, *itertools.chain(*results["to 3"][1])]
    assert len(set(drawn)) == len(drawn)
