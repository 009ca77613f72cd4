"""The arithmetic of an epoch: which samples a rank trains, and with which weight. Pure.

An epoch is one sequence of n positions, the same on every rank. `consumed` is the number of positions that the whole
world has trained. The rest is first cut into *global* batches, so global batch k is the same set of samples at any
world size. Each rank gets a contiguous slice of each global batch, and `micro_batch_size` cuts that slice into shares
of nearly equal size.

The weight of a share is world size x its size / the size of the global batch. DDP divides the sum of all gradients by
the world size. So the weighted sum is the gradient of the mean over the global batch, however unevenly the samples are
distributed. A rank whose slice is empty (the last batch of an epoch can be smaller than the world) runs one borrowed
sample with weight 0: the rank must take part in the collectives, and its result must not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class BatchSlice:
    """A share: the samples of one forward of one rank, at the positions [start, stop) of the epoch's order.

    Attributes:
        start: the first position.
        stop: one past the last position.
        weight: the factor on this forward's gradient; 0.0 marks a borrowed sample, which does not count.
        last: whether this is the rank's last share of the global batch, after which the gradients are reduced.
    """

    start: int
    stop: int
    weight: float
    last: bool


WHOLE = BatchSlice(0, 0, 1.0, True)
"""The share of a batch that no ElasticBatchSampler has cut: the batch counts as it is, and every batch is a step."""


def batch_count(samples: int, consumed: int, batch_size: int, *, drop_last: bool) -> int:
    """How many global batches are left in an epoch of `samples` samples, of which `consumed` are trained."""
    left = max(0, samples - consumed)
    return left // batch_size if drop_last else -(-left // batch_size)


def batch_bounds(samples: int, consumed: int, batch_size: int, *, drop_last: bool) -> Iterator[tuple[int, int]]:
    """The remaining global batches as [start, stop) positions. Without `drop_last` the last one may be smaller."""
    count = batch_count(samples, consumed, batch_size, drop_last=drop_last)
    for k in range(count):
        start = consumed + k * batch_size
        yield start, min(start + batch_size, samples)


def rank_slice(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous part of [start, stop) that belongs to `rank`; sizes differ by at most one, and may be zero."""
    size = stop - start
    return start + rank * size // world_size, start + (rank + 1) * size // world_size


def shares_of_batch(
    start: int, stop: int, rank: int, world_size: int, micro_batch_size: int | None
) -> list[BatchSlice]:
    """The shares that `rank` runs for the global batch [start, stop): at least one, and the last one is marked."""
    lower, upper = rank_slice(start, stop, rank, world_size)
    size = upper - lower
    if size == 0:
        return [BatchSlice(start, start + 1, 0.0, True)]
    # Most steps come here. The result is the same as below, in less time.
    if micro_batch_size is None or size <= micro_batch_size:
        return [BatchSlice(lower, upper, world_size * size / (stop - start), True)]
    # Shares of nearly equal size instead of full ones and a rest: a last share of one sample would upset batch norm.
    pieces = -(-size // micro_batch_size)
    edges = [lower + i * size // pieces for i in range(pieces + 1)]
    return [
        BatchSlice(a, b, world_size * (b - a) / (stop - start), last=i == pieces - 1)
        for i, (a, b) in enumerate(pairwise(edges))
    ]


def strided(samples: int, consumed: int, rank: int, world_size: int, *, drop_last: bool) -> Iterator[int]:
    """The positions of `rank` in the manner of torch's DistributedSampler: every world_size-th of those that are left.

    All ranks get the same number. Without `drop_last`, the first of the remaining positions are repeated at the end, at
    most world_size - 1 of them. With `drop_last` the tail is left out.
    """
    left = max(0, samples - consumed)
    # Modulo what is left: at the end, the last ranks begin again at the first of the remaining positions.
    for k in range(batch_count(left, 0, world_size, drop_last=drop_last)):
        yield consumed + (k * world_size + rank) % left
