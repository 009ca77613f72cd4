"""The protocol as stories: workers that fail, nodes that die or are silent, keys that go, a store that is wiped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrt.ipc.failure import ENDED_EARLY, Failure
from elasticrt.rendezvous.decide import RANK_0_GRACE_S, RETURN_S
from elasticrt.rendezvous.decision import End, Halt, Publish, Rejoin
from elasticrt.rendezvous.records import Restarts
from elasticrt.store.protocol import Delete, StoreUnavailable, Txn
from tests.virtual.world import VirtualMember, World, check_ranks, running, spec, told_to_leave


def _know(member: VirtualMember, **changes: object) -> None:
    """What this member knows of the generation is changed."""
    replica = member.member.replica
    stored = replica.view.generation
    assert stored is not None
    changed = replace(stored, record=stored.record.model_copy(update=changes))
    replica.view = replace(replica.view, generation=changed)


def test_a_worker_failure_restarts_all_and_counts_once() -> None:
    """W01, W05: a failure restarts the same members in one new generation and costs one restart."""
    world = running(3)
    world.members["n1"].fail()
    world.members["n2"].fail(collateral=True)
    world.settle()
    check_ranks(world, 2, ["n0", "n1", "n2"])
    generation, _ = world.members["n0"].ran[-1]
    assert (generation.kind, generation.restarts.total, generation.cause) == ("failure", 1, "rank 1 on n1")


def test_the_cause_is_told_from_its_consequences() -> None:
    """A collateral report that comes first waits a moment for the cause, which then names the generation."""
    world = running(2)
    world.members["n0"].fail(collateral=True)
    world.settle()
    assert world.generations() == [1]
    world.members["n1"].fail()
    world.settle()
    assert world.members["n0"].ran[-1][0].cause == "rank 1 on n1"


@pytest.mark.parametrize("told", [True, False], ids=["the cause", "no cause"])
def test_after_an_outage_of_etcd_the_cause_is_waited_for(*, told: bool) -> None:
    """E02: the nodes come back one by one, so the leader waits longer, but not for ever."""
    world = running(2)
    leader = world.members["n0"].member
    leader.note_failure(StoreUnavailable("no answer"), world.clock())
    leader.note_read(world.clock())
    world.members["n0"].fail(collateral=True)
    world.pass_time(RETURN_S - 0.5)
    assert world.generations() == [1]
    if told:
        world.members["n1"].fail()
    world.pass_time(0.0 if told else 0.75)
    world.settle()
    assert world.generations() == [1, 2]
    assert world.members["n0"].ran[-1][0].cause == ("rank 1 on n1" if told else "rank 0 on n0")


def test_only_collateral_failures_restart_after_the_grace() -> None:
    """When no cause is ever reported the run still goes on."""
    world = running(2)
    world.members["n0"].fail(collateral=True)
    world.pass_time(0.5)
    assert world.generations() == [1, 2]


def test_a_dead_node_is_fenced_without_waiting_for_its_lease() -> None:
    """A01: peers of a killed node report, the dead one refuses the probe, the others go on in the same instant."""
    world = running(3)
    world.members["n2"].crash()
    world.members["n1"].fail(collateral=True)
    before = world.now
    world.settle()
    assert world.now == before
    check_ranks(world, 2, ["n0", "n1"])
    assert world.members["n0"].ran[-1][0].kind == "lost"
    assert world.members["n0"].ran[-1][0].restarts.total == 0


def test_a_dead_leader_is_fenced_by_the_others() -> None:
    """A07: the leader's death is found by those whose workers failed; the next in seniority goes on."""
    world = running(3)
    world.members["n0"].crash()
    world.members["n1"].fail(collateral=True)
    world.members["n2"].fail(collateral=True)
    world.settle()
    check_ranks(world, 2, ["n1", "n2"])


def test_a_dead_node_without_evidence_goes_with_its_lease() -> None:
    """The lease is the backstop: no worker failed, yet the node is out once its key has gone."""
    world = running(2)
    world.members["n1"].crash()
    world.pass_time(7.0)
    check_ranks(world, 2, ["n0"])


def test_a_lost_key_alone_restarts_nobody() -> None:
    """E08: the key of a live member is deleted; it registers again, and the generation goes on."""
    world = running(2)
    world.server.commit(Txn((), (Delete("/elasticrt/run/members/n1"),)))
    world.settle()
    world.pass_time(10.0)
    assert world.generations() == [1]
    assert "n1" in world.members["n0"].view.members


def test_all_leases_lost_at_once_restart_nobody() -> None:
    """etcd can drop every lease while all members live: everybody registers again under the same identity."""
    world = running(3)
    for member in world.members.values():
        world.server.revoke(member.member.lease_id)
    world.pass_time(10.0)
    assert world.generations() == [1]
    assert len(world.members["n0"].view.members) in (2, 3)


def test_a_silent_minority_is_fenced_a_silent_half_is_not() -> None:
    """Silence is no proof: one silent node of four is taken out at once, two of four only by their leases."""
    world = running(4)
    world.members["n3"].silent = True
    world.members["n1"].fail(collateral=True)
    world.settle()
    check_ranks(world, 2, ["n0", "n1", "n2"])

    other = running(4)
    for name in ("n2", "n3"):
        other.members[name].silent = True
    other.members["n1"].fail(collateral=True)
    other.settle()
    assert other.generations() == [1]
    for name in ("n2", "n3"):
        other.members[name].crash()
    other.pass_time(8.0)
    check_ranks(other, 2, ["n0", "n1"])


def test_the_budget_is_the_runs() -> None:
    """S13: with three restarts and no progress the fourth failure ends the run with code 1 everywhere."""
    world = running(2)
    for number in range(1, 5):
        assert world.generations()[-1] == number
        world.members["n1"].fail()
        world.settle()
    codes = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert codes == [1, 1]


@pytest.mark.parametrize(
    ("killed", "others_have_it", "spent"),
    [(True, True, 0), (True, False, 1), (False, True, 1)],
    ids=["killed", "killed, and nobody else has the state", "raised"],
)
def test_a_worker_that_was_killed_spends_no_restart_while_others_live_on(
    killed: bool, others_have_it: bool, spent: int
) -> None:
    """S13, W04: a signal after a step of its own is the loss of one seat; among all restarts it counts."""
    world = running(3)
    for name, member in world.members.items():
        known = {"generation": 1, "ready": 1, "has_state": others_have_it or name == "n1"}
        member.me = replace(member.me, record=member.me.record.model_copy(update=known))
    world.settle()
    failure = Failure(rank=1, code=-9, collateral=False, summary="killed", killed=killed)
    world.members["n1"].report("failed", failure, ready=0, has_state=False)
    world.settle()
    restarts = world.members["n0"].ran[-1][0].restarts
    assert (restarts.spent, restarts.total) == (spent, 1)


@pytest.mark.parametrize(
    ("half_made", "least", "workers"),
    [
        pytest.param("", 1, {"n0": 1, "n2": 1}, id="enough live on"),
        pytest.param("n2", 1, {"n0": 1, "n2": 1}, id="one in the middle of its step"),
        pytest.param("", 3, {"n0": 2, "n2": 2, "n3": 1}, id="with too few nodes"),
    ],
)
def test_newcomers_come_in_where_all_have_agreed_on_a_step(half_made: str, least: int, workers: dict[str, int]) -> None:
    """W02: neither a node that stands by nor a worker that is ready beside the training takes a lost worker's place at
    once, because others may be in an evaluation, unless it is needed. Who takes their
    step over, because its own is half made, does."""
    world = running(3, min_nodes=least, max_nodes=3, join="budget")
    world.add("n3")
    for name, member in world.members.items():
        seated = name != "n3"
        known = {"generation": int(seated), "ready": 1 + seated, "new": 1, "has_state": seated and name != half_made}
        # The generation starts, so that nobody is let in as planned.
        record = member.me.record.model_copy(update=known)
        member.me = replace(member.me, record=record, starting=True)
    world.settle()
    failure = Failure(rank=1, code=-9, collateral=False, summary="killed", killed=True)
    world.members["n1"].report("failed", failure, ready=0, has_state=False)
    world.settle()
    ran = {name: member.ran[-1] for name, member in world.members.items() if member.ran}
    assert {name: seat.workers for name, (new, seat) in ran.items() if new.number == 2} == workers


@pytest.mark.parametrize(
    ("beats", "lasts_s", "survives"),
    [
        ((5, 5, 5, 5), 1.0, False),  # As far as the first time, from the start: three restarts.
        ((0, 0, 0, 0), 3700.0, False),
        ((5, 6, 7, 8), 1.0, True),
        ((5, 3, 6, 3, 7, 3, 3), 1.0, True),
        ((9, 5, 5, 5), 3600.0, True),  # From snapshots of its own: an hour each.
        ((9, 5, 5, 5), 3500.0, False),
    ],
)
def test_optimizer_steps_are_progress(beats: tuple[int, ...], lasts_s: float, survives: bool) -> None:
    """S13: without a Loop, more optimizer steps than ever before, or an hour of them, give the restarts back."""
    world = running(2)
    for steps in beats:
        world.pass_time(lasts_s)
        world.members["n1"].fail(beats=steps)
        world.settle()
    ended = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert ended == ([] if survives else [1, 1])


@pytest.mark.parametrize("early", ["", "a" * 16], ids=["", "before its first step"])
@pytest.mark.parametrize("node", ["n1", "n0"], ids=["another", "the leader's own"])
@pytest.mark.parametrize("reached", [(5, 6, 7, 8, 9), (5, 5, 5, 5), (5, 0, 5, 0)])
def test_steps_before_a_join_are_progress(reached: tuple[int, ...], node: str, early: str) -> None:
    """S13, W13: a newcomer fails again and again before its first step, and until it is let in the others get further,
    or do not."""
    world = running(2)
    for step in reached:
        for member in world.members.values():
            _know(member, in_place=True, reached=step)
        world.members[node].fail(early=early)
        world.settle()
    ended = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert ended == ([] if sorted(set(reached)) == list(reached) else [1, 1])


@pytest.mark.parametrize(
    ("loaded", "survives"),
    [
        ((0, 1, 2, 3, 4), True),  # The first life has nothing to go on from.
        ((1, 2, 3, 4, 5), True),
        ((1, 1, 1, 2, 2, 2, 3), True),
        ((0, 0, 0, 0), False),
        ((7, 7, 7, 7), False),
        ((0, 7, 7, 7, 7), False),
        ((7, 3, 7, 3), False),  # Several old ones in turn: nobody has written one since.
        ((7, 0, 7, 0), False),
    ],
)
def test_steps_from_a_newer_snapshot_are_progress(loaded: tuple[int, ...], survives: bool) -> None:
    """S13: without a Loop, steps from a newer snapshot than ever before give the restarts back; older ones do not."""
    world = running(2)
    for written in loaded:
        world.members["n1"].fail(beats=3, loaded=written)
        world.settle()
    ended = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert ended == ([] if survives else [1, 1])


def test_the_end_names_the_cause_behind_a_collateral_failure() -> None:
    """W13: the restarts are spent by workers that were lost on their way from a failure into the next generation."""
    world = running(2)
    restarts = Restarts(spent=3, total=3, beats=1)
    _know(world.members["n0"], in_place=True, kind="failure", cause="rank 1 raised", restarts=restarts)
    world.members["n1"].fail(collateral=True, beats=1)
    world.pass_time(0.5)
    ended = world.members["n1"].ended
    assert isinstance(ended, End)
    assert ended.result.reason == "rank 1 raised; then rank 1 on n1 (3 restarts without a new step used up)"


@pytest.mark.parametrize(("beats", "spent"), [(0, 1), (1, 2)])
def test_survivors_of_a_first_step_that_cannot_be_undone_spend_no_restart(beats: int, spent: int) -> None:
    """S13: the loss in that step is counted once, and not again because no survivor has a state."""
    world = running(2)
    _know(world.members["n0"], in_place=True, kind="failure", restarts=Restarts(spent=1, total=1, beats=beats))
    world.members["n1"].fail(collateral=True, beats=beats)
    world.pass_time(0.5)
    generation = world.members["n0"].ran[-1][0]
    assert (generation.restarts.spent, generation.restarts.total) == (spent, 2)


@pytest.mark.parametrize(("second", "ended"), [("a", [1, 1]), ("b", []), ("", [])])
def test_the_same_failure_before_the_first_step_twice_is_certain(second: str, ended: list[int]) -> None:
    """S13: what raises the same error at the same line before any step, twice, will do so again."""
    world = running(2)
    world.members["n1"].fail(early="a" * 16)
    world.settle()
    world.members["n0"].fail(early=second * 16)
    world.settle()
    assert [each.ended.result.code for each in world.members.values() if isinstance(each.ended, End)] == ended


def test_a_worker_that_does_not_fit_costs_no_restart() -> None:
    """However often it comes, the run goes on, and a generation says why."""
    world = running(2)
    for _ in range(5):
        world.members["n1"].report("failed", Failure(rank=1, code=1, collateral=False, summary="no fit", misfit=True))
        world.settle()
    generation = world.members["n0"].ran[-1][0]
    assert (generation.number, generation.cause, generation.restarts.spent) == (6, "no fit", 0)


@pytest.mark.parametrize("status", ["finishing", "ok"])
@pytest.mark.parametrize(("well", "who"), [(None, "a worker"), (1, "rank 1")])
def test_who_ended_early_is_the_cause_of_collateral_failures(status: str, well: int | None, who: str) -> None:
    """W02: a worker that ends with 0 while others are in a collective breaks it: it is named, not who complains."""
    world = running(2)
    world.members["n1"].report(status, well=well)
    world.settle()
    world.members["n0"].fail(collateral=True)
    world.pass_time(1.0)
    generation = world.members["n0"].ran[-1][0]
    assert (generation.number, generation.cause) == (2, f"{who} on n1: {ENDED_EARLY}")


@pytest.mark.parametrize("code", [1, 5, 6])
def test_a_failure_that_no_restart_can_cure_is_final(code: int) -> None:
    """A bad checkpoint or a failed preparation ends the run at once with its own code."""
    world = running(2)
    world.members["n1"].fail(final_code=code)
    world.settle()
    codes = [member.ended.result.code for member in world.members.values() if isinstance(member.ended, End)]
    assert codes == [code, code]


def test_a_paused_member_finds_itself_replaced() -> None:
    """A06: after a pause longer than its lease a member kills its workers first and returns in a new life."""
    world = running(3)
    paused = world.members["n2"]
    paused.alive = False  # Neither acts nor answers...
    world.members["n1"].fail(collateral=True)
    world.pass_time(8.0)
    check_ranks(world, 2, ["n0", "n1"])
    paused.alive = True  # ... and goes on where it was.
    world.pass_time(3.0)
    assert any(isinstance(decision, Rejoin) for decision in paused.story)
    check_ranks(world, 3, ["n0", "n1", "n2"])
    assert paused.ran[-1][1].incarnation != paused.ran[0][1].incarnation


def test_a_store_that_lost_its_data_stops_the_run() -> None:
    """E05, E08: a generation key that is gone means lost data: nobody publishes generation 1 again."""
    world = running(2)
    world.server.commit(Txn((), (Delete("/elasticrt/run/generation"),)))
    world.settle()
    halts = [member.ended for member in world.members.values()]
    assert all(isinstance(halt, Halt) and halt.code == 4 for halt in halts)
    assert not any(isinstance(d, Publish) and d.draft.number == 1 for m in world.members.values() for d in m.story[-2:])


def test_a_late_failure_runs_all_again() -> None:
    """W12: a rank that had ended well runs again when another fails before the end."""
    world = running(2)
    world.members["n0"].report("ok")
    world.settle()
    world.members["n1"].fail()
    world.settle()
    check_ranks(world, 2, ["n0", "n1"])


def test_below_min_nodes_all_end_alike_at_the_deadline() -> None:
    """A14, L3: too few members wait until the leader's deadline, then all end with code 3 and the same words."""
    world = running(3, min_nodes=2, max_nodes=3, join_timeout_s=60.0)
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
    world = running(2, min_nodes=2, max_nodes=2, join_timeout_s=60.0)
    world.members["n1"].crash()
    world.members["n0"].fail(collateral=True)
    world.pass_time(30.0)
    world.add("n2")
    world.pass_time(1.0)
    check_ranks(world, 2, ["n0", "n2"])


def test_standby_replaces_a_lost_node() -> None:
    """A13: a member beyond max-nodes stands by and is in the generation that follows a loss."""
    world = running(2, max_nodes=2)
    world.add("n2")
    world.pass_time(5.0)
    assert world.generations() == [1]
    world.members["n1"].crash()
    world.members["n0"].fail(collateral=True)
    world.settle()
    check_ranks(world, 2, ["n0", "n2"])


def test_a_store_that_lost_its_data_before_the_first_generation_stops_the_run() -> None:
    """E05: newcomers that wait for others do not wait for ever for options that nobody will write again."""
    world = World(spec(min_nodes=2))
    world.add("n0")
    world.settle()
    world.server.commit(Txn((), (Delete("/elasticrt/run/"),)))
    world.settle()
    ended = world.members["n0"].ended
    assert isinstance(ended, Halt)
    assert ended.code == 4


def test_a_node_that_leaves_while_another_generation_is_made_has_left() -> None:
    """L1: it has a seat in one that it has not heard of; it gives that up, and nobody takes it for lost."""
    world = running(3)
    leader, first, second = world.members.values()
    first.me = told_to_leave(first)
    while first.alive:
        first.step()
    while leader.ran[-1][0].number == 1:
        assert leader.step()
    assert second.view.generation_number == 1
    second.run(second.member.leave(seat_too=True))
    second.alive = False
    world.settle()
    world.pass_time(1.0)
    assert [generation.cause for generation, _ in leader.ran] == ["start", "n1 left", "n2 left"]


@pytest.mark.parametrize("told", [True, False], ids=["rank 0 too", "nobody else"])
def test_who_ends_together_with_rank_0_is_not_to_blame(*, told: bool) -> None:
    """F07: all ranks refuse the checkpoint for the same reason. The run ends once, and names rank 0 if it reports."""
    world = running(2)
    world.members["n1"].fail(collateral=True, final_code=5)
    world.settle()
    assert world.members["n0"].ended is None
    if told:
        world.members["n0"].fail(final_code=5)
    world.pass_time(0.0 if told else RANK_0_GRACE_S + 0.5)
    world.settle()
    ended = world.members["n0"].ended
    assert isinstance(ended, End)
    assert (ended.result.code, ended.result.reason) == (5, "rank 0 on n0" if told else "rank 1 on n1")
