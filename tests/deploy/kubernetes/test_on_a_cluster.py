"""A run on a real cluster, from apply to its end: whatever `KUBECONFIG` points to. Skipped, and said so, without one.

    KUBECONFIG=~/.kube/config ELASTICRT_IMAGE=elasticrt:0.1.0 python3 dev.py test --full tests/deploy/kubernetes

The image must be where the cluster finds it (deploy/Dockerfile). Everything happens in a namespace of its own, which is
deleted at the end. Drains need a second node that can be scheduled on, and cuts a network plug-in that heeds policies;
what a cluster cannot do is skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.deploy.kubernetes.rendering import DEPLOY, documents, kubectl, rendered

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (it comes with the dev extra)")

IMAGE = os.environ.get("ELASTICRT_IMAGE", "elasticrt:0.1.0")
WORKERS = "app.kubernetes.io/component=worker"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="needs KUBECONFIG: a cluster to play on"),
]


class Cluster:
    """One namespace of the cluster."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.docs = documents(rendered(DEPLOY / "overlays" / "dev"))
        for doc in self.docs:
            if doc["kind"] == "Job":
                doc["spec"]["template"]["spec"]["containers"][0]["image"] = IMAGE

    def kubectl(self, *words: str, text: str | None = None, check: bool = True) -> str:
        """Run kubectl here."""
        command = [kubectl(), f"--namespace={self.namespace}", *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
        assert not check or done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
        return done.stdout

    def pods(self) -> list[dict[str, Any]]:
        """The run's pods."""
        return json.loads(self.kubectl("get", "pods", f"--selector={WORKERS}", "--output=json"))["items"]

    def training(self) -> list[str]:
        """The pods that run and are not told to leave."""
        return [
            pod["metadata"]["name"]
            for pod in self.pods()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    def status(self) -> str:
        """What `elasticrt status` says, asked in some pod that runs; "" when none can be asked."""
        for name in self.training():
            said = self.kubectl("exec", name, "--", "elasticrt", "status", check=False)
            if said:
                return said
        return ""

    def generation(self) -> tuple[int, int]:
        """Number and nodes of the present generation; zeros before the first."""
        found = re.search(r"generation (\d+): (\d+) nodes", self.status())
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def step(self) -> int:
        """The newest step that some pod has seen, by its own word."""
        steps = [0]
        ask = "from urllib.request import urlopen as u; print(u('http://127.0.0.1:8471/live').read().decode())"
        for name in self.training():
            said = self.kubectl("exec", name, "--", "python", "-c", ask, check=False)
            steps.append((json.loads(said)["step"] or 0) if said.startswith("{") else 0)
        return max(steps)

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float = 300.0) -> float:
        """Wait until it is so; how long it took, in seconds."""
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > timeout_s:
                events = self.kubectl("get", "events,pods", "--output=wide", check=False)
                logs = self.kubectl("logs", f"--selector={WORKERS}", "--tail=30", "--prefix", check=False)
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.status()}\n{events}\n{logs}")
            time.sleep(1.0)
        took = time.monotonic() - begin
        print(f"{what}: {took:.0f} s")
        return took

    def wait_for_nodes(self, nodes: int, after: int = 0) -> int:
        """Wait for a generation later than `after` of so many nodes, and for a step in it; its number."""
        self.wait(f"{nodes} nodes train", lambda: self.generation()[1] == nodes and self.generation()[0] > after)
        step = self.step()
        self.wait(f"a step after {step}", lambda: self.step() > step, 120)
        return self.generation()[0]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A namespace of its own, with pod security "restricted", and the dev overlay applied in it."""
    name = f"elasticrt-{secrets.token_hex(3)}"
    here = Cluster(name)
    here.kubectl("create", "namespace", name)
    try:
        here.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        here.kubectl("apply", "--filename=-", text=yaml.safe_dump_all(here.docs))
        here.wait_for_nodes(3)
        yield here
    finally:
        here.kubectl("delete", "namespace", name, "--wait=true", check=False)


def test_all_pods_are_ready(cluster: Cluster) -> None:
    """While all train, all are ready, and the budget lets one of three go."""
    cluster.kubectl("wait", "--for=condition=Ready", "pod", f"--selector={WORKERS}", "--timeout=120s")
    allowed = "jsonpath={.status.disruptionsAllowed}"
    cluster.wait("the budget counts", lambda: cluster.kubectl("get", "pdb", "train", f"--output={allowed}") == "2", 60)


def test_a_deleted_pod_is_replaced(cluster: Cluster) -> None:
    """It hands over, the others train on, its index comes back, and the Job counts no failure for good."""
    number, _ = cluster.generation()
    victim = cluster.training()[-1]
    cluster.kubectl("delete", "pod", victim, "--wait=false")
    cluster.wait("the others train on", lambda: cluster.generation()[0] > number, 120)
    cluster.wait("a replacement", lambda: len(cluster.training()) == 3 and victim not in cluster.training())
    cluster.wait_for_nodes(3, number)
    succeeded = cluster.kubectl("get", "job", "train", "--output=jsonpath={.status.succeeded}")
    assert succeeded in ("", "0"), "nobody who was told to leave has succeeded"


def test_a_killed_agent_is_replaced(cluster: Cluster) -> None:
    """A pod whose agent is killed fails, and another one takes its place."""
    number, _ = cluster.generation()
    victim = cluster.training()[-1]
    kill = "import os, signal; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), signal.SIGKILL)"
    cluster.kubectl("exec", victim, "--", "python", "-c", kill, check=False)
    cluster.wait("a replacement", lambda: len(cluster.training()) == 3 and victim not in cluster.training())
    cluster.wait_for_nodes(3, number)


CUT = """
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: cut}
spec:
  podSelector: {matchLabels: {cut: "yes"}}
  policyTypes: [Ingress, Egress]
"""


def test_a_pod_that_is_cut_off_comes_back(cluster: Cluster) -> None:
    """The others train on without it, and let it in again when it is back.

    Policies add up: the run's own is taken from this pod by taking its labels away, which the Job gives it back.
    """
    number, _ = cluster.generation()
    victim = cluster.training()[-1]
    cluster.kubectl("apply", "--filename=-", text=CUT)
    policy = json.loads(cluster.kubectl("get", "networkpolicy", "train", "--output=json"))
    without = {"spec": {"podSelector": {"matchExpressions": [{"key": "cut", "operator": "DoesNotExist"}]}}}
    cluster.kubectl("patch", "networkpolicy", "train", "--type=merge", f"--patch={json.dumps(without)}")
    cluster.kubectl("label", "pod", victim, "cut=yes")
    try:
        begin = time.monotonic()
        while cluster.generation()[1] != 2:
            if time.monotonic() - begin > 60:
                pytest.skip("this cluster's network plug-in does not heed NetworkPolicies")
            time.sleep(1.0)
        print(f"the others train on: {time.monotonic() - begin:.0f} s")
    finally:
        cluster.kubectl("label", "pod", victim, "cut-")
        cluster.kubectl("delete", "networkpolicy", "cut")
        back = {"spec": {"podSelector": policy["spec"]["podSelector"] | {"matchExpressions": None}}}
        cluster.kubectl("patch", "networkpolicy", "train", "--type=merge", f"--patch={json.dumps(back)}")
    cluster.wait_for_nodes(3, number)


def test_scaling(cluster: Cluster) -> None:
    """Four nodes, two nodes, three nodes, as the README says it: resize, then both numbers of the Job."""
    for nodes in (4, 2, 3):
        number, _ = cluster.generation()
        cluster.kubectl("exec", cluster.training()[0], "--", "elasticrt", "resize", f"1:{nodes}")
        cluster.kubectl("patch", "job", "train", f'--patch={{"spec":{{"parallelism":{nodes},"completions":{nodes}}}}}')
        cluster.wait_for_nodes(nodes, number)
    failed = cluster.kubectl("get", "job", "train", "--output=jsonpath={.status.conditions}")
    assert "FailureTarget" not in failed


def test_a_node_is_drained(cluster: Cluster) -> None:
    """Its pods hand over and come back elsewhere, or when it is back; the budget does not hold the drain up."""
    nodes = json.loads(cluster.kubectl("get", "nodes", "--output=json"))["items"]
    open_ = [node["metadata"]["name"] for node in nodes if not node["spec"].get("unschedulable")]
    etcd = cluster.kubectl("get", "pod", "etcd-0", "--output=jsonpath={.spec.nodeName}")
    places = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in cluster.pods()}
    victims = [place for name, place in places.items() if name in cluster.training() and place != etcd]
    if len(open_) < 2 or not victims:
        pytest.skip("needs a node with a pod of the run, and without its etcd")
    number, _ = cluster.generation()
    try:
        options = ["--ignore-daemonsets", "--delete-emptydir-data", "--timeout=180s"]
        only = f"--pod-selector={WORKERS}"
        cluster.kubectl("drain", victims[0], *options, only)
        cluster.wait("the run goes on", lambda: cluster.generation()[0] > number, 120)
    finally:
        cluster.kubectl("uncordon", victims[0])
    cluster.wait_for_nodes(3, number)


def test_deleted_and_applied_again(cluster: Cluster) -> None:
    """All are told to leave at once, which saves the present step; the same Job again goes on after it."""
    step = cluster.step()
    cluster.kubectl("delete", "job", "train", "--timeout=180s")
    cluster.wait("all pods are gone", lambda: not cluster.pods(), 180)
    cluster.kubectl("apply", "--filename=-", text=yaml.safe_dump_all(cluster.docs))
    cluster.wait("training goes on", lambda: cluster.step() > 0)
    assert cluster.step() >= step
