"""What a schema cannot know about Jobs and their pods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from elasticrt.errors import (
    EXIT_CHECKPOINT,
    EXIT_DUPLICATE,
    EXIT_OK,
    EXIT_PREPARATION,
    EXIT_RENDEZVOUS,
    EXIT_STORE,
    EXIT_TERMINATED,
    EXIT_USAGE,
    EXIT_WORKERS,
)
from elasticrt.option_values import parse_nodes, seconds
from elasticrt.run_options import STOP_TIMEOUT_S, RunOptions
from tests.deploy.kubernetes.environment import entries, environment, undefined
from tests.deploy.kubernetes.finding import Doc, containers, jobs, means, of_kind, pods, quantity, rule, settings

FINAL = {EXIT_WORKERS, EXIT_USAGE, EXIT_CHECKPOINT, EXIT_PREPARATION}
AGAIN = {EXIT_RENDEZVOUS, EXIT_STORE, EXIT_DUPLICATE}
WORDS = {
    "podReplacementPolicy": {"Failed", "TerminatingOrFailed"},
    "completionMode": {"Indexed", "NonIndexed"},
    "action": {"FailJob", "FailIndex", "Ignore", "Count"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "unhealthyPodEvictionPolicy": {"AlwaysAllow", "IfHealthyBudget"},
    "podManagementPolicy": {"Parallel", "OrderedReady"},
    "fsGroupChangePolicy": {"OnRootMismatch", "Always"},
    "restartPolicy": {"Never", "OnFailure", "Always"},
    "medium": {"", "Memory"},
    "protocol": {"TCP", "UDP", "SCTP"},
    "operator": {"In", "NotIn", "Exists", "DoesNotExist", "Equal"},
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "effect": {"NoExecute", "NoSchedule", "PreferNoSchedule"},
}


# Jobs.


@rule("seen: with exit code 0 after SIGTERM an index counts as succeeded and its pod never comes back")
def leaving_is_no_failure(docs: Sequence[Doc]) -> Iterator[str]:
    """Evictions and exit code 143 are ignored, so that the index is replaced; 0 is never listed."""
    for spec in jobs(docs):
        rules = spec.get("podFailurePolicy", {}).get("rules")
        if rules is None:
            if spec.get("podReplacementPolicy") != "TerminatingOrFailed":
                yield "no podFailurePolicy, and nothing in return for it"
            continue
        ignored = [each for each in rules if each["action"] == "Ignore"]
        codes = {code for each in ignored for code in each.get("onExitCodes", {}).get("values", ())}
        conditions = {each["type"] for other in ignored for each in other.get("onPodConditions", ())}
        if EXIT_TERMINATED not in codes:
            yield f"exit code {EXIT_TERMINATED} is not ignored"
        if "DisruptionTarget" not in conditions:
            yield "evictions (DisruptionTarget) are not ignored"
        first = next(iter(rules), {})
        if conditions and "onPodConditions" not in first:
            yield "evictions have to be looked at first: the first rule that matches decides"


@rule("a script that cannot work is started a thousand times; a full queue (3) or etcd being away (4) ends the Job")
def final_codes_end_the_job(docs: Sequence[Doc]) -> Iterator[str]:
    """FailJob for exactly those exit codes that another try cannot cure, of a container that exists."""
    for spec in jobs(docs):
        rules = spec.get("podFailurePolicy", {}).get("rules")
        if rules is None:
            continue
        names = {container["name"] for container in spec["template"]["spec"]["containers"]}
        final = {code for each in rules if each["action"] == "FailJob" for code in each["onExitCodes"]["values"]}
        if final != FINAL:
            yield f"FailJob for {sorted(final)}; final are {sorted(FINAL)}, not {sorted(AGAIN)}, never {EXIT_OK}"
        for each in rules:
            name = each.get("onExitCodes", {}).get("containerName", next(iter(names), None))
            if name not in names:
                yield f"there is no container {name}"


@rule('seen: the API server rejects it (podReplacementPolicy, unsupported value "TerminatingOrFailed": use "Failed")')
def failure_policy_waits_for_the_end(docs: Sequence[Doc]) -> Iterator[str]:
    """podFailurePolicy goes with podReplacementPolicy Failed only."""
    for spec in jobs(docs):
        if "podFailurePolicy" in spec and spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield "podFailurePolicy with TerminatingOrFailed"


@rule("seen: scaling works by changing parallelism and completions together; parallelism alone leaves indexes out")
def as_many_pods_as_nodes(docs: Sequence[Doc]) -> Iterator[str]:
    """Indexed, with parallelism = completions = the run's maximum."""
    _, most = parse_nodes(settings(docs).get("ELASTICRT_NNODES", "1"))
    for spec in jobs(docs):
        if spec.get("completionMode") != "Indexed":
            yield "not Indexed: then completions cannot be changed"
        if not spec.get("parallelism") == spec.get("completions") == most:
            yield f"parallelism {spec.get('parallelism')}, completions {spec.get('completions')}, maximum {most}"


@rule("OnFailure restarts in place: the Job never sees the exit code, and podFailurePolicy is not allowed with it")
def pods_are_replaced_not_restarted(docs: Sequence[Doc]) -> Iterator[str]:
    """restartPolicy Never, and a backoffLimit that a long run on borrowed nodes does not use up."""
    for spec in jobs(docs):
        if spec["template"]["spec"].get("restartPolicy") != "Never":
            yield "restartPolicy is not Never"
        if spec.get("backoffLimit", 6) < 100:
            yield f"backoffLimit {spec.get('backoffLimit', 6)}: lost pods of a week use that up"
        if "activeDeadlineSeconds" in spec:
            yield "activeDeadlineSeconds kills the run without a checkpoint"


@rule("ended pods stay for ever, and the name of the Job with them; or they go before anybody has read their logs")
def ended_jobs_go(docs: Sequence[Doc]) -> Iterator[str]:
    """ttlSecondsAfterFinished, of an hour at least."""
    for spec in jobs(docs):
        if spec.get("ttlSecondsAfterFinished", 0) < 3600:
            yield f"ttlSecondsAfterFinished {spec.get('ttlSecondsAfterFinished')}"


# Pods.


@rule("SIGKILL in the middle of the last checkpoint: the default of 30 s is what draining, stopping and a lease take")
def grace_is_long_enough(docs: Sequence[Doc]) -> Iterator[str]:
    """terminationGracePeriodSeconds is stated, and >= drain timeout + stop timeout + lease."""
    given = settings(docs)
    defaults = {
        "DRAIN_TIMEOUT": RunOptions.drain_timeout_s,
        "STOP_TIMEOUT": STOP_TIMEOUT_S,
        "LEASE_TTL": RunOptions.lease_ttl_s,
    }
    needed = sum(seconds(given.get(f"ELASTICRT_{name}", f"{default:g}")) for name, default in defaults.items())
    for name, template in pods(docs):
        if "terminationGracePeriodSeconds" not in template["spec"]:
            yield f"{name}: the default, which is just enough for today's options"
    for spec in jobs(docs):
        grace = spec["template"]["spec"].get("terminationGracePeriodSeconds", needed)
        if grace < needed:
            yield f"{grace} s; draining, stopping and a lease take {needed:g} s"


@rule("a container has 64 MiB by default (data loaders end with Bus error); one that is too large gets the pod killed")
def shared_memory_has_a_size(docs: Sequence[Doc]) -> Iterator[str]:
    """/dev/shm is a memory volume with a limit, and smaller than the pod's memory."""
    for spec in jobs(docs):
        pod = spec["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            mounts = [mount["name"] for mount in container.get("volumeMounts", ()) if mount["mountPath"] == "/dev/shm"]
            shm = volumes.get(mounts[0], {}).get("emptyDir", {}) if mounts else {}
            limit = container.get("resources", {}).get("limits", {}).get("memory")
            if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
                yield f"{container['name']}: /dev/shm is no memory volume with a sizeLimit"
            elif limit and quantity(shm["sizeLimit"]) > quantity(limit) // 2:
                yield f"{container['name']}: /dev/shm of {shm['sizeLimit']} in {limit} of memory"


@rule("a mount without a volume is refused; a volume without a mount, and the write goes to a root that is read-only")
def volumes_are_mounted(docs: Sequence[Doc]) -> Iterator[str]:
    """Mounts and volumes belong to each other; HOME and /tmp can be written to; Secrets cannot, disks are bounded."""
    for name, template in pods(docs):
        volumes = {each["name"]: each for each in template["spec"].get("volumes", ())}
        claimed = {
            each["metadata"]["name"]
            for doc in of_kind(docs, "StatefulSet")
            if doc["spec"]["template"] is template
            for each in doc["spec"].get("volumeClaimTemplates", ())
        }
        mounts = [each for container in containers(template) for each in container.get("volumeMounts", ())]
        if {each["name"] for each in mounts} != {*volumes, *claimed}:
            yield f"{name}: volumes {sorted({*volumes, *claimed})}, mounts {sorted({each['name'] for each in mounts})}"
        for each in mounts:
            secret = volumes.get(each["name"], {}).get("secret")
            if secret is not None and (not each.get("readOnly") or secret.get("defaultMode") != 0o440):
                yield f"{name}: {each['name']} is a key; it must be read-only, and readable by the group alone"
        for volume in volumes.values():
            disk = volume.get("emptyDir") if set(volume) - {"name"} else {}  # Without a source it is an emptyDir.
            if disk is not None and disk.get("medium") != "Memory" and "sizeLimit" not in disk:
                yield f"{name}: {volume['name']} may fill its node's disk"
    for spec in jobs(docs):
        for container in spec["template"]["spec"]["containers"]:
            written = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
            for path in ("/tmp", environment(docs, container, {}).get("HOME", "no HOME")):
                if not any(path == mount or path.startswith(f"{mount}/") for mount in written):
                    yield f"{container['name']}: {path} cannot be written to"


@rule("seen: pod security 'restricted' complains; where a namespace enforces it, it refuses the pods")
def restricted_security(docs: Sequence[Doc]) -> Iterator[str]:
    """What pod security "restricted" asks for, and a root file system that cannot be written to."""
    for name, template in pods(docs):
        pod = template["spec"]
        of_pod = pod.get("securityContext", {})
        wrong = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
        wrong += [f"volume {volume['name']}" for volume in pod.get("volumes", ()) if "hostPath" in volume]
        for container in containers(template):
            own = {**of_pod, **container.get("securityContext", {})}
            wanted = {
                "runAsNonRoot": True,
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            wrong += [f"{container['name']}.{key}" for key, value in wanted.items() if own.get(key) != value]
            wrong += [f"{container['name']}.{key}" for key in ("runAsUser", "runAsGroup") if not own.get(key, 0)]
        wrong += [] if of_pod.get("fsGroup") else ["fsGroup"]
        if of_pod.get("fsGroupChangePolicy") != "OnRootMismatch":
            wrong += ["fsGroupChangePolicy (each start would walk over every checkpoint)"]
        if wrong:
            yield f"{name}: {', '.join(wrong)}"


@rule("a token is a way out of a training pod; service links make ETCD_* and ELASTICRT_* variables of Services' names")
def nothing_is_injected(docs: Sequence[Doc]) -> Iterator[str]:
    """No service account token, no variables for Services; a Job's account is its own, without rights."""
    accounts = {doc["metadata"]["name"]: doc for doc in of_kind(docs, "ServiceAccount")}
    for spec in jobs(docs):
        account = spec["template"]["spec"].get("serviceAccountName", "default")
        if accounts.get(account, {}).get("automountServiceAccountToken") is not False:
            yield f"account {account} is not ours, or mounts its token"
    for name, template in pods(docs):
        for field in ("automountServiceAccountToken", "enableServiceLinks"):
            if template["spec"].get(field) is not False:
                yield f"{name}: {field} is not false"


@rule("seen: kustomize puts patched entries first; etcd ends with 'bootstrap failed ... https://$(POD_NAME).etcd:2380'")
def references_are_defined(docs: Sequence[Doc]) -> Iterator[str]:
    """Each $(NAME) in an entry's value is an entry further up; those in commands and paths are any of its entries."""
    for pod, template in pods(docs):
        for container in containers(template):
            where = f"{pod}: {container['name']}"
            for name, text, before in entries(docs, container, {}):
                yield from (f"{where}: {name} uses $({each}) before it is defined" for each in undefined(text, before))
            env = environment(docs, container, {})
            words = [*container.get("command", ()), *container.get("args", ())]
            words += [mount.get("subPathExpr", "") for mount in container.get("volumeMounts", ())]
            for word in words:
                yield from (f"{where}: {word} uses $({each}), which is not defined" for each in undefined(word, env))
            names = [each["name"] for each in container.get("env", ())]
            yield from (f"{where}: {name} is there twice" for name in sorted(set(names)) if names.count(name) > 1)
    for name, text in settings(docs).items():
        yield from (f"{name} uses $({each}): a ConfigMap's text is taken as it is" for each in undefined(text, {}))


@rule("seen: the replacement stays Pending while a node is lost ('didn't match pod topology spread constraints')")
def spreading_is_a_wish(docs: Sequence[Doc]) -> Iterator[str]:
    """topologySpreadConstraints with ScheduleAnyway, about the Job's own pods."""
    for spec in jobs(docs):
        template = spec["template"]
        spread = template["spec"].get("topologySpreadConstraints", ())
        if [each["topologyKey"] for each in spread] != ["kubernetes.io/hostname"]:
            yield "pods share a node while others are free, and are lost together"
        for each in spread:
            if each["whenUnsatisfiable"] != "ScheduleAnyway" and each.get("nodeTaintsPolicy") != "Honor":
                yield f"{each['topologyKey']}: {each['whenUnsatisfiable']}"
            if not means(each["labelSelector"], template, ("name", "component")):
                yield f"{each['topologyKey']}: it spreads other pods"


@rule("by default a pod of a lost node is given up after 300 s, and its GPUs wait with it")
def lost_pods_are_given_up_soon(docs: Sequence[Doc]) -> Iterator[str]:
    """Tolerations of 10 to 60 s for nodes that are not ready or unreachable."""
    for spec in jobs(docs):
        tolerations = {each.get("key"): each for each in spec["template"]["spec"].get("tolerations", ())}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
            given = tolerations.get(key, {})
            if not 10 <= given.get("tolerationSeconds", 300) <= 60:
                yield f"{key} is tolerated for {given.get('tolerationSeconds', 300)} s"
            elif (given.get("operator"), given.get("effect")) != ("Exists", "NoExecute"):
                yield f"{key}: seconds go with operator Exists and effect NoExecute"


@rule("pods that ask for no memory are the first to be killed, and the last to be placed where there is some")
def resources_are_stated(docs: Sequence[Doc]) -> Iterator[str]:
    """Requests for CPU and memory; a limit for memory that equals the request in Jobs."""
    for name, template in pods(docs):
        for container in containers(template):
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            if not {"cpu", "memory"} <= set(requests) or "memory" not in limits:
                yield f"{name}: {container['name']} states {sorted(requests)} and limits {sorted(limits)}"
            devices = {key for key in {*requests, *limits} if "/" in key}
            if any(requests.get(key) != limits.get(key) for key in devices):
                yield f"{name}: devices must be requested as they are limited: {sorted(devices)}"
            tolerated = [(each.get("key"), each.get("operator"), each.get("effect"))
                         for each in template["spec"].get("tolerations", ())]  # fmt: skip
            if "nvidia.com/gpu" in devices and ("nvidia.com/gpu", "Exists", "NoSchedule") not in tolerated:
                yield f"{name}: nodes with devices often have a taint of the device's name"


@rule("`latest` is another version on a replaced pod than on the others, and their options may differ (exit code 7)")
def images_have_versions(docs: Sequence[Doc]) -> Iterator[str]:
    """A tag that names a version, or a digest."""
    for name, template in pods(docs):
        for container in containers(template):
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            if "@sha256:" not in container["image"] and tag in ("", "latest"):
                yield f"{name}: {container['image']}"


# Spelling.


@rule("seen: `podReplacementPolicy: Bogus` and `action: Nope` pass kubernetes-validate --strict")
def words_exist(docs: Sequence[Doc]) -> Iterator[str]:
    """Where Kubernetes takes one of some words, it is one of them."""
    for doc in docs:
        yield from _words(doc, f"{doc['kind']} {doc['metadata']['name']}")


def _words(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            for word in inner if isinstance(inner, list) else [inner]:
                if key in WORDS and isinstance(word, str) and word not in WORDS[key]:
                    yield f"{where}: {key}: {word}"
            yield from _words(inner, where)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner, where)
