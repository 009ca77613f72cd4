"""When a Loop saves, as other ranks become rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrt.data.position import Position
from elasticrt.distributed import agent_client
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.train.saving import Saving
from elasticrt.train.training_state import TrainingState

WORKER = agent_client.worker_env()


def _saving(directory: Path, steps: int, every: str) -> Saving:
    state = TrainingState({}, None, None, None, "")
    state.position = Position(steps=steps)
    made = Saving(state, directory, every=every, keep=3, memory=0.0)
    made.begin()
    return made


def _seat(saving: Saving, step: int) -> WorkerEnv:
    """A seat in a generation whose head has `step`."""
    head = Commit(
        step=step, epoch=0, generation=1, nonce="a" * 16, parent="", directory="/ckpt", file="f", digest="d" * 64,
        size=1, place=saving.checkpointer.place,
    )  # fmt: skip
    return WORKER.__class__(**{**vars(WORKER), "resume": head})


@pytest.mark.parametrize("head", [0, 12])
def test_a_newcomer_counts_from_the_newest_checkpoint(tmp_path: Path, head: int) -> None:
    """D01: however often rank 0 changes hands, there is a checkpoint in each interval."""
    old = _saving(tmp_path / "old", 5, "10 steps")
    old._state.position = Position(steps=15)
    new = _saving(tmp_path / "new", 0, "10 steps")
    new._state.position = Position(steps=15)
    new.take_over({"total": 15, **old.since_saved()})
    if head:
        new.move(_seat(new, head))
    new.is_first, taken = True, []
    new.take = lambda *, save, copy: taken.append(new._state.position.steps)  # type: ignore[method-assign,assignment]
    for steps in range(15, 30):
        new._state.position = Position(steps=steps)
        if not taken:
            new.between_steps()
    assert taken == [15 if not head else head + 10]


def test_the_time_since_a_save_of_another_rank_is_estimated(tmp_path: Path) -> None:
    """By the steps since: half of them were made after it, so half of the time was."""
    saving = _saving(tmp_path, 10, "1 h")
    saving._saved_at -= 1000.0
    saving._state.position = Position(steps=30)
    saving.move(_seat(saving, 20))
    assert saving.since_saved()["since_saved_s"] == pytest.approx(500.0, abs=5.0)
    assert saving.since_saved()["saved"]["steps"] == 20
