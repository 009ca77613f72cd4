"""What a worker hands over that loses a peer before or after the batches of an epoch: the state of its position."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrt import ElasticBatchSampler, Loop
from elasticrt.checkpoint import checkpoint_dir
from elasticrt.checkpoint.state_copy import POOLED_BYTES_MIN
from elasticrt.distributed import agent_client
from elasticrt.ipc.env import Copy
from elasticrt.ipc.messages import Copied, LeftGeneration
from tests.fake_worker import Agent, under
from tests.servers import wait_until

SAMPLES, BATCH = 20, 6
PER_EPOCH = 4
Act = Callable[["Script"], None]


def _unlock() -> None:
    while checkpoint_dir._locks:
        checkpoint_dir._locks.popitem()[1].release()


class Script:
    """One start of a script. It takes no copies but those that it hands over."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.trained = 0
        data = TensorDataset(torch.randn(SAMPLES, 3))
        self.sampler = ElasticBatchSampler(data, BATCH)
        self.loader = DataLoader(data, batch_sampler=self.sampler)
        self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.large = nn.Linear(POOLED_BYTES_MIN // 4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        objects = {"model": self.model, "large": self.large, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.loop = Loop(directory, sampler=self.sampler, every="1000 steps", memory=0, **objects)

    def run(self, head: Act, batch: Act, tail: Act) -> None:
        """Two epochs. The three are called before, in and after the batches."""
        for _ in self.loop.epochs(2):
            self.loop._world.in_place.possible = agent_client.agent_link().has_agent
            head(self)
            for (x,) in self.loop.batches(self.loader):
                self.trained += 1
                with self.loop.step():
                    self.model(x).square().mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if self.ends_at(self.loop.steps_done):
                    break
                batch(self)
            tail(self)

    def ends_at(self, step: int) -> bool:
        """Whether a `break` follows this step."""
        return False

    def changes(self) -> None:
        """What scripts do at the end of an epoch: the learning rate, variables, and the running mean of BatchNorm."""
        self.scheduler.step()
        self.loop.vars.setdefault("epochs", []).append(self.loop.epoch)
        self.model(torch.randn(4, 3))

    def loses_its_peer(self) -> None:
        """Loses it in a collective of an evaluation."""
        with self.loop.pause("evaluate"):
            raise torch.distributed.DistNetworkError("Connection closed by peer [127.0.0.1]:1")


class Breaks(Script):
    """Leaves the batches of the second epoch after its second step, or its last."""

    at = PER_EPOCH + 2

    def ends_at(self, step: int) -> bool:
        """After this one step."""
        return step == self.at


class BreaksLast(Breaks):
    """Leaves by `break` when there is nothing left anyway."""

    at = 2 * PER_EPOCH


def _nothing(_: Script) -> None:
    pass


def _changes(script: Script) -> None:
    script.changes()


def _loses(script: Script) -> None:
    """The tail of the second epoch, where the peer is lost."""
    script.changes()
    if script.loop.epoch == 1:
        script.loses_its_peer()


def _loses_after_a_large_change(script: Script) -> None:
    if script.loop.epoch == 1:
        with torch.no_grad():
            script.large.weight.add_(1.0)
    _loses(script)


def _loses_among_the_batches(script: Script) -> None:
    script.loop.vars["steps"] = script.loop.steps_done
    if script.loop.steps_done == PER_EPOCH + 2:
        script.loses_its_peer()


def _handed_over(
    kind: type[Script], directory: Path, monkeypatch: pytest.MonkeyPatch, acts: tuple[Act, Act, Act]
) -> tuple[Copied, bytes] | None:
    """Run the script until it loses its peer; what it has handed over."""
    agent = Agent()
    with under(agent, monkeypatch):
        with pytest.raises(torch.distributed.DistNetworkError):
            kind(directory).run(*acts)
        link = agent_client.agent_link()
        assert link is not None
        link.send(LeftGeneration(0))
        wait_until(lambda: agent.of(LeftGeneration), "the agent has read all that was said before")
    return next(zip(agent.of(Copied), agent.copies, strict=True), None)


def _end(script: Script) -> dict[str, Any]:
    return {
        "vars": dict(script.loop.vars),
        "scheduler": script.scheduler.state_dict(),
        "rate": script.optimizer.param_groups[0]["lr"],
        "weights": [each.tolist() for each in script.model.state_dict().values()],
    }


@pytest.mark.parametrize(
    ("kind", "head", "tail"),
    [
        (Script, _nothing, _loses),
        (Breaks, _nothing, _loses),
        (BreaksLast, _nothing, _loses),
        (Script, _loses, _nothing),
    ],
    ids=["tail", "break", "break at the last batch", "head"],
)
def test_what_follows_a_boundary_counts_once(tmp_path, monkeypatch, kind, head, tail):
    """A restart from what was handed over runs the head or the tail again, and ends as the undisturbed run does."""
    undisturbed = kind(tmp_path / "undisturbed")
    acts = [_changes if act is _loses else act for act in (head, _nothing, tail)]
    undisturbed.run(*acts)
    handed = _handed_over(kind, tmp_path / "lost", monkeypatch, (head, _nothing, tail))
    assert handed is not None
    said, state = handed
    copy = Copy(said.step, said.epoch, said.size, said.digest, 1, said.place)
    with os.fdopen(os.memfd_create("copy"), "wb") as file:
        file.write(state)
        file.flush()
        with under(Agent(), monkeypatch, copy=copy, state_fd=file.fileno()):
            _unlock()
            again = kind(tmp_path / "lost")
            again.run(*acts)
    assert again.trained == undisturbed.trained - said.step
    assert _end(again) == _end(undisturbed)


def test_a_state_of_no_position_is_not_handed_over(tmp_path, monkeypatch, caplog):
    """Where the tail has changed large tensors, a restart goes on from the newest copy."""
    assert _handed_over(Script, tmp_path, monkeypatch, (_nothing, _nothing, _loses_after_a_large_change)) is None
    assert "the agent does not get the newest step" in caplog.text


def test_among_the_batches_the_state_is_handed_over_as_it_is(tmp_path, monkeypatch, caplog):
    """What the script has changed after a step of the epoch belongs to that step; what is cut off there is told."""
    handed = _handed_over(Script, tmp_path, monkeypatch, (_nothing, _loses_among_the_batches, _nothing))
    assert handed is not None
    ours = torch.load(io.BytesIO(handed[1]), weights_only=True)["elasticrt"]
    assert (ours["vars"], ours["position"]["steps"]) == ({"steps": PER_EPOCH + 2}, PER_EPOCH + 2)
    assert f"'evaluate' after step {PER_EPOCH + 2} failed with a lost worker, and is not repeated" in caplog.text


def _loses_with_other_weights(script: Script) -> None:
    """An average's weights lie in the model while it is evaluated."""
    if script.loop.steps_done == PER_EPOCH + 2:
        with script.loop.pause("evaluate"):
            with torch.no_grad():
                for each in script.model.parameters():
                    each.zero_()
            raise torch.distributed.DistNetworkError("Connection closed by peer [127.0.0.1]:1")


def _loses_with_a_large_one(script: Script) -> None:
    if script.loop.steps_done == PER_EPOCH + 2:
        with torch.no_grad(), script.loop.pause("evaluate"):
            script.large.weight.zero_()
            raise torch.distributed.DistNetworkError("Connection closed by peer [127.0.0.1]:1")


def test_what_a_pause_changes_is_not_handed_over(tmp_path, monkeypatch):
    """Weights that are exchanged for the time of an evaluation are not those of the training."""
    weights = []

    def note(script: Script) -> None:
        weights[:] = [each.detach().clone() for each in script.model.parameters()]
        _loses_with_other_weights(script)

    handed = _handed_over(Script, tmp_path / "small", monkeypatch, (_nothing, note, _nothing))
    assert handed is not None
    model = torch.load(io.BytesIO(handed[1]), weights_only=True)["model"]
    assert all(torch.equal(model[name], each) for name, each in zip(("0.weight", "0.bias"), weights, strict=False))
    assert weights[0].abs().sum() > 0
    _unlock()
    acts = (_nothing, _loses_with_a_large_one, _nothing)
    assert _handed_over(Script, tmp_path / "large", monkeypatch, acts) is None


class Looks(Script):
    """Loses its peer in a pause before the step of a batch."""

    def run(self, head: Act, batch: Act, tail: Act) -> None:
        """One batch."""
        for _ in self.loop.epochs(1):
            self.loop._world.in_place.possible = agent_client.agent_link().has_agent
            for _batch in self.loop.batches(self.loader):
                self.loses_its_peer()


def test_a_pause_before_the_step_of_a_batch_is_told_as_well(tmp_path, monkeypatch, caplog):
    """The run goes on after the step before, and comes there no more: a line says so."""
    assert _handed_over(Looks, tmp_path, monkeypatch, (_nothing, _nothing, _nothing)) is not None
    assert "'evaluate' after step 0 failed with a lost worker, and is not repeated" in caplog.text


def test_a_pause_that_ends_leaves_nothing_behind(tmp_path, monkeypatch):
    """What the script changes after it belongs to the step again."""

    def act(script: Script) -> None:
        with script.loop.pause("evaluate"):
            pass
        _loses_among_the_batches(script)

    handed = _handed_over(Script, tmp_path, monkeypatch, (_nothing, act, _nothing))
    assert handed is not None
    assert torch.load(io.BytesIO(handed[1]), weights_only=True)["elasticrt"]["vars"] == {"steps": PER_EPOCH + 2}
