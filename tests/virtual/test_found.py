"""What the simulator has found, as stories: each was a livelock, a wrong seat or a needless loss in some seed."""

from __future__ import annotations

from dataclasses import replace

from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import Wait
from elasticrt.rendezvous.view import apply_range
from elasticrt.store.protocol import Delete, Put, Txn
from tests.virtual.world import check_ranks, running, told_to_leave


def test_a_seat_is_taken_only_from_the_generations_own_roster() -> None:
    """S3: between seeing a new generation and reading its roster, the last one's seats say nothing about it."""
    world = running(3)
    slow = world.members["n2"]
    world.members["n1"].me = told_to_leave(world.members["n1"])
    for _ in range(20):
        for name in ("n0", "n1"):
            world.members[name].step()
    while slow.notices:
        slow.rendezvous.absorb(slow.notices.popleft())
    assert slow.rendezvous.view.number == 2
    assert isinstance(decide(slow.me, slow.rendezvous.view, world.now), Wait)
    world.settle()
    check_ranks(world, 2, ["n0", "n2"])


def test_a_key_made_anew_between_two_looks_has_lost_its_seniority() -> None:
    """L1: a read that finds another creation of the oldest key asks who is oldest; else each waits for the other."""
    world = running(2)
    world.pass_time(1.0)
    follower, key = world.members["n1"].rendezvous, "/elasticrt/run/members/n0"
    assert follower.view.oldest == "n0"
    value = world.server.read(key, exact=True).keys[0].value
    world.server.commit(Txn((), (Delete(key),)))
    world.server.commit(Txn((), (Put(key, value),)))
    follower.view = apply_range(follower.view, follower.keys, key, world.server.read(key, exact=True), world.now)
    assert follower.view.oldest is None


def test_who_was_fenced_for_silence_is_not_fenced_again_for_it() -> None:
    """L8: below the minimum, a node that was silent and comes back completes the next generation."""
    world = running(4, min_nodes=4)
    quiet = world.members["n3"]
    quiet.silent = True
    world.members["n1"].fail(collateral=True)
    world.settle()
    assert "n3" not in world.members["n0"].rendezvous.view.members
    quiet.silent = False
    quiet.fail(collateral=True)
    world.pass_time(12.0)
    assert world.generations()[-1] > 1
    assert world.members["n0"].ran[-1][0].nodes == 4


def test_a_leader_that_sees_nobody_at_all_comes_back() -> None:
    """E08: all member keys are deleted while the leader looks; it registers again instead of giving up."""
    world = running(1)
    world.server.commit(Txn((), (Delete("/elasticrt/run/members/", prefix=True),)))
    world.settle()
    assert world.generations() == [1]
    assert "n0" in world.members["n0"].rendezvous.view.members


def test_a_new_leader_gives_missing_keys_their_whole_lease_term() -> None:
    """L7: after all leases were lost the first to register leads; who is a little slower is not taken for lost."""
    world = running(3)
    world.pass_time(10.0)
    for member in world.members.values():
        world.server.revoke(member.lease.lease_id)
        member.me = replace(member.me, lease="lost")
    for _ in range(50):
        world.members["n1"].step()
    assert world.members["n1"].rendezvous.view.leads
    world.settle()
    assert world.generations() == [1]
