"""The protocol as stories: a generation that ends without a handover resumes from a copy in a survivor's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrt.ipc.env import Commit, Copy
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.decide import COLLATERAL_GRACE_S
from elasticrt.store.protocol import Put, Txn
from tests.virtual.world import VirtualMember, World, check_ranks, running


def _copy(step: int, digest: str = "c") -> Copy:
    return Copy(step=step, epoch=0, size=1, digest=digest * 64, world_size=2)


def _fail(member: VirtualMember, copy: Copy | None) -> None:
    failure = Failure(rank=0, code=1, collateral=False, summary=f"rank 0 on {member.name}")
    member.report("failed", failure, memory=copy)


def _commit(world: World, step: int) -> None:
    """A checkpoint of the present generation becomes the head."""
    member = world.members["n0"]
    head = Commit(
        step=step,
        epoch=0,
        generation=member.me.running_generation,
        nonce="e" * 16,
        parent="",
        directory="/ckpt",
        file="step.pt",
        digest="f" * 64,
        size=1,
    )
    assert member.store.commit(Txn((), (Put(member.keys.checkpoint, head.to_json().encode()),))).succeeded
    world.settle()


def test_a_failure_goes_back_to_the_newest_copy_that_was_stated() -> None:
    """The node that holds it gets rank 0; what another node holds in addition does not matter."""
    world = running(3)
    _fail(world.members["n1"], _copy(40))
    _fail(world.members["n2"], _copy(41))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    check_ranks(world, 2, ["n2", "n0", "n1"])
    generation, seat = world.members["n2"].ran[-1]
    assert (generation.memory, seat.rank_offset) == (_copy(41), 0)


def test_a_copy_outlives_workers_that_have_ended_well() -> None:
    """S5: one node's workers were at the end, and another is lost before it has saved the last step."""
    world = running(3)
    world.members["n1"].report("ok", memory=_copy(96))
    world.members["n0"].crash()
    world.pass_time(10.0)
    check_ranks(world, 2, ["n1", "n2"])
    assert world.members["n1"].ran[-1][0].memory == _copy(96)


def test_a_restart_waits_for_the_copies_of_survivors() -> None:
    """S5: they lost a peer in a pause, and their keys say so before they report the newest step."""
    world = running(3)
    _fail(world.members["n0"], _copy(204))
    world.settle()
    assert world.generations() == [1], "the others are still ending"
    collateral = Failure(rank=1, code=1, collateral=True, summary="rank 1 lost a peer")
    for name in ("n1", "n2"):
        world.members[name].report("failed", collateral, memory=_copy(240))
    before = world.now
    world.settle()
    assert (world.generations(), world.now) == ([1, 2], before), "all have reported"
    assert world.members["n0"].ran[-1][0].memory == _copy(240)


def test_a_restart_does_not_wait_for_long_or_without_copies() -> None:
    """L1: workers that hang report nothing; and where no copies are kept there is nothing to wait for."""
    world = running(3)
    _fail(world.members["n0"], _copy(204))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    assert world.members["n1"].ran[-1][0].memory == _copy(204)
    _fail(world.members["n1"], None)
    world.settle()
    assert world.generations() == [1, 2, 3]


def test_the_leader_need_not_report_its_own_copy() -> None:
    """A node is silent and nothing fails: the leader's workers hang, and its copy is there all the same."""
    world = running(3)
    leader = world.members["n0"]
    leader.me = replace(leader.me, copy=_copy(40))
    world.members["n2"].silent = True
    world.pass_time(10.0)
    check_ranks(world, 2, ["n0", "n1"])
    assert leader.ran[-1][0].memory == _copy(40)


def test_a_copy_that_is_older_than_the_checkpoint_is_not_used() -> None:
    """S6: nobody goes back behind what is committed."""
    world = running(2)
    _commit(world, 50)
    _fail(world.members["n1"], _copy(50))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    generation, _ = world.members["n0"].ran[-1]
    assert generation.number == 2
    assert generation.memory is None
    assert generation.resume is not None
    assert generation.resume.step == 50


def test_a_copy_of_another_life_or_generation_is_not_used() -> None:
    """S6: a leader that has no seat in the generation that is replaced has no copy of it, whatever it holds."""
    world = running(3)
    stranger = world.members["n0"]
    stranger.me = replace(stranger.me, copy=_copy(99), seated_generation=0)
    _fail(world.members["n1"], _copy(40))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    assert world.members["n1"].ran[-1][0].memory == _copy(40)


def test_the_step_of_a_resumed_copy_stands_until_there_is_a_newer() -> None:
    """S5: a second failure at once goes back to the same copy, not to the checkpoint behind it."""
    world = running(2)
    _fail(world.members["n1"], _copy(40))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    assert world.members["n1"].ran[-1][0].memory == _copy(40)
    _fail(world.members["n1"], _copy(40))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    assert world.generations() == [1, 2, 3]
    assert world.members["n1"].ran[-1][0].memory == _copy(40)


def test_a_copy_that_was_refused_gives_way_to_another_node_s() -> None:
    """F06: who found its copy damaged states none; another node's copy of the same step is as good."""
    world = running(2)
    _fail(world.members["n0"], _copy(40))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    check_ranks(world, 2, ["n0", "n1"])
    _fail(world.members["n0"], None)
    _fail(world.members["n1"], _copy(40, "d"))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    check_ranks(world, 3, ["n0", "n1"])
    generation, seat = world.members["n1"].ran[-1]
    assert (generation.memory, seat.rank_offset) == (_copy(40, "d"), 0)


def test_without_any_copy_that_is_whole_the_head_is_next() -> None:
    """F06: the generation after a refusal goes on from disk, and not from the same copy again."""
    world = running(1)
    _commit(world, 30)
    _fail(world.members["n0"], _copy(40))
    world.settle()
    assert world.members["n0"].ran[-1][0].memory == _copy(40)
    _fail(world.members["n0"], None)
    world.settle()
    generation, _ = world.members["n0"].ran[-1]
    assert (generation.number, generation.memory) == (3, None)
    assert generation.resume is not None
    assert generation.resume.step == 30


@pytest.mark.parametrize("how", ["fails", "is lost", "fails during a handover"])
def test_a_generation_that_ends_early_goes_back_to_the_copy_that_it_began_from(how: str) -> None:
    """S5: its record says who has that copy, although that node has not reported: its workers still set up, or hold."""
    world = running(3)
    _fail(world.members["n2"], _copy(40))
    world.pass_time(2 * COLLATERAL_GRACE_S)
    check_ranks(world, 2, ["n2", "n0", "n1"])
    if how == "is lost":
        world.members["n1"].crash()
        world.pass_time(10.0)
    else:
        if how == "fails during a handover":
            world.members["n2"].report("holding")
        _fail(world.members["n1"], None)
        world.pass_time(2 * COLLATERAL_GRACE_S)
    generation, seat = world.members["n2"].ran[-1]
    assert (generation.number, generation.memory, seat.rank_offset) == (3, _copy(40), 0)
