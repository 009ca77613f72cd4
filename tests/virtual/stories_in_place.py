"""Directed plans: workers go on in place while others are killed, hang, join, leave, or set up beside them."""

from __future__ import annotations

from tests.virtual.plan import Fault, Plan, Snag
from tests.virtual.story import spec_for, story


def _living(name: str, nodes: int, *troubles: Fault | Snag, **changes: object) -> Plan:
    """A story whose script has `with loop.step()`; unless it says otherwise nobody starts anew and nothing is lost."""
    standard: dict[str, object] = {"in_place": True, "loops": True, "stays": True, "lossless": True, "commit_every": 50}
    return story(name, nodes, *troubles, **{**standard, **changes})


IN_PLACE: list[Plan] = [
    _living(
        "a worker is killed, and all others go on",
        3,
        Fault(6.0, "worker_killed", "n0", other="1"),
        workers=(2, 1, 1),
        generations_max=3,
    ),
    _living("a node is killed, and the others go on", 3, Fault(6.0, "crash", "n1"), generations_max=3),
    _living("the leader is killed, and the others go on", 3, Fault(6.0, "crash", "leader"), generations_max=3),
    _living(
        "two nodes are killed at once, and the others go on",
        4,
        Fault(6.0, "crash", "n1"),
        Fault(6.03, "crash", "n2"),
        workers=(1, 2, 1, 2),
        generations_max=3,
    ),
    _living(
        "a node loses power, and the others hang until they are cut off",
        3,
        Fault(6.0, "power_loss", "n1"),
        generations_max=3,
    ),
    _living(
        "a node joins when it has set up beside the training",
        3,
        arrivals=(0.0, 0.1, 6.0),
        setup_s=4.0,
        workers=(1, 2, 2),
        generations_max=3,
    ),
    _living("a node drains, and the others go on", 3, Fault(6.0, "leave", "n1"), generations_max=2),
    _living(
        "all workers of the node that leads are killed",
        3,
        Fault(6.0, "worker_killed", "n0"),
        Fault(6.01, "worker_killed", "n0"),
        workers=(2, 1, 1),
        generations_max=5,
    ),
    _living(
        "a rank is ahead when another dies",
        3,
        Fault(6.0, "torn_step", "n2"),
        workers=(2, 1, 1),
        generations_max=3,
    ),
    _living(
        "a survivor does not come back from the cut",
        3,
        Fault(6.0, "worker_stuck", "n1"),
        Fault(6.6, "crash", "n2"),
        generations_max=5,
        commit_every=1,
        commits_within_s=16.0,
    ),
    _living(
        "the rank that sends the state dies in the share",
        4,
        Fault(0.05, "worker_killed", "n0", on="goes on after step"),
        arrivals=(0.0, 0.1, 0.2, 6.0),
        share_s=1.0,
        generations_max=5,
    ),
    _living(
        "a newcomer dies in the share",
        3,
        Fault(0.05, "worker_killed", "n2", on="goes on after step"),
        arrivals=(0.0, 0.1, 6.0),
        share_s=1.0,
        generations_max=5,
    ),
    _living(
        "a set-up beside the training fails, and is tried again",
        3,
        arrivals=(0.0, 0.1, 6.0),
        setup_fails=0.7,
        generations_max=2,
    ),
    _living(
        "a newcomer prepares data of its own beside the training",
        3,
        arrivals=(0.0, 0.1, 6.0),
        own_disks=True,
        prepares=True,
        generations_max=2,
    ),
    _living(
        "the only one that has the state drains, and another has set up",
        2,
        Fault(8.0, "leave", "n0"),
        spec=spec_for(1),
        stays=False,
    ),
    _living(
        "too few are left, and wait with their state for one that sets up",
        3,
        Fault(6.0, "crash", "n2"),
        Fault(8.0, "start", "n2"),
        spec=spec_for(3, min_nodes=3),
        setup_s=4.0,
        generations_max=3,
    ),
    _living(
        "too few are left, all others set up, and hear of the survivor only from the leader",
        3,
        Fault(6.0, "crash", "n0"),
        Fault(6.0, "crash", "n1"),
        Fault(8.0, "start", "n0"),
        Fault(10.0, "key_deleted", "n2"),
        Fault(12.0, "start", "n1"),
        spec=spec_for(3, min_nodes=3),
        setup_s=9.0,
        generations_max=4,
    ),
    _living(
        "the run ends while a replacement sets up",
        2,
        Fault(0.0, "worker_killed", "n1", on="committed step=10"),
        workers=(1, 2),
        commit_every=10,
        ends_after=14,
        setup_fails=1.0,
    ),
    _living(
        "a survivor is fenced, and comes back as a newcomer",
        3,
        Fault(6.0, "cut_all", "n1", 9.0),
        hangs=0.5,
        safety_s=30.0,
    ),
    _living(
        "the node that has the checkpoint on its disk dies, and then all other workers",
        3,
        Fault(0.5, "crash", "n0", on="= head: step 10"),
        Fault(2.5, "worker_killed", "n1", on="= head: step 10"),
        Fault(2.5, "worker_killed", "n2", on="= head: step 10"),
        own_disks=True,
        commit_every=10,
        stays=False,
        lossless=False,
        succeeds=True,
    ),
    _living(
        "all workers are killed when the checkpoint and the one before it are on two disks",
        3,
        Fault(0.5, "crash", "n0", on="= head: step 20"),
        Fault(0.3, "start", "n0", on="= generation 2"),
        *(Fault(2.5, "worker_killed", f"n{i}", on="n0 joined") for i in range(3)),
        own_disks=True,
        commit_every=20,
        stays=False,
        lossless=False,
        succeeds=True,
    ),
    _living("all workers of all nodes are killed", 2, *(Fault(6.0, "worker_killed", f"n{i}") for i in range(2)),
        stays=False, lossless=False, commit_every=2, commits_within_s=8.0),
]  # fmt: skip
