"""Histories of a run, with the samplers themselves: resized, crashed, restored. No sample is lost, none repeated."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, product

import pytest

from elasticrt import ElasticBatchSampler, ElasticDistributedSampler


class World:
    """As many ranks as it takes, all at one position."""

    def __init__(self, samples: int, batch: int, size: int, micro: int | None, state: dict | None) -> None:
        data = range(samples)
        self.samplers = [
            ElasticBatchSampler(data, batch, micro_batch_size=micro, seed=3, rank=rank, world_size=size)
            for rank in range(size)
        ]
        if state is not None:
            for sampler in self.samplers:
                sampler.load_state_dict(state)

    def epoch(self, number: int) -> list[list[int]]:
        """The rest of it: what the ranks together run and count, for each global batch."""
        batches: list[list[int]] = []
        for sampler in self.samplers:
            sampler.set_epoch(number)
            k = 0
            for indices, share in zip(sampler, sampler.shares(), strict=True):
                if k == len(batches):
                    batches.append([])
                batches[k] += indices if share.weight else []
                k += share.last
            assert k == sampler.remaining, "a rank that takes part in fewer steps leaves the others waiting"
        return batches

    def train(self, steps: int) -> None:
        """So many global batches are done."""
        for sampler in self.samplers:
            for _ in range(steps):
                sampler.advance()

    def state(self) -> dict:
        """What a checkpoint holds: the same on every rank."""
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]


def test_every_history_of_small_worlds():
    """S5, D08, D10: all assignments of world sizes 1 to 3 to the steps of an epoch, for all small epochs."""
    histories = 0
    for samples, batch, micro in product(range(1, 8), range(1, 4), (None, 2)):
        steps = -(-samples // batch)
        if steps > 5:
            continue
        reference = World(samples, batch, 1, None, None).epoch(0)
        for sizes in product((1, 2, 3), repeat=steps):
            state, seen = None, []
            for size in sizes:
                world = World(samples, batch, size, micro, state)
                seen.append(world.epoch(0)[0])
                world.train(1)
                state = world.state()
            assert seen == reference, (samples, batch, micro, sizes)
            assert sorted(chain(*seen)) == list(range(samples))
            histories += 1
    assert histories > 1000


def _history(draw: random.Random) -> tuple[Counter[tuple[int, int]], int, int]:
    """Two epochs with commits, crashes and resizes; how often each (epoch, sample) was trained and committed."""
    samples, batch = draw.randint(1, 30), draw.randint(1, 9)
    micro = draw.choice([None, 1, 3])
    counted: Counter[tuple[int, int]] = Counter()
    committed: tuple[int, dict | None] = (0, None)
    while committed[0] < 2:
        epoch, state = committed
        world = World(samples, batch, draw.randint(1, 5), micro, state)
        since: Counter[tuple[int, int]] = Counter()
        while epoch < 2:
            rest = world.epoch(epoch)
            steps = draw.randint(0, len(rest))
            since.update((epoch, sample) for done in rest[:steps] for sample in done)
            world.train(steps)
            if steps == len(rest):
                epoch += 1
                for sampler in world.samplers:
                    sampler.set_epoch(epoch)
            if draw.random() < 0.5:
                committed = epoch, world.state()
                counted, since = counted + since, Counter()
            if draw.random() < 0.4:  # A crash, or a resize: what was not committed is lost, and is done again.
                break
        else:
            counted, committed = counted + since, (epoch, world.state())
    return counted, samples, 2


@pytest.mark.parametrize("part", range(4))
def test_random_histories_of_crashes_and_resizes(part):
    """S5, D08, D09, G6: 10,000 histories in all; what was committed is every sample of every epoch, once."""
    for seed in range(part * 2500, part * 2500 + 2500):
        counted, samples, epochs = _history(random.Random(seed))
        assert counted == Counter(product(range(epochs), range(samples))), f"seed {seed}"


def test_random_histories_of_the_strided_sampler():
    """D08: ElasticDistributedSampler trains every sample, and repeats some only in the last step before a change."""
    for seed in range(2000):
        draw = random.Random(seed)
        samples, per_rank = draw.randint(1, 30), draw.randint(1, 4)
        state, counted, left, size = None, Counter(), samples, 0
        while left:
            size = draw.randint(1, 5)
            ranks = [ElasticDistributedSampler(range(samples), size, rank, seed=1) for rank in range(size)]
            for sampler in ranks:
                if state is not None:
                    sampler.load_state_dict(state)
            drawn = [list(sampler) for sampler in ranks]
            assert len({len(indices) for indices in drawn}) == 1
            steps = draw.randint(1, max(1, -(-len(drawn[0]) // per_rank)))
            for indices in drawn:
                counted.update(indices[: steps * per_rank])
            for sampler in ranks:
                sampler.advance(steps * per_rank * size)
            state, left = ranks[0].state_dict(), ranks[0].remaining
        assert set(counted) == set(range(samples)), f"seed {seed}"
        assert sum(counted.values()) - samples < size, f"seed {seed}: only the last world fills up its last round"
