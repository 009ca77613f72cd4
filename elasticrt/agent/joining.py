"""Workers that set up beside the training: replacements of those that died, and newcomers, until they are let in.

They run the script up to its loop in a world of one, which takes as long as it takes: nobody waits. One that fails
there is told to people and tried again, after a while that grows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from elasticrt.ipc.env import WorkerEnv
from elasticrt.rendezvous.records import Generation
from elasticrt.settings import Settings
from elasticrt.workers.failures import describe
from elasticrt.workers.group import WorkerEnded
from elasticrt.workers.outcomes import beside_env

READY = 2
"""What the page of one says that waits to be let in (see `ipc.status_page`)."""

AGAIN_S = 1.0
AGAIN_S_MAX = 60.0
"""Between a failure and the next try: doubled each time, up to the second."""


class JoiningWorkers:
    """One node's. Used by the agent's thread.

    Args:
        settings: the agent's.
        start: starts workers with these environments, as generation 0.
        kill: ends all of them.
        says: the word `in_place` of the page of one, by local rank; 0 when it has none.
        say: for people.

    Attributes:
        ranks: local ranks that set up, or have.
        ending: those whose processes are being ended: only then another one is started.
        at: when the next try is due; None when nothing has failed.
    """

    def __init__(
        self,
        settings: Settings,
        start: Callable[[Sequence[WorkerEnv]], None],
        kill: Callable[[], None],
        says: Callable[[int], int],
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._start = start
        self._kill = kill
        self._says = says
        self._say = say
        self.ranks: set[int] = set()
        self.ending: set[int] = set()
        self.at: float | None = None
        self._tries = 0
        self._of: tuple[Generation, int] | None = None

    def attend(self, generation: Generation, index: int) -> None:
        """Workers go on in place in `generation`: from now on, what this node lacks sets up beside it."""
        self._of = (generation, index)

    def start(self, seated: Collection[int], now: float) -> None:
        """Start what is missing, unless the last try has just failed."""
        if self._of is None or (self.at is not None and now < self.at):
            return
        self.at = None
        taken = {*seated, *self.ranks, *self.ending}
        missing = [rank for rank in range(self._settings.workers) if rank not in taken]
        if missing:
            self.ranks |= set(missing)
            self._start([beside_env(self._settings, *self._of, rank) for rank in missing])

    def ready(self) -> list[int]:
        """Those that wait to be let in."""
        return [rank for rank in sorted(self.ranks) if self._says(rank) == READY]

    def let_in(self, local_rank: int) -> None:
        """It has a seat now."""
        self.ranks.discard(local_rank)
        self._tries = 0

    def ended(self, event: WorkerEnded, now: float) -> None:
        """One has failed while it set up, or was ended. The training has not noticed."""
        self.ending.discard(event.local_rank)
        if event.local_rank not in self.ranks:
            return
        self.ranks.discard(event.local_rank)
        wait_s = min(AGAIN_S * 2**self._tries, AGAIN_S_MAX)
        self._tries += 1
        self.at = now + wait_s
        what = describe(event.failure) if event.failure is not None else f"exit code {event.code}"
        self._say(f"a worker that was to join failed while it set up: {what}; another try in {wait_s:g} s")

    def stop(self) -> None:
        """Nobody is to be let in any more, or all begin anew."""
        self._of, self.at = None, None
        if self.ranks:
            self.ranks, self.ending = set(), self.ending | self.ranks
            self._kill()
