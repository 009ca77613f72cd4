"""The tls overlay's three etcd members, each on a host of its own, with the names and ports of the manifests."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrt.store import etcd_server
from tests.deploy.kubernetes.environment import environment
from tests.deploy.kubernetes.finding import Doc, of_kind
from tests.deploy.kubernetes.rendering import DEPLOY, documents, overlay
from tests.netns import Network, NetworkNode, missing
from tests.servers import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.root]

CLIENT = """
import sys
from elasticrt.store.address import parse_endpoints
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Credentials
endpoints, files = sys.argv[1:]
store = EtcdStore(parse_endpoints(endpoints), Credentials(f"{files}/ca.crt", f"{files}/tls.crt", f"{files}/tls.key"))
store.grant(5.0)
store.close()
"""


@pytest.fixture
def secrets_(tmp_path: Path) -> Path:
    """What certificates.sh makes, a directory for each Secret."""
    script = DEPLOY / "components" / "etcd-tls" / "certificates.sh"
    made = subprocess.run([script, "research"], capture_output=True, text=True, timeout=60, check=True).stdout
    for secret in documents(made):
        directory = tmp_path / secret["metadata"]["name"]
        directory.mkdir()
        for key, value in secret["data"].items():
            (directory / key).write_bytes(base64.b64decode(value))
    return tmp_path


def with_names(hosts: Path, *command: str) -> list[str]:
    """The command with these names in /etc/hosts, as the headless Service gives them in the cluster."""
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, str(hosts), *command]


@contextmanager
def members(docs: list[Doc], network: Network, secrets: Path) -> Iterator[tuple[list[NetworkNode], Path]]:
    """The StatefulSet's members, started at once; their hosts, and the file with their names."""
    (doc,) = of_kind(docs, "StatefulSet")
    names = [f"etcd-{number}" for number in range(doc["spec"]["replicas"])]
    nodes = [network.add(name) for name in names]
    hosts = secrets / "hosts"
    service = doc["spec"]["serviceName"]
    hosts.write_text("".join(f"{node.address} {node.name}.{service}\n" for node in nodes) + "127.0.0.1 localhost\n")
    container = doc["spec"]["template"]["spec"]["containers"][0]
    processes = []
    try:
        for node in nodes:
            own = environment(docs, container, {"metadata.name": node.name})
            own = {name: value.replace("/etc/etcd/tls", f"{secrets}/etcd-server-tls") for name, value in own.items()}
            own["ETCD_DATA_DIR"] = str(secrets / f"data-{node.name}")
            with (secrets / f"{node.name}.log").open("wb") as log:
                command = with_names(hosts, str(etcd_server.find_binary()))
                processes.append(node.popen(command, env={**os.environ, **own}, stdout=log, stderr=log))
        yield nodes, hosts
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(20)


def test_three_members_over_tls(secrets_: Path) -> None:
    """They find each other by their names, trust each other's certificates, and serve while one is without power."""
    if reason := missing():
        pytest.skip(reason)
    docs = overlay("tls")
    (options,) = [doc["data"] for doc in of_kind(docs, "ConfigMap")]
    with Network() as network:
        agents = network.add("agents")
        with members(docs, network, secrets_) as (nodes, hosts):
            ask = [sys.executable, "-c", CLIENT, options["ELASTICRT_ETCD"], str(secrets_ / "etcd-client-tls")]
            command = agents.command(with_names(hosts, *ask))

            def serves() -> bool:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                return done.returncode == 0

            try:
                wait_until(serves, "three members serve", 60)
                nodes[1].power_off()
                wait_until(serves, "two members serve", 60)
            except AssertionError:
                logs = "\n".join((secrets_ / f"{node.name}.log").read_text()[-3000:] for node in nodes)
                raise AssertionError(logs) from None
            text = "".join((secrets_ / f"{node.name}.log").read_text() for node in nodes)
            # A member that ends a connection while it starts is rejected as well, with "EOF".
            rejected = [line for line in text.splitlines() if "rejected connection" in line]
            assert not [line for line in rejected if "tls:" in line or "x509:" in line], "a certificate for every name"
