"""A copy in memory that is not what was promised: refused before anybody parses it, and the agent is told."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticrt import Loop
from elasticrt.checkpoint.snapshot import Snapshot
from elasticrt.ipc.env import Copy
from elasticrt.ipc.messages import CopyDamaged, Save
from tests.fake_worker import Agent, under


def _script(directory: Path) -> tuple[nn.Module, Loop]:
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    return model, Loop(directory, model=model)


@contextlib.contextmanager
def _copied(directory: Path) -> Iterator[tuple[int, Copy]]:
    """The state of a loop as the agent keeps it, in a memory file, after 3 steps."""
    model, loop = _script(directory)
    for _ in loop.steps(3):
        with loop.step(), torch.no_grad():
            next(model.parameters()).add_(1.0)
        snapshot = Snapshot(loop._state.collect())
    fd = os.memfd_create("copy")
    size, digest = snapshot.write_to(fd)
    yield fd, Copy(3, 0, size, digest, 1)
    os.close(fd)


def _flip(share: float) -> Callable[[int, int], None]:
    """Another bit, so far into the file."""

    def damage(fd: int, size: int) -> None:
        at = min(size - 1, int(share * size))
        before = os.pread(fd, 1, at)[0]
        os.pwrite(fd, bytes([before ^ 0x10]), at)

    return damage


def _cut(share: float) -> Callable[[int, int], None]:
    return lambda fd, size: os.ftruncate(fd, int(share * size))


DAMAGES: dict[str, tuple[Callable[[int, int], None], str]] = {
    "a bit of the first byte": (_flip(0.0), "SHA-256"),
    "a bit of the header": (_flip(0.01), "SHA-256"),
    "a bit in the middle": (_flip(0.5), "SHA-256"),
    "a bit near the end": (_flip(0.99), "SHA-256"),
    "a bit of the last byte": (_flip(1.0), "SHA-256"),
    "all bytes": (lambda fd, size: os.pwrite(fd, bytes(size), 0), "SHA-256"),
    "one byte is missing": (lambda fd, size: os.ftruncate(fd, size - 1), "bytes; expected"),
    "half of it is missing": (_cut(0.5), "bytes; expected"),
    "all of it is missing": (_cut(0.0), "got 0 bytes; expected"),
    "a byte too many": (lambda fd, size: os.ftruncate(fd, size + 1), "bytes; expected"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_copy_is_refused_before_it_is_parsed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F06, S7: nothing is made of its bytes, the failure is not a final one, and the agent is told."""
    damage, words = DAMAGES[name]
    agent = Agent()
    with _copied(tmp_path / "before") as (fd, copy):
        damage(fd, copy.size)
        parsed: list[object] = []
        monkeypatch.setattr(torch, "load", lambda *arguments, **_: parsed.append(arguments))
        with under(agent, monkeypatch, copy=copy, state_fd=fd):
            model, loop = _script(tmp_path / "after")
            untouched = [parameter.clone() for parameter in model.parameters()]
            with pytest.raises(RuntimeError, match=f"copy of step 3 in this node's memory is damaged: .*{words}"):
                next(loop.epochs(1))
            deadline = time.monotonic() + 10
            while not agent.of(CopyDamaged) and time.monotonic() < deadline:
                time.sleep(0.005)
    assert not parsed
    assert all(map(torch.equal, untouched, model.parameters()))
    assert agent.of(CopyDamaged) == [CopyDamaged()]


def test_a_copy_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F06: an agent that does not hold the copy any more hands none over; the worker does not take anything else."""
    with _copied(tmp_path / "before") as (_, copy), under(Agent(), monkeypatch, copy=copy):
        _, loop = _script(tmp_path / "after")
        with pytest.raises(RuntimeError, match="copy of step 3 is not in this node's memory"):
            next(loop.epochs(1))


def test_an_intact_copy_is_resumed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the tests above damage is a state that a loop goes on from."""
    agent = Agent()
    with _copied(tmp_path / "before") as (fd, copy), under(agent, monkeypatch, copy=copy, state_fd=fd):
        model, loop = _script(tmp_path / "after")
        begun = next(model.parameters()).clone()
        next(loop.epochs(2))
        assert loop.steps_done == 3
        assert torch.equal(next(model.parameters()), begun + 1.0 + 1.0 + 1.0)
        assert not agent.of(CopyDamaged)


def test_a_state_from_a_copy_is_saved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S8: however long the interval of saves is, a run that fails more often than that has a checkpoint."""
    agent = Agent()
    with _copied(tmp_path / "before") as (fd, copy), under(agent, monkeypatch, copy=copy, state_fd=fd):
        model, loop = _script(tmp_path / "after")
        for step in loop.steps(9):
            with loop.step(), torch.no_grad():
                next(model.parameters()).add_(1.0)
            if step == 4:
                loop._saving.checkpointer.wait()
                assert [message.commit["step"] for message in agent.of(Save)] == [4]
                break
