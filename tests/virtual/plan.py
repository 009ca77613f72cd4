"""What happens in one simulated run, drawn from one seed before it begins: topology, timings and faults, as values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from elasticrt.spec import RunSpec


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time. `who` is a node, "leader", or "" for etcd; `for_s` how long it lasts.

    `other`: the node at the other end of a cut, or what else the kind needs. `on`: the time counts from when the story
    first says this.
    """

    at: float
    kind: str
    who: str = ""
    for_s: float = 0.0
    other: str = ""
    on: str = ""

    def __str__(self) -> str:
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        other, on = (f" {self.other}" if self.other else ""), (f" after {self.on!r}" if self.on else "")
        return f"{self.at:7.2f}  {self.kind} {self.who}{other}{lasting}{on}"


@dataclass(frozen=True)
class Snag:
    """What happens to one transaction: the `nth` of node `who` whose purpose (`Txn.why`) contains `what`.

    `how`: "before", "after" (its sender is stopped for a while just then), "slow" (it is under way for so long, its
    sender waits), "unsent", "unheard", "belated" (by so long). `who` "" is anybody; counted from when the story first
    says `on`.
    """

    who: str
    what: str
    how: str
    for_s: float = 0.0
    nth: int = 1
    on: str = ""


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
    """One run. Times are seconds of virtual time from the start.

    `loops`: the script has a Loop, so that its workers can hand over. `copy_every_s`: each node then copies its state
    into memory about so often (0: never). `own_disks`: checkpoints are on the disk of the node that wrote them.
    `in_place`: the script has `with loop.step()`, so that its workers can go on in place; who joins then sets up beside
    the training, for `setup_s` at most, and fails there with a share of `setup_fails`; `share_s`: how long it takes to
    get the state of another rank, at most. `kill_s`: how long workers take to be gone when they are killed. `reap_s`:
    how long the kernel takes apart a process of which the agent knows already that it has ended. `hangs`:
    the share of workers that hang instead of failing when a peer has gone. `ends_after`: the script ends after so many
    steps, faults or not (0: when faults have stopped). `build_s`: how long a preparation takes at most. `others`: the
    options of nodes, or of single lives (`n1.2`), that are started otherwise; `resubmitted`: those of all nodes after a
    "resubmit"; `again`: those of a second attempt once the first has ended. `sleeper`: a doomed node that is not dead
    but stopped, until all has been submitted again. What stories promise beyond the
    invariants: `commits_within_s`, `leaves_within_s`, `generations_max`, `lossless`, `succeeds`, and
    `stays`: no worker is started anew.
    """

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
    copy_every_s: float = 0.0
    own_disks: bool = False
    kill_s: float = 0.03
    prepares: bool = False
    in_place: bool = False
    setup_s: float = 1.0
    setup_fails: float = 0.0
    share_s: float = 0.05
    reap_s: float = 0.0
    loops: bool = False
    hangs: float = 0.0
    ends_after: int = 0
    build_s: float = 2.0
    seats_per_chunk: int = 64
    rates: Rates = field(default_factory=Rates)
    faults: tuple[Fault, ...] = ()
    snags: tuple[Snag, ...] = ()
    others: Mapping[str, RunSpec] = field(default_factory=dict)
    resubmitted: RunSpec | None = None
    again: RunSpec | None = None
    sleeper: str = ""
    commits_within_s: float = 0.0
    leaves_within_s: float = 0.0
    generations_max: int = 0
    lossless: bool = False
    stays: bool = False
    succeeds: bool = False
    doomed: tuple[str, ...] = ()
    safety_s: float = 40.0
    returns: float = 1.0

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.nodes} nodes"]
        lines.append("  spec " + ", ".join(f"{k}={v}" for k, v in self.spec.model_dump().items()))
        skip = {"seed", "nodes", "spec", "rates", "faults", "snags"}
        lines += [f"  {f.name} {getattr(self, f.name)}" for f in fields(self) if f.name not in skip]
        lines.append("  rates " + ", ".join(f"{k}={v}" for k, v in asdict(self.rates).items()))
        return "\n".join(lines + [f"  {each}" for each in (*self.faults, *self.snags)])


KINDS: dict[str, tuple[float, float]] = {
    "crash": (0, 0),
    "power_loss": (0, 0),
    "pause_node": (0.5, 20),
    "pause_agent": (0.5, 20),
    "leader_hang": (4, 16),
    "cut_etcd": (1, 28),
    "cut_peers": (1, 10),
    "cut_all": (1, 18),
    "cut_pair": (1, 12),
    "leave": (0, 0),
    "worker_failure": (0, 0),
    "collateral_first": (0, 0),
    "flap": (0, 0),
    "outage": (1, 18),
    "etcd_restart": (1, 12),
    "leases_dropped": (0, 0),
    "key_deleted": (0, 0),
    "compaction": (0, 0),
    "missed": (0.5, 6),
    "resubmit": (0, 0),
    "wiped": (0, 0),
    "drain": (0, 1),
}
"""Faults that happen at a time, and how long they last (at least, at most)."""

IN_PLACE_KINDS: dict[str, tuple[float, float]] = {
    "worker_killed": (0, 0),
    "two_workers_killed": (0, 0),
    "worker_stuck": (0.5, 15),
    "worker_lost": (0, 0),
}
"""Faults of workers that can go on in place, besides."""

AT_ETCD = ("outage", "etcd_restart", "leases_dropped", "compaction", "resubmit", "wiped")

ONCE = {"resubmit": 0.35, "wiped": 0.3}
"""Faults that a run can have once, and in how many seeds they are drawn."""

OFTEN = {"worker_failure": 0.65, "collateral_first": 0.65, "drain": 0.55, "leave": 0.5}
"""Faults that often find nothing to hit, and in how many seeds they are drawn; others in 0.45 of all."""


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
        if rng.random() > ONCE.get(kind, OFTEN.get(kind, 0.45)):
            continue
        for _ in range(rng.choice((1, 1, 2, 3)) if kind not in ONCE else 1):
            who = "" if kind in AT_ETCD else "leader" if kind == "leader_hang" else rng.choice(names)
            if kind in ("crash", "leave", "key_deleted", "pause_node") and rng.random() < 0.3:
                who = "leader"
            at = round(rng.uniform(2.0, safety_s), 2)
            other = rng.choice([name for name in names if name != who]) if kind == "cut_pair" and nodes > 1 else ""
            faults.append(Fault(at, kind, who, round(rng.uniform(shortest, longest), 2), other))
    living = random.Random(f"living plan {seed}")
    in_place = living.random() < 2 / 3
    for kind, (shortest, longest) in IN_PLACE_KINDS.items() if in_place else ():
        for _ in range(living.choice((0, 0, 1, 1, 2, 3))):
            at, for_s = round(living.uniform(2.0, safety_s), 2), round(living.uniform(shortest, longest), 2)
            faults.append(Fault(at, kind, living.choice(names), for_s))
    core = max(least, 1)
    doomed = tuple(rng.sample(names, rng.randint(0, nodes - core))) if rng.random() < 0.5 else ()
    skewed = rng.random() < 0.5
    elsewise = replace_spec(spec, settle_max_s=2.5)
    return Plan(
        seed=str(seed),
        nodes=nodes,
        spec=spec,
        workers=tuple(rng.choice((1, 1, 2)) for _ in names),
        arrivals=tuple(0.0 if burst else round(rng.uniform(0, 12.0) * (rng.random() < 0.5), 2) for _ in names),
        offsets=tuple(float(rng.randint(0, 4 * 10**8)) if skewed else 0.0 for _ in names),
        clock_rates=tuple(rng.choice((1.0, 0.98, 1.02)) if skewed else 1.0 for _ in names),
        latency_s=rng.choice((0.001, 0.003, 0.02, 0.1)),
        timeout_s=rng.choice((0.5, 1.0)),
        warm_s=rng.choice((0.1, 0.5, 2.0)),
        step_s=rng.choice((0.3, 0.6)),
        commit_every=rng.choice((1, 3, 5)),
        prepares=rng.random() < 0.4,
        loops=rng.random() < 0.5 or in_place,
        in_place=in_place,
        setup_s=living.choice((0.5, 2.0, 6.0)),
        setup_fails=living.choice((0.0, 0.0, 0.2, 0.5)),
        share_s=living.choice((0.02, 0.3)),
        hangs=some((0.2, 0.7), 0.3),
        ends_after=rng.choice((0, 0, 0, 15, 30)),
        build_s=rng.choice((2.0, 6.0)),
        seats_per_chunk=rng.choice((1, 2, 64)),
        resubmitted=rng.choice((spec, elsewise)),
        again=rng.choice((spec, elsewise)) if rng.random() < 0.4 else None,
        sleeper=doomed[0] if doomed and rng.random() < 0.6 else "",
        rates=rates,
        faults=tuple(sorted(faults, key=lambda fault: (fault.at, fault.kind, fault.who))),
        doomed=doomed,
        safety_s=safety_s,
        returns=rng.choice((0.5, 1.0)),
        copy_every_s=rng.choice((0.0, 1.0, 3.0)),
        own_disks=rng.random() < 0.3,
    )


def replace_spec(spec: RunSpec, **changes: object) -> RunSpec:
    """The same run with other options."""
    return spec.model_copy(update=changes)
