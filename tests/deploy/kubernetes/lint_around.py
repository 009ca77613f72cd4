"""What a schema cannot know about what surrounds the pods: their options, claims, budgets, Services and policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elasticrt.option_values import options_of, parse_nodes
from elasticrt.run_options import RunOptions
from tests.deploy.kubernetes.finding import Doc, jobs, labels, means, of_kind, pods, rule, selects, settings

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
    host, served = options_of(RunOptions)["health"].parse(settings(docs)["ELASTICRT_HEALTH_PORT"])
    for spec in jobs(docs):
        for container in spec["template"]["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for kind, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/ready")):
                asked = container.get(kind, {}).get("httpGet", {})
                port = ports.get(asked.get("port"), asked.get("port"))
                if asked.get("path") != path or port != served:
                    yield f"{kind} asks {asked.get('path')} at {port}"
        if host not in ("0.0.0.0", "::"):
            yield f"answered at {host} only"


@rule("a node that is busy for a moment answers late, and a healthy pod is killed with its workers")
def liveness_is_lenient(docs: Sequence[Doc]) -> Iterator[str]:
    """A pod has one to three minutes to start, is killed after one of silence at least, and 3 s for each answer."""
    for _, template in pods(docs):
        for container in template["spec"]["containers"]:
            for kind, least, most in (
                ("startupProbe", 60, 180), ("livenessProbe", 60, 180), ("readinessProbe", 10, 15),
            ):  # fmt: skip
                probe = container.get(kind, {})
                lasts = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
                if not least <= lasts <= most:
                    yield f"{kind} fails after {lasts} s"
                if kind != "startupProbe" and probe.get("timeoutSeconds", 1) < 3:
                    yield f"{kind} waits {probe.get('timeoutSeconds', 1)} s for an answer"


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


@rule("another version's defaults: a grace period that is too short, a queue that is too long, a run without a name")
def options_are_stated(docs: Sequence[Doc]) -> Iterator[str]:
    """What the pod's own fields count on is written down, and a run has a name."""
    given = settings(docs)
    wanted = "RUN_ID LOG_DIR NNODES NPROC_PER_NODE JOIN_TIMEOUT ETCD_WAIT"
    for name in (*wanted.split(), "LEASE_TTL", "DRAIN_TIMEOUT", "STOP_TIMEOUT"):
        if not given.get(f"ELASTICRT_{name}"):
            yield f"ELASTICRT_{name} is not stated"


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
            for option in ("--data-dir=", "--checkpoint-dir="):
                if not any(word.startswith(option) for word in container["args"]):
                    yield f"{option} is not given, and its default is on no claimed volume"
            words = [word for word in container["args"] if word.startswith(("--data-dir=", "--checkpoint-dir="))]
            for path in [*(word.partition("=")[2] for word in words), settings(docs).get("ELASTICRT_LOG_DIR", "/")]:
                if path != "/" and not any(path.startswith(f"{mount}/") for mount in shared):
                    yield f"{path} is on no claimed volume"
        for name in volumes.values():
            if several and "ReadWriteMany" not in claims.get(name, {}).get("accessModes", ()):
                yield f"claim {name} is not ReadWriteMany"


@rule("the API server refuses a claim that does not say how much, and of what kind")
def claims_are_complete(docs: Sequence[Doc]) -> Iterator[str]:
    """Each claim, those of a StatefulSet's pods as well, has access modes and a size."""
    claims = of_kind(docs, "PersistentVolumeClaim")
    claims += [each for doc in of_kind(docs, "StatefulSet") for each in doc["spec"].get("volumeClaimTemplates", ())]
    for claim in claims:
        spec = claim.get("spec", {})
        if not spec.get("accessModes") or not spec.get("resources", {}).get("requests", {}).get("storage"):
            yield f"claim {claim.get('metadata', {}).get('name')}: access modes or size are missing"


# Budgets, Services and policies.


@rule("seen: 'jobs.batch does not implement the scale subresource', allowed disruptions 0, every drain blocked")
def budgets_of_jobs_are_integers(docs: Sequence[Doc]) -> Iterator[str]:
    """A PodDisruptionBudget over Job pods has an integer minAvailable, the run's minimum; unhealthy pods may go."""
    least, _ = parse_nodes(settings(docs).get("ELASTICRT_NNODES", "1"))
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
                yield f"{each['metadata']['name']}: minAvailable {budget['minAvailable']}, the run's minimum {least}"
    for each in of_kind(docs, "PodDisruptionBudget"):
        if each["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"{each['metadata']['name']}: a pod that is not ready would block the drain"


@rule("a label renamed in one place: a Service without endpoints, a policy over nothing; left out: over others' pods")
def selectors_select_something(docs: Sequence[Doc]) -> Iterator[str]:
    """Every selector of a Service, budget, policy and StatefulSet means pods of this rendering, and no others."""
    templates = [template for _, template in pods(docs)]
    for doc in docs:
        if doc["kind"] == "PodMonitor":
            selectors = [(doc["spec"]["selector"], ("name", "component"))]  # All runs of the namespace.
        elif doc["kind"] in ("Service", "PodDisruptionBudget", "StatefulSet"):
            selectors = [(doc["spec"]["selector"], ("name", "component", "instance"))]
        elif doc["kind"] == "NetworkPolicy":
            spec = doc["spec"]
            own = [each for each in templates if selects(spec["podSelector"], labels(each))]
            selectors = [(spec["podSelector"], ("name", "component", "instance"))]
            for other in [*spec.get("ingress", ()), *spec.get("egress", ())]:
                peers = [*other.get("from", ()), *other.get("to", ())]
                for each in (peer for peer in peers if "podSelector" in peer):
                    # Within a run nobody else is meant; etcd is for all runs of a namespace.
                    inside = any(selects(each["podSelector"], labels(template)) for template in own)
                    keys = ("name", "component", "instance") if inside else ("name", "component")
                    selectors.append((each["podSelector"], keys))
        else:
            continue
        for selector, keys in selectors:
            if not any(means(selector, template, keys) for template in templates):
                yield f"{doc['kind']} {doc['metadata']['name']} selects nothing, or others as well: {selector}"


@rule("a Service with an address of its own gives no pod a name; a port that no container has is refused by everybody")
def names_lead_to_pods(docs: Sequence[Doc]) -> Iterator[str]:
    """A Job's subdomain is a headless Service over its pods, and each Service's ports are ports of its pods."""
    services = {doc["metadata"]["name"]: doc["spec"] for doc in of_kind(docs, "Service")}
    for spec in jobs(docs):
        template = spec["template"]
        service = services.get(template["spec"].get("subdomain"))
        if service is None or service.get("clusterIP") != "None" or not selects(service["selector"], labels(template)):
            yield f"subdomain {template['spec'].get('subdomain')} is no headless Service over the Job's pods"
    for doc in of_kind(docs, "JobSet"):
        if doc["spec"].get("network", {}).get("enableDNSHostnames") is not False:
            yield "the JobSet makes a Service and a subdomain of its own"
    for name, service in services.items():
        served = [
            (port.get("name"), port["containerPort"])
            for _, template in pods(docs) if selects(service["selector"], labels(template))
            for container in template["spec"]["containers"] for port in container.get("ports", ())
        ]  # fmt: skip
        named = [port for port in service.get("ports", ()) if port.get("name")]
        if len(service.get("ports", ())) > max(len(named), 1):
            yield f"Service {name}: several ports need a name each"
        ports = [port.get("targetPort", port["port"]) for port in service.get("ports", ())]
        if not ports or not all(any(port in each for each in served) for port in ports):
            yield f"Service {name}: ports {ports}; its pods have {served}"


@rule("agents cannot resolve etcd's name, or reach etcd but not each other: silence for a whole time-out")
def workers_reach_what_they_need(docs: Sequence[Doc]) -> Iterator[str]:
    """A policy on workers lets out DNS, etcd and each other on all ports, and lets in each other on all ports."""
    for spec in jobs(docs):
        own = labels(spec["template"])
        for doc in of_kind(docs, "NetworkPolicy"):
            policy = doc["spec"]
            if not selects(policy["podSelector"], own):
                continue
            if sorted(policy.get("policyTypes", ())) != ["Egress", "Ingress"]:
                yield f"{doc['metadata']['name']} is about {policy.get('policyTypes')}"
            if not lets(policy.get("ingress", ()), "from", own, None):
                yield f"{doc['metadata']['name']}: workers do not let each other in"
            if not lets(policy.get("egress", ()), "to", own, None):
                yield f"{doc['metadata']['name']}: workers do not reach each other on all ports"
            for protocol in ("UDP", "TCP"):
                if not any(each.get("protocol") == protocol and each.get("port") == 53
                           for other in policy.get("egress", ()) for each in other.get("ports", ())):  # fmt: skip
                    yield f"{doc['metadata']['name']}: no DNS over {protocol}"
            for other in of_kind(docs, "StatefulSet"):
                outward, of_etcd = policy.get("egress", ()), labels(other["spec"]["template"])
                if not lets(outward, "to", of_etcd, 2379) or lets(outward, "to", of_etcd, None):
                    yield f"{doc['metadata']['name']}: workers need {other['metadata']['name']}, at its port alone"


def lets(rules: Sequence[Doc], direction: str, whom: dict[str, str], port: int | None) -> bool:
    """Whether some rule lets traffic of pods with these labels through: on that port, or (None) on all."""
    for each in rules:
        selected = any(
            selects(other["podSelector"], whom) for other in each.get(direction, ()) if "podSelector" in other
        )
        open_ = "ports" not in each or any(other.get("port") == port for other in each["ports"])
        if selected and open_ and (port is not None or "ports" not in each):
            return True
    return False
