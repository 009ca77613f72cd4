"""Samplers whose position survives any change of the world size.

The order of an epoch is a pure function of (number of samples, seed, epoch). A sampler's state counts the samples that
were *trained* (`advance`), never those that a prefetching loader has drawn. `sample_order` does the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from elasticrt.data import sample_order
from elasticrt.distributed.collectives import rank_and_world
from elasticrt.errors import CheckpointError, explain, flag, whole_number


def permutation(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffled order of an epoch: an int64 tensor of shape (samples,), the same in every process."""
    # Hashed, because seed + epoch would give run 1's epoch 2 and run 2's epoch 1 the same order.
    digest = hashlib.sha256(f"elasticrt {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(samples, generator=generator)


class _Position:
    """The position in an epoch: which epoch, how many of its samples are trained, and their order."""

    def __init__(self, dataset: Sized, *, shuffle: bool, seed: int, rank: int | None, world_size: int | None) -> None:
        self._where = type(self).__name__
        if not isinstance(dataset, Sized):
            got, expected = type(dataset).__name__, "a map-style dataset"
            what, remedy = "the dataset has no length", "An IterableDataset brings its own order and needs no sampler"
            raise TypeError(explain(what, self._where, got=got, expected=expected, remedy=remedy))
        self._samples = whole_number(len(dataset), "the dataset's length", self._where, 1)
        self._shuffle = flag(shuffle, "shuffle", self._where)
        self._seed = whole_number(seed, "seed", self._where, 0)
        if (rank is None) != (world_size is None):
            raise ValueError(explain("give both or none", self._where, got=f"rank={rank}, world_size={world_size}"))
        self._given: tuple[int, int] | None = None
        if rank is not None and world_size is not None:
            whole_number(world_size, "world_size", self._where, 1)
            if whole_number(rank, "rank", self._where, 0) >= world_size:
                raise ValueError(explain("no such rank", self._where, got=rank, expected=f"< {world_size}"))
            self._given = rank, world_size
        self._epoch = 0
        self._consumed = 0
        self._order: tuple[int, torch.Tensor] | None = None
        # The settings that may be others when the run goes on from a checkpoint.
        self._cut: dict[str, Any] = {}

    @property
    def has_given_rank(self) -> bool:
        """Whether the rank is that of an argument, which stays what it is when the process gets another one."""
        return self._given is not None

    @property
    def epoch(self) -> int:
        """The epoch that `set_epoch` named last."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """Samples of this epoch that the whole world has trained."""
        return self._consumed

    @property
    def trained(self) -> int:
        """The same over all epochs."""
        return self._epoch * self._samples + self._consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. The current epoch keeps its position: a resumed one is not repeated."""
        if whole_number(epoch, "epoch", self._where, 0) != self._epoch:
            self._epoch = epoch
            self._consumed = 0

    def state_dict(self) -> dict[str, Any]:
        """The position and what it depends on, as plain values."""
        return {
            "kind": self._where,
            "samples": self._samples,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
        }

    def settings(self) -> dict[str, Any]:
        """What decides beside the position which samples a step has, as plain values: ranks of one run have the same.

        Empty with a rank that is given: each rank may then have data of its own.
        """
        if self.has_given_rank:
            return {}
        own = {name: value for name, value in self.state_dict().items() if name not in ("epoch", "consumed")}
        return {**own, **self._cut}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. The world size and the batch size may differ from those that saved it.

        Raises CheckpointError when the position would mean other samples: another dataset length, or, in the middle of
        an epoch, another seed or another `shuffle`.
        """
        own = self.state_dict()
        missing = set(own) - set(state)
        if missing:
            raise CheckpointError("not a sampler's state", self._where, got=f"without {sorted(missing)}")
        for name in ("kind", "samples", *(("shuffle", "seed") if state["consumed"] else ())):
            if state[name] != (now := own[name]):
                got, expected = f"{name}={state[name]} in the checkpoint", f"{name}={now} as now"
                what = f"the checkpoint's {name} is not this sampler's"
                raise CheckpointError(what, self._where, got=got, expected=expected)
        epoch, consumed = state["epoch"], state["consumed"]
        if type(epoch) is not int or type(consumed) is not int or epoch < 0 or not 0 <= consumed <= self._samples:
            raise CheckpointError("impossible position", self._where, got=f"epoch {epoch}, consumed {consumed}")
        self._epoch, self._consumed = epoch, consumed

    def _rank_and_world(self) -> tuple[int, int]:
        return self._given or rank_and_world()

    def _indices(self, start: int, stop: int) -> list[int]:
        if not self._shuffle:
            return list(range(start, stop))
        if self._order is None or self._order[0] != self._epoch:
            self._order = (self._epoch, permutation(self._samples, self._seed, self._epoch))
        indices: list[int] = self._order[1][start:stop].tolist()
        return indices


class ElasticBatchSampler(_Position, Sampler[list[int]]):
    """A batch sampler: this rank's part of each global batch, cut into micro-batches. For `DataLoader(batch_sampler=)`.

    Args:
        dataset: anything with a length; only the length is used.
        global_batch_size: samples per optimizer update, over all ranks.
        micro_batch_size: the most samples in one forward; None: a rank's whole slice at once.
        shuffle: a new order each epoch, from `seed`.
        seed: the same on all ranks.
        drop_last: leave out the last global batch of an epoch when it is smaller. Otherwise each sample counts once.
        rank: of this process; by default that of the process group, looked up when iterated. With one that is given all
            workers restart when the membership changes.
        world_size: processes in all; given with `rank`, or not at all.

    Attributes:
        micro_batch_size: as given.

    Raises TypeError and ValueError for arguments that cannot be.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch_size: int,
        *,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(dataset, shuffle=shuffle, seed=seed, rank=rank, world_size=world_size)
        self._batch_size = whole_number(global_batch_size, "global_batch_size", self._where, 1)
        if micro_batch_size is not None:
            whole_number(micro_batch_size, "micro_batch_size", self._where, 1)
        self.micro_batch_size = micro_batch_size
        self._drop_last = flag(drop_last, "drop_last", self._where)
        # Not `micro_batch_size`: it moves no sample from one step to another, and machines may have unlike memory.
        self._cut = {"global_batch_size": self._batch_size, "drop_last": self._drop_last}
        if self._drop_last and self._samples < self._batch_size:
            got = f"{self._samples} samples, global_batch_size={self._batch_size}, drop_last=True"
            what, remedy = "an epoch without a single batch", "Use drop_last=False or a smaller global_batch_size"
            raise ValueError(explain(what, self._where, got=got, remedy=remedy))

    def __len__(self) -> int:
        """Global batches of a full epoch: the same at any position and any world size."""
        return sample_order.batch_count(self._samples, 0, self._batch_size, drop_last=self._drop_last)

    @property
    def remaining(self) -> int:
        """Global batches of this epoch that are not trained yet."""
        return sample_order.batch_count(self._samples, self._consumed, self._batch_size, drop_last=self._drop_last)

    def advance(self) -> None:
        """The whole world has trained the next global batch. `Loop` calls this; a loop of one's own does it itself."""
        if not self.remaining:
            raise ValueError(explain("advanced past the end of the epoch", self._where, got=f"epoch {self._epoch}"))
        self._consumed = min(self._consumed + self._batch_size, self._samples)

    def shares(self) -> Iterator[sample_order.BatchSlice]:
        """What this rank runs from this position on, one share for each batch that `iter` yields."""
        rank, world_size = self._rank_and_world()
        bounds = sample_order.batch_bounds(self._samples, self._consumed, self._batch_size, drop_last=self._drop_last)
        return (
            share
            for start, stop in bounds
            for share in sample_order.shares_of_batch(start, stop, rank, world_size, self.micro_batch_size)
        )

    def indices(self, share: sample_order.BatchSlice) -> list[int]:
        """The dataset indices of a share that count. A borrowed sample does not."""
        return self._indices(share.start, share.stop) if share.weight else []

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of dataset indices from the present position to the end of the epoch. Drawing changes no state."""
        # Not a generator function: the position is the one at this call, not at the first draw.
        return (self._indices(share.start, share.stop) for share in self.shares())


class ElasticDistributedSampler(_Position, Sampler[int]):
    """torch's DistributedSampler with a position: shuffle everything, leave out what is consumed, then stride by rank.

    All ranks get equally many indices. As with DistributedSampler that repeats up to world_size - 1 samples at the end
    of an epoch (or with `drop_last` leaves up to that many out); use `ElasticBatchSampler` to count each exactly once.

    Args:
        dataset: anything with a length; only the length is used.
        num_replicas: processes in all; by default those of the process group, looked up when iterated. With a number
            that is given all workers restart when the membership changes.
        rank: of this process; given with `num_replicas`, or not at all.
        shuffle: a new order each epoch, from `seed`.
        seed: the same on all ranks.
        drop_last: leave out up to world_size - 1 samples instead of repeating so many.

    Raises TypeError and ValueError for arguments that cannot be.
    """

    def __init__(  # noqa: PLR0917  The order of DistributedSampler's own arguments.
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, shuffle=shuffle, seed=seed, rank=rank, world_size=num_replicas)
        self._drop_last = flag(drop_last, "drop_last", self._where)
        self._cut = {"drop_last": self._drop_last}

    def __len__(self) -> int:
        """Indices per rank of a full epoch at the present world size."""
        return sample_order.batch_count(self._samples, 0, self._rank_and_world()[1], drop_last=self._drop_last)

    @property
    def remaining(self) -> int:
        """Samples of this epoch that the world has not trained yet."""
        return self._samples - self._consumed

    def advance(self, samples: int) -> None:
        """The whole world has trained `samples` more: batch size x world size, cut at the end of the epoch."""
        self._consumed = min(self._consumed + whole_number(samples, "samples", self._where, 0), self._samples)

    def __iter__(self) -> Iterator[int]:
        """Dataset indices of this rank from the present position to the end of the epoch."""
        rank, world_size = self._rank_and_world()
        if self._samples and not len(self):
            got = f"{self._samples} samples for {world_size} ranks, drop_last=True"
            what, remedy = "an epoch without a single sample for each rank", "Use drop_last=False"
            raise ValueError(explain(what, self._where, got=got, remedy=remedy))
        positions = sample_order.strided(self._samples, self._consumed, rank, world_size, drop_last=self._drop_last)
        every = self._indices(0, self._samples)
        return (every[position] for position in positions)
