"""Reads the status pages of this node's workers. Nothing here sends a message or waits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from elasticrt.ipc.status_page import READY, StatusPage
from elasticrt.ipc.time_bounds import STANDING_IN_PLACE_S
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.group_state import GroupState


class WorkerPages:
    """The status pages of the workers in `group`. The parameter `state` of all methods is the state of that group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def of_seated(self, state: GroupState) -> list[StatusPage]:
        """The pages of the seated workers of the running generation, in the order of local ranks.

        Empty if a page is missing: a part of the workers must not be taken for all.
        """
        try:
            return [self._group.page(rank, state.number) for rank in sorted(state.seated)] if state.running else []
        except KeyError:
            return []

    def is_building(self, state: GroupState) -> bool:
        """Whether a worker prepares shared data."""
        return any(page.building for page in self.of_seated(state))

    def doing(self, state: GroupState) -> str:
        """What the workers do before their first step in this generation, in words; "" after that step."""
        pages = self.of_seated(state)
        if any(page.building for page in pages):
            return "preparing data"
        if state.generation is None or state.generation.waits or all(map(_steps, pages)):
            return ""
        # A page keeps the times of an earlier generation until they are replaced. A time that is earlier than that of
        # the phase before it is such an old one: the phase is not over.
        if any(page.init_at_ns > page.joined_at_ns for page in pages):
            return "making the process group"
        if all(page.restored_at_ns > page.joined_at_ns for page in pages):
            return "making the first step"
        if state.generation.in_place:
            return "taking over the state"
        resumes = state.generation.memory or state.generation.resume
        return "setting up, and restoring a saved state" if resumes else "setting up"

    def able_in_place(self, state: GroupState) -> list[int]:
        """The local ranks of the workers that can go on in another generation in place, with their processes."""
        seated = sorted(state.seated) if state.running and not state.hung else []
        return [rank for rank in seated if self._word(rank, state.number, "in_place")]

    def ready_beside(self, local_ranks: Iterable[int]) -> list[int]:
        """Those of `local_ranks` whose workers have set up beside the training, and wait to be let in."""
        return [rank for rank in sorted(local_ranks) if self._word(rank, 0, "in_place") == READY]

    def have_state(self, state: GroupState, local_ranks: Sequence[int]) -> bool:
        """Whether a worker of `local_ranks` has the training state of its generation, or of the one before."""
        return any(self._word(rank, state.number, "restored_at_ns") for rank in local_ranks)

    def is_late(self, state: GroupState, local_rank: int, *, leaves: bool) -> bool:
        """Whether a worker has not taken its new seat, and has no good reason.

        Good reasons are a save, a pause, or code between two epochs. `leaves`: the node is draining, and the others
        only need the worker's state. Then no reason is good.
        """
        began, restored = (self._word(local_rank, state.number, word) for word in ("init_at_ns", "restored_at_ns"))
        trains = leaves or self._word(local_rank, state.number, "stepping") == 1
        # `restored < began`: the worker was still meeting others, or taking over the state, in the generation before.
        return began < state.seated_ns and (restored < began or trains)

    def took_seat(self, state: GroupState, local_rank: int) -> bool:
        """Whether a worker has come to the process group of its present seat, or was started for the seat."""
        in_place = state.generation is not None and state.generation.in_place
        return not in_place or self._word(local_rank, state.number, "init_at_ns") >= state.seated_ns

    def unmet_since(self, state: GroupState, now: float) -> float | None:
        """When workers began to wait too long for the others of their generation; None if they do not wait too long.

        If a node dies before all workers have met (in new seats: before the first step there), no connection breaks, so
        the other workers only wait. But the node may also just take long to set up. So each time the wait has doubled,
        the answer is a later time, and the nodes are probed again.

        `now` and the answer are seconds of the monotonic clock.
        """
        generation, pages = state.generation, self.of_seated(state)
        if generation is None:
            return None
        if not generation.in_place:
            begun = [page.begun_at_ns or page.init_at_ns for page in pages if not (page.joined_at_ns or page.beats)]
        # A generation that waits makes no step: it is complete when its workers have agreed on the state.
        elif generation.waits:
            begun = [page.init_at_ns for page in pages if page.is_meeting]
        else:
            begun = [page.init_at_ns for page in pages if not page.step_at_ns]
        at = min((at for at in begun if at >= max(1, state.seated_ns)), default=math.inf) / 1e9
        times = (now - at) / STANDING_IN_PLACE_S
        return at + STANDING_IN_PLACE_S * 2.0 ** int(math.log2(times)) if times >= 1 else None

    def step_of(self, local_rank: int, generation: int) -> int:
        """The last step that a worker has finished in `generation`; 0 without one."""
        stepped = self._word(local_rank, generation, "step_at_ns")
        return self._word(local_rank, generation, "step") if stepped else 0

    def has_stepped(self, local_rank: int, generation: int) -> bool:
        """Whether a worker, which is in `generation` now, has finished a step since its process began."""
        return self._word(local_rank, generation, "step") > 0

    def _word(self, local_rank: int, generation: int, word: str) -> int:
        """The value of the field `word` on one worker's page; 0 for a worker without a page."""
        try:
            value: int = getattr(self._group.page(local_rank, generation), word)
        except KeyError:
            return 0
        return value


def _steps(page: StatusPage) -> bool:
    """Whether a worker has made a step in this generation. Without a Loop, optimizer steps count."""
    return bool(page.step_at_ns or (page.first_beat_at_ns and not page.entered))
