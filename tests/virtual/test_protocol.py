"""The protocol as stories: members with the production decisions over the memory store, in virtual time.

Here: how a run begins, who comes and goes, how it ends. Failures and losses are in `test_losses.py`, handovers in
`test_planned.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrt.errors import DuplicateError, StoreError
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import End, Leave
from elasticrt.rendezvous.records import Result
from tests.virtual.world import VirtualMember, World, check_ranks, running, spec, told_to_leave


def test_members_below_max_start_after_a_quiet_time() -> None:
    """Three of at most four members begin together half a second after the last one came, in one generation."""
    world = World(spec())
    for index in range(3):
        world.add(f"n{index}")
    world.settle()
    assert world.generations() == []
    world.pass_time(0.5)
    assert world.generations() == [1]
    check_ranks(world, 1, ["n0", "n1", "n2"])


def test_members_at_max_start_at_once() -> None:
    """No quiet time is spent when nobody else may come."""
    world = World(spec(max_nodes=2))
    world.add("n0")
    world.add("n1")
    world.settle()
    check_ranks(world, 1, ["n0", "n1"])


def test_a_cold_member_is_waited_for_only_so_long() -> None:
    """A member that is not warm after the settling limit is left out, and joins when it is."""
    world = World(spec())
    world.add("n0")
    world.add("n1")
    slow = world.add("n2", warm=False)
    world.pass_time(2.75)
    assert world.generations() == []
    world.pass_time(0.5)
    check_ranks(world, 1, ["n0", "n1"])
    slow.warm()
    world.pass_time(1.0)
    check_ranks(world, 2, ["n0", "n1", "n2"])


def test_a_join_is_free_and_keeps_the_order() -> None:
    """A newcomer gets the last rank; the others keep theirs, and no restart is counted (L4)."""
    world = running(2)
    world.add("n2")
    world.pass_time(1.0)
    check_ranks(world, 2, ["n0", "n1", "n2"])
    generation, seat = world.members["n2"].ran[-1]
    assert (seat.index, generation.kind, generation.restarts.total) == (2, "join", 0)


def test_a_burst_of_joins_is_one_generation() -> None:
    """A11: newcomers within the quiet time share one re-form."""
    world = running(1, max_nodes=40)
    for index in range(1, 33):
        world.add(f"n{index}")
        world.pass_time(0.02, tick=0.02)
    world.pass_time(1.0)
    assert world.generations() == [1, 2]
    assert world.members["n0"].ran[-1][0].world_size == 33


def test_joins_pay_for_the_last_re_form() -> None:
    """With the join budget, a newcomer waits until 20 times the last re-form's cost has passed."""
    world = running(1, join="budget")
    world.add("n1")
    world.pass_time(15.0)
    assert world.generations() == [1]
    world.pass_time(6.0)
    assert world.generations() == [1, 2]


def test_the_next_leader_counts_from_the_last_re_form_too() -> None:
    """A member that has not published the generation itself, and leads it now, knows since when it has lasted."""
    world = running(2, join="budget")
    world.add("n2")
    world.pass_time(22.0)
    assert world.generations() == [1, 2]
    world.server.revoke(world.members["n0"].member.lease_id)
    world.add("n3")
    world.pass_time(15.0)
    assert world.members["n1"].view.is_leader
    assert world.generations() == [1, 2]
    world.pass_time(6.0)
    assert world.generations() == [1, 2, 3]


def test_leaving_is_at_once_and_free() -> None:
    """A02: a member that leaves is not waited for, and no restart is counted."""
    world = running(3)
    leaving = world.members["n1"]
    leaving.me = told_to_leave(leaving)
    world.settle()
    check_ranks(world, 2, ["n0", "n2"])
    assert world.members["n0"].ran[-1][0].cause == "n1 left"


@pytest.mark.parametrize("name", ["n0", "n1"])
def test_a_run_whose_nodes_have_all_left_starts_again(name: str) -> None:
    """A02: the same command later finds a run that was stopped, and that has lost nobody."""
    world = running(1, max_nodes=1)
    world.members["n0"].me = told_to_leave(world.members["n0"])
    world.settle()
    again = VirtualMember(world, name, life=2)
    again.enter()
    again.warm()
    world.members[name] = again
    world.settle()
    assert [(generation.number, generation.cause, generation.kind) for generation, _ in again.ran] == [
        (2, "start again", "start")
    ]


@pytest.mark.parametrize(("stay", "minimum", "go_on"), [("n1", 1, True), ("n1", 2, False), ("", 1, False)])
def test_who_leaves_at_once_knows_whether_enough_others_stay(stay: str, minimum: int, go_on: bool) -> None:
    """K04: if so nobody need start the run again. Those that leave themselves do not count."""
    world = running(3, min_nodes=minimum)
    leaving = world.members["n0"]
    drains = {name: name != stay for name in leaving.view.members}
    members = {
        name: replace(each, record=each.record.model_copy(update={"draining": drains[name]}))
        for name, each in leaving.view.members.items()
    }
    decision = decide(told_to_leave(leaving), replace(leaving.view, members=members), world.now)
    assert decision == Leave("SIGTERM received", others_go_on=go_on)


def test_a_leaving_member_is_not_seated_again() -> None:
    """Its report can arrive before its key's deletion (they are watched apart): it must not get a seat in between."""
    world = running(3)
    leaving, leader = world.members["n1"], world.members["n0"]
    leaving.me = told_to_leave(leaving)
    leaving.step()
    while leader.notices:
        notice = leader.notices.popleft()
        if notice.range.endswith("/reports/"):
            leader.member.handle(notice, world.now)
    leader.step()
    assert "n1" not in {seat.node for seat in leader.view.seats_in_rank_order()} or leader.view.generation_number == 1
    world.settle()
    check_ranks(world, 2, ["n0", "n2"])


def test_rank_zero_may_leave_and_so_may_all() -> None:
    """A20, A19: rank 0 leaves and another takes over; after all have left, newcomers go on with a larger number."""
    world = running(2)
    for name in ("n0", "n1"):
        world.members[name].me = told_to_leave(world.members[name])
        world.settle()
    world.add("n2")
    world.pass_time(1.0)
    numbers = world.generations()
    assert numbers == list(range(1, len(numbers) + 1))
    check_ranks(world, numbers[-1], ["n2"])


def test_success_needs_every_rank() -> None:
    """W12, S12: one node's good end closes the run to newcomers; success comes with the last, for all at once."""
    world = running(2)
    world.members["n0"].report("ok")
    world.add("n2")
    world.pass_time(3.0)
    assert world.generations() == [1]
    assert all(member.ended is None for member in world.members.values())
    world.members["n1"].report("ok")
    world.settle()
    codes = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert codes == [0, 0, 0]


def test_a_finished_run_is_not_run_again_by_accident() -> None:
    """The same run id after success: nothing to do, unless another attempt is asked for; numbers go on."""
    world = running(1, max_nodes=1)
    world.members["n0"].report("ok")
    world.settle()
    world.server.revoke(world.members["n0"].member.lease_id)
    late = VirtualMember(world, "n1")
    answer = late.enter()
    assert isinstance(answer, Result)
    assert answer.status == "succeeded"
    again = VirtualMember(world, "n2")
    again.enter(again=True)
    again.warm()
    world.members["n2"] = again
    world.settle()
    assert [(generation.number, generation.cause) for generation, _ in again.ran] == [(2, "start again")]
    assert again.me.attempt == 2


def test_other_options_are_refused_while_members_live() -> None:
    """A15: a joiner whose options differ is told which; with nobody alive its own options replace the old."""
    world = running(1)
    world.spec = spec(max_nodes=3)
    stranger = VirtualMember(world, "n9")
    with pytest.raises(DuplicateError, match="--max-nodes: 3 here, 4 in the run"):
        stranger.enter()
    world.server.revoke(world.members["n0"].member.lease_id)
    stranger.enter()
    assert stranger.view.spec is not None
    assert stranger.view.spec.record.spec.max_nodes == 3


def test_other_options_replace_those_of_a_run_that_was_killed_when_its_leases_end() -> None:
    """A15: its members' keys outlive it; a newcomer says that it waits, and takes no key away."""
    world = running(2, lease_ttl_s=2.0)
    for member in world.members.values():
        member.crash()
    world.spec = spec(max_nodes=3, lease_ttl_s=2.0)
    stranger, began = VirtualMember(world, "n9"), world.now
    assert stranger.enter() is None
    assert stranger.me.spec.max_nodes == 3
    assert 1.0 < world.now - began < 2.2
    options = "the run had other options (--max-nodes: 3 here, 4 in the run)"
    assert sum(f"{options}: waiting until its lease ends, 4 s at most" in said for said in stranger.said) == 1


def test_who_comes_with_other_options_waits_until_the_members_of_an_ended_attempt_have_left() -> None:
    """They may need seconds to leave: it is the result that counts, not that they are still there."""
    world = running(1, max_nodes=1)
    world.members["n0"].report("ok")
    world.settle()
    world.spec = spec(max_nodes=3)
    stranger = VirtualMember(world, "n9")
    with pytest.raises(StoreError, match="it could not join"):
        stranger.enter()
    world.server.revoke(world.members["n0"].member.lease_id)
    assert isinstance(stranger.enter(), Result)
