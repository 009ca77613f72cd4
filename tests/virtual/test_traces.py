"""Golden traces: conversations as text, the script above, every decision with its reason below.

They are the protocol's documentation. When a change of the protocol changes one, read the difference; when it is what
was meant, rewrite it: `python -m tests.virtual.test_traces --rewrite`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from elasticrt.spec import RunSpec
from tests.virtual.plan import Fault, Plan
from tests.virtual.simulator import simulate

TRACES = Path(__file__).with_name("traces")


def _plan(
    name: str,
    nodes: int,
    *faults: Fault,
    arrivals: tuple[float, ...] = (),
    workers: tuple[int, ...] = (),
    loops: bool = False,
    in_place: bool = False,
    **changes: object,
) -> Plan:
    spec = RunSpec(**{"min_nodes": 1, "max_nodes": nodes, "command": ("script", "train.py"), "join": "now", **changes})
    arrivals = arrivals or (0.0,) * nodes
    ones = workers or (1,) * nodes
    return Plan(
        seed=name, nodes=nodes, spec=spec, workers=ones, arrivals=arrivals, offsets=(0.0,) * nodes,
        clock_rates=(1.0,) * nodes, latency_s=0.002, step_s=1.0, commit_every=2, faults=faults, safety_s=15.0,
        returns=0.0, loops=loops or in_place, in_place=in_place,
    )  # fmt: skip


PLANS: dict[str, tuple[str, Plan]] = {
    "start": ("Three nodes start together; the run trains, commits, and ends.", _plan("start", 3)),
    "join": (
        "Two nodes train in a Loop; a third comes, and all hand over to a generation with it.",
        _plan("join", 3, arrivals=(0.0, 0.0, 6.0), loops=True),
    ),
    "drain": (
        "A node that trains in a Loop is told to leave: all hand over, and the others go on after the very same step.",
        _plan("drain", 3, Fault(6.0, "leave", "n1"), loops=True),
    ),
    "crash": (
        "A node that does not lead is killed: its peers' workers fail, the leader asks it, is refused, and goes on.",
        _plan("crash", 3, Fault(6.0, "crash", "n2")),
    ),
    "leader_crash": (
        "The leader is killed: the others ask it, fence it, and the next in seniority leads.",
        _plan("leader_crash", 3, Fault(6.0, "crash", "leader")),
    ),
    "leave": (
        "A node without a Loop is told to leave: it says so and goes, nobody waits for it, and no restart is counted.",
        _plan("leave", 3, Fault(6.0, "leave", "n1")),
    ),
    "etcd_outage": (
        "etcd is away for five seconds: workers run on, nothing is committed, nobody restarts.",
        _plan("etcd_outage", 2, Fault(6.0, "etcd_restart", "", 5.0)),
    ),
    "below_minimum": (
        "Two of three nodes are lost without a word; two are needed: the third waits until one comes back.",
        _plan("below_minimum", 3, Fault(5.0, "power_loss", "n1"), Fault(5.0, "power_loss", "n2"), min_nodes=2),
    ),
    "in_place_kill": (
        "One of a node's two workers is killed: all others go on, and it is let in again when it has set up.",
        _plan("in_place_kill", 2, Fault(6.0, "worker_killed", "n1", other="1"), workers=(1, 2), in_place=True),
    ),
    "in_place_join": (
        "A third node sets up beside the training, and is let in after an agreed step; nobody else starts anew.",
        _plan("in_place_join", 3, arrivals=(0.0, 0.0, 6.0), in_place=True),
    ),
    "in_place_leave": (
        "A node is told to leave: after an agreed step the others go on without it, as the processes that they are.",
        _plan("in_place_leave", 3, Fault(6.0, "leave", "n1"), in_place=True),
    ),
    "in_place_ahead": (
        "A worker dies when another has finished a step and it has not: the others get the state of the one ahead.",
        _plan("in_place_ahead", 3, Fault(6.0, "torn_step", "n2"), in_place=True),
    ),
    "in_place_stuck": (
        "A node is killed, and a survivor does not come back from the cut: its agent ends it, and starts another.",
        _plan("in_place_stuck", 3, Fault(6.0, "worker_stuck", "n1"), Fault(6.6, "crash", "n2"), in_place=True),
    ),
}


def trace(name: str) -> str:
    """The conversation as text."""
    title, plan = PLANS[name]
    script = "\n".join(
        [f"{plan.arrivals[index]:7.2f}  start n{index}" for index in range(plan.nodes)]
        + [str(fault) for fault in plan.faults]
        + [f"{plan.safety_s:7.2f}  whoever is away starts again; after the next commit three steps more, and the end"]
    )
    spec = f"min_nodes {plan.spec.min_nodes}, max_nodes {plan.spec.max_nodes}, lease {plan.spec.lease_ttl_s:g} s"
    story = "\n".join(line.rstrip() for line in simulate(plan).story)
    return f"{title}\n\n{spec}\n\n{script}\n\n(the clock begins at 64 s)\n\n{story}\n"


@pytest.mark.parametrize("name", PLANS)
def test_conversations_are_as_written_down(name: str) -> None:
    """The protocol says and does what its documentation shows, word for word."""
    assert trace(name) == (TRACES / f"{name}.txt").read_text()


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit("python -m tests.virtual.test_traces --rewrite")
    TRACES.mkdir(exist_ok=True)
    for each in PLANS:
        (TRACES / f"{each}.txt").write_text(trace(each))
