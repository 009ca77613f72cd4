"""Workers that set up beside the training until they get seats: newcomers, and replacements of workers that died.

They run the script up to its loop in a world of one, however long that takes. A worker that fails there, or in its seat
before its first step, is started again, with a delay that grows until one makes a step.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticrt.ipc.time_bounds import JOIN_AGAIN_S, JOIN_AGAIN_S_MAX
from elasticrt.rendezvous.records import Generation
from elasticrt.rendezvous.view import View


class JoiningWorkers:
    """The joining workers of one node. It starts and ends no process; its owner does.

    Attributes:
        ranks: local ranks of workers that set up, or have finished that and have no seat yet.
        new: local ranks of workers that were let in, and have made no step since.
        ending: local ranks whose processes are being ended; they get no new one before that.
        at: when the next try is due; None if nothing has failed.
        beside: the generation that they set up beside, and this node's index in it; None: nothing to set up beside.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.new: set[int] = set()
        self.ending: set[int] = set()
        self.at: float | None = None
        self.beside: tuple[Generation, int] | None = None
        self._wait_s = JOIN_AGAIN_S

    def start(self, workers: int, seated: Collection[int], now: float) -> list[int]:
        """The local ranks to start at `now`, which then count as started: of all `workers`, those not `seated`."""
        if self.beside is None or (self.at is not None and now < self.at):
            return []
        self.at = None
        missing = [rank for rank in range(workers) if rank not in {*seated, *self.ranks, *self.ending}]
        self.ranks |= set(missing)
        return missing

    def let_in(self, local_ranks: Collection[int]) -> None:
        """Workers of these local ranks have got seats; those of them that have set up here are new."""
        self.new |= self.ranks & set(local_ranks)
        self.ranks -= set(local_ranks)

    def trained(self, local_rank: int) -> None:
        """A worker has made its first step in its seat. If no other one of this node has to, the delay is short again.

        Workers that were there before make a first step in each generation, also while one that joins fails each time.
        """
        self.new.discard(local_rank)
        if not self.new and not self.ranks and self.at is None:
            self._wait_s = JOIN_AGAIN_S

    def lost(self, local_rank: int) -> bool:
        """The process of `local_rank`, which had a seat, has ended. Returns whether it was new there."""
        self.ending.discard(local_rank)
        was_new = local_rank in self.new
        self.new.discard(local_rank)
        return was_new

    def ended(self, local_rank: int, now: float) -> float | None:
        """The process of `local_rank` has ended at `now`. Returns the seconds to the next try, None for no try."""
        self.ending.discard(local_rank)
        if local_rank not in self.ranks:
            return None
        self.ranks.discard(local_rank)
        return self.failed(now)

    def failed(self, now: float) -> float:
        """A worker has failed at `now` before its first step. Returns the seconds to the next try, of all that have."""
        if self.at is None:
            self.at = now + self._wait_s
            self._wait_s = min(2 * self._wait_s, JOIN_AGAIN_S_MAX)
        return max(0.0, self.at - now)

    def give_up(self, local_ranks: Collection[int], now: float) -> None:
        """The processes of these local ranks, setting up or seated, are being ended at `now`, because they hang."""
        if self.new & set(local_ranks):
            self.failed(now)
        self._end(local_ranks)

    def stop(self) -> bool:
        """Let no worker join any more. Returns whether there are processes to end."""
        doomed = bool(self.ranks)
        self._end(self.ranks)
        self.new.clear()
        self.beside = self.at = None
        return doomed

    def _end(self, local_ranks: Collection[int]) -> None:
        self.ending = self.ending | set(local_ranks)
        self.ranks = self.ranks - set(local_ranks)
        self.new -= set(local_ranks)


def others_go_on(view: View, node: str) -> bool:
    """Whether workers of other nodes than `node` train on, so that its missing workers can set up beside them."""
    if view.generation is None or view.ended:
        return False
    known = [entry.record for entry in view.members.values() if entry.record.node != node]
    told = any(view.number in (each.goes_on, each.generation if each.ready else 0) for each in known)
    return view.generation.record.in_place or told
