"""When copies of the state are taken into memory, and when not."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch

from elasticrt.checkpoint import commits, memory_tier
from elasticrt.checkpoint.memory_tier import STEP_S_MIN, MemoryTier, lacks_room, stride
from elasticrt.checkpoint.snapshot import Snapshots
from elasticrt.checkpoint.state_copy import Buffers, plain_copy, tensors_of
from elasticrt.errors import ConfigError
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.messages import Copied, Message, Reply, Save
from elasticrt.train.loop import Loop
from tests.fake_worker import Agent, under
from tests.servers import wait_until

MIB = 2**20


@pytest.mark.parametrize("interval_s", [0.0, 1e-7, 0.01, 0.1, 1.0, 39.9, 1000.0])
@pytest.mark.parametrize("step_s", [0.0, 1e-4, 0.05, 0.3, 40.0])
def test_copies_take_their_share_of_the_time_and_no_more(interval_s: float, step_s: float) -> None:
    """At least the interval lies between two, and at most half as much again, but for whole steps."""
    steps = stride(interval_s, step_s)
    step_s = max(step_s, STEP_S_MIN)
    assert interval_s <= steps * step_s * (1 + 1e-9)
    assert steps * step_s < 1.5 * (interval_s + step_s)


def test_many_nodes_copy_after_the_same_steps() -> None:
    """Of 1,000 nodes whose copies differ in cost by up to a half, training waits for less than two per interval."""
    strides = [stride(4.0 * (1 + number / 2000), 0.05) for number in range(1000)]
    steps = {step for each in set(strides) for step in range(each, 10_001, each)}
    assert len(steps) < 2 * 10_000 / min(strides)


@pytest.mark.parametrize(("taken", "more"), [(0, 4), (1, 2), (2, 1), (3, 1), (1000, 1)])
def test_what_is_still_to_come_must_fit(taken: int, more: int) -> None:
    """Four copies are held at once: on the host, being written, and two by the agent. Those that are there take no room
    again; a state for which the memory does not suffice is left to the disk, and the reason has both numbers."""
    assert lacks_room(100 * MIB, more * 100 * MIB + 1, taken) == ""
    assert lacks_room(100 * MIB, more * 100 * MIB, taken) == (
        f"no room for {more} of 100 MiB each, {more * 100} MiB are free"
    )


def test_memory_that_is_just_enough_stays_enough() -> None:
    """Copies that have once been begun are not given up for the room that they take themselves."""
    size, free = 100 * MIB, 401 * MIB
    for taken, held in enumerate((0, 2, 3, 3, 3)):
        assert not lacks_room(size, free - held * size, taken)


@pytest.mark.parametrize("fits", [True, False])
def test_a_state_without_room_is_not_copied(
    fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is measured against this machine's free memory; if it does not fit, none is copied and the reason is said."""
    size = 1024 if fits else 2**50  # A tensor that is only described takes no memory, whatever its size.
    state = {"w": torch.empty(size, dtype=torch.uint8, device="cpu" if fits else "meta")}
    agent = Agent()
    with under(agent, monkeypatch) as worker, caplog.at_level(logging.WARNING):
        copies = MemoryTier(worker, 0.01, "")
        copies.begin(0.0, 0)
        uses = copies.to_agent(state, 1, 0)
        assert len(uses) == fits
        if fits:
            Snapshots().take(state, uses)
            wait_until(lambda: agent.of(Copied), "the agent has the copy")
        assert len(agent.of(Copied)) == fits
    assert ("no copies are kept in memory: no room for 4 of" in caplog.text) is not fits


@pytest.mark.parametrize("budget", [0.01, 0.0])
def test_a_newcomer_has_the_memory_of_its_first_copy(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy of its state, with Adam's part, lies in what it has touched beside the training of others; that
    is nothing if it takes no copies."""
    weight = torch.ones(200, 100)
    small = {"model": {"weight": weight, "bias": torch.ones(2)}}
    state = {**small, "optimizer": {"first": weight + 1, "second": weight + 2, "more": weight + 3}}
    with under(Agent(), monkeypatch) as worker:
        buffers = Buffers()
        MemoryTier(worker, budget, "").touch(small, buffers)
    touched = {each.data_ptr() for each in itertools.chain(*buffers._taken.values())}
    copied = plain_copy(state, "state", buffers)
    found = {each.data_ptr() for each in tensors_of(copied)}
    assert len(touched) == len(touched & found) == (3 if budget else 0)
    assert all(map(torch.equal, tensors_of(copied), tensors_of(state)))


def test_who_is_left_alone_copies_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others had the state, copies could be rare; then after the next step, whichever it is, and rarely again."""
    agent, snapshots, state = Agent(), Snapshots(), {"w": torch.ones(1000)}
    with under(agent, monkeypatch) as worker:
        copies = MemoryTier(worker, 1e-9, "")
        copies.begin(0.0, 0)
        for step, number in ((1024, 1), (1031, 2)):
            assert copies.is_due(1e12, step)
            snapshots.take(state, copies.to_agent(state, step, 0))
            wait_until(lambda number=number: len(agent.of(Copied)) == number, "the agent has the copy")
            wait_until(lambda: copies.is_due(1e12, 3 * 2**60), "what it has cost is known")
            assert not copies.is_due(1e12, step + 7)
            copies.left_alone()


class WithoutEtcd(Agent):
    """An agent that cannot commit as long as `away`."""

    def __init__(self) -> None:
        self.away = True
        super().__init__(answer=self.say)

    def say(self, message: Message) -> Reply | None:
        """What an agent says to `message`."""
        if isinstance(message, Save) and self.away:
            return Reply(message.request, ok=False, reason="etcd does not answer", refusal="unsure")
        return self.fenced(message)


def test_copies_are_taken_while_a_commit_waits_for_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E03: else a node that is alone would lose all of an outage, if its workers died in it."""
    monkeypatch.setattr(commits, "ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(memory_tier, "FIRST_S", 0.0)
    agent = WithoutEtcd()
    with under(agent, monkeypatch):
        loop = Loop(tmp_path / "ckpt", every="1 steps", memory=0.9)
        for _ in loop.epochs(1):
            for number in loop.batches(range(10**7)):
                asked = {save.commit["step"] for save in agent.of(Save)[:1]}
                if sum(copied.step > min(asked, default=number) for copied in agent.of(Copied)) >= 3:
                    break
            else:
                pytest.fail("copies were taken")
            assert len({save.commit["step"] for save in agent.of(Save)}) == 1, "one save at a time"
            agent.away = False
    assert agent.of(Save)[-1].commit["step"] == loop.steps_done


def test_without_an_agent_none_are_taken() -> None:
    """A script that runs by itself has nobody to keep its copies."""
    copies = MemoryTier(WorkerEnv.from_env({}), 0.01, "")
    copies.begin(0.0, 0)
    assert not copies.is_due(1e12, 1024)


@pytest.mark.parametrize("share", [-0.1, 1.0, True, "1%"])
def test_a_share_that_cannot_be_is_refused(share: object, tmp_path: object) -> None:
    """`Loop(memory=)` takes a share of the time."""
    with pytest.raises(ConfigError, match="memory"):
        Loop(str(tmp_path), memory=share)  # type: ignore[arg-type]  # That is the point.
