"""Waits for other ranks that may take long, through the store of the process group.

A collective fails after the group's timeout: an hour of preparing data on one node would end the whole run. Here every
rank writes to the store that it has come, and later that it is through. The others poll for that, and print for which
ranks they wait. Under an agent (ours or torchrun's) there is no limit: when a process dies, the agent ends the others
or starts all anew. Without one there is a limit.

Every rank makes the same barriers in the same order, as with collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from elasticrt.distributed.collectives import alone, local_rank_of, rank_and_world, require_group
from elasticrt.errors import explain
from elasticrt.ipc.std_streams import say
from elasticrt.ipc.wording import listed

UNWATCHED_S = 1800.0
"""What torch gives its collectives."""

_POLL_S, _POLL_S_MAX = 0.001, 0.2
_POLLS_PER_S = 20_000
"""How many polls, of all ranks together, the store answers beside other work."""

_PROGRESS_S = 10.0
_NAMED_MAX = 4
_ERROR_CHARS = 2000

_numbers = itertools.count()
_written: list[str] = []
"""This rank's keys that another rank may still read. They are deleted when all ranks have passed a later barrier."""

_in_turns = 0
"""In how many blocks of `local_first` or `global_first` this process is: ranks must not wait for each other there."""


def begin_anew() -> None:
    """Count barriers from 0 again, because the ranks have met in another store."""
    global _numbers  # noqa: PLW0603  As below.
    _numbers = itertools.count()
    _written.clear()


def together() -> bool:
    """Whether there are other ranks, and all come to the same places at the same time."""
    return not alone() and not _in_turns


class Barrier:
    """One barrier.

    Args:
        what: its name in messages.
        store: of the ranks; by default the process group's.
    """

    def __init__(self, what: str, store: Any = None) -> None:
        self._what = what
        self._rank, self._world_size = rank_and_world()
        self._store = dist.distributed_c10d._get_default_store() if store is None else store
        self._prefix = f"elasticrt/{next(_numbers)}"
        self._earlier = len(_written)
        self._limit_s = math.inf if "TORCHELASTIC_RUN_ID" in os.environ else UNWATCHED_S

    def come(self) -> None:
        """Announce that this rank is here, and not through yet."""
        self._write("?")

    def through(self, error: str = "") -> None:
        """Announce that this rank is through, or the error because of which it will never be."""
        word = f"-{error}"[:_ERROR_CHARS] if error else "+"
        self._write(word)
        if error or self._store.add(self._key("count"), 1) == self._world_size:
            self._store.set(self._key("all"), word)

    def wait(self, limit_s: float = math.inf) -> str:
        """Wait until all ranks are through, or one has failed. Returns its error, or "". Raises TimeoutError."""
        error = self._wait("all", prints=self._rank < 2, limit_s=limit_s)
        if not error:
            for key in _written[: self._earlier]:  # All ranks have come here, so none waits in an earlier barrier.
                self._store.delete_key(key)
            del _written[: self._earlier]
        return error

    def wait_for(self, rank: int) -> str:
        """As `wait`, for one rank, which has not called `come`."""
        return self._wait(rank, prints=self._rank == rank + 1, limit_s=math.inf)

    def _write(self, word: str) -> None:
        self._store.set(self._key(self._rank), word)
        names = (self._rank, "count", "all") if self._rank == 0 else (self._rank,)
        _written.extend(self._key(name) for name in names if self._key(name) not in _written[self._earlier :])

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _wait(self, name: int | str, *, prints: bool, limit_s: float) -> str:
        began = printed = now = time.monotonic()
        while not self._store.check([self._key(name)]):
            # Polled: torch writes a wait in the store that ends early to stderr.
            time.sleep(max(min((now - began) / 5, _POLL_S_MAX), _POLL_S, self._world_size / _POLLS_PER_S))
            now = time.monotonic()
            if now - began >= min(limit_s, self._limit_s):
                raise TimeoutError(
                    explain("waited too long", self._what, got=f"{now - began:.0f} s for {self._missing(name)}")
                )
            if prints and now - printed >= _PROGRESS_S:
                printed = now
                say(f"waiting in {self._what} for {self._missing(name)}, {now - began:.0f} s so far")
        return bytes(self._store.get(self._key(name))).decode(errors="replace")[1:]

    def _missing(self, name: int | str) -> str:
        if isinstance(name, int):
            return f"rank {name}"
        here = [rank for rank in range(self._world_size) if self._store.check([self._key(rank)])]
        away = sorted(set(range(self._world_size)) - set(here))
        busy = [rank for rank in here if bytes(self._store.get(self._key(rank))) == b"?"]
        parts = [_ranks(away, "to come"), _ranks(busy, "to be through")]
        return " and ".join(part for part in parts if part) or "nobody"


def _ranks(ranks: list[int], what: str) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, _NAMED_MAX)} {what}" if ranks else ""


def barrier() -> None:
    """Wait until every rank is here, and say for whom if that takes long. Collective; alone it does nothing.

    Under an agent (`elasticrt run`, torchrun) there is no limit: it ends this process when a rank can't come.
    Without one TimeoutError is raised after half an hour.
    """
    require_group("barrier")
    if not alone():
        meeting = Barrier("barrier()")
        meeting.through()
        meeting.wait()


def local_first() -> AbstractContextManager[bool]:
    """Let local rank 0 of each node run the block first, then the others of its node: `with local_first() as first:`.

    Gives True to the rank that goes first. When it raises, the others raise RuntimeError with its error instead of
    running the block. They wait as in `barrier`. For data, `prepare` does more: it leaves nothing half done.
    Collective.
    """
    require_group("local_first")
    rank, _ = rank_and_world()
    return _first(rank - local_rank_of(rank), "local_first()")


def global_first() -> AbstractContextManager[bool]:
    """As `local_first`, for rank 0 of the whole world alone."""
    require_group("global_first")
    return _first(0, "global_first()")


@contextlib.contextmanager
def _first(leader: int, name: str) -> Iterator[bool]:
    if alone():
        yield True
        return
    global _in_turns  # noqa: PLW0603  The whole process is in such a block.
    rank, _ = rank_and_world()
    turns = Barrier(name)
    if rank != leader and (failed := turns.wait_for(leader)):
        raise RuntimeError(explain("who went first failed", name, got=failed))
    _in_turns += 1
    try:
        yield rank == leader
    except BaseException as error:
        # Without a store the others cannot be told, but the error that the user must see is this one.
        with contextlib.suppress(RuntimeError):
            if rank == leader:
                turns.through(f"rank {rank}: {type(error).__name__}: {error}")
        raise
    finally:
        _in_turns -= 1
    if rank == leader:
        turns.through()
