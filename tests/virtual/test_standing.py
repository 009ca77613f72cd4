"""The protocol as stories: steps that stand still, because a node has lost its power, or for no reason at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.decide import STACKS_GRACE_S
from elasticrt.rendezvous.decision import End, Fence, Probe
from elasticrt.rendezvous.member import ProbeResult
from elasticrt.rendezvous.view import Verdict
from tests.virtual.world import VirtualMember, World, check_ranks, running


def _stand(world: World, *names: str) -> None:
    """The steps of these nodes' workers stand still from now on."""
    for name in names:
        world.members[name].me = replace(world.members[name].me, standing_since=world.now)


def _go_on(world: World) -> None:
    for member in world.members.values():
        member.me = replace(member.me, standing_since=None)


def _fenced(world: World) -> list[str]:
    """Whom anybody has fenced, in the order of members and of their decisions."""
    stories = [decision for member in world.members.values() for decision in member.story]
    return [decision.member.record.node for decision in stories if isinstance(decision, Fence)]


def _long_after_a_silence() -> World:
    """Two, of whom one was silent for a moment while steps stood; both have gone on for half a minute since."""
    world = running(2)
    world.cuts.append({"n0", "n1"})
    _stand(world, "n0", "n1")
    world.pass_time(3.0)
    world.cuts.clear()
    _go_on(world)
    world.pass_time(30.0)
    return world


def _rounds(member: VirtualMember) -> int:
    return sum(isinstance(decision, Probe) for decision in member.story)


def test_a_node_without_power_is_fenced_before_its_lease_ends() -> None:
    """N11, L1: nobody fails and nobody is told; the steps stand, the silent one is asked, and the others go on."""
    world = running(3)
    world.members["n2"].silent = True
    _stand(world, "n0", "n1")
    before = world.now
    world.settle()
    assert world.now == before, "its lease has not ended"
    check_ranks(world, 2, ["n0", "n1"])
    generation, _ = world.members["n0"].ran[-1]
    assert (generation.kind, generation.restarts.total) == ("lost", 0)


def test_steps_that_stand_among_the_living_cost_one_question_each() -> None:
    """L6, L8: all answer: the stand is somebody's long step. Nothing is asked again before steps have gone on."""
    world = running(4)
    rounds = {name: _rounds(member) for name, member in world.members.items()}
    for stand in (1, 2):
        _stand(world, *world.members)
        world.pass_time(30.0)
        assert {name: _rounds(world.members[name]) - before for name, before in rounds.items()} == dict.fromkeys(
            rounds, stand
        )
        _go_on(world)
        world.pass_time(1.0)
    assert world.generations() == [1]


def test_moving_steps_cost_no_question() -> None:
    """L6: in the steady state nobody asks anybody."""
    world = running(4)
    before = {name: _rounds(member) for name, member in world.members.items()}
    world.pass_time(60.0)
    assert {name: _rounds(member) for name, member in world.members.items()} == before


@pytest.mark.parametrize(("nodes", "cut_off", "after_s"), [(3, 1, 0.0), (2, 1, 5.0), (4, 2, 5.0), (6, 3, 5.0)])
def test_a_node_that_registers_again_at_once_is_left_out_all_the_same(nodes: int, cut_off: int, after_s: float) -> None:
    """N02, L1: etcd tells the fenced at once, and they register before the others have new seats; none waits for it."""
    world = running(nodes, max_nodes=nodes)
    names = sorted(world.members)
    here, there = names[:-cut_off], names[-cut_off:]
    world.cuts = [{a, b} for a in here for b in there]
    _stand(world, *names)
    world.pass_time(after_s + 0.5)
    check_ranks(world, 2, here)
    assert all(world.members[name].life == 0 for name in here), "nobody healthy begins anew"
    world.pass_time(20.0)
    assert world.generations() == [1, 2], "who cannot be reached is not let in again and again"


def test_of_two_the_silent_one_has_a_lease_term() -> None:
    """N02: neither can tell whose fault the silence is; only after a lease term in which etcd kept both one is out."""
    world = running(2)
    world.cuts.append({"n0", "n1"})
    _stand(world, "n0", "n1")
    world.pass_time(4.5)
    assert not _fenced(world)
    world.pass_time(1.0)
    assert _fenced(world) == ["n1"]


def test_steps_that_go_on_are_an_answer() -> None:
    """L8: of two, one was silent for a moment; its steps go on, so it is not fenced when the lease term is over."""
    world = _long_after_a_silence()
    assert world.generations() == [1]
    world.members["n1"].silent = True
    _stand(world, "n0")
    world.pass_time(0.25)
    assert world.members["n0"].view.verdicts[world.members["n1"].me.record.incarnation].kind == "silent"


def test_a_silence_of_long_ago_is_no_loss() -> None:
    """L7: of two, one was silent for a moment. When its key goes much later it is asked, and registers again."""
    world = _long_after_a_silence()
    world.server.revoke(world.members["n1"].member.lease_id)
    world.pass_time(10.0)
    assert world.generations() == [1]


def test_a_silence_in_the_last_generation_is_no_loss_in_this_one() -> None:
    """L7: the answer to a question about the last generation comes late; who then loses its key is asked again."""
    world = running(3)
    asked_at = world.now
    world.members["n2"].crash()
    world.members["n1"].fail(collateral=True)
    world.pass_time(1.0)
    assert world.generations() == [1, 2]
    leader, other = world.members["n0"], world.members["n1"]
    late = Verdict("silent", asked_at)
    leader.member.handle(ProbeResult(other.me.record.incarnation, late), world.now)
    world.server.revoke(other.member.lease_id)
    world.pass_time(10.0)
    assert world.generations() == [1, 2]


def test_an_old_answer_does_not_settle_a_new_failure() -> None:
    """A01: a node that answered while steps stood is asked again when workers fail later, and is found to be gone."""
    world = running(3)
    _stand(world, "n0", "n1", "n2")
    world.pass_time(2.0)
    world.members["n2"].crash()
    world.members["n1"].fail(collateral=True)
    before = world.now
    world.settle()
    assert world.now == before
    check_ranks(world, 2, ["n0", "n1"])


def test_a_leader_without_power_is_fenced_by_the_others() -> None:
    """A07, N11: who finds the leader silent asks all others; it is out when most of the generation can be reached."""
    world = running(3)
    world.members["n0"].silent = True
    _stand(world, "n1", "n2")
    before = world.now
    world.settle()
    assert world.now == before, "its lease has not ended"
    check_ranks(world, 2, ["n1", "n2"])
    assert set(_fenced(world)) == {"n0"}


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
def test_a_follower_that_is_cut_off_fences_nobody(nodes: int) -> None:
    """N02, L4: it hears neither the leader nor the others: it is this node whose cable is cut, and it stays quiet."""
    world = running(nodes)
    alone = f"n{nodes - 1}"
    world.cuts += [{alone, name} for name in world.members if name != alone]
    _stand(world, alone)
    world.pass_time(20.0)
    assert _fenced(world) == []
    assert world.generations() == [1]


def test_followers_that_are_cut_off_from_the_leader_in_halves_fence_nobody() -> None:
    """N05: two of four hear only each other: half is no majority, and the leases tell."""
    world = running(4)
    world.cuts += [{near, far} for near in ("n0", "n1") for far in ("n2", "n3")]
    _stand(world, "n2", "n3")
    world.pass_time(20.0)
    assert _fenced(world) == []


def _hang(member: VirtualMember) -> None:
    """This node has seen no step for too long."""
    rank = member.ran[-1][1].rank_offset
    summary = "no progress for 600 s after step 7"
    text = f"rank {rank} on {member.name}:\n" + "  | File train.py, line 7\n" * 200
    member.report("failed", Failure(rank=rank, code=-9, collateral=False, summary=summary, text=text, stalled=True))
    # Its workers hang on, until the next generation.
    member.me = replace(member.me, running_generation=member.me.started_generation)


def test_a_hang_waits_for_all_stacks() -> None:
    """L5, W09: each node finds a hang by its own clock; the next generation comes when all have. It is a restart."""
    world = running(3)
    _hang(world.members["n1"])
    world.pass_time(1.0)
    _hang(world.members["n0"])
    world.pass_time(1.0)
    assert world.generations() == [1]
    _hang(world.members["n2"])
    before = world.now
    world.settle()
    assert world.now == before
    check_ranks(world, 2, ["n0", "n1", "n2"])
    generation, _ = world.members["n0"].ran[-1]
    assert (generation.kind, generation.restarts.total) == ("failure", 1)
    assert "no progress" in generation.cause


def test_a_hang_does_not_wait_for_ever() -> None:
    """L5: a node that takes its time is not waited for longer than a few seconds."""
    world = running(3)
    _hang(world.members["n1"])
    world.pass_time(STACKS_GRACE_S - 0.5)
    assert world.generations() == [1]
    world.pass_time(1.0)
    assert world.generations() == [1, 2]


@pytest.mark.parametrize("nodes", [2, 4])
def test_the_end_after_a_hang_shows_everybodys_stacks(nodes: int) -> None:
    """L5: with the budget spent the run's result has a share of each node's stacks, and still fits."""
    world = running(nodes, max_restarts=0)
    for member in world.members.values():
        _hang(member)
    world.pass_time(1.0)
    ended = world.members["n0"].ended
    assert isinstance(ended, End)
    for name in world.members:
        assert f"on {name}:\n" in ended.result.text


@pytest.mark.parametrize(("saves", "given_up_s"), [(False, 6.0), (True, 13.5)])
def test_a_save_under_way_is_waited_for_as_long_as_the_nodes_have(saves: bool, given_up_s: float) -> None:
    """L7: all nodes are told to leave in a run's last save, which another generation would end and begin once more."""
    world = running(2)
    began = world.now
    for member in world.members.values():
        record = member.me.record.model_copy(update={"ready": 1, "has_state": True, "drain_s": 15.0, "draining": True})
        member.me, member.entered = replace(member.me, record=record, saves=saves), 51
        # The workers hold, and do not come to the agreed step.
        member.report = lambda status, *args, report=member.report, **more: (
            report(status, *args, ready=1, has_state=True, **more) if status != "held" else None
        )
    while world.generations() == [1]:
        world.pass_time(0.25)
        assert world.now < began + 60.0
    assert world.now - began == pytest.approx(given_up_s, abs=1.0)
