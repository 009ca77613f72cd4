"""The ways in which agents find each other: a shared etcd of this machine, an address one serves, `elasticrt etcd`."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers import free_port, wait_until

HELLO = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("world", os.environ["WORLD_SIZE"], "total", int(total), flush=True)
dist.destroy_process_group()
"""


def _script(tmp_path: Path) -> list[str]:
    (tmp_path / "hello.py").write_text(HELLO)
    return [str(tmp_path / "hello.py")]


def test_an_agent_serves_the_endpoint_that_it_owns(tmp_path: Path) -> None:
    """c10d's way of speaking: the agent that owns the address serves the etcd there, the other one uses it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing.
        except OSError:
            pytest.skip("this machine has no address but that of loopback")
        endpoint = f"{probe.getsockname()[0]}:{free_port()}"
    assert _meet_at(endpoint, tmp_path) == {f"http://{endpoint}"}


def test_agents_of_one_machine_meet_at_loopback(tmp_path: Path) -> None:
    """SEC10: an endpoint of loopback is a name for a socket that other users of the machine can't use."""
    (etcd,) = _meet_at(f"localhost:{free_port()}", tmp_path)
    assert etcd.startswith("unix:")


def _meet_at(endpoint: str, tmp_path: Path) -> set[str]:
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    with Cluster(tmp_path, f"c10d-{secrets.token_hex(4)}", options, _script(tmp_path)) as cluster:
        agents = [cluster.start("n0"), cluster.start("n1")]
        assert cluster.ended() == {"n0": 0, "n1": 0}
        assert all("world 2 total 2" in agent.text() for agent in agents)
        return {event["etcd"] for event in cluster.events("agent_started")}


def test_a_served_etcd_carries_a_run(tmp_path: Path) -> None:
    """`elasticrt etcd --listen` says how to join and that it is unauthenticated, serves, and ends cleanly."""
    port = free_port()
    command = [sys.executable, "-m", "elasticrt", "etcd", "--insecure-etcd", "--listen", f"127.0.0.1:{port}"]
    output = tmp_path / "etcd.out"
    with output.open("wb") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=tmp_path)
    try:
        wait_until(lambda: f"elasticrt run --etcd http://127.0.0.1:{port}" in output.read_text(), "it says how to join")
        assert "unauthenticated" in output.read_text()
        options = ["--nnodes", "2", "--etcd", f"127.0.0.1:{port}"]
        with Cluster(tmp_path, f"served-{secrets.token_hex(4)}", options, _script(tmp_path)) as cluster:
            cluster.start("n0")
            cluster.start("n1")
            assert cluster.ended() == {"n0": 0, "n1": 0}
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(15) == 143


def test_without_a_run_id_the_line_to_join_is_printed_and_works(tmp_path: Path) -> None:
    """A15: the first agent prints the line that brings another node: that line works, with the first one's options."""
    _script(tmp_path)
    options = ["--nnodes", "2", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "elasticrt", "run", *options, "hello.py"]
    output, env = tmp_path / "first.out", {**os.environ, "ELASTICRT_JOIN": "now"}
    with output.open("wb") as sink:
        first = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=tmp_path, env=env)
    try:
        wait_until(lambda: "join from this machine: " in output.read_text(), "the line is printed")
        line = output.read_text().split("join from this machine: ")[1].splitlines()[0]
        assert line.startswith("elasticrt run --run-id ")
        pasted = [sys.executable, "-m", *shlex.split(line)]
        joined = subprocess.run(pasted, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert joined.returncode == 0, joined.stderr
        assert joined.stdout.count("world 4 total 4") == 2
        assert first.wait(30) == 0
        # Both agents had this machine's name to begin with; the second took another one by itself.
        assert "node " in joined.stderr
    finally:
        if first.poll() is None:
            first.kill()
            first.wait(10)
