"""Two machines without a shared directory: the run goes on from the node that has the newest checkpoint, or says so."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrt.rendezvous.records import HeadRecord, Keys, decode
from elasticrt.store.etcd import EtcdStore
from tests.cluster import Cluster, kill
from tests.servers import EtcdServer, wait_until, wheel_binary

BEGINNING = """
import os, sys, time
from pathlib import Path
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

elasticrt.init()
data = TensorDataset(torch.randn(6400, 8), torch.randn(6400, 1))
sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=64)
model = DDP(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
directory = "ckpt-" + os.environ["ELASTICRT_NODE"]
"""

SCRIPT = f"""{BEGINNING}
loop = elasticrt.Loop(directory, sampler=sampler, model=model, optimizer=optimizer, every="10 steps", memory=0)
for epoch in loop.epochs(1000, max_steps=int(sys.argv[1])):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
"""
FOR_EVER = 10**6


@contextmanager
def _life(tmp_path: Path, run_id: str, names: str, *options: str, steps: int = FOR_EVER) -> Iterator[Cluster]:
    """Agents of these names, the first with rank 0, started together."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    nodes = str(len(names))
    flags = ["--min-nodes", nodes, "--max-nodes", nodes, "--lease-ttl", "2", *options]
    with Cluster(tmp_path, run_id, flags, [str(script), str(steps)]) as cluster:
        for rank, name in enumerate(names):
            cluster.start(name, "--node-rank", str(rank))
        yield cluster


def _newest(tmp_path: Path, name: str) -> int:
    """The newest step that is marked as committed in a node's directory, 0 for none."""
    marks = (tmp_path / f"ckpt-{name}").glob("*.committed")
    return max((int(path.name.split("-")[1]) for path in marks), default=0)


def _head_of_the_dead(server: EtcdServer, run_id: str) -> int:
    """The step of the newest checkpoint, as etcd knows it when it has found out that nobody is left."""
    store, keys = EtcdStore((server.address,)), Keys(run_id)
    try:
        wait_until(lambda: not store.read(keys.members).keys, "the keys of the killed are gone")
        record = store.read(keys.checkpoint).get(keys.checkpoint)
        assert record is not None
        return decode(HeadRecord, keys.checkpoint, record.value).step
    finally:
        store.close()


def _resumed_from(cluster: Cluster) -> set[tuple[int, int]]:
    """Where each node went on, and the first step that it made."""
    return {(event["resumed_from"], event["step"]) for event in cluster.events("first_step")}


@pytest.mark.slow
def test_the_node_that_has_the_newest_sends_it(tmp_path: Path) -> None:
    """F16, S6: killed, and started again with another rank 0, with a node missing, with a new etcd."""
    run_id = f"own-{secrets.token_hex(4)}"
    with EtcdServer(wheel_binary(), tmp_path / "etcd") as server:
        etcd = ("--etcd", str(server.address))
        with _life(tmp_path, run_id, "ab", *etcd) as cluster:
            cluster.wait_for_commits(2)
            for agent in cluster.agents.values():
                kill(agent.pid)
            cluster.ended()
        head = _head_of_the_dead(server, run_id)
        assert head >= 20
        assert _newest(tmp_path, "b") == 0

        # Alone, b must not begin again: the head is on a.
        with _life(tmp_path, run_id, "b", *etcd) as cluster:
            assert cluster.ended() == {"b": 5}
            said = cluster.agents["b"].text()
        assert f"step {head}, is on a node that is not here ({tmp_path}/ckpt-a)" in said
        assert "Start a together with these nodes" in said

        with _life(tmp_path, run_id, "ba", *etcd, steps=head + 25) as cluster:
            assert cluster.ended() == {"a": 0, "b": 0}
            assert _resumed_from(cluster) == {(head, head + 1)}
            assert f"step {head} comes from the checkpoint directory of node a" in cluster.agents["b"].text()
    assert _newest(tmp_path, "a") == head
    assert _newest(tmp_path, "b") == head + 25

    # Another run, with an etcd that knows nothing: a has rank 0 and an older checkpoint.
    with _life(tmp_path, f"{run_id}-again", "ab", steps=head + 40) as cluster:
        assert cluster.ended() == {"a": 0, "b": 0}
        assert _resumed_from(cluster) == {(head + 25, head + 26)}
        assert f"ckpt-a/ on node b from step {head + 25}" in cluster.agents["a"].text()
    assert _newest(tmp_path, "a") == head + 40


GOING_BACK = f"""{BEGINNING}
# So small a share that there is no copy but the one below.
share = float(os.environ["SHARE"])
loop = elasticrt.Loop(directory, sampler=sampler, model=model, optimizer=optimizer, every="15 steps", memory=share)
for epoch in loop.epochs(1, max_steps=40):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        if loop.steps_done == 12 and share:
            loop._copies.hand_over(loop._state(), loop.steps_done, epoch)
        if loop.steps_done == 16:
            loop._checkpointer.wait()
            with loop.pause("the test looks around"):
                while not Path("go").exists():
                    time.sleep(0.01)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
COPY, HEAD, LAST = 12, 15, 40


@pytest.mark.parametrize("share", ["1e-9", "0"])
def test_the_node_with_the_newest_checkpoint_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """F16, S6: the others go on from an older copy in memory; without one the run ends and says where the newest is."""
    monkeypatch.setenv("SHARE", share)
    script = tmp_path / "train.py"
    script.write_text(GOING_BACK)
    options = ["--min-nodes", "2", "--max-nodes", "3", "--lease-ttl", "2"]
    with Cluster(tmp_path, f"back-{secrets.token_hex(4)}", options, [str(script)]) as cluster:
        for rank, name in enumerate("abc"):
            cluster.start(name, "--node-rank", str(rank))
        copies = 3 if float(share) else 0
        cluster.wait("copies", lambda: sum(event["step"] == COPY for event in cluster.events("copied")) == copies)
        cluster.wait("the checkpoint", lambda: any(event["step"] == HEAD for event in cluster.events("committed")))
        kill(cluster.agents["a"].pid)
        (tmp_path / "go").touch()
        codes = cluster.ended()
        said = cluster.agents["b"].text() + cluster.agents["c"].text()
    assert f"the newest checkpoint, step {HEAD}, is on a node that is not here ({tmp_path}/ckpt-a)" in said
    if not copies:
        assert (codes["b"], codes["c"]) == (5, 5)
        return
    assert (codes["b"], codes["c"]) == (0, 0)
    assert f"the checkpoint of step {HEAD} is away with a; going back to step {COPY}, in memory" in said
    assert {(event["resumed_from"], event["step"]) for event in cluster.events("first_step")} == {
        (0, 1),
        (COPY, COPY + 1),
    }
    assert max(_newest(tmp_path, "b"), _newest(tmp_path, "c")) == LAST
