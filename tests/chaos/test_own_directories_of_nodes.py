"""Two machines without a shared directory: the run goes on from the node that has the newest checkpoint, or says so."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrt.ipc.env import Commit
from elasticrt.rendezvous.records import Keys, decode
from elasticrt.store.etcd import EtcdStore
from tests.cluster import Cluster, gone, kill
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
loop = elasticrt.Loop(directory, sampler=sampler, model=model, optimizer=optimizer, memory=0,
                      every=os.environ["EVERY"])
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
    flags = ["--nnodes", nodes, "--lease-ttl", "2", *options]
    with Cluster(tmp_path, run_id, flags, [str(script), str(steps)]) as cluster:
        for rank, name in enumerate(names):
            cluster.start(name, "--node-rank", str(rank))
        yield cluster


def _newest(tmp_path: Path, name: str) -> int:
    """The newest step that is marked as committed in a node's directory, 0 for none."""
    marks = (tmp_path / f"ckpt-{name}").glob("*.json")
    return max((int(path.name.split("-")[1]) for path in marks), default=0)


def _head_of_the_dead(server: EtcdServer, run_id: str) -> int:
    """The step of the newest checkpoint, as etcd knows it when it has found out that nobody is left."""
    store, keys = EtcdStore((server.address,)), Keys(run_id)
    try:
        wait_until(lambda: not store.read(keys.members).keys, "the keys of the killed are gone")
        record = store.read(keys.checkpoint).get(keys.checkpoint)
        assert record is not None
        return decode(Commit, keys.checkpoint, record.value).step
    finally:
        store.close()


def _resumed_from(cluster: Cluster) -> set[tuple[int, int]]:
    """Where each node went on, and the first step that it made."""
    return {(event["resumed_from"], event["step"]) for event in cluster.events("first_step")}


@pytest.mark.slow
def test_the_node_that_has_the_newest_sends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F16, S6: killed, and started again with another rank 0, with a node missing, with a new etcd."""
    monkeypatch.setenv("EVERY", "10 steps")
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

        # Alone, b must not begin again: the head is on a, and b knows of nothing before it.
        with _life(tmp_path, run_id, "b", *etcd) as cluster:
            assert cluster.ended() == {"b": 5}
            said = cluster.agents["b"].text()
        assert f"a has written it to {tmp_path}/ckpt-a" in said
        assert "start a together with these nodes" in said

        # With a, b saves at once, and never again.
        monkeypatch.setenv("EVERY", "100000 steps")
        with _life(tmp_path, run_id, "ba", *etcd) as cluster:
            wait_until(lambda: _newest(tmp_path, "b") and _resumed_from(cluster), "b has saved and goes on", 60)
            for agent in cluster.agents.values():
                kill(agent.pid)
            cluster.ended()
            assert _resumed_from(cluster) == {(head, head + 1)}
            assert f"step {head} comes from the checkpoint directory of node a" in cluster.agents["b"].text()
        assert _head_of_the_dead(server, run_id) == _newest(tmp_path, "b") == head + 1
        assert _newest(tmp_path, "a") == head

        # Alone, a has what was before that, as the head's record says.
        monkeypatch.setenv("EVERY", "10 steps")
        with _life(tmp_path, run_id, "a", *etcd, steps=head + 25) as cluster:
            assert cluster.ended() == {"a": 0}
            assert _resumed_from(cluster) == {(head, head + 1)}
            said = cluster.agents["a"].text()
        assert f"b has written it to {tmp_path}/ckpt-b" in said
        assert f"going back from step {head + 1} to step {head}" in said
    assert _newest(tmp_path, "a") == head + 25

    # Another run, with an etcd that knows nothing: b has rank 0 and an older checkpoint.
    with _life(tmp_path, f"{run_id}-again", "ba", steps=head + 40) as cluster:
        assert cluster.ended() == {"a": 0, "b": 0}
        assert _resumed_from(cluster) == {(head + 25, head + 26)}
        assert f"ckpt-b/ on node a from step {head + 25}" in cluster.agents["b"].text()
    assert _newest(tmp_path, "b") == head + 40


IN_PLACE = f"""{BEGINNING}
loop = elasticrt.Loop(directory, sampler=sampler, model=model, optimizer=optimizer, every="15 steps", memory=0)
for epoch in loop.epochs(1, max_steps=29):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        if loop.steps_done in (16, 20):
            loop._saving.checkpointer.wait()
            with loop.pause("the test looks around"):
                while not Path(f"go-{{loop.steps_done}}").exists():
                    time.sleep(0.01)
        with loop.step():
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_the_node_with_the_newest_checkpoint_is_lost(tmp_path: Path) -> None:
    """F16: whoever has rank 0 then saves at once, so that the run survives the loss of all other workers as well."""
    script = tmp_path / "train.py"
    script.write_text(IN_PLACE)
    options = ["--nnodes", "2:3", "--lease-ttl", "2"]

    def commits(cluster: Cluster) -> list[int]:
        return [event["step"] for event in cluster.events("committed")]

    with Cluster(tmp_path, f"back-{secrets.token_hex(4)}", options, [str(script)]) as cluster:
        for rank, name in enumerate("abc"):
            cluster.start(name, "--node-rank", str(rank))
        # The mark beside the files follows the commit in etcd.
        cluster.wait("a has saved", lambda: commits(cluster) == [15] and _newest(tmp_path, "a") == 15)
        lost = cluster.agents["a"]
        kill(lost.pid)
        assert gone([*lost.worker_pids().values()], 10.0) == [], "it would make the next step with the others"
        (tmp_path / "go-16").touch()
        cluster.wait("the next checkpoint", lambda: commits(cluster) == [15, 17])
        others = [cluster.agents[name] for name in "bc"]
        for pid in {pid for agent in others for pid in agent.worker_pids().values()}:
            kill(pid)
        (tmp_path / "go-20").touch()
        codes = cluster.ended()
        assert (codes["b"], codes["c"]) == (0, 0), cluster.story()
        # Where c is heard of later than b it is rank 0 in between, and afterwards: it saves at once as well.
        assert commits(cluster) in ([15, 17, 29], [15, 17, 18, 29])
        assert _resumed_from(cluster) == {(0, 1), (16, 17), (17, 18)}
    assert (_newest(tmp_path, "a"), max(_newest(tmp_path, name) for name in "bc")) == (15, 29)
