"""Ranks that wait for all others, or for one that goes first: `barrier`, `local_first`, `global_first`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from elasticrt.distributed import collectives
from elasticrt.distributed.barrier import Barrier, one_after_the_other
from elasticrt.distributed.context import own_local_rank
from elasticrt.errors import explain


def barrier() -> None:
    """Wait until every rank is here, and say for whom if that takes long. Collective; alone it does nothing.

    Under an agent (`elasticrt run`, torchrun) there is no limit: it ends this process when a rank can't come.
    Without one TimeoutError is raised after half an hour.
    """
    collectives.require_group("barrier")
    if not collectives.alone():
        meeting = Barrier("barrier()")
        meeting.through()
        meeting.wait()


def local_first() -> AbstractContextManager[bool]:
    """Let local rank 0 of each node run the block first, then the others of its node: `with local_first() as first:`.

    Gives True to the rank that goes first. When it raises, the others raise RuntimeError with its error instead of
    running the block. They wait as in `barrier`. For data, `prepare` does more: it leaves nothing half done.
    Collective.
    """
    collectives.require_group("local_first")
    rank, _ = collectives.rank_and_world()
    return _first(rank - own_local_rank(rank), "local_first()")


def global_first() -> AbstractContextManager[bool]:
    """As `local_first`, for rank 0 of the whole world alone."""
    collectives.require_group("global_first")
    return _first(0, "global_first()")


@contextlib.contextmanager
def _first(leader: int, name: str) -> Iterator[bool]:
    if collectives.alone():
        yield True
        return
    rank, _ = collectives.rank_and_world()
    turns = Barrier(name)
    if rank != leader:
        error = turns.wait_for(leader)
        if error:
            raise RuntimeError(explain("who went first failed", name, got=error))
        with one_after_the_other():
            yield False
        return
    try:
        with one_after_the_other():
            yield True
    except BaseException as error:
        text = f"rank {rank}: {type(error).__name__}: {error}"
        # Without a store the others cannot be told, but the error that the user must see is this one.
        with contextlib.suppress(RuntimeError):
            turns.through(text)
        raise
    turns.through()
