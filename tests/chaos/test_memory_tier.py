"""Copies of the state in the nodes' memory: what a run goes back to when it dies without a warning."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import pytest

from tests.cluster import TOGETHER, AgentProcess, Cluster, kill

SCRIPT = """
import sys, time
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ctx = elasticrt.init()
torch.manual_seed(0)
data = TensorDataset(torch.randn(6400, 8), torch.randn(6400, 1))
sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=64)
loader = DataLoader(data, batch_sampler=sampler)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", sampler=sampler, model=model, optimizer=optimizer, every="1 h", memory=float(sys.argv[1]))
for epoch in loop.epochs(3):
    for x, y in loop.batches(loader):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
if ctx.is_first:
    print("loss", F.mse_loss(model.module(data.tensors[0]), data.tensors[1]).item())
"""


def _cluster(tmp_path: Path, memory: str, nodes: int) -> Cluster:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--nnodes", f"1:{nodes}", "--join", "now", *TOGETHER]
    return Cluster(tmp_path, f"copy-{secrets.token_hex(4)}", options, [str(script), memory])


def _copies(cluster: Cluster) -> int:
    """The step of which every node has a copy at least."""
    newest = {agent.name: 0 for agent in cluster.agents.values()}
    for event in cluster.events("copied"):
        newest[event["node"]] = max(newest[event["node"]], event["step"])
    return min(newest.values())


def _kill_worker(cluster: Cluster) -> None:
    agent = cluster.holder_of_rank(0)
    kill(agent.worker_pids()[0])


def _kill_node(cluster: Cluster) -> AgentProcess:
    agent = cluster.holder_of_rank(0)
    kill(agent.pid)
    return agent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "nodes"),
    [
        (_kill_worker, 1),
        (_kill_worker, 2),
        (_kill_node, 2),
    ],
)
def test_a_failure_costs_the_steps_since_the_newest_copy(tmp_path: Path, disturb: object, nodes: int) -> None:
    """S5: without a single checkpoint on disk a run that loses rank 0 goes on from a copy in a survivor's memory."""
    assert callable(disturb)
    with _cluster(tmp_path, "0.05", nodes) as cluster:
        for index in range(nodes):
            cluster.start(f"node-{index}")
        cluster.wait("a world", lambda: any(len(e["nodes"]) == nodes for e in cluster.events("generation")))
        before = cluster.number()
        cluster.wait("copies", lambda: _copies(cluster) >= 20)
        copied = _copies(cluster)
        assert not cluster.events("committed")
        victim = disturb(cluster)
        codes = cluster.ended()
    assert set(codes.values()) == ({0, -9} if victim else {0})
    first = [event for event in cluster.events("first_step") if event["generation"] == before + 1]
    assert first
    assert {event["resumed_from"] for event in first} == {first[0]["step"] - 1}
    assert first[0]["resumed_from"] >= copied


@pytest.mark.slow
def test_the_result_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    """L4: a run that went back to a copy in memory ends with the loss of one that was left alone."""
    losses = []
    for disturbed in (False, True):
        directory = tmp_path / str(disturbed)
        directory.mkdir()
        with _cluster(directory, "0.05", 1) as cluster:
            agent = cluster.start("node-0")
            cluster.wait("copies", lambda: _copies(cluster) >= 50)
            if disturbed:
                _kill_worker(cluster)
            assert cluster.ended() == {"node-0": 0}
            (line,) = [line for line in agent.text().splitlines() if line.startswith("loss")]
            losses.append(float(line.split()[1]))
            assert len(cluster.events("generation")) == 1 + disturbed
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
def test_no_copies_are_taken_when_none_are_wanted(tmp_path: Path) -> None:
    """`memory=0` switches the tier off: after a failure the run starts from what is on disk, here from nothing."""
    with _cluster(tmp_path, "0", 1) as cluster:
        cluster.start("node-0")
        cluster.wait("a step", lambda: cluster.last_step() >= 20)
        _kill_worker(cluster)
        assert cluster.ended() == {"node-0": 0}
    assert not cluster.events("copied")
    assert [event["resumed_from"] for event in cluster.events("first_step")] == [0, 0]


COPYING = """
import os, sys, time
from pathlib import Path
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

ctx = elasticrt.init()
torch.manual_seed(0)
data = TensorDataset(torch.randn(640, 8), torch.randn(640, 1))
sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=16)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
# So small a share that the only copy is the one below.
loop = elasticrt.Loop("ckpt", sampler=sampler, model=model, optimizer=optimizer, every="5 steps", memory=1e-9)
for epoch in loop.epochs(1):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        loop._saving.checkpointer.wait()
        if loop.steps_done == 12 and not Path("go").exists():
            with loop.pause("the test looks around"):
                loop._saving.memory_tier.hand_over(loop._state.collect(), loop.steps_done, epoch)
                while not Path("go").exists():
                    time.sleep(0.01)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
HEAD, COPY = 10, 12


def _copying(tmp_path: Path, nodes: int) -> Cluster:
    script = tmp_path / "train.py"
    script.write_text(COPYING)
    options = ["--nnodes", str(nodes), "--max-restarts", "20"]
    cluster = Cluster(tmp_path, f"copy-{secrets.token_hex(4)}", options, [str(script)])
    for index in range(nodes):
        cluster.start(f"node-{index}")
    return cluster


def _wait_for_copies(cluster: Cluster, generation: int) -> None:
    """Until every node of a generation has its copy, and the checkpoint before it is committed."""

    def there() -> bool:
        copied = [event for event in cluster.events("copied") if event["generation"] == generation]
        steps = {event["node"]: event["step"] for event in copied}
        heads = [event["step"] for event in cluster.events("committed")]
        return set(steps.values()) == {COPY} and len(steps) == len(cluster.agents) and max(heads, default=0) == HEAD

    cluster.wait(f"the copies of generation {generation}", there)


def _memory_files(pid: int) -> list[Path]:
    """The copies that an agent keeps, as files of its own that a test may damage."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # A connection that was closed while we looked.
            if path.readlink().name.startswith("memfd:elasticrt-copy"):
                found.append(path)
    return found


def _damage(agent: AgentProcess, where: float | None, size: float = 1.0) -> None:
    """Another bit at a share of each copy of a node, or another size."""
    files = _memory_files(agent.pid)
    assert files
    for path in files:
        with path.open("r+b") as file:
            length = os.fstat(file.fileno()).st_size
            if where is None:
                file.truncate(int(size * length))
            else:
                file.seek(min(length - 1, int(where * length)))
                (byte,) = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 4]))


@pytest.mark.slow
def test_a_damaged_copy_costs_the_steps_since_the_checkpoint_and_no_more(tmp_path: Path) -> None:
    """F06, S7: whatever is wrong with a copy, one generation refuses it, and the next goes on from the head."""
    damages: list[tuple[float | None, float]] = [(0.0, 1), (0.5, 1), (1.0, 1), (None, 0.0), (None, 0.7), (None, 1.5)]
    with _copying(tmp_path, 1) as cluster:
        agent = cluster.agents["node-0"]
        for number, damage in enumerate(damages):
            _wait_for_copies(cluster, 2 * number + 1)
            _damage(agent, *damage)
            kill(agent.worker_pids()[0])
        _wait_for_copies(cluster, 2 * len(damages) + 1)
        (tmp_path / "go").touch()
        assert cluster.ended() == {"node-0": 0}
    assert [event["resume_step"] for event in cluster.events("generation")] == [0, *[COPY, HEAD] * len(damages)]
    assert "the copy of step 12 in this node's memory is damaged" in agent.text()


BESIDE = """
import os, sys, time, torch, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP

ctx = elasticrt.init()
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
best = elasticrt.Checkpointer("best", keep=1)
found = best.restore()
loop = elasticrt.Loop("ckpt", model=model, optimizer=optimizer, every="1 h", memory=float(sys.argv[1]))
for step in loop.steps(40):
    with loop.step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.07)
    if ctx.restart_count == 0 and loop.steps_done == 28:
        best.save({"model": model.module.state_dict()}, step=5)
        best.wait()
    if ctx.restart_count == 0 and loop.steps_done == 30:
        os.kill(os.getpid(), 9)
assert ctx.restart_count == 0 or found.step == 5
"""


@pytest.mark.parametrize("memory", ["0.2", pytest.param("0", marks=pytest.mark.slow)])
def test_what_a_script_saves_beside_its_loop(tmp_path: Path, memory: str) -> None:
    """The run goes on from the newest copy in memory, or from its own beginning, and counts the steps of the Loop."""
    (tmp_path / "train.py").write_text(BESIDE)
    with Cluster(
        tmp_path, f"best-{secrets.token_hex(4)}", [*TOGETHER], [str(tmp_path / "train.py"), memory]
    ) as cluster:
        cluster.start("node")
        assert cluster.ended(60) == {"node": 0}, cluster.story()
        first, again = cluster.events("first_step")
        assert first["resumed_from"] == 0
        copied = max((each["step"] for each in cluster.events("copied") if each["step"] <= 30), default=0)
        assert (again["resumed_from"], again["redone"]) == (copied, 30 - copied)
        assert bool(copied) == bool(float(memory)), cluster.story()
        *earlier, last = cluster.events("committed")
        assert last["step"] == 40
        # A state that comes from memory is on no disk, and is saved at the next boundary.
        assert [each["generation"] for each in earlier] == [2] * bool(copied)
