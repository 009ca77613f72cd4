"""Nodes are told to leave while a worker hangs, or has died: what has ended is saved before they go. Real processes."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import TOGETHER
from tests.integration.agent.test_narration import Terminal, terminals
from tests.servers import wait_until

HANGS_AFTER, STEPS = 25, 40

SCRIPT = f"""
import time
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP

def hang():
    print("it hangs", flush=True)
    time.sleep(600)

ctx = elasticrt.init()
hangs = ctx.generation == 1 and ctx.rank == RANK
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", every="1000 steps", model=model, optimizer=optimizer)
for step in loop.steps({STEPS}):
    with loop.step():
        if step == {HANGS_AFTER} and hangs and not PAUSES:
            hang()
        F.mse_loss(model(torch.randn(4, 2)), torch.randn(4, 1)).backward()
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.02)
    if step == {HANGS_AFTER} - 1 and hangs and PAUSES:
        with loop.pause("evaluate"):
            hang()
"""


@contextmanager
def _hanging(directory: Path, nodes: str, rank: int, *, pauses: bool = False) -> Iterator[list[Terminal]]:
    """The nodes of a run in which `rank` hangs, by rank; with `pauses` in a pause."""
    script = SCRIPT.replace("RANK", str(rank)).replace("PAUSES", str(pauses))
    with terminals(directory, script, nodes, "--nnodes", f"1:{len(nodes)}", *TOGETHER) as agents:
        for agent in agents:
            agent.wait_for(r"\(rank \d here\)")
        wait_until(lambda: any("it hangs" in agent.text() for agent in agents), "one hangs", 60)
        yield sorted(agents, key=lambda agent: re.search(r"\(rank (\d) here\)", agent.text())[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "pauses"),
    [(1, True), (0, True), (1, False), (0, False)],
)
def test_nodes_that_are_told_one_after_the_other_save_together(tmp_path: Path, rank: int, pauses: bool) -> None:
    """L5, K04: the first one waits for the others, although they could go on without it when it is told."""
    with _hanging(tmp_path, "abc", rank, pauses=pauses) as nodes:
        for agent in reversed(nodes):
            agent.process.send_signal(signal.SIGINT)
            agent.wait_for("SIGINT received: handing over")
        assert [agent.ended() for agent in nodes] == [143] * 3, nodes[0].text()
    assert list((tmp_path / "ckpt").glob(f"step-{HANGS_AFTER}-*")), nodes[0].text()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 0])
def test_a_node_leaves_what_it_has_to_one_that_hangs(tmp_path: Path, rank: int) -> None:
    """L5: of two the healthy one leaves. The other one's worker is ended, and goes on from the last finished step."""
    with _hanging(tmp_path, "ab", rank) as nodes:
        leaves, stays = nodes[1 - rank], nodes[rank]
        leaves.process.send_signal(signal.SIGTERM)
        assert (leaves.ended(), stays.ended()) == (143, 0), leaves.text()
    assert f"drained: the others go on after step {HANGS_AFTER}\n" in leaves.text(), leaves.text()
    goes_on = rf"(resumed after step {HANGS_AFTER}|after step {HANGS_AFTER}, no step lost)"
    assert re.search(goes_on, stays.text()), stays.text()


def _events(directory: Path) -> str:
    return "".join(each.read_text() for each in directory.rglob("events-*.jsonl"))


@pytest.mark.slow
def test_a_node_whose_only_worker_has_just_died_saves_the_newest_copy(tmp_path: Path) -> None:
    """L5: it starts a worker anew from the copy in its memory, and leaves when that has saved. No checkpoint exists."""
    script = SCRIPT.replace("RANK", "1").replace("PAUSES", "False").replace(f"({STEPS})", "(4000)")
    with terminals(tmp_path, script, "a", "--nnodes", "1", *TOGETHER) as [node]:
        wait_until(lambda: '"copied"' in _events(tmp_path), "a copy", 60)
        [worker] = re.findall(r'"workers_started".*"pids": ?\[(\d+)\]', _events(tmp_path))
        os.kill(int(worker), signal.SIGKILL)
        node.process.send_signal(signal.SIGTERM)
        assert node.ended() == 143, node.text()
    assert re.search(r"step [1-9]\d* is saved; to go on", node.text()), node.text()
    assert list((tmp_path / "ckpt").glob("step-*")), node.text()
