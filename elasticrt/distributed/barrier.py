"""Barriers for waits that may take long, through the store of the process group.

A collective fails after the group's timeout, so an hour of preparing data on one node would end the whole run. At a
barrier every rank writes to the store that it has come, and later that it is through. The other ranks poll for that,
and print the ranks that they wait for. Under an agent (ours or torchrun's) a wait has no limit: when a process dies,
the agent ends the others or starts all of them anew. Without an agent a wait has a limit.

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
"""The limit of a wait, in seconds, without an agent: torch's default timeout of a collective."""

_POLL_S, _POLL_S_MAX = 0.001, 0.2
_POLLS_PER_S = 20_000
"""How many polls per second, of all ranks together, the store answers beside other work."""

_PROGRESS_S = 10.0
_NAMED_MAX = 4
_ERROR_CHARS = 2000

# The number of the next barrier. It is a part of the barrier's keys, so all ranks must count alike.
_numbers = itertools.count()
_written: list[str] = []
"""This rank's keys that another rank may still read. They are deleted when all ranks have passed a later barrier."""

_in_turns = 0
"""How many blocks of `local_first` or `global_first` this process is in. In these, ranks must not wait for each
other."""


def begin_anew() -> None:
    """Count barriers from 0 again, because the ranks have met in another store."""
    global _numbers  # noqa: PLW0603  As below.
    _numbers = itertools.count()
    _written.clear()


def together() -> bool:
    """Whether there are other ranks, and all ranks run the same code at the same time.

    In a block of `local_first` or `global_first` they run it one after the other.
    """
    return not alone() and not _in_turns


class Barrier:
    """One barrier, used once. A rank may call `arrive` when it is there, then calls `finish`, then `wait`.

    Args:
        what: the barrier's name in messages.
        store: the store through which the ranks meet; by default the process group's.
    """

    def __init__(self, what: str, store: Any = None) -> None:
        self._what = what
        self._rank, self._world_size = rank_and_world()
        self._store = dist.distributed_c10d._get_default_store() if store is None else store
        self._prefix = f"elasticrt/{next(_numbers)}"
        self._earlier = len(_written)  # So many keys in `_written` are of earlier barriers.
        # Torchrun and our agent both set this variable.
        self._limit_s = math.inf if "TORCHELASTIC_RUN_ID" in os.environ else UNWATCHED_S

    def arrive(self) -> None:
        """Announce that this rank is here, and not through yet."""
        self._write("?")

    def finish(self, error: str = "") -> None:
        """Announce that this rank is through, or the `error` because of which it never will be."""
        word = f"-{error}"[:_ERROR_CHARS] if error else "+"
        self._write(word)
        # The last rank to come through, or the first one to fail, writes the key that all poll for. Each rank thus
        # polls one key, not one for each rank.
        if error or self._store.add(self._key("count"), 1) == self._world_size:
            self._store.set(self._key("all"), word)

    def wait(self, limit_s: float = math.inf) -> str:
        """Wait until all ranks are through, or one has failed. Returns that rank's error, or "".

        Raises TimeoutError after `limit_s` seconds, and without an agent after UNWATCHED_S.
        """
        # Two ranks print: one of them may be the rank that all wait for.
        error = self._wait("all", prints=self._rank < 2, limit_s=limit_s)
        if not error:
            # All ranks have come to this barrier, so none waits in an earlier one.
            for key in _written[: self._earlier]:
                self._store.delete_key(key)
            del _written[: self._earlier]
        return error

    def wait_for(self, rank: int) -> str:
        """As `wait`, for the one rank `rank`. That rank must not call `arrive`, which writes the same key."""
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
            # Polled, because torch prints to stderr when a wait in the store ends early. The longer the wait has
            # lasted, the longer the pause; and the more ranks there are, so that the store can answer all of them.
            time.sleep(max(min((now - began) / 5, _POLL_S_MAX), _POLL_S, self._world_size / _POLLS_PER_S))
            now = time.monotonic()
            if now - began >= min(limit_s, self._limit_s):
                raise TimeoutError(
                    explain(
                        "waited too long for other ranks",
                        self._what,
                        got=f"{now - began:.0f} s for {self._missing(name)}",
                    )
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
        parts = [_ranks(away, "to arrive"), _ranks(busy, "to finish")]
        return " and ".join(part for part in parts if part) or "nobody"


def _ranks(ranks: list[int], what: str) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks, _NAMED_MAX)} {what}" if ranks else ""


def barrier() -> None:
    """Wait until every rank has called this. Collective; in a world of one it does nothing.

    In a long wait a line names the missing ranks. Under an agent (`elasticrt run`, torchrun) there is no limit: the
    agent ends this process when a rank can't come. Without an agent, raises TimeoutError after half an hour.
    """
    require_group("barrier")
    if not alone():
        meeting = Barrier("barrier()")
        meeting.finish()
        meeting.wait()


def local_first() -> AbstractContextManager[bool]:
    """Let local rank 0 of each node run the block first, then the node's other ranks: `with local_first() as first:`.

    `first` is True on the rank that goes first. If that rank raises in the block, the others raise RuntimeError with
    its error instead of running the block. They wait as in `barrier`. To prepare data, use `prepare`, which leaves
    nothing half done. Collective.
    """
    require_group("local_first")
    rank, _ = rank_and_world()
    return _first(rank - local_rank_of(rank), "local_first()")


def global_first() -> AbstractContextManager[bool]:
    """As `local_first`, but rank 0 goes first, before all other ranks of the world."""
    require_group("global_first")
    return _first(0, "global_first()")


@contextlib.contextmanager
def _first(leader: int, name: str) -> Iterator[bool]:
    if alone():
        yield True
        return
    global _in_turns  # noqa: PLW0603  The whole process is in the block, not one thread.
    rank, _ = rank_and_world()
    turns = Barrier(name)
    if rank != leader and (failed := turns.wait_for(leader)):
        raise RuntimeError(explain("the rank that runs the block first has failed", name, got=failed))
    _in_turns += 1
    try:
        yield rank == leader
    except BaseException as error:
        # The store may be gone, and the others cannot be told. The error that the user must see is still this one.
        with contextlib.suppress(RuntimeError):
            if rank == leader:
                turns.finish(f"rank {rank}: {type(error).__name__}: {error}")
        raise
    finally:
        _in_turns -= 1
    if rank == leader:
        turns.finish()
