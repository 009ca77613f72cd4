"""A process that dies at any system call of a save leaves the old checkpoint or the new one, never neither."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elasticrt import Checkpointer
from elasticrt.checkpoint import checkpoint_dir

CALLS = ("open", "write", "fsync", "rename", "unlink", "close")


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((2000,), float(step))}


def _save(directory: Path, *steps: int) -> None:
    saver = Checkpointer(directory, keep=2)
    saver.begin()
    for step in steps:
        saver.save(_state(step), step=step)
        assert saver.wait()


def _child_that_dies(directory: Path, at: int) -> int:
    """Saves step 4 in a fork that gets SIGKILL before its call number `at` into the file system; the exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        saver = Checkpointer(directory, keep=2)
        saver.begin()
        count = iter(range(10_000))

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def dying(*arguments: Any, **options: Any) -> Any:
                if next(count) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)

            return dying

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        saver.save(_state(4), step=4)
        code = 0 if saver.wait() else 1
    finally:
        os._exit(code)


def test_killed_at_every_call(tmp_path, capfd):
    """SIGKILL before each call of a save in turn, until one gets through (F03, G5, S7, S8, W03)."""
    found = []
    for at in range(10_000):
        directory = tmp_path / str(at)
        _save(directory, 1, 2, 3)
        while checkpoint_dir._locks:
            checkpoint_dir._locks.popitem()[1].release()
        code = _child_that_dies(directory, at)
        assert code in (0, -signal.SIGKILL)
        state = Checkpointer(directory).restore()
        assert state is not None
        assert state["w"].tolist() == [float(state.step)] * 2000
        found.append(state.step)
        # What the dead one left does not hinder the next, and is gone after it.
        _save(directory, 5)
        assert Checkpointer(directory).restore().step == 5
        assert not list(directory.glob(".saving-*"))
        assert len(list(directory.glob("*.pt"))) == 2
        while checkpoint_dir._locks:
            checkpoint_dir._locks.popitem()[1].release()
        if code == 0:
            break
    capfd.readouterr()
    assert len(found) > 20
    assert found == sorted(found), "once the new one counts it stays"
    assert (found[0], found[-1]) == (3, 4)
