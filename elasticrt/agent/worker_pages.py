"""What the status pages of this node's workers say. Everything here only looks: nothing is sent or waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from elasticrt.ipc.status_page import READY, StatusPage
from elasticrt.ipc.time_bounds import STANDING_IN_PLACE_S
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.group_state import GroupState


class WorkerPages:
    """The pages of the workers in `group`. `state`, everywhere, is the state of that group."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def of(self, state: GroupState) -> list[StatusPage]:
        """The pages of all workers of the running generation; none when one of them has ended already."""
        try:
            return [self._group.page(rank, state.number) for rank in sorted(state.seated)] if state.running else []
        except KeyError:
            return []

    def building(self, state: GroupState) -> bool:
        """Whether a worker prepares data."""
        return any(page.building for page in self.of(state))

    def doing(self, state: GroupState) -> str:
        """What the workers do before their first step in this generation, in words; "" from that step on."""
        pages = self.of(state)
        if any(page.building for page in pages):
            return "preparing data"
        if state.generation is None or state.generation.waits or all(map(_steps, pages)):
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
        """Local ranks of the workers that can go on in another generation without ending."""
        seated = sorted(state.seated) if state.running and not state.hung else []
        return [rank for rank in seated if self._word(rank, state.number, "in_place")]

    def ready_beside(self, local_ranks: Iterable[int]) -> list[int]:
        """Which of `local_ranks`, whose workers set up beside the training, have finished that."""
        return [rank for rank in sorted(local_ranks) if self._word(rank, 0, "in_place") == READY]

    def have_state(self, state: GroupState, local_ranks: Sequence[int]) -> bool:
        """Whether one of `local_ranks` has the state of its generation, or of the one before."""
        return any(self._word(rank, state.number, "restored_at_ns") for rank in local_ranks)

    def is_late(self, state: GroupState, local_rank: int, *, leaves: bool) -> bool:
        """Whether a worker should have taken its new seat; not while it does something else than training.

        `leaves`: its node leaves as soon as the others have what they need of it, so nothing else counts.
        """
        began, restored = (self._word(local_rank, state.number, word) for word in ("init_at_ns", "restored_at_ns"))
        trains = leaves or self._word(local_rank, state.number, "stepping") == 1
        return began < state.seated_ns and (restored < began or trains)

    def took_seat(self, state: GroupState, local_rank: int) -> bool:
        """Whether a worker has come to the group of its present seat, or was started for it."""
        in_place = state.generation is not None and state.generation.in_place
        return not in_place or self._word(local_rank, state.number, "init_at_ns") >= state.seated_ns

    def unmet_since(self, state: GroupState, now: float) -> float | None:
        """Since when workers have been waiting too long for the others of their generation; None: they have not.

        A node that dies before all have met (in new seats: before the first step there) breaks no connection: the
        others wait for it. Or it takes long to set up; so the answer is a later one each time the wait has doubled.
        `now` and the answer are seconds of the monotonic clock.
        """
        generation, pages = state.generation, self.of(state)
        if generation is None:
            return None
        if not generation.in_place:
            begun = [page.begun_at_ns or page.init_at_ns for page in pages if not (page.joined_at_ns or page.beats)]
        elif generation.waits:  # Then no step comes, but a state.
            begun = [page.init_at_ns for page in pages if page.restored_at_ns <= page.init_at_ns]
        else:
            begun = [page.init_at_ns for page in pages if not page.step_at_ns]
        at = min((at for at in begun if at >= max(1, state.seated_ns)), default=math.inf) / 1e9
        times = (now - at) / STANDING_IN_PLACE_S
        return at + STANDING_IN_PLACE_S * 2.0 ** int(math.log2(times)) if times >= 1 else None

    def step_of(self, local_rank: int, generation: int) -> int:
        """The last step that a worker has finished in `generation`; 0 for none."""
        stepped = self._word(local_rank, generation, "step_at_ns")
        return self._word(local_rank, generation, "step") if stepped else 0

    def has_stepped(self, local_rank: int, generation: int) -> bool:
        """Whether a worker, now of `generation`, has finished a step since its process began."""
        return self._word(local_rank, generation, "step") > 0

    def _word(self, local_rank: int, generation: int, word: str) -> int:
        """A word of one worker's page; 0 for a worker without a page."""
        try:
            value: int = getattr(self._group.page(local_rank, generation), word)
        except KeyError:
            return 0
        return value


def _steps(page: StatusPage) -> bool:
    """Whether a worker has made a step in this generation. Without a Loop only its optimizers' steps are known."""
    return bool(page.step_at_ns or (page.first_beat_at_ns and not page.entered))
