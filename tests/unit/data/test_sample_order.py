"""The arithmetic of an epoch: small worlds completely, large histories at random."""

from __future__ import annotations

import random
from itertools import chain, product

import pytest

from elasticrt.data.sample_order import batch_bounds, batch_count, rank_slice, shares_of_batch, strided


@pytest.mark.parametrize("drop_last", [False, True])
def test_small_worlds_exhaustively(drop_last):
    """Every sample of every global batch is run by exactly one rank, weights add up to the world size (S5, D10)."""
    for samples, batch, world, micro in product(range(1, 9), range(1, 6), range(1, 5), (None, 1, 2, 3)):
        covered = []
        for start, stop in batch_bounds(samples, 0, batch, drop_last=drop_last):
            ranks = [shares_of_batch(start, stop, rank, world, micro) for rank in range(world)]
            run = [p for shares in ranks for s in shares if s.weight for p in range(s.start, s.stop)]
            assert run == list(range(start, stop))
            assert sum(s.weight for shares in ranks for s in shares) == pytest.approx(world)
            for shares in ranks:
                assert [s.last for s in shares] == [False] * (len(shares) - 1) + [True]
                assert all(start <= s.start < s.stop <= stop for s in shares)
                assert micro is None or all(s.stop - s.start <= micro for s in shares)
                assert len(shares) == 1 or all(s.weight for s in shares), "only an empty slice borrows"
            covered += run
        expected = samples - samples % batch if drop_last else samples
        assert covered == list(range(expected))


def test_global_batches_do_not_depend_on_the_world_size():
    """Global batch k is the same set at any world size and any micro-batch size."""
    for samples, batch in product(range(1, 30), (1, 4, 7)):
        sets = set()
        for world, micro in product(range(1, 6), (None, 2)):
            ranks = [
                [
                    tuple(
                        p for s in shares_of_batch(a, b, rank, world, micro) if s.weight for p in range(s.start, s.stop)
                    )
                    for a, b in batch_bounds(samples, 0, batch, drop_last=False)
                ]
                for rank in range(world)
            ]
            sets.add(tuple(tuple(sum(parts, ())) for parts in zip(*ranks, strict=True)))
        assert len(sets) == 1


@pytest.mark.parametrize(
    ("samples", "consumed", "batch", "drop_last", "left"),
    [(10, 0, 4, False, 3), (10, 0, 4, True, 2), (10, 8, 4, False, 1), (10, 8, 4, True, 0), (10, 10, 4, False, 0),
     (3, 0, 4, False, 1), (3, 0, 4, True, 0)],
)  # fmt: skip
def test_batch_count(samples, consumed, batch, drop_last, left):
    """What is left of an epoch, by the policy for its tail."""
    assert batch_count(samples, consumed, batch, drop_last=drop_last) == left
    assert len(list(batch_bounds(samples, consumed, batch, drop_last=drop_last))) == left


def test_slices_differ_by_one_at_most():
    """Nobody waits long for another rank."""
    for size, world in product(range(20), range(1, 9)):
        sizes = [b - a for a, b in (rank_slice(5, 5 + size, r, world) for r in range(world))]
        assert sum(sizes) == size
        assert max(sizes) - min(sizes) <= 1


def test_ten_thousand_histories():
    """World size, batch size and micro-batch size change at random: no sample lost, none repeated (D08, G6)."""
    draw = random.Random(7)
    for history in range(10_000):
        samples = draw.randint(1, 40)
        consumed, seen = 0, []
        while consumed < samples:
            batch, world = draw.randint(1, 12), draw.randint(1, 7)
            micro = draw.choice([None, 1, 2, 5])
            bounds = list(batch_bounds(samples, consumed, batch, drop_last=False))
            for start, stop in bounds[: draw.randint(1, len(bounds))]:
                for rank in range(world):
                    for share in shares_of_batch(start, stop, rank, world, micro):
                        seen += range(share.start, share.stop) if share.weight else ()
                consumed = stop
        assert sorted(seen) == list(range(samples)), f"history {history}"


@pytest.mark.parametrize("drop_last", [False, True])
def test_strided_shape(drop_last):
    """All ranks get equally many; repeated or left out are fewer than the world size."""
    for samples, world in product(range(1, 15), range(1, 6)):
        for consumed in range(samples + 1):
            ranks = [list(strided(samples, consumed, r, world, drop_last=drop_last)) for r in range(world)]
            assert len({len(rank) for rank in ranks}) == 1
            everything = list(chain(*ranks))
            left = set(range(consumed, samples))
            if drop_last:
                assert len(set(everything)) == len(everything)
                assert len(left - set(everything)) < world
            else:
                assert set(everything) == left
                assert len(everything) - len(left) < world
