"""What happens in one simulated run, drawn from one seed before it begins: topology, timings and faults, as values."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, fields

from elasticrt.spec import RunSpec


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time. `who` is a node, "leader", or "" for etcd; `for_s` how long it lasts."""

    at: float
    kind: str
    who: str = ""
    for_s: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.at:7.2f}  {self.kind} {self.who}{lasting}"


@dataclass(frozen=True)
class Rates:
    """How often a message or a request goes wrong; each is 0 in some seeds.

    `late`: of watches, the share that is slow, by up to `late_s`. Of deliveries: `doubled`, `resync` (dropped, then
    told to read again). Of writes: `unsent` (no effect, no answer), `unheard` (effect, no answer), `belated` (no
    answer, the effect comes later), `frozen` (the process stops in the middle, for up to `frozen_s`).
    """

    late: float = 0.0
    late_s: float = 0.0
    doubled: float = 0.0
    resync: float = 0.0
    unsent: float = 0.0
    unheard: float = 0.0
    belated: float = 0.0
    frozen: float = 0.0
    frozen_s: float = 12.0


@dataclass(frozen=True)
class Plan:
    """One run. Times are seconds of virtual time from the start."""

    seed: str
    nodes: int
    spec: RunSpec
    workers: tuple[int, ...] = ()
    arrivals: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    clock_rates: tuple[float, ...] = ()
    latency_s: float = 0.002
    timeout_s: float = 1.0
    warm_s: float = 0.5
    step_s: float = 0.5
    commit_every: int = 4
    prepares: bool = False
    rates: Rates = field(default_factory=Rates)
    faults: tuple[Fault, ...] = ()
    doomed: tuple[str, ...] = ()
    safety_s: float = 40.0
    returns: float = 1.0

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.nodes} nodes"]
        lines.append("  spec " + ", ".join(f"{k}={v}" for k, v in self.spec.model_dump().items()))
        skip = {"seed", "nodes", "spec", "rates", "faults"}
        lines += [f"  {f.name} {getattr(self, f.name)}" for f in fields(self) if f.name not in skip]
        lines.append("  rates " + ", ".join(f"{k}={v}" for k, v in asdict(self.rates).items()))
        return "\n".join(lines + [f"  {fault}" for fault in self.faults])


KINDS: dict[str, tuple[float, float]] = {
    "crash": (0, 0),
    "power_loss": (0, 0),
    "pause_node": (0.5, 20),
    "pause_agent": (0.5, 20),
    "leader_hang": (4, 16),
    "cut_etcd": (1, 18),
    "cut_peers": (1, 10),
    "cut_all": (1, 18),
    "leave": (0, 0),
    "worker_failure": (0, 0),
    "collateral_first": (0, 0),
    "flap": (0, 0),
    "outage": (1, 18),
    "etcd_restart": (1, 12),
    "leases_dropped": (0, 0),
    "key_deleted": (0, 0),
    "compaction": (0, 0),
}
"""Faults that happen at a time, and how long they last (at least, at most)."""

AT_ETCD = ("outage", "etcd_restart", "leases_dropped", "compaction")


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")
    nodes = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7))
    names = [f"n{index}" for index in range(nodes)]
    least = rng.randint(1, max(1, nodes - 1))
    spec = RunSpec(
        min_nodes=least,
        max_nodes=rng.choice((nodes, nodes, max(least, nodes - 1), nodes + 2)),
        command=("script", "train.py"),
        max_restarts=rng.choice((1, 3, 100)),
        restarts_reset=rng.random() < 0.7,
        join_timeout_s=rng.choice((90.0, 600.0, 600.0)),
        lease_ttl_s=rng.choice((3.0, 5.0, 5.0)),
        join=rng.choice(("now", "budget", "failure")),
    )
    burst = rng.random() < 0.4
    safety_s = rng.choice((25.0, 40.0))

    def some(values: tuple[float, ...], share: float = 0.5) -> float:
        return rng.choice(values) if rng.random() < share else 0.0

    rates = Rates(
        late=some((0.2, 0.6)),
        late_s=rng.choice((0.3, 2.0, 8.0)),
        doubled=some((0.05, 0.3)),
        resync=some((0.01, 0.05)),
        unsent=some((0.02, 0.08)),
        unheard=some((0.02, 0.08)),
        belated=some((0.02, 0.08)),
        frozen=some((0.01, 0.04)),
        frozen_s=rng.choice((2.0, 7.0, 15.0)),
    )
    faults: list[Fault] = []
    for kind, (shortest, longest) in KINDS.items():
        if rng.random() < 0.55:
            continue
        for _ in range(rng.choice((1, 1, 2, 3))):
            who = "" if kind in AT_ETCD else "leader" if kind == "leader_hang" else rng.choice(names)
            if kind in ("crash", "leave", "key_deleted", "pause_node") and rng.random() < 0.3:
                who = "leader"
            at = round(rng.uniform(2.0, safety_s), 2)
            faults.append(Fault(at, kind, who, round(rng.uniform(shortest, longest), 2)))
    core = max(least, 1)
    doomed = tuple(rng.sample(names, rng.randint(0, nodes - core))) if rng.random() < 0.5 else ()
    skewed = rng.random() < 0.5
    return Plan(
        seed=str(seed),
        nodes=nodes,
        spec=spec,
        workers=tuple(rng.choice((1, 1, 2)) for _ in names),
        arrivals=tuple(0.0 if burst else round(rng.uniform(0, 12.0) * (rng.random() < 0.5), 2) for _ in names),
        offsets=tuple(float(rng.randint(-(10**8), 3 * 10**8)) if skewed else 0.0 for _ in names),
        clock_rates=tuple(rng.choice((1.0, 0.98, 1.02)) if skewed else 1.0 for _ in names),
        latency_s=rng.choice((0.001, 0.003, 0.02, 0.1)),
        timeout_s=rng.choice((0.5, 1.0)),
        warm_s=rng.choice((0.1, 0.5, 2.0)),
        step_s=rng.choice((0.3, 0.6)),
        commit_every=rng.choice((1, 3, 5)),
        prepares=rng.random() < 0.4,
        rates=rates,
        faults=tuple(sorted(faults, key=lambda fault: (fault.at, fault.kind, fault.who))),
        doomed=doomed,
        safety_s=safety_s,
        returns=rng.choice((0.5, 1.0)),
    )
