"""The protocol as stories: members with the production decisions over the memory store, in virtual time."""

from __future__ import annotations

import pytest

from elasticrt.errors import DuplicateError
from elasticrt.rendezvous.decision import Ask, End, Halt, Publish, Rejoin
from elasticrt.rendezvous.records import FailureRecord, Result
from elasticrt.store.protocol import Delete, Txn
from tests.virtual.world import VirtualMember, World, spec


def _world(nodes: int, **changes: object) -> World:
    """A world in which `nodes` members run generation 1."""
    world = World(spec(**changes))
    for index in range(nodes):
        world.add(f"n{index}")
    world.settle()
    world.pass_time(1.0)
    return world


def _check_ranks(world: World, number: int, names: list[str]) -> None:
    """S3: ranks are a permutation of 0..W-1, and everybody agrees on everything else."""
    seats = {
        member.name: seat
        for member in world.members.values()
        for generation, seat in member.ran
        if generation.number == number
    }
    records = {
        generation for member in world.members.values() for generation, _ in member.ran if generation.number == number
    }
    assert sorted(seats) == sorted(names)
    assert len(records) == 1
    (record,) = records
    assert (record.nodes, record.world_size) == (len(names), len(names))
    assert sorted(seat.rank_offset for seat in seats.values()) == list(range(len(names)))


def test_members_below_max_start_after_a_quiet_time() -> None:
    """Three of at most four members begin together half a second after the last one came, in one generation."""
    world = World(spec())
    for index in range(3):
        world.add(f"n{index}")
    world.settle()
    assert world.generations() == []
    world.pass_time(0.5)
    assert world.generations() == [1]
    _check_ranks(world, 1, ["n0", "n1", "n2"])


def test_members_at_max_start_at_once() -> None:
    """No quiet time is spent when nobody else may come."""
    world = World(spec(max_nodes=2))
    world.add("n0")
    world.add("n1")
    world.settle()
    _check_ranks(world, 1, ["n0", "n1"])


def test_a_cold_member_is_waited_for_only_so_long() -> None:
    """A member that is not warm after the settling limit is left out, and joins when it is."""
    world = World(spec())
    world.add("n0")
    world.add("n1")
    slow = world.add("n2", warm=False)
    world.pass_time(2.75)
    assert world.generations() == []
    world.pass_time(0.5)
    _check_ranks(world, 1, ["n0", "n1"])
    slow.warm()
    world.pass_time(1.0)
    _check_ranks(world, 2, ["n0", "n1", "n2"])


def test_a_join_is_free_and_keeps_the_order() -> None:
    """A newcomer gets the last rank; the others keep theirs, and no restart is counted (L4)."""
    world = _world(2)
    world.add("n2")
    world.pass_time(1.0)
    _check_ranks(world, 2, ["n0", "n1", "n2"])
    generation, seat = world.members["n2"].ran[-1]
    assert (seat.index, generation.kind, generation.restarts_total) == (2, "join", 0)


def test_a_burst_of_joins_is_one_generation() -> None:
    """A11: newcomers within the quiet time share one re-form."""
    world = _world(1, max_nodes=40)
    for index in range(1, 33):
        world.add(f"n{index}")
        world.pass_time(0.02, tick=0.02)
    world.pass_time(1.0)
    assert world.generations() == [1, 2]
    assert world.members["n0"].ran[-1][0].world_size == 33


def test_joins_pay_for_the_last_re_form() -> None:
    """With the join budget, a newcomer waits until 20 times the last re-form's cost has passed."""
    world = _world(1, join="budget")
    world.add("n1")
    world.pass_time(15.0)
    assert world.generations() == [1]
    world.pass_time(6.0)
    assert world.generations() == [1, 2]


def test_a_worker_failure_restarts_all_and_counts_once() -> None:
    """W01, W05: a failure restarts the same members in one new generation and costs one restart."""
    world = _world(3)
    world.members["n1"].fail()
    world.members["n2"].fail(collateral=True)
    world.settle()
    _check_ranks(world, 2, ["n0", "n1", "n2"])
    generation, _ = world.members["n0"].ran[-1]
    assert (generation.kind, generation.restarts_total, generation.cause) == ("failure", 1, "rank 1 on n1")


def test_the_cause_is_told_from_its_consequences() -> None:
    """A collateral report that comes first waits a moment for the cause, which then names the generation."""
    world = _world(2)
    world.members["n0"].fail(collateral=True)
    world.settle()
    assert world.generations() == [1]
    world.members["n1"].fail()
    world.settle()
    assert world.members["n0"].ran[-1][0].cause == "rank 1 on n1"


def test_only_collateral_failures_restart_after_the_grace() -> None:
    """When no cause is ever reported the run still goes on."""
    world = _world(2)
    world.members["n0"].fail(collateral=True)
    world.pass_time(0.5)
    assert world.generations() == [1, 2]


def test_a_dead_node_is_fenced_without_waiting_for_its_lease() -> None:
    """A01: peers of a killed node report, the dead one refuses the probe, the others go on in the same instant."""
    world = _world(3)
    world.members["n2"].crash()
    world.members["n1"].fail(collateral=True)
    before = world.now
    world.settle()
    assert world.now == before
    _check_ranks(world, 2, ["n0", "n1"])
    assert world.members["n0"].ran[-1][0].kind == "lost"
    assert world.members["n0"].ran[-1][0].restarts_total == 0


def test_a_dead_leader_is_fenced_by_the_others() -> None:
    """A07: the leader's death is found by those whose workers failed; the next in seniority goes on."""
    world = _world(3)
    world.members["n0"].crash()
    world.members["n1"].fail(collateral=True)
    world.members["n2"].fail(collateral=True)
    world.settle()
    _check_ranks(world, 2, ["n1", "n2"])


def test_a_dead_node_without_evidence_goes_with_its_lease() -> None:
    """The lease is the backstop: no worker failed, yet the node is out once its key has gone."""
    world = _world(2)
    world.members["n1"].crash()
    world.pass_time(7.0)
    _check_ranks(world, 2, ["n0"])


def test_a_lost_key_alone_restarts_nobody() -> None:
    """E08: the key of a live member is deleted; it registers again, and the generation goes on."""
    world = _world(2)
    world.server.commit(Txn((), (Delete("/elasticrt/run/members/n1"),)))
    world.settle()
    world.pass_time(10.0)
    assert world.generations() == [1]
    assert "n1" in world.members["n0"].rendezvous.view.members


def test_all_leases_lost_at_once_restart_nobody() -> None:
    """etcd can drop every lease while all members live: everybody registers again under the same identity."""
    world = _world(3)
    for member in world.members.values():
        world.server.revoke(member.lease.lease_id)
    world.pass_time(10.0)
    assert world.generations() == [1]
    assert len(world.members["n0"].rendezvous.view.members) in (2, 3)


def test_a_silent_minority_is_fenced_a_silent_half_is_not() -> None:
    """Silence is no proof: one silent node of four is taken out at once, two of four only by their leases."""
    world = _world(4)
    world.members["n3"].silent = True
    world.members["n1"].fail(collateral=True)
    world.settle()
    _check_ranks(world, 2, ["n0", "n1", "n2"])

    other = _world(4)
    for name in ("n2", "n3"):
        other.members[name].silent = True
    other.members["n1"].fail(collateral=True)
    other.settle()
    assert other.generations() == [1]
    for name in ("n2", "n3"):
        other.members[name].crash()
    other.pass_time(8.0)
    _check_ranks(other, 2, ["n0", "n1"])


def test_leaving_is_at_once_and_free() -> None:
    """A02: a member that leaves is not waited for, and no restart is counted."""
    world = _world(3)
    leaving = world.members["n1"]
    leaving.me = _leaving(leaving)
    world.settle()
    _check_ranks(world, 2, ["n0", "n2"])
    assert world.members["n0"].ran[-1][0].cause == "n1 left"


def test_a_leaving_member_is_not_seated_again() -> None:
    """Its report can arrive before its key's deletion (they are watched apart): it must not get a seat in between."""
    world = _world(3)
    leaving, leader = world.members["n1"], world.members["n0"]
    leaving.me = _leaving(leaving)
    leaving.step()
    while leader.notices:
        notice = leader.notices.popleft()
        if notice.range.endswith("/reports/"):
            leader.rendezvous.absorb(notice)
    leader.step()
    assert "n1" not in {seat.node for seat in leader.rendezvous.view.order()} or leader.rendezvous.view.number == 1
    world.settle()
    _check_ranks(world, 2, ["n0", "n2"])


def test_rank_zero_may_leave_and_so_may_all() -> None:
    """A20, A19: rank 0 leaves and another takes over; after all have left, newcomers go on with a larger number."""
    world = _world(2)
    for name in ("n0", "n1"):
        world.members[name].me = _leaving(world.members[name])
        world.settle()
    world.add("n2")
    world.pass_time(1.0)
    numbers = world.generations()
    assert numbers == list(range(1, len(numbers) + 1))
    _check_ranks(world, numbers[-1], ["n2"])


def test_standby_replaces_a_lost_node() -> None:
    """A13: a member beyond max-nodes stands by and is in the generation that follows a loss."""
    world = _world(2, max_nodes=2)
    world.add("n2")
    world.pass_time(5.0)
    assert world.generations() == [1]
    world.members["n1"].crash()
    world.members["n0"].fail(collateral=True)
    world.settle()
    _check_ranks(world, 2, ["n0", "n2"])


def test_below_min_nodes_all_end_alike_at_the_deadline() -> None:
    """A14, L3: too few members wait until the leader's deadline, then all end with code 3 and the same words."""
    world = _world(3, min_nodes=2, max_nodes=3, join_timeout_s=60.0)
    for name in ("n1", "n2"):
        world.members[name].crash()
    world.members["n0"].fail(collateral=True)
    world.pass_time(50.0)
    assert world.members["n0"].ended is None
    world.pass_time(20.0)
    ended = world.members["n0"].ended
    assert isinstance(ended, End)
    assert ended.result.code == 3


def test_a_node_that_comes_in_time_ends_the_wait() -> None:
    """A16: below the minimum, a newcomer starts the next generation."""
    world = _world(2, min_nodes=2, max_nodes=2, join_timeout_s=60.0)
    world.members["n1"].crash()
    world.members["n0"].fail(collateral=True)
    world.pass_time(30.0)
    world.add("n2")
    world.pass_time(1.0)
    _check_ranks(world, 2, ["n0", "n2"])


def test_success_needs_every_rank() -> None:
    """W12, S12: one node's good end closes the run to newcomers; success comes with the last, for all at once."""
    world = _world(2)
    world.members["n0"].report("ok")
    world.add("n2")
    world.pass_time(3.0)
    assert world.generations() == [1]
    assert all(member.ended is None for member in world.members.values())
    world.members["n1"].report("ok")
    world.settle()
    codes = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert codes == [0, 0, 0]


def test_a_late_failure_runs_all_again() -> None:
    """W12: a rank that had ended well runs again when another fails before the end."""
    world = _world(2)
    world.members["n0"].report("ok")
    world.settle()
    world.members["n1"].fail()
    world.settle()
    _check_ranks(world, 2, ["n0", "n1"])


def test_the_budget_is_the_runs() -> None:
    """S13: with three restarts and no progress the fourth failure ends the run with code 1 everywhere."""
    world = _world(2)
    for number in range(1, 5):
        assert world.generations()[-1] == number
        world.members["n1"].fail()
        world.settle()
    codes = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert codes == [1, 1]


@pytest.mark.parametrize("code", [5, 6])
def test_a_failure_that_no_restart_can_cure_is_final(code: int) -> None:
    """A bad checkpoint or a failed preparation ends the run at once with its own code."""
    world = _world(2)
    world.members["n1"].fail(final_code=code)
    world.settle()
    codes = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert codes == [code, code]


def test_a_finished_run_is_not_run_again_by_accident() -> None:
    """The same run id after success: nothing to do, unless another attempt is asked for; numbers go on."""
    world = _world(1, max_nodes=1)
    world.members["n0"].report("ok")
    world.settle()
    world.server.revoke(world.members["n0"].lease.lease_id)
    late = VirtualMember(world, "n1")
    answer = late.enter()
    assert isinstance(answer, Result)
    assert answer.status == "succeeded"
    again = VirtualMember(world, "n2")
    again.enter(again=True)
    again.warm()
    world.members["n2"] = again
    world.settle()
    assert [generation.number for generation, _ in again.ran] == [2]
    assert again.me.attempt == 2


def test_other_options_are_refused_while_members_live() -> None:
    """A15: a joiner whose options differ is told which; with nobody alive its own options replace the old."""
    world = _world(1)
    other = World(spec(max_nodes=3))
    other.server = world.server
    stranger = VirtualMember(other, "n9")
    with pytest.raises(DuplicateError, match="max_nodes: 3 here, 4 in the run"):
        stranger.enter()
    world.server.revoke(world.members["n0"].lease.lease_id)
    stranger.enter()
    assert stranger.rendezvous.view.spec is not None
    assert stranger.rendezvous.view.spec.record.spec.max_nodes == 3


def test_a_paused_member_finds_itself_replaced() -> None:
    """A06: after a pause longer than its lease a member kills its workers first and returns in a new life."""
    world = _world(3)
    paused = world.members["n2"]
    paused.alive = False  # Neither acts nor answers...
    world.members["n1"].fail(collateral=True)
    world.pass_time(8.0)
    _check_ranks(world, 2, ["n0", "n1"])
    paused.alive = True  # ... and goes on where it was.
    world.pass_time(3.0)
    assert any(isinstance(decision, Rejoin) for decision in paused.story)
    _check_ranks(world, 3, ["n0", "n1", "n2"])
    assert paused.ran[-1][1].incarnation != paused.ran[0][1].incarnation


def test_a_store_that_lost_its_data_stops_the_run() -> None:
    """E05, E08: a generation key that is gone means lost data: nobody publishes generation 1 again."""
    world = _world(2)
    world.server.commit(Txn((), (Delete("/elasticrt/run/generation"),)))
    world.settle()
    halts = [member.ended for member in world.members.values()]
    assert all(isinstance(halt, Halt) and halt.code == 4 for halt in halts)
    assert not any(isinstance(d, Publish) and d.draft.number == 1 for m in world.members.values() for d in m.story[-2:])


def _leaving(member: VirtualMember) -> object:
    from dataclasses import replace

    return replace(member.me, leaving="SIGTERM received")


def _enter_steps(world: World, **entered: int) -> None:
    for name, step in entered.items():
        world.members[name].entered = step


def test_a_join_with_loops_loses_no_step() -> None:
    """All hold, the furthest step is agreed, all leave after it, and the next generation resumes from a copy of it."""
    world = _world(2)
    _enter_steps(world, n0=7, n1=8)
    world.add("n2")
    world.pass_time(1.0)
    _check_ranks(world, 2, ["n0", "n1", "n2"])
    generation, _ = world.members["n0"].ran[-1]
    assert generation.memory is not None
    assert (generation.memory.step, generation.kind) == (8, "join")
    assert world.members["n0"].rendezvous.view.handover is None


def test_a_drained_node_hands_over_and_leaves() -> None:
    """A draining member gets no seat in the next generation, which resumes from the agreed step; then it leaves."""
    world = _world(3)
    _enter_steps(world, n0=4, n1=5, n2=4)
    _drain(world.members["n0"])  # Rank 0 and the leader.
    world.settle()
    _check_ranks(world, 2, ["n1", "n2"])
    generation, seat = world.members["n1"].ran[-1]
    assert generation.memory is not None
    assert (generation.memory.step, generation.kind, seat.rank_offset) == (5, "drain", 0)
    assert not world.members["n0"].alive


def test_the_last_node_saves_before_it_leaves() -> None:
    """K01: when too few would remain, the agreed step goes to disk, and the draining members leave."""
    world = _world(2)
    _enter_steps(world, n0=4, n1=4)
    for name in ("n0", "n1"):
        _drain(world.members[name])
    world.settle()
    assert [member.alive for member in world.members.values()] == [False, False]
    asked = [d.handover for m in world.members.values() for d in m.story if isinstance(d, Ask)]
    assert asked[-1].save
    assert world.generations() == [1]


def test_a_failure_voids_a_handover() -> None:
    """A worker that fails while others hold: the generation is replaced as after any failure."""
    world = _world(2)
    _enter_steps(world, n0=7, n1=7)
    stubborn = world.members["n1"]
    newcomer = world.add("n2")
    newcomer.step()
    world.now += 1.0
    stubborn.fail()
    world.settle()
    _check_ranks(world, 2, ["n0", "n1", "n2"])
    assert world.members["n0"].ran[-1][0].kind == "failure"


def test_a_node_that_does_not_answer_a_hold_is_not_waited_for_long() -> None:
    """Two seconds without an answer, and the generation is re-formed from the head."""
    world = _world(2)
    _enter_steps(world, n0=7, n1=7)
    world.members["n1"].silent = True
    world.add("n2")
    world.pass_time(2.0)
    assert world.generations() == [1]
    world.pass_time(2.0)
    assert 2 in world.generations()


def _drain(member: VirtualMember) -> None:
    from dataclasses import replace

    member.me = replace(member.me, record=member.me.record.model_copy(update={"draining": True}))


def test_a_failure_after_a_handover_goes_back_to_its_step() -> None:
    """Before anything is committed, the copy that a generation resumed from serves the next one as well."""
    world = _world(2)
    _enter_steps(world, n0=7, n1=7)
    world.add("n2")
    world.pass_time(1.0)
    kept = world.members["n0"].ran[-1][0].memory
    assert kept is not None
    world.members["n1"].report("failed", _failure("n1"), memory=kept)
    world.settle()
    _check_ranks(world, 3, ["n1", "n0", "n2"])
    generation, seat = world.members["n1"].ran[-1]
    assert (generation.memory, generation.kind, seat.rank_offset) == (kept, "failure", 0)


def _failure(name: str) -> FailureRecord:
    return FailureRecord(rank=1, code=1, collateral=False, summary=f"rank 1 on {name}")
