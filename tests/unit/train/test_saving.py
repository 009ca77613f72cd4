"""When a Loop saves, as other ranks become rank 0, and generations end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrt.data.position import Position
from elasticrt.distributed import agent_client
from elasticrt.train.saving import Saving
from elasticrt.train.training_state import TrainingState


def _saving(directory: Path, steps: int) -> tuple[Saving, list[int]]:
    """That of a newcomer, and the steps that it saves."""
    state = TrainingState({}, None, None, None, "")
    state.position = Position(steps=steps)
    made = Saving(state, directory, every="10 steps", keep=3, memory=0.0)
    made.begin()
    saved, take = [], made.take

    def noting(*, save: bool, copy: bool, patient: bool = False, **more: Any) -> None:
        saved.append(state.position.steps)
        take(save=save, copy=copy, patient=patient, **more)

    made.take = noting  # type: ignore[method-assign,assignment]
    return made, saved


def _move(saving: Saving, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    saving.move(replace(agent_client.worker_env(), rank=rank, world_size=2))
    saving.begin_generation()


def test_a_new_rank_0_saves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D01: there is a checkpoint in each interval, however often rank 0 changes: from its first step on."""
    saving, saved = _saving(tmp_path, 5)
    for steps in range(5, 50):
        saving._state.position = Position(steps=steps)
        if steps in (7, 17, 20, 40):
            _move(saving, {7: 1, 17: 0, 20: 0, 40: 1}[steps], monkeypatch)
        saving.save_due()
        saving.checkpointer.wait()
    assert saved == [17, 27, 37]


def test_a_new_rank_0_saves_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer after the last step becomes rank 0 because that one was lost while it saved."""
    saving, saved = _saving(tmp_path, 5)
    _move(saving, 1, monkeypatch)
    _move(saving, 0, monkeypatch)
    saving.save_last()
    assert saved == [5]


def test_a_save_that_was_refused_is_repeated_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D01: where it was of a generation that is over, however early its refusal has come."""
    saving, saved = _saving(tmp_path, 5)
    _move(saving, 0, monkeypatch)
    for steps in range(5, 30):
        saving._state.position = Position(steps=steps)
        if steps == 18:
            draft = saving.checkpointer._draft(15, 0).commit
            saving.checkpointer._missed(RuntimeError, draft, "another generation has begun", repeated=True)
            _move(saving, 0, monkeypatch)
        saving.save_due()
        saving.checkpointer.wait()
    assert saved == [5, 15, 18, 28]
