"""Many disturbances of all kinds in one run, in an order drawn from a seed: nothing is lost, nothing counted twice."""

from __future__ import annotations

import random
import secrets
import signal
from pathlib import Path

import pytest

from tests.chaos.history import History
from tests.chaos.test_kill_a_node import BATCH, EXAMPLE, RECORDER, STEPS_PER_EPOCH, data
from tests.cluster import AgentProcess, Cluster, kill

__all__ = ["data"]  # The fixture: the data set, built once.

EPOCHS = 5
DISTURBANCES = 14


def _seated(cluster: Cluster) -> list[AgentProcess]:
    """Agents whose workers run in the newest generation, and which have not been told to leave."""
    number = cluster.number()
    return [
        agent
        for agent in cluster.agents.values()
        if agent.process.poll() is None
        and any(event["event"] == "workers_started" and event["generation"] == number for event in agent.events)
        and agent.name not in cluster.leaving
    ]


class Storm(Cluster):
    """A cluster that remembers whom it has told to leave."""

    def __init__(self, directory: Path, options: list[str], script: list[str]) -> None:
        super().__init__(directory, f"storm-{secrets.token_hex(4)}", options, script)
        self.leaving: set[str] = set()
        self.added = 0

    def add(self) -> None:
        """One more node, with a new name."""
        self.start(f"node-{self.added}")
        self.added += 1

    def disturb(self, draw: random.Random) -> str:
        """One disturbance; what it was."""
        seated = _seated(self)
        living = [agent for agent in self.agents.values() if agent.process.poll() is None]
        kinds = ["worker"] + ["node", "drain", "two at once"] * (len(seated) > 2) + ["add"] * (len(living) < 4)
        kind = draw.choice(kinds)
        victim = draw.choice(seated) if seated else None
        if kind == "add" or victim is None:
            self.add()
        elif kind == "worker":
            kill(draw.choice(list(victim.worker_pids().values())))
        elif kind == "node":
            kill(victim.pid)
        elif kind == "drain":
            self.leaving.add(victim.name)
            victim.process.send_signal(signal.SIGTERM)
        else:
            other = draw.choice([agent for agent in seated if agent is not victim])
            kill(victim.pid)
            self.add()
            kill(draw.choice(list(other.worker_pids().values())))
        return kind


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_storm(seed: int, tmp_path: Path, data: Path) -> None:
    """G7, X01: fourteen kills, joins and drains; along the counted history each sample is seen once in each epoch."""
    draw = random.Random(seed)
    (tmp_path / "records").mkdir()
    options = ["--nnodes", "1:4", "--join", "now", "--max-restarts", "100"]
    script = [str(RECORDER), str(tmp_path / "records"), str(EXAMPLE), "--epochs", str(EPOCHS)]
    script += ["--global-batch-size", str(BATCH)]
    script += ["--data-dir", str(data), "--checkpoint-dir", str(tmp_path / "ckpt"), "--save-every", "15 steps"]
    told = []
    with Storm(tmp_path, options, script) as storm:
        for _ in range(3):
            storm.add()
        storm.wait_for_commits(1)
        for _ in range(DISTURBANCES):
            if storm.events("result"):
                break
            told.append(storm.disturb(draw))
            step = storm.last_step()
            storm.wait_for_step_after(step + draw.randrange(2, 25))
        codes = storm.ended(200)
        survivors = [code for code in codes.values() if code not in (-signal.SIGKILL, 143)]
        assert survivors, told
        assert set(survivors) == {0}, f"{told}\n{storm.story()}"
        history = History.read(tmp_path / "records")
        history.check_ranks()
        history.check_exactly_once(STEPS_PER_EPOCH, EPOCHS)
        assert len(history.generations) > DISTURBANCES // 2
