"""Keeps account of workers that set up beside the training: newcomers, and replacements of workers that died.

Such a worker runs the script up to its loop in a world of one, however long that takes, and then gets a seat. A worker
that fails before that, or in its seat before its first step, is started again after a delay. The delay grows until a
worker makes a step.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticrt.ipc.time_bounds import JOIN_AGAIN_S, JOIN_AGAIN_S_MAX
from elasticrt.rendezvous.records import Generation
from elasticrt.rendezvous.view import View


class JoiningWorkers:
    """The joining workers of one node. This class only keeps account: the supervisor starts and ends the processes.

    Attributes:
        ranks: local ranks of workers that set up, or that have set up and have no seat yet.
        new: local ranks of workers that have got their first seat, and have made no step since.
        ending: local ranks whose processes are being ended. No new worker starts there before that is done.
        retry_at: when the next try is due, in seconds of the monotonic clock; None if nothing has failed.
        beside: the generation beside which workers set up, and this node's group rank there; None if there is none.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.new: set[int] = set()
        self.ending: set[int] = set()
        self.retry_at: float | None = None
        self.beside: tuple[Generation, int] | None = None
        self._wait_s = JOIN_AGAIN_S

    def start(self, workers: int, seated: Collection[int], now: float) -> list[int]:
        """Return the local ranks to start at `now`. From then on they count as started.

        `workers`: the number of workers of this node; `seated`: the local ranks that have a worker in a seat.
        """
        if self.beside is None or (self.retry_at is not None and now < self.retry_at):
            return []
        self.retry_at = None
        missing = [rank for rank in range(workers) if rank not in {*seated, *self.ranks, *self.ending}]
        self.ranks |= set(missing)
        return missing

    def let_in(self, local_ranks: Collection[int]) -> None:
        """Note that workers of these local ranks have got seats. Those that have set up beside the training are new."""
        self.new |= self.ranks & set(local_ranks)
        self.ranks -= set(local_ranks)

    def trained(self, local_rank: int) -> None:
        """Note that a worker has made its first step in its seat.

        The delay is short again once no worker is new, sets up, or waits for its next try.
        """
        self.new.discard(local_rank)
        # The step of an old worker proves nothing: old workers make a first step in every generation, also while a
        # worker that joins fails each time.
        if not self.new and not self.ranks and self.retry_at is None:
            self._wait_s = JOIN_AGAIN_S

    def ended(self, local_rank: int, *, seated: bool) -> bool:
        """Note that a worker has ended, which had a seat (`seated`) or set up. Returns whether it was new, or set up.

        False as well for a worker that does not count any more, because it was given up or all joining was stopped.
        """
        self.ending.discard(local_rank)
        among = self.new if seated else self.ranks
        counts = local_rank in among
        among.discard(local_rank)
        return counts

    def failed(self, now: float) -> float:
        """Note that a worker has failed at `now` before its first step. Returns the seconds to the next try."""
        # Workers that fail together are tried again together, and double the delay once.
        if self.retry_at is None:
            self.retry_at = now + self._wait_s
            self._wait_s = min(2 * self._wait_s, JOIN_AGAIN_S_MAX)
        return max(0.0, self.retry_at - now)

    def give_up(self, local_ranks: Collection[int], now: float) -> None:
        """Note that the workers of these local ranks are being ended at `now`, because they hang."""
        if self.new & set(local_ranks):
            self.failed(now)
        self._end(local_ranks)

    def stop(self) -> bool:
        """Let no worker join any more. Returns whether processes of joining workers are to be ended."""
        doomed = bool(self.ranks)
        self._end(self.ranks)
        self.new.clear()
        self.beside = self.retry_at = None
        return doomed

    def _end(self, local_ranks: Collection[int]) -> None:
        self.ending = self.ending | set(local_ranks)
        self.ranks = self.ranks - set(local_ranks)
        self.new -= set(local_ranks)


def others_go_on(view: View, node: str) -> bool:
    """Whether workers of other nodes train on, so that the missing workers of `node` can set up beside them."""
    if view.generation is None or view.ended_nodes:
        return False
    # A follower sees only its own key and the leader's. If the leader's workers are lost and others have the state, the
    # next generation is one in place, also if it has to wait for nodes.
    others = [entry.record for entry in view.members.values() if entry.record.node != node]
    able = any(each.ready and each.generation == view.generation_number for each in others)
    return view.generation.record.in_place or able
