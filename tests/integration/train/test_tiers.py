"""What is saved comes back to the last bit: over disk, over memory, to more and to fewer processes."""

from __future__ import annotations

import itertools

import pytest
from ranks import run

STEPS = 5
PER_EPOCH = 6
LAST = 2 * PER_EPOCH + 2
SEEDS = ("own", "alike", "loop")
KINDS = {"model", "optimizer", "schedule", "scaler", "ema"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """What the ranks of each phase return, all of it from one interpreter: starting it is most of the time."""
    phases = {
        "left": (2, "tiers.leave_behind", {"steps": STEPS}),
        "disk, one process": (1, "tiers.from_disk", {"name": "one"}),
        "disk, three processes": (3, "tiers.from_disk", {"name": "three"}),
        "memory, one process": (1, "tiers.from_copy", {}),
        "memory, three processes": (3, "tiers.from_copy", {}),
        "disk, damaged": (3, "tiers.from_disk", {"name": "damaged", "damaged": 1}),
        "memory, damaged": (3, "tiers.from_copy", {"damaged": 1}),
        **{
            f"{seeds}, {name}": (world, "tiers.numbers", {**of, "seeds": seeds, "name": f"{seeds}-{name}"})
            for seeds in SEEDS
            for name, (world, of) in {
                "alone": (2, {"steps": LAST}),
                "to 3": (2, {"steps": 3}),
                "from 3": (2, {"steps": LAST, "begins_as": f"{seeds}-to 3"}),
                "from 3 again": (2, {"steps": LAST, "begins_as": f"{seeds}-to 3"}),
                "from 3 as three": (3, {"steps": LAST, "begins_as": f"{seeds}-to 3"}),
                f"to {PER_EPOCH}": (2, {"steps": PER_EPOCH}),
                f"from {PER_EPOCH}": (2, {"steps": LAST, "begins_as": f"{seeds}-to {PER_EPOCH}"}),
            }.items()
        },
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
    """S7: who gets the state over the process group holds it against its digest, and all hear that it is not the same
    before any of them makes anything of it."""
    well, damaged, also_well = results[f"{how}, damaged"]
    assert damaged["refused"].startswith("RuntimeError: the state was corrupted on its way to this rank")
    for each in (well, also_well):
        assert each["refused"].startswith("RuntimeError: the state was corrupted on its way to another rank")


@pytest.mark.parametrize("cut", [3, PER_EPOCH])
@pytest.mark.parametrize("seeds", SEEDS)
def test_rank_0_draws_what_it_would_have_drawn(results: dict[str, list], seeds: str, cut: int) -> None:
    """S6: python's, numpy's and torch's generators go on where they were: in an epoch, at its end, in later ones."""
    assert results[f"{seeds}, to {cut}"][0] + results[f"{seeds}, from {cut}"][0] == results[f"{seeds}, alone"][0]


@pytest.mark.parametrize("cut", [3, PER_EPOCH])
@pytest.mark.parametrize("seeds", ["alike", "loop"])
def test_every_rank_draws_what_it_would_have_drawn(results: dict[str, list], seeds: str, cut: int) -> None:
    """S6: where the script seeds all ranks alike, and where the Loop has a seed."""
    before, after, alone = (results[f"{seeds}, {name}"] for name in (f"to {cut}", f"from {cut}", "alone"))
    assert [first + then for first, then in zip(before, after, strict=True)] == alone


def test_what_ranks_draw_alike_they_go_on_drawing_alike(results: dict[str, list]) -> None:
    """Ranks that decide by the same random numbers whether to skip a layer would wait for each other for ever when one
    of them drew another number, after a restart with more of them as well."""
    first, *others = results["alike, from 3 as three"]
    assert all([step[:2] for step in other] == [step[:2] for step in first] for other in others)
    assert [step[:2] for step in first] == [step[:2] for step in results["alike, alone"][0][3:]]


@pytest.mark.parametrize("seeds", ["own", "loop"])
def test_other_ranks_draw_the_same_in_every_restart(results: dict[str, list], seeds: str) -> None:
    """Two restarts from one checkpoint are the same run; and no rank draws the numbers of another, or of before."""
    assert results[f"{seeds}, from 3"] == results[f"{seeds}, from 3 again"]
    for name in ("from 3", "from 3 as three"):
        after = itertools.chain.from_iterable(itertools.chain(*results[f"{seeds}, {name}"]))
        drawn = [*after, *itertools.chain(*results[f"{seeds}, to 3"][1])]
        assert len(set(drawn)) == len(drawn)
