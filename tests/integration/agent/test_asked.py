"""Asking a real agent how it is, from its start to its end, with etcd away in between."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, kill
from tests.servers import EtcdServer, free_port, wait_until, wheel_binary

SCRIPT = """
import os, sys, time
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
directory = sys.argv[1]
elasticrt.init()
data = TensorDataset(torch.randn(4000, 2), torch.randn(4000, 1))
sampler = elasticrt.ElasticBatchSampler(data, 8)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop(os.path.join(directory, "ckpt"), every="1s", sampler=sampler, model=model, optimizer=optimizer)
for epoch in loop.epochs(100):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        F.mse_loss(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.02)
"""


def ask(url: str) -> tuple[int, dict[str, Any]]:
    """Status and body; status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
    except OSError:
        return 0, {}


def test_from_the_start_to_the_end(tmp_path: Path) -> None:
    """An agent is alive at once, ready when its workers train, both while etcd is away, and gone when it has ended."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with EtcdServer(wheel_binary(), tmp_path) as etcd:
        options = ["--etcd", str(etcd.address), "--health-port", "0", "--nnodes", "1"]
        with Cluster(tmp_path, "asked", options, [str(script), str(tmp_path)]) as cluster:
            agent = cluster.start("alpha")
            cluster.wait("a health port", lambda: bool(cluster.events("health")))
            url = cluster.events("health")[0]["url"]
            assert url.startswith("http://127.0.0.1:")
            assert ask(f"{url}/live")[0] == 200
            wait_until(lambda: ask(f"{url}/ready")[0] == 200, "the node trains", 60)
            wait_until(lambda: (ask(f"{url}/ready")[1]["step"] or 0) > 5, "steps are seen", 60)
            body = ask(f"{url}/ready")[1]
            assert (body["run_id"], body["node"], body["lease"]) == ("asked", "alpha", "connected")
            assert (body["generation"], body["nodes"], body["world_size"], body["ranks"]) == (1, 1, 1, [0, 0])
            etcd.pause()
            try:
                wait_until(lambda: ask(f"{url}/ready")[1]["etcd_away_s"], "the agent misses etcd", 60)
                (status, ready), (alive, _) = ask(f"{url}/ready"), ask(f"{url}/live")
                assert (status, alive) == (200, 200), ready
                assert "etcd has not answered" in ready["reason"]
                seen = ready["step"]
                wait_until(lambda: ask(f"{url}/ready")[1]["step"] > seen, "training goes on", 60)
            finally:
                etcd.resume()
            wait_until(lambda: ask(f"{url}/ready")[1]["etcd_away_s"] is None, "etcd is back", 60)
            kill(agent.pid, signal.SIGTERM)
            assert cluster.ended() == {"alpha": 143}
            assert ask(f"{url}/live")[0] == 0


def test_etcd_may_come_later(tmp_path: Path) -> None:
    """With --etcd-wait an agent may be there before its etcd: alive, not ready, and ready once there is one."""
    etcd = EtcdServer(wheel_binary(), tmp_path)
    options = ["--etcd", str(etcd.address), "--etcd-wait", "5m", "--health-port", str(free_port()), "--no-python"]
    with Cluster(tmp_path, "early", options, ["sleep", "600"]) as cluster:
        agent = cluster.start("alpha")
        url = f"http://127.0.0.1:{options[5]}"
        wait_until(lambda: ask(f"{url}/live")[0] == 200, "it is alive", 60)
        status, body = ask(f"{url}/ready")
        assert (status, body["reason"]) == (503, "joining: not a member of the run")
        with etcd:
            wait_until(lambda: ask(f"{url}/ready")[0] == 200, "it is ready", 60)
            kill(agent.pid, signal.SIGTERM)
            assert cluster.ended() == {"alpha": 143}


def test_told_to_leave_while_etcd_is_awaited(tmp_path: Path) -> None:
    """An agent that waits for its etcd leaves when it is told to, with the exit code of one that was told to."""
    options = ["--etcd", f"127.0.0.1:{free_port()}", "--etcd-wait", "5m", "--no-python"]
    with Cluster(tmp_path, "early", options, ["sleep", "600"]) as cluster:
        agent = cluster.start("alpha")
        wait_until(lambda: "etcd does not answer" in agent.text(), "it waits", 60)
        kill(agent.pid, signal.SIGTERM)
        assert cluster.ended(30) == {"alpha": 143}
        assert "told to leave before the run was joined" in agent.text()


def test_etcd_stands_still_while_a_node_joins(tmp_path: Path) -> None:
    """E03, E08: an etcd that takes connections and answers nothing costs a newcomer time, its lease, and no more."""
    with EtcdServer(wheel_binary(), tmp_path) as etcd:
        options = ["--etcd", str(etcd.address), "--lease-ttl", "1", "--no-python"]
        with Cluster(tmp_path, "stall", options, ["true"]) as cluster:
            etcd.pause()
            try:
                agent = cluster.start("alpha")
                wait_until(lambda: "etcd does not answer" in agent.text(), "it waits for an answer", 60)
            finally:
                etcd.resume()
            assert cluster.ended(60) == {"alpha": 0}


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An agent whose health port is taken ends with exit code 2 and the remedy."""
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ["--health-port", str(taken.getsockname()[1])]
        with Cluster(tmp_path, "taken", options, [str(tmp_path / "train.py")]) as cluster:
            agent = cluster.start("alpha")
            assert cluster.ended() == {"alpha": 2}
            assert "Choose another one (0: any free port)" in agent.text()
