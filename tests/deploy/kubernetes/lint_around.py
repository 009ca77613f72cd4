"""What a schema cannot know about what surrounds the pods: their options, budgets, Services, policies, and etcd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.deploy.kubernetes.environment import environment
from tests.deploy.kubernetes.finding import Doc, jobs, labels, of_kind, pods, rule, selects, settings

# Agents.


@rule("seen: a cut-off pod and its replacement exist at once, with one index and one host name")
def nodes_are_named_after_pods(docs: Sequence[Doc]) -> Iterator[str]:
    """ELASTICRT_NODE is the pod's name, which no other pod ever has."""
    for spec in jobs(docs):
        for container in spec["template"]["spec"]["containers"]:
            env = {each["name"]: each for each in container.get("env", ())}
            field = env.get("ELASTICRT_NODE", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            if field != "metadata.name":
                yield f"{container['name']}: ELASTICRT_NODE comes from {field}"


@rule("a port that nobody serves, or one on loopback only: the kubelet gets no answer and kills every pod")
def probes_ask_the_agent(docs: Sequence[Doc]) -> Iterator[str]:
    """Startup and liveness ask /live, readiness asks /ready, at the port and address that the agent is told."""
    given = settings(docs)
    for spec in jobs(docs):
        for container in spec["template"]["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for kind, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/ready")):
                asked = container.get(kind, {}).get("httpGet", {})
                port = ports.get(asked.get("port"), asked.get("port"))
                if asked.get("path") != path or str(port) != given.get("ELASTICRT_HEALTH_PORT"):
                    yield f"{kind} asks {asked.get('path')} at {port}"
        if given.get("ELASTICRT_HEALTH_HOST") not in ("0.0.0.0", "::"):
            yield f"answered at {given.get('ELASTICRT_HEALTH_HOST')} only"


@rule("a node that is busy for a moment answers late, and a healthy pod is killed with its workers")
def liveness_is_lenient(docs: Sequence[Doc]) -> Iterator[str]:
    """A pod is killed only after 30 s of silence at least, and has a minute to start."""
    for spec in jobs(docs):
        for container in spec["template"]["spec"]["containers"]:
            for kind, least in (("livenessProbe", 30), ("startupProbe", 60)):
                probe = container.get(kind, {})
                lasts = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
                if lasts < least:
                    yield f"{kind} fails after {lasts} s"


@rule("a ConfigMap that is edited gives the next replaced pod other options than the rest have: exit code 7, for ever")
def options_do_not_change(docs: Sequence[Doc]) -> Iterator[str]:
    """The agents' ConfigMap is immutable, and the pods take it."""
    names = {doc["metadata"]["name"] for doc in of_kind(docs, "ConfigMap")}
    for doc in of_kind(docs, "ConfigMap"):
        if doc.get("immutable") is not True:
            yield f"ConfigMap {doc['metadata']['name']} is not immutable"
    for spec in jobs(docs):
        for container in spec["template"]["spec"]["containers"]:
            taken = {each.get("configMapRef", {}).get("name") for each in container.get("envFrom", ())}
            if not taken & names:
                yield f"{container['name']} takes {sorted(map(str, taken))}; there is {sorted(names)}"


@rule("each pod writes to a disk of its own, and the next generation finds no checkpoint (exit code 5)")
def checkpoints_are_shared(docs: Sequence[Doc]) -> Iterator[str]:
    """Paths given to the agent lie on a claimed volume; several etcd members mean several nodes, so ReadWriteMany."""
    claims = {doc["metadata"]["name"]: doc["spec"] for doc in of_kind(docs, "PersistentVolumeClaim")}
    several = any(doc["spec"].get("replicas", 1) > 1 for doc in of_kind(docs, "StatefulSet"))
    for spec in jobs(docs):
        pod = spec["template"]["spec"]
        volumes = {each["name"]: each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]
                   if "persistentVolumeClaim" in each}  # fmt: skip
        for container in pod["containers"]:
            shared = [each["mountPath"] for each in container["volumeMounts"] if volumes.get(each["name"]) in claims]
            paths = [word.partition("=")[2] for word in container["args"] if word.startswith("--checkpoint-dir=")]
            for path in [*paths, settings(docs).get("ELASTICRT_RUN_DIR", "")]:
                if not any(path.startswith(f"{mount}/") for mount in shared):
                    yield f"{path or 'the run directory'} is on no claimed volume"
        for name in volumes.values():
            if several and "ReadWriteMany" not in claims.get(name, {}).get("accessModes", ()):
                yield f"claim {name} is not ReadWriteMany"


# Budgets, Services and policies.


@rule("seen: 'jobs.batch does not implement the scale subresource', allowed disruptions 0, every drain blocked")
def budgets_of_jobs_are_integers(docs: Sequence[Doc]) -> Iterator[str]:
    """A PodDisruptionBudget over Job pods has an integer minAvailable, which is min-nodes; unhealthy pods may go."""
    least = int(settings(docs).get("ELASTICRT_MIN_NODES", "1"))
    for spec in jobs(docs):
        of_job = [each for each in of_kind(docs, "PodDisruptionBudget")
                  if selects(each["spec"]["selector"], labels(spec["template"]))]  # fmt: skip
        if not of_job:
            yield "no PodDisruptionBudget selects the Job's pods"
        for each in of_job:
            budget = each["spec"]
            if type(budget.get("minAvailable")) is not int or "maxUnavailable" in budget:
                yield f"{each['metadata']['name']}: minAvailable must be an integer, and maxUnavailable absent"
            elif budget["minAvailable"] != least:
                yield f"{each['metadata']['name']}: minAvailable {budget['minAvailable']}, min-nodes {least}"
            if budget.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
                yield f"{each['metadata']['name']}: a pod that is not ready would block the drain"


@rule("a label renamed in one place: a Service without endpoints, a policy that lets nobody in, a budget over nothing")
def selectors_select_something(docs: Sequence[Doc]) -> Iterator[str]:
    """Every selector of a Service, budget, policy and StatefulSet matches pods of this rendering."""
    of_pods = [labels(template) for _, template in pods(docs)]
    for doc in docs:
        selectors = []
        if doc["kind"] in ("Service", "PodDisruptionBudget", "StatefulSet"):
            selectors.append(doc["spec"]["selector"])
        if doc["kind"] == "NetworkPolicy":
            spec = doc["spec"]
            others = [*spec.get("ingress", ()), *spec.get("egress", ())]
            selectors.append(spec["podSelector"])
            selectors += [
                each["podSelector"]
                for other in others
                for each in [*other.get("from", ()), *other.get("to", ())]
                if "podSelector" in each
            ]
        for selector in selectors:
            if not any(selects(selector, each) for each in of_pods):
                yield f"{doc['kind']} {doc['metadata']['name']} selects nothing: {selector}"


@rule("agents cannot resolve etcd's name, or reach etcd but not each other: silence for a whole time-out")
def workers_reach_what_they_need(docs: Sequence[Doc]) -> Iterator[str]:
    """A policy on workers lets out DNS, etcd and each other on all ports, and lets in each other on all ports."""
    for spec in jobs(docs):
        own = labels(spec["template"])
        for doc in of_kind(docs, "NetworkPolicy"):
            policy = doc["spec"]
            if not selects(policy["podSelector"], own):
                continue
            if not _lets(policy.get("ingress", ()), "from", own, None):
                yield f"{doc['metadata']['name']}: workers do not let each other in"
            if not _lets(policy.get("egress", ()), "to", own, None):
                yield f"{doc['metadata']['name']}: workers do not reach each other on all ports"
            for protocol in ("UDP", "TCP"):
                if not any(each.get("protocol") == protocol and each.get("port") == 53
                           for other in policy.get("egress", ()) for each in other.get("ports", ())):  # fmt: skip
                    yield f"{doc['metadata']['name']}: no DNS over {protocol}"
            for other in of_kind(docs, "StatefulSet"):
                if not _lets(policy.get("egress", ()), "to", labels(other["spec"]["template"]), 2379):
                    yield f"{doc['metadata']['name']}: workers do not reach {other['metadata']['name']}"


def _lets(rules: Sequence[Doc], direction: str, whom: dict[str, str], port: int | None) -> bool:
    """Whether some rule lets traffic of pods with these labels through: on that port, or (None) on all."""
    for each in rules:
        selected = any(
            selects(other["podSelector"], whom) for other in each.get(direction, ()) if "podSelector" in other
        )
        open_ = "ports" not in each or any(other.get("port") == port for other in each["ports"])
        if selected and open_ and (port is not None or "ports" not in each):
            return True
    return False


# etcd.


@rule("a name that no Service gives, or http where etcd speaks TLS: every pod ends with exit code 4")
def agents_find_etcd(docs: Sequence[Doc]) -> Iterator[str]:
    """Every endpoint is a member of the StatefulSet, by its headless Service, in etcd's own scheme; TLS or said not."""
    given = settings(docs)
    for doc in of_kind(docs, "StatefulSet"):
        name, spec = doc["metadata"]["name"], doc["spec"]
        env = environment(docs, spec["template"]["spec"]["containers"][0], {})
        scheme = env["ETCD_LISTEN_CLIENT_URLS"].partition(":")[0]
        wanted = {f"{scheme}://{name}-{number}.{spec['serviceName']}:2379" for number in range(spec["replicas"])}
        if set(given.get("ELASTICRT_ETCD", "").split(",")) != wanted:
            yield f"agents are told {given.get('ELASTICRT_ETCD')}; there are {sorted(wanted)}"
        if (scheme == "http") != ("ELASTICRT_INSECURE_ETCD" in given):
            yield f"etcd speaks {scheme}, and ELASTICRT_INSECURE_ETCD is {given.get('ELASTICRT_INSECURE_ETCD')}"
        if scheme == "https" and "ELASTICRT_ETCD_CA_FILE" not in given:
            yield "etcd speaks TLS, and agents have no authority to check it by"
        services = {each["metadata"]["name"]: each["spec"] for each in of_kind(docs, "Service")}
        service = services.get(spec["serviceName"], {})
        if service.get("clusterIP") != "None" or service.get("publishNotReadyAddresses") is not True:
            yield f"Service {spec['serviceName']} must be headless and name members before they are ready"


@rule("two of two members are a majority, so losing one loses all; members that share a node die together")
def etcd_survives_a_node(docs: Sequence[Doc]) -> Iterator[str]:
    """An odd number of members that know each other; several: disks, apart from each other, one away at a time."""
    for doc in of_kind(docs, "StatefulSet"):
        name, spec = doc["metadata"]["name"], doc["spec"]
        replicas, pod = spec["replicas"], spec["template"]["spec"]
        env = environment(docs, pod["containers"][0], {})
        scheme = env["ETCD_LISTEN_PEER_URLS"].partition(":")[0]
        members = [f"{name}-{n}={scheme}://{name}-{n}.{spec['serviceName']}:2380" for n in range(replicas)]
        if env["ETCD_INITIAL_CLUSTER"] != ",".join(members):
            yield f"{replicas} members, told of {env['ETCD_INITIAL_CLUSTER']}"
        if replicas % 2 == 0:
            yield f"{replicas} members: no more can be lost than of {replicas - 1}"
        if replicas == 1:
            continue
        if spec.get("podManagementPolicy") != "Parallel":
            yield "members start one after the other, and none is ready before there is a majority"
        if not spec.get("volumeClaimTemplates"):
            yield "several members without disks: after a power cut of all, nothing is left"
        apart = pod.get("affinity", {}).get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        if not apart or not all(selects(each["labelSelector"], labels(spec["template"])) for each in apart):
            yield "members may share a node"
        budgets = [each["spec"] for each in of_kind(docs, "PodDisruptionBudget")
                   if selects(each["spec"]["selector"], labels(spec["template"]))]  # fmt: skip
        if [each.get("maxUnavailable") for each in budgets] != [1]:
            yield "its PodDisruptionBudget must allow one member to be away"
