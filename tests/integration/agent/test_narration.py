"""What people read of a run on each node's terminal, from its generations to its end. Real processes, real etcd."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elasticrt.agent.agent import ECHO_S
from tests.cluster import gone, kill
from tests.servers import EtcdServer, wait_until, wheel_binary

PLAIN = """
import os, time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(10_000):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if step == 0:
        print("stepping in process", os.getpid(), flush=True)
    time.sleep(0.05)
"""

LOOP = """
import time, torch, elasticrt
from torch.utils.data import DataLoader, TensorDataset
elasticrt.init()
data = TensorDataset(torch.randn(4000, 2), torch.randn(4000, 1))
sampler = elasticrt.ElasticBatchSampler(data, 8)
model = torch.nn.Linear(2, 1)
loop = elasticrt.Loop("ckpt", sampler=sampler, model=model)
for epoch in loop.epochs(100):
    for number, (x, y) in enumerate(loop.batches(DataLoader(data, batch_sampler=sampler))):
        print("step", number, flush=True)
        time.sleep(0.05)
"""


class Terminal:
    """One agent, with all that it prints in a file."""

    def __init__(self, directory: Path, name: str, *options: str) -> None:
        self._output = directory / f"{name}.out"
        command = [sys.executable, "-m", "elasticrt", "run", "--node", name, "--nproc-per-node", "1", *options]
        with self._output.open("wb") as sink:
            self.process = subprocess.Popen(command, cwd=directory, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)

    def text(self) -> str:
        """What it has printed by now."""
        return self._output.read_text(errors="replace")

    def wait_for(self, words: str) -> None:
        """Wait until it has printed a line with these words (a pattern)."""
        wait_until(lambda: re.search(words, self.text()) is not None, f"{words!r} in {self.text()}", 60)

    def ended(self, seconds: float = 120.0) -> int:
        """Wait for its end; the exit code."""
        return self.process.wait(seconds)


@contextmanager
def terminals(directory: Path, script: str, names: str, *options: str) -> Iterator[list[Terminal]]:
    """Agents of one run, which find each other in an etcd of this machine."""
    (directory / "train.py").write_text(script)
    run = ("--run-id", f"said-{secrets.token_hex(4)}", *options, "train.py")
    with ExitStack() as stack:
        agents = [Terminal(directory, name, *run) for name in names]
        for agent in agents:
            stack.callback(agent.process.wait, 15)
            stack.callback(agent.process.kill)
        yield agents


def test_every_node_tells_of_a_generation_and_what_it_cost(tmp_path: Path) -> None:
    """W02: each terminal has each generation, with this node's ranks, and the pause, also for a script without Loop."""
    with terminals(tmp_path, PLAIN, "ab", "--nnodes", "2") as agents:
        for agent in agents:
            agent.wait_for(r"generation 1: 2 nodes, world size 2, first step after .* \(rank [01] here\)")
            agent.wait_for("stepping in process")
        kill(int(re.search(r"stepping in process (\d+)", agents[0].text())[1]))
        for agent in agents:
            agent.wait_for(
                r"generation 2: rank \d on a: killed by SIGKILL, 2 nodes, world size 2, "
                r"paused \d+\.\d\d s; what the script had not saved is done again \(rank [01] here\)"
            )
        for agent in agents:
            agent.process.send_signal(signal.SIGINT)
        assert [agent.ended() for agent in agents] == [143, 143]
        for agent in agents:
            assert "leaving: SIGINT received\n" in agent.text()
            assert re.search(r"to go on: the same command, with --run-id said-", agent.text())


def test_when_all_leave_each_says_which_step_is_saved(tmp_path: Path) -> None:
    """K04: a whole job is cancelled: nobody goes on, and every node names the step that is on disk."""
    with terminals(tmp_path, LOOP, "ab", "--nnodes", "2") as agents:
        for agent in agents:
            agent.wait_for("step 3")
        for agent in agents:
            agent.process.send_signal(signal.SIGTERM)
        assert [agent.ended() for agent in agents] == [143, 143]
        left = [re.search(r"too few nodes are left to go on after step (\d+)\n", agent.text())[1] for agent in agents]
        assert left[0] == left[1]
        assert list((tmp_path / "ckpt").glob(f"step-{left[0]}-*"))
        for agent in agents:  # One of them may be gone before the other has saved.
            said = rf"(step {left[0]} is saved|node of rank 0 says whether step {left[0]} is saved); to go on: "
            assert re.search(said, agent.text()), agent.text()
            assert "the others go on" not in agent.text()
        assert any(f"step {left[0]} is saved" in agent.text() for agent in agents)


@pytest.mark.parametrize("hung", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_node_that_cannot_hand_over_says_what_may_be_lost(tmp_path: Path, hung: bool) -> None:
    """A worker hangs, and its node, or the other one, is told to leave: nobody need start the run again."""
    hang = "        if rank and number == 5:\n            print('it hangs', flush=True)\n            time.sleep(600)\n"
    script = LOOP.replace("elasticrt.init()", "rank = elasticrt.init().rank") + hang
    together = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=60", "--drain-timeout", "1s")
    with terminals(tmp_path, script, "ab", *together) as agents:
        wait_until(lambda: any("it hangs" in agent.text() for agent in agents), "one hangs", 60)
        (leaves,) = [agent for agent in agents if ("it hangs" in agent.text()) == hung]
        leaves.process.send_signal(signal.SIGTERM)
        assert leaves.ended() == 143
        said = leaves.text()
        assert "leaving: not handed over within 1 s\n" in said
        # On a busy machine etcd may not answer in time.
        assert re.search(r"step \d+ was not handed over, and (no checkpoint has it: .* lost unless|etcd does)", said)
        assert "to bring this node back: the same command" in said
        assert "to go on" not in said


def test_a_second_signal_ends_a_node_that_waits_for_etcd(tmp_path: Path) -> None:
    """A04, E03: etcd does not answer, so that nobody can be told: the second signal ends the node and its workers."""
    with (
        EtcdServer(wheel_binary(), tmp_path) as etcd,
        terminals(tmp_path, PLAIN, "a", "--nnodes", "1", "--etcd", str(etcd.address)) as (agent,),
    ):
        agent.wait_for("stepping in process")
        worker = int(re.search(r"stepping in process (\d+)", agent.text())[1])
        etcd.pause()
        try:
            agent.process.send_signal(signal.SIGINT)
            agent.wait_for("leaving: SIGINT received")
            with pytest.raises(subprocess.TimeoutExpired):
                agent.process.wait(ECHO_S)
            agent.process.send_signal(signal.SIGINT)
            assert agent.ended() == 143
            assert gone([worker], 10.0) == []
        finally:
            etcd.resume()
        assert "ended at once" in agent.text()


def test_a_resubmitted_run_says_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    """Its last generation is over, and nobody stands by there."""
    server = EtcdServer(wheel_binary(), tmp_path / "etcd")
    server.start()
    try:
        for _ in range(2):
            options = ["--etcd", str(server.address), "--run-id", "again", "--no-python", "--max-restarts", "0"]
            command = [sys.executable, "-m", "elasticrt", "run", *options, "false"]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 1
            assert "standing by" not in done.stderr
    finally:
        server.stop()
