"""The samplers: which samples this rank trains, with a position that survives any change of the world size.

The order of an epoch is a pure function of (number of samples, seed, epoch). A sampler's state counts the samples that
were *trained* (`advance`), never those that a prefetching loader has drawn. The division among ranks is arithmetic
(`sample_order`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from elasticrt.data import sample_order
from elasticrt.distributed.collectives import rank_and_world
from elasticrt.errors import CheckpointError, ConfigError, explain, flag, whole_number


def permutation(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffled order of an epoch: an int64 tensor of shape (samples,), the same in every process."""
    # Seed and epoch are hashed. Their sum would give epoch 2 with seed 1 and epoch 1 with seed 2 the same order. The
    # shift makes 63 bits of the digest's 64, as `manual_seed` takes a signed number.
    digest = hashlib.sha256(f"elasticrt {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(samples, generator=generator)


class _Position:
    """The part that both samplers share: the epoch, how many of its samples are trained, and their order.

    Args:
        dataset: anything with a length.
        shuffle, seed: as for the samplers.
        rank, world_size: given by the script, or both None.

    Raises TypeError and ValueError for invalid arguments.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool, seed: int, rank: int | None, world_size: int | None) -> None:
        self._where = type(self).__name__
        if not isinstance(dataset, Sized):
            got, expected = type(dataset).__name__, "a map-style dataset"
            what, remedy = "the dataset has no length", "An IterableDataset brings its own order and needs no sampler"
            raise TypeError(explain(what, self._where, got=got, expected=expected, remedy=remedy))
        self._dataset = dataset
        self._samples = whole_number(len(dataset), "the dataset's length", self._where, 1)
        self._shuffle = flag(shuffle, "shuffle", self._where)
        self._seed = whole_number(seed, "seed", self._where, 0)
        if (rank is None) != (world_size is None):
            raise ValueError(explain("give both or none", self._where, got=f"rank={rank}, world_size={world_size}"))
        self._given: tuple[int, int] | None = None  # Rank and world size, if the script has given them.
        if rank is not None and world_size is not None:
            whole_number(world_size, "world_size", self._where, 1)
            if whole_number(rank, "rank", self._where, 0) >= world_size:
                raise ValueError(explain("no such rank", self._where, got=rank, expected=f"< {world_size}"))
            self._given = rank, world_size
        self._epoch = 0
        self._consumed = 0
        self._order: tuple[int, torch.Tensor] | None = None  # An epoch and its shuffled order, made when needed.
        # Settings that divide an epoch into steps. They are not in `state_dict`: a run may resume with others.
        self._cut: dict[str, Any] = {}

    @property
    def has_given_rank(self) -> bool:
        """Whether the script has given the rank, which then stays the same when the process gets another rank."""
        return self._given is not None

    @property
    def epoch(self) -> int:
        """The epoch that `set_epoch` named last."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """The number of samples of this epoch that the whole world has trained."""
        return self._consumed

    @property
    def trained(self) -> int:
        """The number of samples that the whole world has trained over all epochs."""
        return self._epoch * self._samples + self._consumed

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of `epoch`. The current epoch keeps its position, so a resumed epoch is not repeated.

        Raises ConfigError if the dataset has changed its length.
        """
        self.check_length()
        if whole_number(epoch, "epoch", self._where, 0) != self._epoch:
            self._epoch = epoch
            self._consumed = 0

    def check_length(self) -> None:
        """Raise ConfigError if the dataset has another length than when the sampler was made."""
        if len(self._dataset) != self._samples:
            got, expected = f"{len(self._dataset)} samples", f"{self._samples}, as at first"
            remedy = "Make the dataset with its last length, and skip in the step what an epoch is not to train"
            what = "the dataset has changed its length"
            raise ConfigError(what, self._where, got=got, expected=expected, remedy=remedy)

    def state_dict(self) -> dict[str, Any]:
        """The position, and the settings that give it its meaning, as plain values."""
        return {
            "kind": self._where,
            "samples": self._samples,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
        }

    def settings(self) -> dict[str, Any]:
        """The settings that decide, with the position, which samples a step has. Plain values, the same on all ranks.

        Empty if the script has given the rank: each rank may then have data of its own.
        """
        if self.has_given_rank:
            return {}
        own = {name: value for name, value in self.state_dict().items() if name not in ("epoch", "consumed")}
        return {**own, **self._cut}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. World size and batch size may differ from those at the save.

        Args:
            state: a result of `state_dict`.

        Raises CheckpointError when the position would mean other samples: with another dataset length, or, in the
        middle of an epoch, with another `seed` or `shuffle`.
        """
        own = self.state_dict()
        missing = set(own) - set(state)
        if missing:
            raise CheckpointError("not a sampler's state", self._where, got=f"without {sorted(missing)}")
        # At the beginning of an epoch any order will do, so `shuffle` and `seed` matter only in its middle.
        for name in ("kind", "samples", *(("shuffle", "seed") if state["consumed"] else ())):
            if state[name] != (now := own[name]):
                got, expected = f"{name}={state[name]} in the checkpoint", f"{name}={now} as now"
                what = f"the checkpoint's {name} is not this sampler's"
                raise CheckpointError(what, self._where, got=got, expected=expected)
        # The state comes from a file or another rank: it is checked, not trusted.
        epoch, consumed = state["epoch"], state["consumed"]
        if type(epoch) is not int or type(consumed) is not int or epoch < 0 or not 0 <= consumed <= self._samples:
            raise CheckpointError("impossible position", self._where, got=f"epoch {epoch}, consumed {consumed}")
        self._epoch, self._consumed = epoch, consumed

    def _rank_and_world(self) -> tuple[int, int]:
        return self._given or rank_and_world()

    def _indices(self, start: int, stop: int) -> list[int]:
        """The dataset indices at the positions [start, stop) of this epoch's order."""
        if not self._shuffle:
            return list(range(start, stop))
        if self._order is None or self._order[0] != self._epoch:
            self._order = (self._epoch, permutation(self._samples, self._seed, self._epoch))
        indices: list[int] = self._order[1][start:stop].tolist()
        return indices


class ElasticBatchSampler(_Position, Sampler[list[int]]):
    """A batch sampler for `DataLoader(batch_sampler=)`: this rank's slice of each global batch, cut into micro-batches.

    Args:
        dataset: anything with a length; only the length is used.
        global_batch_size: the number of samples in one optimizer update, over all ranks.
        micro_batch_size: the largest number of samples in one forward; None: a rank's whole slice at once.
        shuffle: whether each epoch has a new order, which follows from `seed`.
        seed: the seed of the order, the same on all ranks.
        drop_last: leave out the last global batch of an epoch when it is smaller. Otherwise each sample of an epoch
            counts exactly once.
        rank: the rank of this process. By default it is the rank in the process group, looked up at each iteration. If
            a rank is given, all workers restart when the membership changes.
        world_size: the number of processes; given together with `rank`, or not at all.

    Attributes:
        micro_batch_size: as given.

    Raises TypeError and ValueError for invalid arguments.
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
        # Without `micro_batch_size`, which moves no sample from one step to another. Ranks may differ in it, as their
        # machines may differ in memory.
        self._cut = {"global_batch_size": self._batch_size, "drop_last": self._drop_last}
        if self._drop_last and self._samples < self._batch_size:
            got = f"{self._samples} samples, global_batch_size={self._batch_size}, drop_last=True"
            what, remedy = "an epoch without a single batch", "Use drop_last=False or a smaller global_batch_size"
            raise ValueError(explain(what, self._where, got=got, remedy=remedy))

    def __len__(self) -> int:
        """The number of global batches in a full epoch: the same at any position and any world size."""
        return sample_order.batch_count(self._samples, 0, self._batch_size, drop_last=self._drop_last)

    @property
    def remaining(self) -> int:
        """The number of global batches of this epoch that are not trained yet."""
        return sample_order.batch_count(self._samples, self._consumed, self._batch_size, drop_last=self._drop_last)

    def advance(self) -> None:
        """Count the next global batch as trained by the whole world.

        `Loop` calls this. In a training loop without `Loop`, call it after each optimizer update. Raises ValueError at
        the end of the epoch.
        """
        if not self.remaining:
            raise ValueError(explain("advanced past the end of the epoch", self._where, got=f"epoch {self._epoch}"))
        self._consumed = min(self._consumed + self._batch_size, self._samples)

    def shares(self) -> Iterator[sample_order.BatchSlice]:
        """This rank's slices from the present position to the end of the epoch: one for each batch of `__iter__`."""
        rank, world_size = self._rank_and_world()
        bounds = sample_order.batch_bounds(self._samples, self._consumed, self._batch_size, drop_last=self._drop_last)
        return (
            share
            for start, stop in bounds
            for share in sample_order.shares_of_batch(start, stop, rank, world_size, self.micro_batch_size)
        )

    def indices(self, share: sample_order.BatchSlice) -> list[int]:
        """The dataset indices in `share` that count. A borrowed sample (weight 0) does not count."""
        return self._indices(share.start, share.stop) if share.weight else []

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of dataset indices from the present position to the end of the epoch. Drawing changes no state."""
        # Not a generator function, which would read the position at the first draw instead of at this call.
        return (self._indices(share.start, share.stop) for share in self.shares())


class ElasticDistributedSampler(_Position, Sampler[int]):
    """torch's DistributedSampler with a position: shuffle everything, leave out what is consumed, then stride by rank.

    All ranks get the same number of indices. As with DistributedSampler, up to world_size - 1 samples are therefore
    repeated at the end of an epoch, or left out with `drop_last`. Use `ElasticBatchSampler` to count each sample
    exactly once.

    Args:
        dataset: anything with a length; only the length is used.
        num_replicas: the number of processes. By default it is the world size of the process group, looked up at each
            iteration. If a number is given, all workers restart when the membership changes.
        rank: the rank of this process; given together with `num_replicas`, or not at all.
        shuffle: whether each epoch has a new order, which follows from `seed`.
        seed: the seed of the order, the same on all ranks.
        drop_last: leave out up to world_size - 1 samples instead of repeating as many.

    Raises TypeError and ValueError for invalid arguments.
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
        """The number of indices per rank in a full epoch, at the present world size."""
        return sample_order.batch_count(self._samples, 0, self._rank_and_world()[1], drop_last=self._drop_last)

    @property
    def remaining(self) -> int:
        """The number of samples of this epoch that the whole world has not trained yet."""
        return self._samples - self._consumed

    def advance(self, samples: int) -> None:
        """Count `samples` more samples as trained by the whole world: batch size x world size after each update.

        The count stops at the end of the epoch.
        """
        self._consumed = min(self._consumed + whole_number(samples, "samples", self._where, 0), self._samples)

    def __iter__(self) -> Iterator[int]:
        """Dataset indices of this rank, from the present position to the end of the epoch."""
        rank, world_size = self._rank_and_world()
        if self._samples and not len(self):
            got = f"{self._samples} samples for {world_size} ranks, drop_last=True"
            what, remedy = "an epoch without a single sample for each rank", "Use drop_last=False"
            raise ValueError(explain(what, self._where, got=got, remedy=remedy))
        positions = sample_order.strided(self._samples, self._consumed, rank, world_size, drop_last=self._drop_last)
        every = self._indices(0, self._samples)
        return (every[position] for position in positions)
