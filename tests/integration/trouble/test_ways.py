"""The way to etcd: slow, by names that change or are not known, by endpoints of which one is silent, by IPv6."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrt.store.protocol import Address
from tests.integration.trouble.names import NameServer, missing
from tests.integration.trouble.stepping import Stepping
from tests.integration.trouble.test_away import ends_well, undisturbed
from tests.servers import EtcdServer, Proxy, wheel_binary

OPTIONS = ("--nnodes", "2", "--lease-ttl", "2", "--insecure-etcd")
NAME = "etcd.example"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay_s", "works"), [pytest.param(0.1, True, id="200-ms"), pytest.param(1.0, False, id="2-s")]
)
def test_a_slow_way(tmp_path: Path, etcd: EtcdServer, delay_s: float, works: bool) -> None:
    """N09, L7: 200 ms more there and back cost nothing; 2 s more are an outage. Neither restarts anybody."""
    with Proxy(etcd.address) as proxy, Stepping(tmp_path, *OPTIONS, "--etcd", str(proxy.address)) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        proxy.delay_s = delay_s
        run.wait_for_silence(10.0)
        undisturbed(run, before, since)
        late = [event for event in run.events("committed") if event["at"] > since + 3]
        assert bool(late) == works
        proxy.delay_s = 0.0
        history = ends_well(run, etcd)
        assert history.numbers() == [1]
        assert run.pids() == before


@pytest.fixture
def names(tmp_path: Path) -> Iterator[NameServer]:
    """A name server. Skips, loudly, where there can be none."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with NameServer(tmp_path) as server:
        yield server


class Named(Stepping):
    """A run whose agents ask a name server of the test's own."""

    names: NameServer

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """See `Cluster`."""
        return self.names.command(command)


def _by_name(tmp_path: Path, names: NameServer, etcd: EtcdServer) -> Named:
    run = Named(tmp_path, *OPTIONS, "--etcd", f"http://{NAME}:{etcd.port}")
    run.names = names
    return run


@pytest.mark.root
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param("", "Name or service not known", id="no-such-name"),
        pytest.param(None, "Temporary failure in name resolution", id="no-answer", marks=pytest.mark.slow),
        pytest.param("127.0.0.9", "Connection refused", id="wrong-address", marks=pytest.mark.slow),
    ],
)
def test_a_name_that_leads_nowhere(
    tmp_path: Path, names: NameServer, etcd: EtcdServer, answer: str | None, words: str
) -> None:
    """N12: at the start a name that is not known, not answered, or wrong: code 4, the name and what happened."""
    names.answer = answer
    endpoint = f"http://{NAME}:{etcd.port}"
    command = [sys.executable, "-m", "elasticrt", "run", "--etcd", endpoint, "--insecure-etcd"]
    command += ["--log-dir", str(tmp_path / "run"), "--no-python", "true"]
    done = subprocess.run(names.command(command), capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 4, done.stderr
    assert f"etcd cannot be reached (--etcd): got {endpoint}: {words}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("answer", [pytest.param("", id="no-such-name"), pytest.param(None, id="no-answer")])
def test_names_fail_in_mid_run(tmp_path: Path, names: NameServer, etcd: EtcdServer, answer: str | None) -> None:
    """N12, L7: the name server fails, then etcd is away and comes back; later the name server too: no restart."""
    with _by_name(tmp_path, names, etcd) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        names.answer = answer
        run.wait_for_commits(len(run.events("committed")) + 2)
        etcd.kill()
        run.wait_for_silence(3.0)
        etcd.restart()
        run.wait_for_silence(3.0)
        names.answer = "127.0.0.1"
        undisturbed(run, before, since)
        history = ends_well(run, etcd)
        assert history.numbers() == [1]
        assert run.pids() == before


@pytest.mark.root
@pytest.mark.slow
def test_etcd_moves_to_another_address(tmp_path: Path, names: NameServer, etcd: EtcdServer) -> None:
    """K06, N12, L7: etcd comes back with its data at another address of the same name: no restart."""
    with _by_name(tmp_path, names, etcd) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        before, since = run.pids(), time.monotonic()
        etcd.stop()
        etcd.address = Address("http", f"127.44.{secrets.randbelow(255)}.2", etcd.port)
        etcd.restart()
        names.answer = etcd.address.host
        run.wait_for_commits(len(run.events("committed")) + 2)
        undisturbed(run, before, since)
        history = ends_well(run, etcd)
        assert history.numbers() == [1]
        assert run.pids() == before


MOVING = """
import sys, time
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import StoreUnavailable
from elasticrt.store.address import parse_endpoints
store = EtcdStore(parse_endpoints(sys.argv[1]), timeout_s=0.5)
store.read("x")
print("reads", flush=True)
sys.stdin.readline()
while True:
    try:
        store.read("x")
    except StoreUnavailable:
        continue
    print("reads again", flush=True)
    break
"""


@pytest.mark.root
def test_a_name_is_looked_up_again_soon(tmp_path: Path, names: NameServer, etcd: EtcdServer) -> None:
    """K06: gRPC by itself looks a name up every 30 s; an etcd that has moved is found long before that."""
    command = names.command([sys.executable, "-c", MOVING, f"http://{NAME}:{etcd.port}"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdin is not None
            assert client.stdout is not None
            assert client.stdout.readline() == "reads\n"
            etcd.stop()
            etcd.address = Address("http", f"127.44.{secrets.randbelow(255)}.2", etcd.port)
            etcd.restart()
            names.answer = etcd.address.host
            client.stdin.write("\n")
            client.stdin.flush()
            client.wait(20)
            assert client.stdout.read() == "reads again\n"
        finally:
            client.kill()


@pytest.mark.slow
def test_a_silent_endpoint_in_the_list(tmp_path: Path, etcd: EtcdServer) -> None:
    """N14: the first of two endpoints takes connections and says nothing: the run goes through the other one."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoints = f"http://127.0.0.1:{silent.getsockname()[1]},{etcd.address}"
        with Stepping(tmp_path, "--nnodes", "2", "--etcd", endpoints) as run:
            run.start_many(["n0", "n1"])
            run.wait_for_commits(1)
            assert ends_well(run, etcd).numbers() == [1]


@pytest.mark.slow
def test_etcd_by_ipv6(tmp_path: Path) -> None:
    """N15: an etcd whose endpoint is an IPv6 address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    server = EtcdServer(wheel_binary(), tmp_path / "etcd")
    server.address = Address("http", "::1", server.port)
    with server, Stepping(tmp_path, "--nnodes", "2", "--etcd", str(server.address)) as run:
        run.start_many(["n0", "n1"])
        run.wait_for_commits(1)
        assert ends_well(run, server).numbers() == [1]
