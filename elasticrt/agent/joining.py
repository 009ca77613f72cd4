"""Workers that set up beside the training: replacements of those that died, and newcomers, until they are let in.

They run the script up to its loop in a world of one, however long that takes. One that fails there is tried again,
after a while that grows.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticrt.ipc.time_bounds import JOIN_AGAIN_S, JOIN_AGAIN_S_MAX
from elasticrt.rendezvous.records import Generation
from elasticrt.rendezvous.view import View


class JoiningWorkers:
    """One node's. It only remembers: its owner starts them and ends them.

    Attributes:
        ranks: local ranks that set up, or have.
        ending: those whose processes are being ended: only then another one is started.
        at: when the next try is due; None when nothing has failed.
        beside: the generation that they set up beside, and this node's index in it; None: none shall.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.ending: set[int] = set()
        self.at: float | None = None
        self.beside: tuple[Generation, int] | None = None
        self._tries = 0

    def attend(self, generation: Generation, index: int) -> None:
        """Workers go on in place in `generation`, where this node has `index`: what it lacks sets up beside it."""
        self.beside = (generation, index)

    def start(self, workers: int, seated: Collection[int], now: float) -> list[int]:
        """The local ranks, of so many `workers` without those `seated`, to start at `now`. They count as started."""
        if self.beside is None or (self.at is not None and now < self.at):
            return []
        self.at = None
        missing = [rank for rank in range(workers) if rank not in {*seated, *self.ranks, *self.ending}]
        self.ranks |= set(missing)
        return missing

    def let_in(self, local_rank: int) -> None:
        """The worker with `local_rank` has a seat now."""
        self.ranks.discard(local_rank)
        self._tries = 0

    def ended(self, local_rank: int, now: float) -> float | None:
        """The process of `local_rank` has ended at `now`. After how many seconds it is tried again; None: it is not."""
        self.ending.discard(local_rank)
        if local_rank not in self.ranks:
            return None
        self.ranks.discard(local_rank)
        wait_s = min(JOIN_AGAIN_S * 2.0**self._tries, JOIN_AGAIN_S_MAX)
        self._tries += 1
        self.at = now + wait_s
        return wait_s

    def stop(self) -> bool:
        """None shall join any more, or all begin anew. Whether there are processes to end."""
        doomed = bool(self.ranks)
        self.ranks, self.ending = set(), self.ending | self.ranks
        self.beside = self.at = None
        return doomed


def others_go_on(view: View, node: str) -> bool:
    """Whether, by `view`, workers of others than `node` train on, so that what it lacks is set up beside them."""
    if view.generation is None or any(each.record.status in ("finishing", "ok") for each in view.reports.values()):
        return False
    known = [entry.record for entry in view.members.values() if entry.record.node != node]
    told = any(view.number in (each.goes_on, each.generation if each.ready else 0) for each in known)
    return view.generation.record.in_place or told
