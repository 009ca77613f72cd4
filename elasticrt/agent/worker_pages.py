"""What the status pages of this node's workers say of them. Only looks: it sends nothing, and waits for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from elasticrt.ipc.status_page import READY, StatusPage
from elasticrt.ipc.time_bounds import STANDING_IN_PLACE_S
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.group_state import GroupState


class WorkerPages:
    """One node's. `group` gives its workers; `state`, everywhere, is what they are in."""

    def __init__(self, group: Callable[[], WorkerGroup]) -> None:
        self._group = group

    def of(self, state: GroupState) -> list[StatusPage]:
        """The pages of all workers of the running generation; none when one has gone already."""
        try:
            return [self._group().page(rank, state.number) for rank in sorted(state.seated)] if state.running else []
        except KeyError:
            return []

    def building(self, state: GroupState) -> bool:
        """Whether one of the workers prepares data."""
        return any(page.building for page in self.of(state))

    def doing(self, state: GroupState) -> str:
        """What they do before their first step in this generation, in words; "" when that is done, or there is none."""
        pages = self.of(state)
        if any(page.building for page in pages):
            return "preparing data"
        if state.generation is None or all(map(_steps, pages)):
            return ""
        if any(page.init_at_ns > page.joined_at_ns for page in pages):
            return "making the process group"
        if all(page.restored_at_ns > page.joined_at_ns for page in pages):
            return "making the first step"
        if state.generation.in_place:
            return "taking over the state"
        resumes = state.generation.memory or state.generation.resume
        return "setting up, and restoring a saved state" if resumes else "setting up"

    def able(self, state: GroupState) -> list[int]:
        """Local ranks that take part and can go on in another generation without ending."""
        seated = sorted(state.seated) if state.running and not state.hung else []
        return [rank for rank in seated if self._word(rank, state.number, "in_place")]

    def ready_beside(self, local_ranks: Iterable[int]) -> list[int]:
        """Those of `local_ranks`, which set up beside the training, that have done so."""
        return [rank for rank in sorted(local_ranks) if self._word(rank, 0, "in_place") == READY]

    def have_state(self, state: GroupState, local_ranks: Sequence[int]) -> bool:
        """Whether one of `local_ranks` has the state of its generation, or of the one before."""
        return any(self._word(rank, state.number, "restored_at_ns") for rank in local_ranks)

    def is_late(self, state: GroupState, local_rank: int) -> bool:
        """Whether a worker should have taken its seat by now: not one that does something else than training."""
        began, restored = (self._word(local_rank, state.number, word) for word in ("init_at_ns", "restored_at_ns"))
        return began < state.seated_ns and (restored < began or self._word(local_rank, state.number, "stepping") != 0)

    def is_awaited(self, state: GroupState, local_rank: int) -> bool:
        """Whether others wait for a worker, although no step of this generation tells: it is late, or in the first."""
        stepping, stepped = (self._word(local_rank, state.number, word) for word in ("stepping", "step_at_ns"))
        return (stepping != 0 and not stepped) or self.is_late(state, local_rank)

    def unmet_since(self, state: GroupState, now: float) -> float | None:
        """From when on workers in new seats have been waiting too long for their first step there; None: they have not.

        A node that dies between its seat and the meeting breaks no connection: the others wait for it. `now` and the
        answer are seconds of the monotonic clock.
        """
        if state.generation is None or not state.generation.in_place:
            return None
        begun = [page.init_at_ns for page in self.of(state) if not page.step_at_ns]
        at = min((at for at in begun if at >= state.seated_ns), default=math.inf) / 1e9 + STANDING_IN_PLACE_S
        return at if now >= at else None

    def _word(self, local_rank: int, generation: int, word: str) -> int:
        """What the page of one worker says; 0 without one."""
        try:
            value: int = getattr(self._group().page(local_rank, generation), word)
        except (KeyError, ValueError):
            return 0
        return value


def _steps(page: StatusPage) -> bool:
    """Whether a worker has made a step in this generation. Without a Loop only its optimizers' steps are known."""
    return bool(page.step_at_ns or (page.first_beat_at_ns and not page.entered))
