"""Snapshots: the state between two steps, serialised once for all who want it, while training goes on."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elasticrt
from elasticrt.checkpoint import snapshot
from elasticrt.checkpoint.checkpoint_dir import parse
from elasticrt.checkpoint.snapshot import Snapshot, Snapshots
from elasticrt.checkpoint.state_copy import plain_copy
from elasticrt.ipc.messages import Copied
from tests.fake_worker import Agent, under
from tests.servers import wait_until

WIDTH = 160


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.Adam(model.parameters(), 0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()


def moments(state: dict[str, Any]) -> list[torch.Tensor]:
    """Adam's tensors in a state."""
    return [tensor for each in state["optimizer"]["state"].values() for tensor in each.values()]


def checkpoints(directory: Path) -> dict[int, dict[str, Any]]:
    """What is saved in a directory, by step."""
    found = [parse(path.read_bytes()) for path in directory.glob("*.pt")]
    return {state["elasticrt"]["position"]["steps"]: state for state in found}


def test_each_checkpoint_is_the_state_between_two_steps(tmp_path: Path) -> None:
    """Saved after every step that it can be, beside the training: each is what the same training had at that step."""
    model, optimizer = build()
    truth = {}
    for step in range(1, 61):
        train(model, optimizer)
        truth[step] = plain_copy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state")
    model, optimizer = build()
    loop = elasticrt.Loop(tmp_path, every="1 steps", keep=100, model=model, optimizer=optimizer)
    for _ in loop.epochs(1, max_steps=60):
        for step, _ in enumerate(loop.batches(repeat(None))):
            train(model, optimizer)
            if step in (10, 20, 30):
                loop._saving.checkpointer.wait()  # So that each of these begins another save, on any disk.
    found = checkpoints(tmp_path)
    assert len(found) > 3
    assert 60 in found
    for step, state in found.items():
        assert all(torch.equal(mine, true) for mine, true in zip(moments(state), moments(truth[step]), strict=True))
        assert all(torch.equal(tensor, truth[step]["model"][name]) for name, tensor in state["model"].items())


def test_a_copy_and_a_checkpoint_of_one_step_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are due after one step: the agent has the copy, and the file on disk is like it."""
    agent = Agent()
    with under(agent, monkeypatch):
        model, optimizer = build()
        loop = elasticrt.Loop(tmp_path / "ckpt", model=model, optimizer=optimizer)
        epochs = loop.epochs(1)
        next(epochs)
        loop._saving.take(save=True, copy=True)
        loop._saving.checkpointer.wait()
        wait_until(lambda: agent.of(Copied), "the agent has the copy")
        (copied,) = agent.of(Copied)
        (payload,) = (tmp_path / "ckpt").glob("*.pt")
        content = payload.read_bytes()
        assert (copied.size, copied.digest) == (len(content), hashlib.sha256(content).hexdigest())
        assert torch.equal(parse(content)["model"]["0.weight"], model[0].weight)  # type: ignore[index]
        assert loop._saving.checkpointer._head.known.step == 0
        del epochs


def test_a_handover_does_not_wait_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has the state of the agreed step while an older snapshot is still being written to the disk."""
    agent, go = Agent(), threading.Event()
    with under(agent, monkeypatch):
        model, _ = build()
        loop = elasticrt.Loop(tmp_path / "ckpt", model=model)
        next(loop.epochs(1))
        loop._saving.checkpointer.snapshots.take(loop._state.collect(), [lambda _: go.wait(30)])
        loop._saving.memory_tier.hand_over(loop._state.collect(), 7, 0)
        wait_until(lambda: agent.of(Copied), "the agent has the copy")
        assert loop._saving.checkpointer.snapshots.busy
        go.set()
        assert loop._saving.checkpointer.snapshots.wait(30)
    assert [copied.step for copied in agent.of(Copied)] == [7]


def test_where_there_is_no_memory_for_a_copy_the_save_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy is given up in words; the checkpoint is then written straight to its file."""
    agent = Agent()
    monkeypatch.setattr(snapshot, "hashed", _only_to_disk(snapshot.hashed))
    with under(agent, monkeypatch), caplog.at_level(logging.WARNING):
        model, _ = build()
        loop = elasticrt.Loop(tmp_path / "ckpt", model=model)
        epochs = loop.epochs(1)
        next(epochs)
        loop._saving.take(save=True, copy=True)
        loop._saving.checkpointer.wait()
        assert loop._saving.checkpointer._head.known.step == 0
        assert not agent.of(Copied)
        del epochs
    assert "no copies are kept in memory any more" in caplog.text


def _only_to_disk(hashed: Any) -> Any:
    """As if memory ran out while a memory file is written."""

    def limited(fd: int, produce: Any) -> Any:
        if "memfd:" in os.readlink(f"/proc/self/fd/{fd}"):  # noqa: PTH115  Of a descriptor.
            raise OSError(12, "Cannot allocate memory")
        return hashed(fd, produce)

    return limited


def test_what_is_written_is_the_state(tmp_path: Path) -> None:
    """The state as it was, with the size and the digest of the bytes."""
    state = {"w": torch.arange(100_000.0), "n": 7}
    taken = Snapshot(state)
    state["w"].zero_()
    with (tmp_path / "file").open("w+b") as file:
        size, digest = taken.write_to(file.fileno())
    content = (tmp_path / "file").read_bytes()
    assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())
    assert torch.equal(torch.load(io.BytesIO(content))["w"], torch.arange(100_000.0))


def test_one_use_that_fails_leaves_the_others_their_snapshot(caplog: pytest.LogCaptureFixture) -> None:
    """It is said, the others get theirs, and there is another snapshot after it."""
    taken, used = Snapshots(), []
    for number in range(2):
        taken.take({"n": number}, [lambda _: 1 // 0, lambda each: used.append(each._copied["n"])])
        assert taken.wait(10)
    assert used == [0, 1]
    assert "ZeroDivisionError" in caplog.text


def test_the_thread_of_a_snapshot_keeps_no_process_from_ending() -> None:
    """It is a daemon, works while the snapshots are busy, and ends with the last use."""
    taken, seen = Snapshots(), []
    for _ in range(3):
        taken.take({}, [lambda _: seen.append((threading.current_thread(), taken.busy))])
        assert taken.wait(10)
    assert [(thread.daemon, busy, thread.is_alive()) for thread, busy in seen] == [(True, True, False)] * 3


def test_a_forked_process_waits_for_no_snapshot_of_its_parents() -> None:
    """A child that is forked while one is being written has its memory and not its thread."""
    taken, go = Snapshots(), threading.Event()
    taken.take({}, [lambda _: go.wait(30)])
    assert taken.busy
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        os._exit(0 if not taken.busy and taken.wait(20) and time.monotonic() - began < 10 else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    assert taken.wait(10)
    assert status == 0
