"""Several processes: gradients, samples and checkpoints do not depend on how many there are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from ranks import run

EPOCHS, BATCH, SAMPLES = 2, 8, 53
DAMAGED = "step-3-g0-" + "a" * 16
STEPS = EPOCHS * -(-SAMPLES // BATCH)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int | None], list[dict]]:
    """What every world size ends with, for every way to cut a batch."""
    directory = tmp_path_factory.mktemp("gradients")
    # 53 samples in batches of 13 leave one sample for the last batch: two of three ranks have nothing.
    keys = list(itertools.product((1, 2, 3, 4), (13, 8), (None, 3)))
    phases = [(world, "gradients", {"batch_size": batch, "micro": micro}) for world, batch, micro in keys]
    return dict(zip(keys, run(directory, *phases), strict=True))


@pytest.mark.parametrize("batch_size", [13, 8])
@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradient_is_the_mean_over_the_global_batch(gradients, world_size, micro, batch_size):
    """Uneven and empty slices, micro-batches, chained modules, penalties: all equal one process with whole batches."""
    expected = gradients[1, batch_size, None][0]["parameters"]
    for rank in gradients[world_size, batch_size, micro]:
        assert rank["parameters"] == pytest.approx(expected, rel=0, abs=1e-11)


def test_ranks_differ_in_their_number_of_forwards(gradients):
    """The equality above is not for want of unevenness: ranks ran different numbers of micro-batches."""
    assert len({rank["forwards"] for rank in gradients[2, 13, 3]}) > 1


def merged(ranks: list[dict]) -> dict[tuple[int, int], list[int]]:
    """The samples of each (epoch, step) over all ranks."""
    steps: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        for epoch, step, ids in rank["seen"]:
            steps.setdefault((epoch, step), []).extend(ids)
    return {key: sorted(ids) for key, ids in steps.items()}


def test_resume_in_the_middle_of_an_epoch_at_other_world_sizes(tmp_path: Path):
    """2 -> 3 -> 1 -> 2 processes train the same samples in the same steps to the same weights (D08, D10, S5, S6)."""
    worlds = [(2, 3), (3, 7), (1, 9), (2, None)]
    phases = [(world, "train", {"steps": steps, "epochs": EPOCHS, "name": "changing"}) for world, steps in worlds]
    reference, *results = run(tmp_path, (1, "train", {"steps": None, "epochs": EPOCHS, "name": "alone"}), *phases)
    assert [ranks[0]["began"] for ranks in results] == [0, 3, 7, 9]
    assert {rank["steps"] for rank in results[-1]} == {STEPS}
    seen: dict[tuple[int, int], list[int]] = {}
    for ranks in results:
        phase = merged(ranks)
        assert not set(phase) & set(seen), "a step was trained twice"
        seen |= phase
    assert seen == merged(reference)
    for epoch in range(EPOCHS):
        ids = sorted(itertools.chain.from_iterable(ids for (e, _), ids in seen.items() if e == epoch))
        assert ids == list(range(SAMPLES))
    for rank in results[-1]:
        assert rank["parameters"] == pytest.approx(reference[0]["parameters"], rel=0, abs=1e-11)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """Cases that need three processes and little else."""
    directory = tmp_path_factory.mktemp("small")
    (directory / "damaged").mkdir()
    (directory / "damaged" / f"{DAMAGED}.json").write_text("not json")
    names = ("first_and_sum", "first_fails", "damaged", "waits", "other_batches", "other_loaders", "apart")
    return dict(zip(names, run(directory, *((3, name, {}) for name in names)), strict=True))


def test_first_sum_and_shard(small):
    """local_first lets one go first, sums are exact and mixed types agree, shards are disjoint and complete."""
    ranks = small["first_and_sum"]
    assert [rank["first"] for rank in ranks] == [True, False, False]
    assert ranks[0]["order"][0] == "0"
    assert sorted(ranks[0]["order"]) == ["0", "1", "2"]
    for number, rank in enumerate(ranks):
        assert rank["sum"] == [3 * 2**60, 0.5, 3]
        assert isinstance(rank["sum"][0], int)
        assert rank["one"] == 3
        assert rank["again"]
        assert rank["place"] == [number, number, 3, 3, 0]
    assert sorted(itertools.chain.from_iterable(rank["shard"] for rank in ranks)) == list(range(10))


def test_first_fails_for_all_at_once(small):
    """When the one that goes first raises, the others raise with its words, and at once."""
    ranks = small["first_fails"]
    assert ranks[0] == "FileNotFoundError: [Errno 2] No such file or directory: 'no such file'"
    for text in ranks[1:]:
        assert text.startswith("RuntimeError: the rank that runs the block first has failed")
        assert "FileNotFoundError: [Errno 2] No such file or directory: 'no such file'" in text


def test_batch_sizes_that_differ(small):
    """Ranks that start with unlike batches would count the samples differently: all end, and name both values."""
    words = "got global_batch_size=6 on rank 1; expected global_batch_size=5, as on other ranks"
    assert [words in text for text in small["other_batches"]] == [True, True, True]
    words = "got batch_size=6 on rank 1; expected batch_size=5, as on other ranks"
    assert [words in text for text in small["other_loaders"]] == [True, True, True]


def test_a_step_without_an_exchange_is_told(small):
    """Whoever forgets DistributedDataParallel trains a model on each rank, and would find out by the results."""
    for rank in small["apart"]:
        assert rank["alone"].count("each rank trains a model of its own. Wrap the model in") == 1
        assert rank["wrapped"] == ""


def test_waiting_is_not_silent_and_not_a_collective(small):
    """D05, D06: who waits says for whom; the error of one rank's build is everybody's; no keys are left behind."""
    ranks = small["waits"]
    said = "\n".join(ranks[0]["lines"])
    assert "waiting in barrier() for rank 2 to arrive" in said
    assert "waiting in prepare(" in said
    assert "for rank 1 to finish" in said
    assert "waiting in global_first() for rank 0" in "\n".join(ranks[1]["lines"])
    assert ranks[2]["lines"] == [], "one of those who wait speaks for all"
    for rank in ranks:
        assert rank["there"], "nobody goes on before all nodes have their data"
        assert "ValueError: no corpus for" in rank["failed"]
        assert rank["kept"] <= 3


def test_no_usable_checkpoint_is_one_error_everywhere(small):
    """All ranks raise CheckpointError naming the file, not only the one that looked (F07)."""
    assert len(set(small["damaged"])) == 1
    assert "no checkpoint can be used" in small["damaged"][0]
    assert f"{DAMAGED}.json" in small["damaged"][0]
