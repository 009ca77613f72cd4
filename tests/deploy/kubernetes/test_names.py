"""Our manifests, our image and our programs use the same names."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import urllib.request
from pathlib import Path

import pytest

from elasticrt.cli.configure import configure
from elasticrt.cli.main import build_parser
from elasticrt.cli.options import variables
from elasticrt.cli.run import KINDS, options_given
from elasticrt.errors import StoreError
from elasticrt.option_values import options_of
from elasticrt.store import etcd_server
from elasticrt.store.address import parse_endpoints
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Credentials
from tests.deploy.kubernetes.environment import environment
from tests.deploy.kubernetes.finding import Doc, jobs, of_kind
from tests.deploy.kubernetes.rendering import DEPLOY, OVERLAYS, documents, overlay
from tests.servers import free_port

ROOT = DEPLOY.parents[1]
IN_IMAGE = "/opt/elasticrt/"
"""Where the image has the repository's examples."""


def agent(docs: list[Doc]) -> Doc:
    """The agent's container."""
    (spec,) = jobs(docs)
    return spec["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_is_told_what_elasticrt_run_understands(name: str, tmp_path: Path) -> None:
    """Every ELASTICRT_ variable is one of an option, and command and variables together are a valid `elasticrt run`."""
    docs = overlay(name)
    env = environment(docs, agent(docs), {"metadata.name": "train-0-x2b4d"})
    known = {name for kind in KINDS for option in options_of(kind).values() for name in variables(option)}
    assert {each for each in env if each.startswith("ELASTICRT_")} <= known
    for variable in ("CA", "CERT", "KEY"):
        if f"ELASTICRT_ETCD_{variable}_FILE" in env:
            mounted = Path(env[f"ELASTICRT_ETCD_{variable}_FILE"])
            assert any(Path(each["mountPath"]) == mounted.parent for each in agent(docs)["volumeMounts"])
            env[f"ELASTICRT_ETCD_{variable}_FILE"] = str(tmp_path / mounted.name)
            (tmp_path / mounted.name).touch()
    args = [word.replace(IN_IMAGE, f"{ROOT}/") for word in agent(docs)["args"]]
    arguments = build_parser().parse_args(args)
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1"}
    got, spec = configure(options_given(arguments, env), arguments.script, arguments.arguments, gpus)
    (of_job,) = jobs(docs)
    assert (f"{spec.min_nodes}:{spec.max_nodes}", spec.max_nodes) == (env["ELASTICRT_NNODES"], of_job["parallelism"])
    assert (got.node, got.run_id) == ("train-0-x2b4d", env["ELASTICRT_RUN_ID"])
    assert [("0.0.0.0", each["containerPort"]) for each in agent(docs)["ports"]] == [got.options.health]
    assert got.etcd_wait_s >= 60, "etcd and the agents are applied together"
    assert got.workers == (2 if name == "gpu" else 1)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_script_is_in_the_image_and_has_these_options(name: str) -> None:
    """The Dockerfile puts the script where the Job starts it, and the script declares each option that it is given."""
    script, *options = agent(overlay(name))["args"][1:]
    assert script.startswith(IN_IMAGE)
    path = ROOT / script.removeprefix(IN_IMAGE)
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.search(rf"^COPY {path.parent.name} {re.escape(IN_IMAGE)}{path.parent.name}$", dockerfile, re.MULTILINE)
    for option in options:
        assert f'"{option.partition("=")[0]}"' in path.read_text()


def etcd_env(docs: list[Doc]) -> dict[str, str]:
    """What etcd's container is told in the first member's pod."""
    (doc,) = of_kind(docs, "StatefulSet")
    return environment(docs, doc["spec"]["template"]["spec"]["containers"][0], {"metadata.name": "etcd-0"})


@pytest.mark.parametrize("name", OVERLAYS)
def test_etcd_is_told_what_etcd_understands(name: str) -> None:
    """Every ETCD_ variable is a flag of etcd: it only warns of others."""
    done = subprocess.run(
        [etcd_server.find_binary(), "--help"], capture_output=True, text=True, timeout=20, check=False
    )
    flags = set(re.findall(r"^\s+--([a-z0-9-]+)", done.stdout + done.stderr, re.MULTILINE))
    variables = {each for each in etcd_env(overlay(name)) if each.startswith("ETCD_")}
    assert {each.removeprefix("ETCD_").lower().replace("_", "-") for each in variables} <= flags


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, Path]:
    """The Secrets that certificates.sh makes, each as a directory, as a pod sees it."""
    script = DEPLOY / "components" / "etcd-tls" / "certificates.sh"
    done = subprocess.run([script, "research"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for secret in documents(done.stdout):
        directory = tmp_path / secret["metadata"]["name"]
        directory.mkdir()
        for key, value in secret["data"].items():
            (directory / key).write_bytes(base64.b64decode(value))
        found[directory.name] = directory
    assert set(found) == {"etcd-server-tls", "etcd-client-tls"}
    return found


def test_etcd_and_agents_trust_each_other(certificates: dict[str, Path], tmp_path: Path) -> None:
    """A real etcd with the tls overlay's variables and the script's Secrets serves an agent with its own, and no other.

    The overlay's names and ports become this machine's; nothing else is changed.
    """
    docs = overlay("tls")
    ports = {str(number): str(free_port()) for number in (2379, 2380, 2381)}
    env = etcd_env(docs)
    env["ETCD_INITIAL_CLUSTER"] = env["ETCD_INITIAL_CLUSTER"].split(",")[0]
    env["ETCD_DATA_DIR"] = str(tmp_path / "data")
    for name, value in env.items():
        text = value.replace("/etc/etcd/tls", str(certificates["etcd-server-tls"]))
        for number, port in ports.items():
            text = text.replace(f"0.0.0.0:{number}", f"127.0.0.1:{port}")
            text = text.replace(f"etcd-0.etcd:{number}", f"localhost:{port}")
        env[name] = text
    log = tmp_path / "etcd.log"
    with log.open("wb") as output:
        etcd = subprocess.Popen([etcd_server.find_binary()], env={**os.environ, **env}, stdout=output, stderr=output)
    try:
        assert etcd_server.await_ready(etcd, Address("https", "127.0.0.1", int(ports["2379"]))), log.read_text()
        files = certificates["etcd-client-tls"]
        own = {name: str(files / file) for name, file in
               (("ca_file", "ca.crt"), ("cert_file", "tls.crt"), ("key_file", "tls.key"))}  # fmt: skip
        address = parse_endpoints(f"https://localhost:{ports['2379']}")
        store = EtcdStore(address, Credentials(**own))
        try:
            assert store.grant(5.0).ttl_s >= 5
        finally:
            store.close()
        stranger = EtcdStore(address, Credentials(ca_file=own["ca_file"]))
        try:
            with pytest.raises(StoreError):
                stranger.grant(5.0)
        finally:
            stranger.close()
        # Probes ask here, without a certificate; this version has /health, those from 3.5.11 on /readyz as well.
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['2381']}/health", timeout=5) as answer:
            assert answer.status == 200
        assert "unrecognized environment variable" not in log.read_text()
    finally:
        etcd.terminate()
        etcd.wait(20)
