"""Samplers: positions, prefetching, state, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elasticrt import CheckpointError, ConfigError, ElasticBatchSampler, ElasticDistributedSampler


def data(samples: int) -> TensorDataset:
    """As many samples."""
    return TensorDataset(torch.arange(samples))


def samplers(samples: int, batch: int, world: int, **options) -> list[ElasticBatchSampler]:
    """One for each rank."""
    return [ElasticBatchSampler(data(samples), batch, rank=r, world_size=world, **options) for r in range(world)]


def test_order_depends_on_seed_and_epoch_only():
    """The shuffled order is the same in every process, another one in another epoch or with another seed."""
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1):
            sampler = ElasticBatchSampler(data(20), 20, seed=seed)
            sampler.set_epoch(epoch)
            orders[seed, epoch] = tuple(next(iter(sampler)))
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == list(range(20)) for order in orders.values())


def test_length_is_constant_and_remaining_is_not():
    """len() counts a full epoch at any position; remaining counts down, and advancing past the end is refused."""
    sampler = ElasticBatchSampler(data(10), 4)
    for left in (3, 2, 1):
        assert (len(sampler), sampler.remaining) == (3, left)
        sampler.advance()
    assert (len(sampler), sampler.remaining, list(sampler)) == (3, 0, [])
    with pytest.raises(ValueError, match="past the end"):
        sampler.advance()


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_changes_no_state(workers):
    """Drawing ahead is not training: the position moves by advance() alone (D11)."""
    sampler = ElasticBatchSampler(data(40), 4, rank=0, world_size=1)
    loader = iter(DataLoader(data(40), batch_sampler=sampler, num_workers=workers))
    first = next(loader)[0].tolist()
    assert sampler.consumed == 0
    sampler.advance()
    assert next(iter(sampler)) != first
    assert sampler.consumed == 4
    del loader


def test_iteration_begins_where_the_position_was_at_iter():
    """A loader that draws late starts where it was asked to."""
    sampler = ElasticBatchSampler(data(8), 4, shuffle=False, rank=0, world_size=1)
    later = iter(sampler)
    sampler.advance()
    assert list(later) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(sampler) == [[4, 5, 6, 7]]


def test_set_epoch_keeps_the_current_one():
    """Going to the epoch one is in keeps the position; another one starts at its beginning."""
    sampler = ElasticBatchSampler(data(8), 4)
    sampler.advance()
    sampler.set_epoch(0)
    assert sampler.consumed == 4
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_a_dataset_that_grows_is_refused():
    """Its new samples would never be trained, and nothing would say so."""
    data = list(range(12))
    for sampler in (ElasticBatchSampler(data, 4), ElasticDistributedSampler(data)):
        sampler.set_epoch(1)
        data.append(12)
        with pytest.raises(ConfigError, match=r"changed .*got 13 samples; expected 12, as at first"):
            sampler.set_epoch(2)
        with pytest.raises(ConfigError, match="changed its length"):
            sampler.check_length()
        data.pop()


def test_state_travels_between_world_sizes():
    """Three ranks save, two load, and together they run exactly what was left (D08)."""
    three = samplers(23, 6, 3, seed=5)
    done = []
    for sampler in three:
        for indices, share in list(zip(sampler, sampler.shares(), strict=True))[:2]:
            done += indices if share.weight else []
        sampler.advance()
        sampler.advance()
    two = samplers(23, 6, 2, seed=5)
    rest = []
    for sampler in two:
        sampler.load_state_dict(three[0].state_dict())
        rest += [i for ids, s in zip(sampler, sampler.shares(), strict=True) if s.weight for i in ids]
    assert sorted(done + rest) == list(range(23))


def test_empty_slice_borrows_one_sample():
    """A rank without samples draws one that counts nothing."""
    for sampler in samplers(5, 4, 3, shuffle=False)[:2]:
        *_, last = zip(sampler, sampler.shares(), strict=True)
        assert (last[0], last[1].weight) == ([4], 0.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"samples": 11}, "samples=10"), ({"seed": 1}, "seed=0"), ({"shuffle": False}, "shuffle=True"),
     ({"kind": "ElasticDistributedSampler"}, "kind=")],
)  # fmt: skip
def test_another_dataset_is_refused_with_both_values(change, word):
    """A position that would mean other samples is refused, naming what was and what is (D07)."""
    sampler = ElasticBatchSampler(data(10), 4)
    sampler.advance()
    ((name, other),) = change.items()
    with pytest.raises(CheckpointError, match=f"the checkpoint's {name} is not this sampler's") as caught:
        ElasticBatchSampler(data(10), 4).load_state_dict(sampler.state_dict() | change)
    assert str(other) in str(caught.value)
    assert word in str(caught.value)


def test_another_seed_between_epochs_is_fine():
    """At the beginning of an epoch nothing depends on the old order."""
    sampler = ElasticBatchSampler(data(10), 4, seed=1)
    sampler.load_state_dict(ElasticBatchSampler(data(10), 4).state_dict())
    assert sampler.consumed == 0


@pytest.mark.parametrize("state", [{}, {"kind": "ElasticBatchSampler"}])
def test_foreign_state_is_refused(state):
    """Not a sampler's state."""
    with pytest.raises(CheckpointError, match="not a sampler"):
        ElasticBatchSampler(data(10), 4).load_state_dict(state)


@pytest.mark.parametrize("consumed", [-1, 11, 2.0, None])
def test_impossible_position_is_refused(consumed):
    """A position outside the epoch, or none at all."""
    state = ElasticBatchSampler(data(10), 4).state_dict() | {"consumed": consumed}
    with pytest.raises(CheckpointError, match="impossible"):
        ElasticBatchSampler(data(10), 4).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"global_batch_size": 0}, ValueError),
        ({"global_batch_size": -4}, ValueError),
        ({"global_batch_size": 4.0}, TypeError),
        ({"global_batch_size": True}, TypeError),
        ({"global_batch_size": 4, "micro_batch_size": 0}, ValueError),
        ({"global_batch_size": 4, "micro_batch_size": "2"}, TypeError),
        ({"global_batch_size": 4, "seed": -1}, ValueError),
        ({"global_batch_size": 4, "rank": 1}, ValueError),
        ({"global_batch_size": 4, "rank": 2, "world_size": 2}, ValueError),
        ({"global_batch_size": 11, "drop_last": True}, ValueError),
        ({"global_batch_size": 4, "drop_last": None}, TypeError),
        ({"global_batch_size": 4, "shuffle": "no"}, TypeError),
        ({"dataset": 10, "global_batch_size": 4}, TypeError),
        ({"dataset": [], "global_batch_size": 4}, ValueError),
    ],
)
def test_bad_arguments(arguments, error):
    """Wrong types and sizes are refused at once, in the one form of message."""
    with pytest.raises(error, match=r"ElasticBatchSampler\)"):
        ElasticBatchSampler(**({"dataset": data(10)} | arguments))


def test_an_epoch_with_nothing_for_each_rank_is_refused():
    """A world that is larger than the data, and drop_last: nothing would be trained, and nobody told."""
    sampler = ElasticDistributedSampler(data(2), num_replicas=3, rank=0, drop_last=True)
    with pytest.raises(ValueError, match="2 samples for 3 ranks, drop_last=True"):
        iter(sampler)
    assert len(list(ElasticDistributedSampler(data(2), num_replicas=3, rank=0))) == 1


def test_place_comes_from_the_environment_without_a_group(monkeypatch):
    """Without arguments and process group the launcher's variables say which rank this is."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert list(ElasticBatchSampler(data(8), 4, shuffle=False)) == [[2, 3], [6, 7]]


def test_distributed_sampler_goes_on_exactly():
    """After 6 of 12 at 2 ranks, 3 ranks run each of the other 6 once; torch's own loses three and repeats three."""
    two = [ElasticDistributedSampler(data(12), 2, r) for r in range(2)]
    done = [i for s in two for i in list(s)[:3]]
    two[0].advance(6)
    rest = []
    for rank in range(3):
        sampler = ElasticDistributedSampler(data(12), 3, rank)
        sampler.load_state_dict(two[0].state_dict())
        rest += list(sampler)
        assert (len(sampler), sampler.remaining) == (4, 6)
    assert sorted(done + rest) == list(range(12))


def test_distributed_sampler_with_one_left_and_four_ranks():
    """The tail that other elastic samplers die on: everybody runs the one sample that is left."""
    samplers_ = [ElasticDistributedSampler(data(5), 4, r) for r in range(4)]
    for sampler in samplers_:
        sampler.advance(4)
    (last,) = {tuple(sampler) for sampler in samplers_}
    assert len(last) == 1
