"""What the simulator has found, as stories: each was a livelock, a wrong seat or a needless loss in some seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrt.errors import StoreError
from elasticrt.ipc.env import Commit
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import Wait, WithdrawHandover, WriteHandover, WriteReport
from elasticrt.rendezvous.leader_context import as_reported
from elasticrt.rendezvous.records import HandoverRecord, Report
from elasticrt.rendezvous.view import Stored, apply_range
from elasticrt.store.protocol import Delete, Put, RangeRead, StoreUnavailable, Txn, TxnResult
from tests.memory_store import MemoryStore
from tests.virtual.plan import Fault
from tests.virtual.simulator import simulate
from tests.virtual.story import story
from tests.virtual.world import VirtualMember, World, check_ranks, running, spec, told_to_leave

FAILURE = Failure(rank=1, code=-9, collateral=False, summary="killed by SIGKILL")


def test_a_seat_is_taken_only_from_the_generations_own_roster() -> None:
    """S3: between seeing a new generation and reading its roster, the last one's seats say nothing about it."""
    world = running(4)
    slow = world.members["n2"]
    world.members["n1"].me = told_to_leave(world.members["n1"])
    for _ in range(20):
        for name in ("n0", "n1", "n3"):
            world.members[name].step()
    while slow.notices:
        slow.member.handle(slow.notices.popleft(), world.now)
    assert slow.view.generation_number == 2
    assert isinstance(decide(slow.me, slow.view, world.now), Wait)
    world.settle()
    check_ranks(world, 2, ["n0", "n2", "n3"])


def test_a_generation_that_is_over_before_a_member_reads_its_roster_leaves_nobody_out() -> None:
    """L7: the next generation has taken the roster away, and has a seat for who heard of the former one only now."""
    world = running(4)
    slow = world.members.pop("n3")
    for name in ("n1", "n2"):
        world.members[name].me = told_to_leave(world.members[name])
        world.settle()
    while slow.view.generation_number < 2:
        slow.member.handle(slow.notices.popleft(), world.now)
    late = list(slow.notices)
    slow.notices.clear()
    slow.step()
    world.members["n3"] = slow
    slow.notices.extendleft(reversed(late))
    world.settle()
    assert slow.life == 0
    check_ranks(world, 3, ["n0", "n3"])


def test_a_key_made_anew_between_two_looks_has_lost_its_seniority() -> None:
    """L1: a read that finds another creation of the oldest key asks who is oldest; else each waits for the other."""
    world = running(2)
    world.pass_time(1.0)
    follower, key = world.members["n1"].member.replica, "/elasticrt/run/members/n0"
    assert follower.view.leader_node == "n0"
    value = world.server.read(key).keys[0].value
    world.server.commit(Txn((), (Delete(key),)))
    world.server.commit(Txn((), (Put(key, value),)))
    follower.view = apply_range(follower.view, follower.keys, key, world.server.read(key), world.now)
    assert follower.view.leader_node is None


def test_who_was_fenced_for_silence_is_not_fenced_again_for_it() -> None:
    """L8: below the minimum, a node that was silent and comes back completes the next generation."""
    world = running(4, min_nodes=4)
    quiet = world.members["n3"]
    quiet.silent = True
    world.members["n1"].fail(collateral=True)
    world.settle()
    assert "n3" not in world.members["n0"].view.members
    quiet.silent = False
    quiet.fail(collateral=True)
    world.pass_time(12.0)
    assert world.generations()[-1] > 1
    assert world.members["n0"].ran[-1][0].nodes == 4


def test_a_leader_that_sees_nobody_at_all_comes_back() -> None:
    """E08: all member keys are deleted while the leader looks; it registers again instead of giving up."""
    world = running(1)
    world.server.commit(Txn((), (Delete("/elasticrt/run/members/"),)))
    world.settle()
    assert world.generations() == [1]
    assert "n0" in world.members["n0"].view.members


def test_a_new_leader_gives_missing_keys_their_whole_lease_term() -> None:
    """L7: after all leases were lost the first to register leads; who is a little slower is not taken for lost."""
    world = running(3)
    world.pass_time(10.0)
    for member in world.members.values():
        world.server.revoke(member.member.lease_id)
        member.me = replace(member.me, lease="lost")
    for _ in range(50):
        world.members["n1"].step()
    assert world.members["n1"].view.is_leader
    world.settle()
    assert world.generations() == [1]


def test_old_news_do_not_take_back_what_a_node_has_written() -> None:
    """S5: a watch tells late that a handover was given up; the one that its reader has asked for since stands."""
    world = running(2)
    leader = world.members["n0"]
    ask = WriteHandover("hold", HandoverRecord(generation=1, cause="n2 joined"))
    assert leader.run(leader.member.carry_out(ask))
    assert leader.run(leader.member.carry_out(WithdrawHandover("a test")))
    assert leader.view.handover is None
    assert leader.run(leader.member.carry_out(ask))
    mine = leader.view.handover
    assert mine is not None
    while leader.notices:
        leader.member.handle(leader.notices.popleft(), world.now)
        assert leader.view.handover == mine
    assert leader.view.written_revisions == {}
    assert leader.run(leader.member.carry_out(WithdrawHandover("a test")))


def test_a_leader_knows_what_it_has_reported_itself() -> None:
    """S18: it decides by its own newest report at once, however late its watch delivers it.

    When the report changes, the failure is as old as before: nobody is asked again for it. Another status is new.
    """
    world = running(2)
    leader = world.members["n0"]
    leader.fail()
    assert isinstance(leader.member.decide(world.now), WriteReport)
    assert leader.run(leader.member.carry_out(leader.member.decide(world.now)))
    first = leader.view.reports["n0"]
    assert first.record == leader.me.report
    world.now += 1.0
    leader.me = replace(leader.me, report=first.record.model_copy(update={"ready": 1}))
    assert leader.run(leader.member.carry_out(leader.member.decide(world.now)))
    newer = leader.view.reports["n0"]
    assert newer.record == leader.me.report
    assert (newer.since, newer.create_revision) == (first.since, first.create_revision)
    leader.me = replace(leader.me, report=newer.record.model_copy(update={"status": "holding"}))
    assert leader.run(leader.member.carry_out(leader.member.decide(world.now)))
    assert leader.view.reports["n0"].since == world.now > first.since


class LateStore(MemoryStore):
    """A client whose first transaction gets no answer, and takes effect only before its `nth` read after that."""

    def __init__(self, world: World, nth: int) -> None:
        super().__init__(world.server)
        self.nth = nth
        self.late: Txn | None = None
        self.arrived: TxnResult | None = None

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`."""
        if self.late is None:
            self.late = txn
            raise StoreUnavailable("no answer")
        return super().commit(txn)

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        if self.late is not None and self.arrived is None:
            self.nth -= 1
            if self.nth == 0:
                self.arrived = super().commit(self.late)
        return super().read(range_, limit=limit, by_create=by_create)


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_registration_that_arrives_late_is_the_same_registration(nth: int) -> None:
    """N09: it brings this node's own options into the run, whichever of the next try's reads it comes before."""
    world = running(1)
    world.server.revoke(world.members["n0"].member.lease_id)
    other = World(spec(max_nodes=3))
    other.server = world.server
    member = VirtualMember(other, "n1")
    member.connect(LateStore(other, nth))
    assert member.enter() is None
    assert member.me.spec.max_nodes == 3
    assert member.store.read("/elasticrt/run/members/").keys[0].key.endswith("/n1")


def test_of_two_who_see_nobody_alive_one_is_refused() -> None:
    """A15: two register in the same moment, one with the options of before; the other does not replace them."""
    world = running(1)
    world.server.revoke(world.members["n0"].member.lease_id)
    other = World(spec(max_nodes=3))
    other.server = world.server
    slow = VirtualMember(other, "n1")
    slow.connect(LateStore(other, 1))
    with pytest.raises(StoreError, match="no answer"):
        slow.enter(wait_s=0.0)
    assert VirtualMember(world, "n2").enter() is None
    slow.store.read("/")
    assert slow.store.arrived is not None
    assert not slow.store.arrived.succeeded


def test_a_key_that_is_newer_than_a_report_counts() -> None:
    """S18: a node that was cut off registers before it reports again, so an old report may be wrong by then."""
    view = running(2).members["n0"].view
    entry = view.members["n1"]
    filed = Stored(
        Report(generation=view.generation_number, node="n1", incarnation=entry.record.incarnation, status="failed",
               failure=FAILURE, ready=1, has_state=True),
        create_revision=1, mod_revision=entry.mod_revision + 1, since=0.0,
    )  # fmt: skip
    newer = replace(view, reports_by_key={"n1": filed})
    assert as_reported(newer, entry).record.has_state
    older = replace(view, reports_by_key={"n1": replace(filed, mod_revision=entry.mod_revision - 1)})
    assert not as_reported(older, entry).record.has_state


@pytest.mark.parametrize(("in_place", "told", "ready"), [(True, False, 2), (True, True, 1), (False, False, 1)])
def test_a_seat_counts_until_its_node_tells_that_it_has_taken_it(in_place: bool, told: bool, ready: int) -> None:
    """L9: the report that the seat was made of went with its generation, and the key is older."""
    view = running(2).members["n0"].view
    assert view.generation is not None
    record = view.generation.record.model_copy(update={"in_place": in_place})
    seats = {**view.seats, "n1": view.seats["n1"].model_copy(update={"workers": 2})}
    view = replace(view, generation=replace(view.generation, record=record), seats=seats)
    entry = view.members["n1"]
    key = entry.record.model_copy(update={"ready": 1, "generation": view.generation_number - (not told)})
    assert as_reported(view, replace(entry, record=key)).record.ready == ready


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_node_whose_workers_have_failed_keeps_its_life_while_the_kernel_takes_them_apart(node: str) -> None:
    """L7: a GPU's memory is given back late: the others agree, the node waits for its seat in the same life."""
    plan = story("reaped late", 3, Fault(6.0, "worker_killed", node), in_place=True, loops=True, reap_s=0.3)
    assert "Rejoin" not in simulate(plan).log


def test_a_head_that_is_deleted_ends_the_run() -> None:
    """E17: nothing could be saved any more, as the record of what was saved before is gone: data lost, exit code 4."""
    world = running(2)
    leader = world.members["n0"]
    keys = leader.keys
    head = Commit(
        step=3, epoch=0, generation=1, nonce="a" * 16, parent="", directory="/ckpt", file="a", digest="d" * 64, size=1
    )
    for operation in (Put(keys.checkpoint, head.to_json().encode()), Delete(keys.checkpoint)):
        leader.store.commit(Txn((), (operation,)))
        world.settle()
    result = leader.view.result
    assert result is not None
    assert (result.code, result.reason) == (4, "the record of the newest checkpoint is gone: data lost")


def test_a_member_whose_key_is_overwritten_is_left_out() -> None:
    """E17: what stands there by hand is nobody's; the others go on without that node, and the key stays."""
    world = running(3)
    leader, key = world.members["n0"], world.members["n0"].keys.member("n2")
    world.members["n2"].crash()
    leader.store.commit(Txn((), (Put(key, b"{garbage"),)))
    world.pass_time(10.0)
    check_ranks(world, 2, ["n0", "n1"])
