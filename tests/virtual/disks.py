"""Checkpoints on the disks of the nodes that wrote them: what workers can go on from when some nodes are not here.

Each node offers what `checkpoint.restoring` would find in its directory; the production rule chooses among them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from elasticrt.checkpoint.newest_offer import OLDER, RESUME, Offer, choose
from elasticrt.errors import EXIT_CHECKPOINT
from elasticrt.ipc.env import Commit
from tests.virtual.engine import require

if TYPE_CHECKING:
    from tests.virtual.simulator import Simulator

NOBODY_HAS_IT = "nobody has a checkpoint"
LOST: dict[str, Any] = {"collateral": False, "final_code": EXIT_CHECKPOINT}
"""How workers fail that find no checkpoint."""


def found(sim: Simulator, head: Commit, nodes: Collection[str]) -> Commit | None:
    """What workers on these nodes resume from, where `head` is the head: itself, its parent, or nothing."""
    if not sim.plan.own_disks:
        return head
    parent = sim.written.get(head.parent)
    here = sorted(nodes)
    offers = [_offer(head, parent, node) for node in here]
    try:
        rank = choose(offers, resuming=True)
    except LookupError:
        return None
    assert rank is not None, "a run that says where to resume does not begin at the beginning"
    return head if offers[rank].kind == RESUME else parent


def _offer(head: Commit, parent: Commit | None, node: str) -> Offer:
    """A node knows the head from its generation's record, and of its ancestors what its own manifests say."""
    if head.node == node:
        return Offer(RESUME, head)
    if parent is not None and parent.node == node:
        return Offer(OLDER, parent)
    return Offer()


def lacks(sim: Simulator, node: str, head: str) -> bool:
    """Whether the checkpoint with this nonce is on another node's disk, so that rank 0 on `node` saves at once."""
    return sim.plan.own_disks and head in sim.written and sim.written[head].node != node


def check_going_back(sim: Simulator, head: Commit, to: Commit, nodes: Collection[str]) -> None:
    """S6: who goes back behind the head goes to its parent, and only when none of these nodes has the head."""
    text = f"the head goes back from step {head.step} to {to.step}"
    require(sim.plan.own_disks and head.node not in nodes, "S6", f"{text}, and {head.node} has it")
    require(to.nonce == head.parent and sim.written[to.nonce].node in nodes, "S6", f"{text}, which nobody has")


def check_end(sim: Simulator, head: Commit, nodes: Collection[str]) -> None:
    """S6: a run ends for want of a checkpoint only when none of these nodes has the head or its parent."""
    for each in (sim.written.get(head.nonce), sim.written.get(head.parent)):
        there = each is not None and each.node in nodes
        require(not there, "S6", f"the run ends, and {each and each.node} has step {each and each.step}")
