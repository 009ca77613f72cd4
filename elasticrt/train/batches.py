"""Draws the batches of an epoch that are still to train, each with this rank's slice of the global batch.

Also checks that loader and sampler belong together: the sampler counts the samples that the loader draws.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from elasticrt.data.sample_order import WHOLE, BatchSlice
from elasticrt.data.sampler import ElasticBatchSampler, ElasticDistributedSampler
from elasticrt.distributed import collectives
from elasticrt.distributed.signal_guard import sheltered
from elasticrt.errors import CheckpointError, ConfigError, explain

_log = logging.getLogger(__name__)

AnySampler = ElasticBatchSampler | ElasticDistributedSampler | None


def check_loader(loader: object, sampler: AnySampler) -> None:
    """Refuse a loader that does not draw the batches of `sampler`. Raises TypeError, ConfigError."""
    if not isinstance(loader, Iterable):
        raise TypeError(explain("not iterable", "batches", got=type(loader).__name__, expected="a DataLoader"))
    # A class around a loader, such as one that copies to the GPU. It must keep the order and the number of batches,
    # which can't be checked here.
    if not isinstance(loader, DataLoader):
        return
    for used in samplers_of(loader):
        if isinstance(used, (ElasticBatchSampler, ElasticDistributedSampler)) and used is not sampler:
            remedy = "Give it to Loop(sampler=...), too"
            raise ConfigError("the loader's sampler is not the Loop's", "batches", remedy=remedy)
    if sampler is None:
        if loader.generator is not None:
            _warn_of_generator()
        return
    sampler.check_length()
    argument = "batch_sampler" if isinstance(sampler, ElasticBatchSampler) else "sampler"
    if getattr(loader, argument) is not sampler:
        remedy = f"Create it with DataLoader({argument}=sampler)"
        raise ConfigError("the loader does not use the Loop's sampler", "batches", remedy=remedy)
    if not loader.in_order:
        raise ConfigError("batches out of order", "batches", got="in_order=False", expected="in_order=True")


@cache
def _warn_of_generator() -> None:
    """Once in a process."""
    if collectives.rank_and_world()[0]:
        return
    what = "a loader with a generator of its own: an epoch that is entered in its middle goes on in another order, and "
    what += "trains other samples. Leave generator= out and seed torch's, or use ElasticBatchSampler"
    _log.warning(what)


def own_sampler(loader: object) -> str:
    """The class of a sampler that may give each rank other samples, by a rule that is not known here; "" for none.

    Such a rule holds for the world in which the sampler was made, or in which its epoch began.

    Args:
        loader: the loader. If it is none of torch's, it is not known what the script draws from, so any sampler counts.
    """
    used: Iterable[object] = (each for each in gc.get_objects() if issubclass(type(each), Sampler))
    if isinstance(loader, DataLoader):
        used = (each for each in samplers_of(loader) if each is not None)
    return next((type(each).__name__ for each in used if _is_own(type(each))), "")


def _is_own(kind: type) -> bool:
    is_known = kind.__module__.startswith(("torch.", "torchdata.", "elasticrt."))
    return issubclass(kind, DistributedSampler) or not is_known


def samplers_of(loader: DataLoader[Any]) -> tuple[object, ...]:
    """All objects that decide which samples `loader` draws. Torch's BatchSampler has a further sampler in it."""
    return loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)


def is_stream(loader: object, sampler: AnySampler) -> bool:
    """Whether the samples come in an order that only the dataset knows, so that nobody can say which ones are left."""
    return sampler is None and isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def stream_resized(before: int, now: int) -> CheckpointError:
    """The error where an epoch of a stream (see `is_stream`) was begun by `before` processes, and there are `now`."""
    got = f"{now} processes, in the middle of an epoch that {before} began"
    remedy = "Resume with as many processes, use a map-style dataset and ElasticBatchSampler, or draw in loop.steps"
    what = "an IterableDataset can't be continued at another world size"
    return CheckpointError(what, "batches", got=got, remedy=remedy)


def length_of(loader: Any) -> int | None:
    """How many batches an epoch of `loader` has; None if it does not tell."""
    # Once torch has been asked for the length of a stream, it warns when the stream goes on beyond that.
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader)
    except Exception:  # noqa: BLE001  A class around a loader is the script's own code.
        return None


def samples_per_batch(loader: object) -> int:
    """How many samples a batch of `loader` has, for a sampler that does not know that.

    Raises ConfigError if the loader does not know it either.
    """
    size = getattr(loader, "batch_size", None)
    if not isinstance(size, int):
        what, remedy = "the batch size is not known", "Use a DataLoader with batch_size, or ElasticBatchSampler"
        raise ConfigError(what, "batches", got=f"batch_size={size}", remedy=remedy)
    return size


class Drawing:
    """Draws the batches of an epoch for one call of `Loop.batches`. Begins anew where this rank gets other samples.

    Args:
        loader: the loader.
        sampler: the sampler of the Loop.
        done: how many batches of the epoch are trained. Without a sampler they are drawn and dropped.
        place: the world size, and this rank.
        beginning: entered while the loader begins its epoch and drops batches. It decides which random numbers the
            loader draws then.

    Attributes:
        skips: whether batches were dropped.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        sampler: AnySampler,
        done: int,
        place: tuple[int, int],
        beginning: AbstractContextManager[None],
    ) -> None:
        self._loader, self._sampler = loader, sampler
        self._begin(done, place, beginning)

    def _begin(self, done: int, place: tuple[int, int], beginning: AbstractContextManager[None]) -> None:
        skip, self._place = done if self._sampler is None else 0, place
        self.skips = skip > 0
        self._drawn = _feed(self._loader, self._sampler, skip, beginning)
        # The batch that was drawn last, and its number in the epoch, from 0.
        self._at_hand: tuple[Any, BatchSlice | None] = (None, None)
        self._number = done - 1

    def move(self, place: tuple[int, int], done: int) -> None:
        """Draw this rank's samples at another `place`, after a change of the membership.

        Only a sampler of ours, or the dataset of a stream, cuts by the place.
        """
        if self._sampler is None and not (place != self._place and is_stream(self._loader, self._sampler)):
            return
        self._drawn.close()
        # A loader may draw random numbers when it begins. An undisturbed run draws none here, so they are put back.
        self._begin(done, place, torch.random.fork_rng(devices=[]))

    def draw(self, done: int) -> tuple[Any, BatchSlice | None]:
        """The batch that follows the `done` trained ones of the epoch, and its slice; (None, None) at the end.

        Without a sampler a rank cannot get other samples. An undone step gets the batch at hand once more, so nothing
        is drawn. If other ranks have finished that step, this rank's batch of it is passed over.
        """
        for _ in range(done - self._number if self._sampler is None else 1):
            self._at_hand = next(self._drawn, (None, None))
        self._number = done
        return self._at_hand


def _feed(
    loader: Iterable[Any], sampler: AnySampler, skip: int, beginning: AbstractContextManager[None]
) -> Generator[tuple[Any, BatchSlice], None, None]:
    """Yield each batch of `loader` with its slice of the global batch: WHOLE without an ElasticBatchSampler.

    The first `skip` batches are dropped. `beginning`: see `Drawing`.

    Raises ConfigError when loader and sampler end at different times.
    """
    shares = sampler.shares() if isinstance(sampler, ElasticBatchSampler) else None
    with beginning:
        # The loader starts its worker processes here. They must not die of a signal that is meant for the agent.
        with sheltered():
            drawn = iter(loader)
        for _ in range(skip):
            next(drawn, None)
    for batch in drawn:
        share = WHOLE if shares is None else next(shares, None)
        if share is None:
            what = "the loader goes on after the sampler's end"
            raise ConfigError(what, "batches", expected="one batch each")
        yield batch, share
    if shares is not None and next(shares, None) is not None:
        raise ConfigError("the loader ends before the sampler", "batches", expected="one batch each")
