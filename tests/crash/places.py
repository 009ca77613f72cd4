"""What the tests of this folder have in common: a state that tells its step, saving, and restoring in both ways."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from elasticrt import Checkpointer
from elasticrt.checkpoint import checkpoint_dir
from elasticrt.checkpoint.commits import DirectoryHead
from elasticrt.ipc.env import Commit, WorkerEnv

SIZE = 400
NUMBERS = itertools.count()
WORKER = WorkerEnv(0, 0, 1, 1, 0, 1, "127.0.0.1", 1, 0, 3, "run", 1, 2, "nonce", "node", "")


def release() -> None:
    """This process holds no directory any more: for the next test, or as the next process."""
    while checkpoint_dir._locks:
        checkpoint_dir._locks.popitem()[1].release()


def close(checkpointer: Checkpointer) -> None:
    """Let go of its directory, as a process does at its end: these tests are thousands of processes in one."""
    directory, checkpointer._directory._directory = checkpointer._directory._directory, None
    if directory is not None:
        os.close(directory.fd)


def state(step: int) -> dict[str, Any]:
    """What a step leaves."""
    return {"w": torch.full((SIZE,), float(step))}


def save(directory: Path, *steps: int, keep: int = 2) -> Checkpointer:
    """One process that restores, then saves at each of `steps`."""
    saver = Checkpointer(directory, keep=keep)
    saver.begin()
    for step in steps:
        saver.save(state(step), step=step)
        assert saver.wait()
    return saver


def save_one(saver: Checkpointer, step: int) -> None:
    """As a Loop saves."""
    saver.snapshots.take(state(step), saver.to_disk(step=step, epoch=0))
    assert saver.wait()


def restored(directory: Path, head: Commit | None = None) -> int:
    """The step that a new process goes on from (0: from none), and that its content is of that step.

    With `head` it is a worker of an agent that has told it so. Raises CheckpointError.
    """
    loader = Checkpointer(directory)
    if head is not None:
        loader._head = DirectoryHead(replace(WORKER, resume=head, nonce=f"n{next(NUMBERS)}"), str(directory))
    try:
        found = loader.restore()
    finally:
        close(loader)
    if found is None:
        return 0
    assert found["w"].tolist() == [float(found.step)] * SIZE, f"torn: {found.step}"
    return found.step


def commit_of(directory: Path, step: int) -> Commit:
    """As the manifest has it."""
    (path,) = directory.glob(f"step-{step}-*.json")
    return Commit.from_fields(json.loads(path.read_text())["commit"])
