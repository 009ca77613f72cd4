"""What a schema cannot know about etcd's members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.deploy.kubernetes.environment import environment
from tests.deploy.kubernetes.finding import Doc, containers, jobs, labels, means, of_kind, pods, rule, selects, settings
from tests.deploy.kubernetes.lint_around import lets

KEPT = {"_CA_FILE": "ca.crt", "_CERT_FILE": "tls.crt", "_KEY_FILE": "tls.key"}
"""What a Secret for TLS keeps where, also one of certificates.sh."""

CLIENT, PEER, METRICS = 2379, 2380, 2381


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
        files = {name for name in ("CA", "CERT", "KEY") if f"ELASTICRT_ETCD_{name}_FILE" in given}
        if len(files) != (3 if scheme == "https" else 0):
            yield f"etcd speaks {scheme}, and agents are given {sorted(files) or 'no certificates'}"
        services = {each["metadata"]["name"]: each["spec"] for each in of_kind(docs, "Service")}
        service = services.get(spec["serviceName"], {})
        if service.get("clusterIP") != "None" or service.get("publishNotReadyAddresses") is not True:
            yield f"Service {spec['serviceName']} must be headless and name members before they are ready"
        if {port["port"] for port in service.get("ports", ())} != {CLIENT, PEER}:
            yield f"Service {spec['serviceName']} has ports {service.get('ports')}"


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
        if not apart or not all(
            means(each["labelSelector"], spec["template"]) and each["topologyKey"] == "kubernetes.io/hostname"
            for each in apart
        ):
            yield "members may share a node"
        budgets = [each["spec"] for each in of_kind(docs, "PodDisruptionBudget")
                   if selects(each["spec"]["selector"], labels(spec["template"]))]  # fmt: skip
        if [each.get("maxUnavailable") for each in budgets] != [1]:
            yield "its PodDisruptionBudget must allow one member to be away"


@rule("a member that others cannot reach by its name, or a log that grows until it is full: exit code 4, for all runs")
def etcd_is_told_who_it_is(docs: Sequence[Doc]) -> Iterator[str]:
    """Name and addresses are the pod's own, the old is compacted, and the data is on the volume for it."""
    for doc in of_kind(docs, "StatefulSet"):
        (container,) = doc["spec"]["template"]["spec"]["containers"]
        env = environment(docs, container, {"metadata.name": "POD"})
        scheme, host = env.get("ETCD_LISTEN_CLIENT_URLS", "").partition(":")[0], f"POD.{doc['spec']['serviceName']}"
        wanted = {
            "NAME": "POD",
            "LISTEN_CLIENT_URLS": f"{scheme}://0.0.0.0:{CLIENT}",
            "LISTEN_PEER_URLS": f"{scheme}://0.0.0.0:{PEER}",
            "LISTEN_METRICS_URLS": f"http://0.0.0.0:{METRICS}",
            "ADVERTISE_CLIENT_URLS": f"{scheme}://{host}:{CLIENT}",
            "INITIAL_ADVERTISE_PEER_URLS": f"{scheme}://{host}:{PEER}",
            "AUTO_COMPACTION_MODE": "periodic",
        }
        for name, text in wanted.items():
            if env.get(f"ETCD_{name}") != text:
                yield f"ETCD_{name} is {env.get(f'ETCD_{name}')}, and not {text}"
        for name in ("AUTO_COMPACTION_RETENTION", "QUOTA_BACKEND_BYTES", "INITIAL_CLUSTER_TOKEN"):
            if not env.get(f"ETCD_{name}"):
                yield f"ETCD_{name} is not stated"
        ports = {port.get("name"): port["containerPort"] for port in container.get("ports", ())}
        if ports != {"client": CLIENT, "peer": PEER, "metrics": METRICS}:
            yield f"ports {ports}"
        written = [each["mountPath"] for each in container.get("volumeMounts", ()) if not each.get("readOnly")]
        if not any(env.get("ETCD_DATA_DIR", "").startswith(f"{mount}/") for mount in written):
            yield f"its data, {env.get('ETCD_DATA_DIR')}, is on no volume"


@rule("whoever reaches the port reads and changes all runs; or members refuse each other, and none gets ready")
def etcd_trusts_certificates(docs: Sequence[Doc]) -> Iterator[str]:
    """Where etcd speaks TLS, clients and members show certificates, and all files are in a Secret that is mounted."""
    for _, template in pods(docs):
        volumes = template["spec"].get("volumes", ())
        made = ("etcd-server-tls", "etcd-client-tls")  # By certificates.sh.
        secrets = {each["name"] for each in volumes if each.get("secret", {}).get("secretName") in made}
        for container in containers(template):
            env = environment(docs, container, {})
            if env.get("ETCD_LISTEN_CLIENT_URLS", "").startswith("https"):
                for who in ("ETCD_", "ETCD_PEER_"):
                    if env.get(f"{who}CLIENT_CERT_AUTH") != "true":
                        yield f"{who}CLIENT_CERT_AUTH is not true"
                    missing = {f"{who}{name}_FILE" for name in ("CERT", "KEY", "TRUSTED_CA")} - set(env)
                    yield from (f"{each} is not given" for each in sorted(missing))
            mounted = [each["mountPath"] for each in container.get("volumeMounts", ()) if each["name"] in secrets]
            for name, path in env.items():
                directory, _, file = path.rpartition("/")
                wanted = [kept for suffix, kept in KEPT.items() if name.endswith(suffix)]
                if wanted and (directory not in mounted or file not in wanted):
                    yield f"{name}: {path} is in no Secret"


@rule("etcd asks probes for a certificate that the kubelet has not, and no member gets ready")
def probes_ask_etcd(docs: Sequence[Doc]) -> Iterator[str]:
    """Probes ask where etcd answers without TLS: /livez whether it lives, /readyz whether it has a leader."""
    for doc in of_kind(docs, "StatefulSet"):
        for container in doc["spec"]["template"]["spec"]["containers"]:
            ports = {port.get("name"): port["containerPort"] for port in container.get("ports", ())}
            for kind, path in (("startupProbe", "/readyz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
                asked = container.get(kind, {}).get("httpGet", {})
                if (asked.get("path"), ports.get(asked.get("port"))) != (path, METRICS):
                    yield f"{kind} asks {asked.get('path')} at {asked.get('port')}"


@rule("members that do not reach each other have no leader; a port open to all is a way into every run")
def etcd_is_reached_by_whom_it_should(docs: Sequence[Doc]) -> Iterator[str]:
    """A policy on members lets in workers at the client port, members at both, nobody else; out go members' and DNS."""
    of_workers = [labels(spec["template"]) for spec in jobs(docs)]
    for doc in of_kind(docs, "StatefulSet"):
        own = labels(doc["spec"]["template"])
        policies = [each for each in of_kind(docs, "NetworkPolicy") if selects(each["spec"]["podSelector"], own)]
        if len(policies) != 1 or sorted(policies[0]["spec"].get("policyTypes", ())) != ["Egress", "Ingress"]:
            yield f"{len(policies)} policies over its members; one is needed, for both directions"
            continue
        policy = policies[0]["spec"]
        inward, outward = policy.get("ingress", ()), policy.get("egress", ())
        for who in of_workers:
            if not lets(inward, "from", who, CLIENT) or lets(inward, "from", who, PEER):
                yield "workers are let in at the client port, and only there"
        for rules, direction in ((inward, "from"), (outward, "to")):
            if not lets(rules, direction, own, CLIENT) or not lets(rules, direction, own, PEER):
                yield f"members do not reach each other ({direction})"
            for each in rules:
                if not each.get("ports") or not all("port" in port for port in each["ports"]):
                    yield f"a rule over all ports ({direction})"
                if direction == "from" and not each.get("from"):
                    yield "a rule that lets in everybody"
        for protocol in ("UDP", "TCP"):
            dns = [port for each in outward if "to" not in each for port in each.get("ports", ())]
            if not any((port.get("protocol"), port.get("port")) == (protocol, 53) for port in dns):
                yield f"no DNS over {protocol}"
