"""Our Kubernetes manifests: rendered by kustomize, checked by the schemas of every version, and by rules of our own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrt.agent.health_server import METRICS
from tests.deploy.kubernetes.finding import Doc, jobs, of_kind, selects
from tests.deploy.kubernetes.lint import BROKE, RULES, complaints
from tests.deploy.kubernetes.rendering import DEPLOY, OVERLAYS, documents, kubectl, overlay, rendered
from tests.deploy.kubernetes.schemas import VERSIONS, check
from tests.unit.agent.exported import exported_samples


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_version_takes_every_overlay(name: str) -> None:
    """From 1.29 on, no version of Kubernetes has an unknown field, a wrong type or a missing field to find in it."""
    assert VERSIONS, "schemas"
    docs = overlay(name)
    assert {"ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"} <= {doc["kind"] for doc in docs}
    assert len(jobs(docs)) == 1
    for version in VERSIONS:
        for doc in docs:
            check(doc, version)


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_obeys_the_rules(name: str) -> None:
    """What has broken runs on real clusters, or would, is in none of them."""
    assert complaints(overlay(name)) == {}


def test_replacing_at_once(tmp_path: Path) -> None:
    """With components/replace-at-once the Job is replaced without waiting, and everything else stays as it was."""
    docs = overlay_with(tmp_path, "tls", "replace-at-once")
    (spec,) = jobs(docs)
    assert spec["podReplacementPolicy"] == "TerminatingOrFailed"
    assert "podFailurePolicy" not in spec
    assert complaints(docs) == {}
    for version in VERSIONS:
        for doc in docs:
            check(doc, version)


def test_monitoring(tmp_path: Path) -> None:
    """With components/monitoring the scraper is let in, at the health port alone; the rest stays as it was."""
    docs = overlay_with(tmp_path, "tls", "monitoring")
    (monitor,) = of_kind(docs, "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("health", METRICS)
    policy = next(doc for doc in of_kind(docs, "NetworkPolicy") if doc["metadata"]["name"] == "train")
    *others, scraper = policy["spec"]["ingress"]
    assert ["namespaceSelector" in each["from"][0] for each in others] == [False]
    assert [each["port"] for each in scraper["ports"]] == [agent(docs)["ports"][0]["containerPort"]]
    assert complaints(docs) == {}
    for version in VERSIONS:
        for doc in docs:
            check(doc, version)


def test_the_dashboard_shows_what_is_exported() -> None:
    """Every series in an expression is one that an agent exports, with its labels; what slows a run down is shown."""
    board = json.loads((DEPLOY / "components" / "monitoring" / "dashboard.json").read_text())
    exported = {sample.name: set(sample.labels) for sample in exported_samples()}
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"elasticrt_\w+", expression)}
    assert names <= exported.keys()
    assert len(names) > 15
    assert {"elasticrt_standing_seconds", "elasticrt_slow"} <= names
    for label, name in re.findall(r"by \((kind|bucket|phase|rank|slow)\) \((?:\w+\()?(elasticrt_\w+)", " ".join(asked)):
        assert label in exported[name]


def overlay_with(directory: Path, name: str, component: str) -> list[Doc]:
    """An overlay with one more component."""
    where = {
        part: os.path.relpath(DEPLOY / part, directory) for part in (f"overlays/{name}", f"components/{component}")
    }
    resource, added = where.values()
    (directory / "kustomization.yaml").write_text(f"resources: [{resource}]\ncomponents: [{added}]\n")
    return documents(rendered(directory))


def test_the_jobset_runs_the_same_job() -> None:
    """overlays/jobset has no Job, and one JobSet with the base's Job in it, to the letter."""
    docs = overlay("jobset")
    assert not of_kind(docs, "Job")
    (inside,) = jobs(docs)
    (own,) = jobs(documents(rendered(DEPLOY / "base")))
    assert inside == own


# A broken manifest for each rule: only that rule may find it, and no schema does.


def job(docs: list[Doc]) -> Any:
    """The Job's spec."""
    return jobs(docs)[0]


def pod(docs: list[Doc]) -> Any:
    """The Job's pod."""
    return job(docs)["template"]["spec"]


def agent(docs: list[Doc]) -> Any:
    """The agent's container."""
    return pod(docs)["containers"][0]


def kind(docs: list[Doc], kind: str, name: str) -> Any:
    """The spec (or data) of one document."""
    (found,) = [doc for doc in of_kind(docs, kind) if doc["metadata"]["name"] == name]
    return found["data"] if kind == "ConfigMap" else found["spec"]


def shm(docs: list[Doc]) -> Any:
    """The volume behind /dev/shm."""
    return next(volume for volume in pod(docs)["volumes"] if volume["name"] == "shm")["emptyDir"]


def _replace_at_once(docs: list[Doc]) -> None:
    job(docs)["podReplacementPolicy"] = "TerminatingOrFailed"


def _one_more_completion(docs: list[Doc]) -> None:
    job(docs)["completions"] += 1


def _percentage(docs: list[Doc]) -> None:
    kind(docs, "PodDisruptionBudget", "train")["minAvailable"] = "50%"


def _unavailable(docs: list[Doc]) -> None:
    budget = kind(docs, "PodDisruptionBudget", "train")
    del budget["minAvailable"]
    budget["maxUnavailable"] = 1


def _renamed(docs: list[Doc]) -> None:
    kind(docs, "NetworkPolicy", "train")["podSelector"] = {"matchLabels": {"app": "train"}}


def _mutable(docs: list[Doc]) -> None:
    del of_kind(docs, "ConfigMap")[0]["immutable"]


def _index_as_name(docs: list[Doc]) -> None:
    agent(docs)["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] = "metadata.annotations['batch.kubernetes.io/index']"


def member(docs: list[Doc]) -> Any:
    """etcd's container."""
    return kind(docs, "StatefulSet", "etcd")["template"]["spec"]["containers"][0]


def unset(container: Any, name: str) -> None:
    """Take a variable away."""
    container["env"] = [each for each in container["env"] if each["name"] != name]


def _node_directory(docs: list[Doc]) -> None:
    pod(docs)["volumes"].append({"name": "node", "hostPath": {"path": "/"}})
    agent(docs)["volumeMounts"].append({"name": "node", "mountPath": "/node"})


BROKEN: list[tuple[str, str, Callable[[list[Doc]], object]]] = [
    ("leaving_is_no_failure", "143 counts", lambda d: job(d)["podFailurePolicy"]["rules"].pop(1)),
    ("leaving_is_no_failure", "evictions count", lambda d: job(d)["podFailurePolicy"]["rules"].pop(0)),
    ("final_codes_end_the_job", "code 3 is final",
     lambda d: job(d)["podFailurePolicy"]["rules"][2]["onExitCodes"]["values"].append(3)),
    ("final_codes_end_the_job", "another container",
     lambda d: job(d)["podFailurePolicy"]["rules"][2]["onExitCodes"].update(containerName="worker")),
    ("failure_policy_waits_for_the_end", "replaced at once", _replace_at_once),
    ("as_many_pods_as_nodes", "one more completion", _one_more_completion),
    ("as_many_pods_as_nodes", "the maximum raised alone",
     lambda d: kind(d, "ConfigMap", "train").update(ELASTICRT_NNODES="2:6")),
    ("as_many_pods_as_nodes", "not indexed", lambda d: job(d).update(completionMode="NonIndexed")),
    ("leaving_is_no_failure", "no policy", lambda d: job(d).pop("podFailurePolicy")),
    ("ended_jobs_go", "never", lambda d: job(d).pop("ttlSecondsAfterFinished")),
    ("ended_jobs_go", "at once", lambda d: job(d).update(ttlSecondsAfterFinished=0)),
    ("pods_are_replaced_not_restarted", "restarted in place", lambda d: pod(d).update(restartPolicy="OnFailure")),
    ("pods_are_replaced_not_restarted", "six failures in all", lambda d: job(d).pop("backoffLimit")),
    ("grace_is_long_enough", "a short one", lambda d: pod(d).update(terminationGracePeriodSeconds=29)),
    ("grace_is_long_enough", "the Job's default", lambda d: pod(d).pop("terminationGracePeriodSeconds")),
    ("grace_is_long_enough", "etcd's default",
     lambda d: kind(d, "StatefulSet", "etcd")["template"]["spec"].pop("terminationGracePeriodSeconds")),
    ("grace_is_long_enough", "a long drain",
     lambda d: kind(d, "ConfigMap", "train").update(ELASTICRT_DRAIN_TIMEOUT="10m")),
    ("shared_memory_has_a_size", "no limit", lambda d: shm(d).pop("sizeLimit")),
    ("shared_memory_has_a_size", "on disk", lambda d: shm(d).pop("medium")),
    ("shared_memory_has_a_size", "all of the memory", lambda d: shm(d).update(sizeLimit="4Gi")),
    ("restricted_security", "root", lambda d: pod(d)["securityContext"].update(runAsNonRoot=False)),
    ("restricted_security", "a node's directory",
     _node_directory),
    ("restricted_security", "a writable root", lambda d: agent(d)["securityContext"].pop("readOnlyRootFilesystem")),
    ("volumes_are_mounted", "no /tmp", lambda d: agent(d)["volumeMounts"].pop()),
    ("volumes_are_mounted", "no HOME", lambda d: unset(agent(d), "HOME")),
    ("volumes_are_mounted", "a key for all", lambda d: agent(d)["volumeMounts"][0].pop("readOnly")),
    ("volumes_are_mounted", "a full disk", lambda d: pod(d)["volumes"][3]["emptyDir"].pop("sizeLimit")),
    ("nothing_is_injected", "another account", lambda d: pod(d).pop("serviceAccountName")),
    ("nothing_is_injected", "a token", lambda d: pod(d).pop("automountServiceAccountToken")),
    ("nothing_is_injected", "service links",
     lambda d: kind(d, "StatefulSet", "etcd")["template"]["spec"].pop("enableServiceLinks")),
    ("references_are_defined", "in another order",
     lambda d: agent(d)["env"].insert(0, {"name": "NAME", "value": "of $(ELASTICRT_NODE)"})),
    ("references_are_defined", "in a command", lambda d: agent(d)["args"].append("--run-id=$(RUN)")),
    ("references_are_defined", "at the start", lambda d: pod(d).update(initContainers=[
        {**agent(d), "name": "before", "command": ["true", "$(POD_NAME)"]}])),
    ("references_are_defined", "in a path", lambda d: agent(d)["volumeMounts"][0].update(subPathExpr="$(POD_NAME)")),
    ("references_are_defined", "in the ConfigMap",
     lambda d: kind(d, "ConfigMap", "train").update(OMP_NUM_THREADS="$(ELASTICRT_NPROC_PER_NODE)")),
    ("references_are_defined", "twice", lambda d: agent(d)["env"].append(dict(agent(d)["env"][1]))),
    ("spreading_is_a_wish", "DoNotSchedule",
     lambda d: pod(d)["topologySpreadConstraints"][0].update(whenUnsatisfiable="DoNotSchedule")),
    ("spreading_is_a_wish", "none", lambda d: pod(d).pop("topologySpreadConstraints")),
    ("lost_pods_are_given_up_soon", "another effect",
     lambda d: pod(d)["tolerations"][0].update(effect="NoSchedule")),
    ("lost_pods_are_given_up_soon", "the default", lambda d: pod(d).pop("tolerations")),
    ("resources_are_stated", "no memory", lambda d: agent(d)["resources"]["requests"].pop("memory")),
    ("images_have_versions", "latest", lambda d: agent(d).update(image="registry.example:5000/elasticrt")),
    ("nodes_are_named_after_pods", "by index", _index_as_name),
    ("probes_ask_the_agent", "another port", lambda d: agent(d)["ports"][0].update(containerPort=8080)),
    ("probes_ask_the_agent", "on loopback",
     lambda d: kind(d, "ConfigMap", "train").update(ELASTICRT_HEALTH_PORT="8471")),
    ("probes_ask_the_agent", "ready is alive",
     lambda d: agent(d)["livenessProbe"]["httpGet"].update(path="/ready")),
    ("liveness_is_lenient", "at once", lambda d: agent(d)["livenessProbe"].update(failureThreshold=1)),
    ("liveness_is_lenient", "one second",
     lambda d: member(d)["readinessProbe"].pop("timeoutSeconds")),
    ("options_are_stated", "no lease", lambda d: kind(d, "ConfigMap", "train").pop("ELASTICRT_LEASE_TTL")),
    ("options_are_stated", "no name", lambda d: kind(d, "ConfigMap", "train").pop("ELASTICRT_RUN_ID")),
    ("options_do_not_change", "mutable", _mutable),
    ("options_do_not_change", "not taken", lambda d: agent(d)["envFrom"][0]["configMapRef"].update(name="other")),
    ("checkpoints_are_shared", "in the container",
     lambda d: agent(d).update(args=["run", "train.py", "--checkpoint-dir=/tmp/ckpt"])),
    ("checkpoints_are_shared", "one node's disk",
     lambda d: kind(d, "PersistentVolumeClaim", "checkpoints").update(accessModes=["ReadWriteOnce"])),
    ("checkpoints_are_shared", "by default", lambda d: agent(d)["args"].pop()),
    ("claims_are_complete", "no size", lambda d: kind(d, "PersistentVolumeClaim", "checkpoints").pop("resources")),
    ("budgets_of_jobs_are_integers", "a percentage", _percentage),
    ("budgets_of_jobs_are_integers", "maxUnavailable", _unavailable),
    ("budgets_of_jobs_are_integers", "unlike the run's minimum",
     lambda d: kind(d, "ConfigMap", "train").update(ELASTICRT_NNODES="3:4")),
    ("selectors_select_something", "a renamed label", _renamed),
    ("selectors_select_something", "any run's pods",
     lambda d: kind(d, "NetworkPolicy", "train")["podSelector"]["matchLabels"].pop("app.kubernetes.io/instance")),
    ("selectors_select_something", "all workers",
     lambda d: kind(d, "Service", "train")["selector"].pop("app.kubernetes.io/instance")),
    ("names_lead_to_pods", "an address", lambda d: kind(d, "Service", "train").pop("clusterIP")),
    ("names_lead_to_pods", "no subdomain", lambda d: pod(d).pop("subdomain")),
    ("names_lead_to_pods", "no such port", lambda d: kind(d, "Service", "train")["ports"][0].update(targetPort="web")),
    ("workers_reach_what_they_need", "one direction",
     lambda d: kind(d, "NetworkPolicy", "train").update(policyTypes=["Ingress"])),
    ("workers_reach_what_they_need", "all of etcd",
     lambda d: kind(d, "NetworkPolicy", "train")["egress"][1].pop("ports")),
    ("workers_reach_what_they_need", "no DNS", lambda d: kind(d, "NetworkPolicy", "train")["egress"].pop(2)),
    ("workers_reach_what_they_need", "no etcd", lambda d: kind(d, "NetworkPolicy", "train")["egress"].pop(1)),
    ("workers_reach_what_they_need", "one port between workers",
     lambda d: kind(d, "NetworkPolicy", "train")["ingress"][0].update(ports=[{"protocol": "TCP", "port": 29400}])),
    ("agents_find_etcd", "http to TLS",
     lambda d: kind(d, "ConfigMap", "train").update(ELASTICRT_ETCD="http://etcd-0.etcd:2379")),
    ("agents_find_etcd", "names when ready", lambda d: kind(d, "Service", "etcd").pop("publishNotReadyAddresses")),
    ("agents_find_etcd", "no certificate", lambda d: kind(d, "ConfigMap", "train").pop("ELASTICRT_ETCD_KEY_FILE")),
    ("etcd_is_told_who_it_is", "another's name", lambda d: unset(member(d), "ETCD_NAME")),
    ("etcd_is_told_who_it_is", "no compaction", lambda d: unset(member(d), "ETCD_AUTO_COMPACTION_RETENTION")),
    ("etcd_is_told_who_it_is", "in the container", lambda d: unset(member(d), "ETCD_DATA_DIR")),
    ("etcd_trusts_certificates", "anybody's", lambda d: unset(member(d), "ETCD_CLIENT_CERT_AUTH")),
    ("etcd_trusts_certificates", "a path to nothing",
     lambda d: kind(d, "ConfigMap", "train").update(ELASTICRT_ETCD_CA_FILE="/ca.crt")),
    ("probes_ask_etcd", "over TLS", lambda d: member(d)["readinessProbe"]["httpGet"].update(port="client")),
    ("etcd_is_reached_by_whom_it_should", "by everybody",
     lambda d: kind(d, "NetworkPolicy", "etcd")["ingress"][1].pop("from")),
    ("etcd_is_reached_by_whom_it_should", "not by members",
     lambda d: kind(d, "NetworkPolicy", "etcd")["ingress"].pop()),
    ("etcd_survives_a_node", "members share a node",
     lambda d: kind(d, "StatefulSet", "etcd")["template"]["spec"].pop("affinity")),
    ("etcd_survives_a_node", "two may go", lambda d: kind(d, "PodDisruptionBudget", "etcd").update(maxUnavailable=2)),
    ("words_exist", "an effect",
     lambda d: pod(d)["tolerations"].append({"key": "spot", "operator": "Exists", "effect": "NoExecution"})),
    ("words_exist", "an action", lambda d: job(d)["podFailurePolicy"]["rules"].append(
        {"action": "Nope", "onExitCodes": {"operator": "In", "values": [9]}})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "break_it"), BROKEN, ids=[f"{name}: {how}" for name, how, _ in BROKEN])
def test_each_rule_alone_rejects_its_broken_manifest(
    name: str, how: str, break_it: Callable[[list[Doc]], object]
) -> None:
    """A manifest that is broken in one way passes the newest schema and all rules but one."""
    docs = overlay("tls")
    break_it(docs)
    whole = overlay("tls")
    changed = [doc for doc in docs if doc not in whole]
    assert changed
    for doc in changed:
        check(doc, VERSIONS[-1])
    assert list(complaints(docs)) == [name], how


def test_no_rule_is_dead() -> None:
    """For every rule it is known what breaks without it, and there is a manifest that it rejects."""
    assert set(RULES) == set(BROKE) == {name for name, _, _ in BROKEN}


def test_the_record_is_of_these_files() -> None:
    """deploy/kubernetes/checked.txt is about every overlay and every rule that there is."""
    text = (DEPLOY / "checked.txt").read_text()
    assert [name for name in OVERLAYS if f"\n{name}: {len(RULES)} rules, complaints: none" not in text] == []
    assert [name for name in RULES if f"{name}\n    {BROKE[name]}\n" not in text] == []


@pytest.fixture(scope="module")
def second_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Doc]]:
    """The README's example of a second run beside the first."""
    directory = tmp_path_factory.mktemp("second")
    block = block_after((DEPLOY / "README.md").read_text(), "A second run beside it")
    base = os.path.relpath(DEPLOY / "base", directory)
    (directory / "kustomization.yaml").write_text(block.replace("../../base", base))
    yield documents(rendered(directory))


def block_after(text: str, mark: str) -> str:
    """The first code block after a mark."""
    _, found, after = text.partition(mark)
    assert found, mark
    return after.split("```", 2)[1].partition("\n")[2]


def test_two_runs_in_one_namespace_do_not_meet(second_run: list[Doc]) -> None:
    """The README's second run has no name in common with the first, and neither's selectors match the other's pods."""
    first = overlay("tls")
    names = [{(doc["kind"], doc["metadata"]["name"]) for doc in docs} for docs in (first, second_run)]
    assert not names[0] & names[1]
    assert "StatefulSet" not in {doc["kind"] for doc in second_run}
    labels = [next(spec["template"]["metadata"]["labels"] for spec in jobs(docs)) for docs in (first, second_run)]
    selecting = ("Service", "PodDisruptionBudget", "NetworkPolicy")
    for docs, own, others in ((first, *labels), (second_run, *reversed(labels))):
        for doc in (doc for doc in docs if doc["kind"] in selecting and doc["metadata"]["name"].startswith("train")):
            selector = doc["spec"].get("selector") or doc["spec"]["podSelector"]
            assert selects(selector, own), doc
            assert not selects(selector, others), doc
    assert job(second_run)["template"]["spec"]["subdomain"] in {name for kind, name in names[1] if kind == "Service"}
    etcd = [doc for doc in overlay("jobset") if doc["metadata"]["name"] == "etcd"]  # Without TLS, as the second run is.
    assert complaints([*second_run, *etcd]) == {}


@pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="needs KUBECONFIG: a cluster to ask")
@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "jobset"])
def test_the_api_server_would_take_it(name: str) -> None:
    """A real API server has nothing against an overlay, whether it knows a field or a word or not."""
    command = [kubectl(), "apply", "--dry-run=server", "--validate=strict", "--filename", "-"]
    done = subprocess.run(
        command, input=rendered(DEPLOY / "overlays" / name), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
