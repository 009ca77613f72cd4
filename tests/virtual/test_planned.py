"""The protocol as stories: nodes that come and go without the loss of a step, by handover."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.decision import Leave, WriteHandover
from tests.virtual.world import VirtualMember, World, check_ranks, running


def _enter_steps(world: World, **entered: int) -> None:
    for name, step in entered.items():
        world.members[name].entered = step


def _drain(member: VirtualMember) -> None:
    member.me = replace(member.me, record=member.me.record.model_copy(update={"draining": True}))


def _failure(name: str) -> Failure:
    return Failure(rank=1, code=1, collateral=False, summary=f"rank 1 on {name}")


def test_a_join_with_loops_loses_no_step() -> None:
    """All hold, the furthest step is agreed, all leave after it, and the next generation resumes from a copy of it."""
    world = running(2)
    _enter_steps(world, n0=7, n1=8)
    world.add("n2")
    world.pass_time(1.0)
    check_ranks(world, 2, ["n0", "n1", "n2"])
    generation, _ = world.members["n0"].ran[-1]
    assert generation.memory is not None
    assert (generation.memory.step, generation.kind) == (8, "join")
    assert world.members["n0"].view.handover is None


def test_a_drained_node_hands_over_and_leaves() -> None:
    """A draining member gets no seat in the next generation, which resumes from the agreed step; then it leaves."""
    world = running(3)
    _enter_steps(world, n0=4, n1=5, n2=4)
    _drain(world.members["n0"])  # Rank 0 and the leader.
    world.settle()
    check_ranks(world, 2, ["n1", "n2"])
    generation, seat = world.members["n1"].ran[-1]
    assert generation.memory is not None
    assert (generation.memory.step, generation.kind, seat.rank_offset) == (5, "drain", 0)
    assert not world.members["n0"].alive


def test_the_last_node_saves_before_it_leaves() -> None:
    """K01: when too few would remain, the agreed step goes to disk, and the draining members leave."""
    world = running(2)
    _enter_steps(world, n0=4, n1=4)
    for name in ("n0", "n1"):
        _drain(world.members[name])
    world.settle()
    assert [member.alive for member in world.members.values()] == [False, False]
    asked = [d.handover for m in world.members.values() for d in m.story if isinstance(d, WriteHandover)]
    assert asked[-1].save
    left = {d for member in world.members.values() for d in member.story if isinstance(d, Leave)}
    assert left == {Leave(f"drained: too few nodes are left to go on after step {asked[-1].step}", asked[-1].step)}
    assert world.generations() == [1]


@pytest.mark.parametrize("late", ["hold", "go"])
def test_nodes_that_are_told_one_after_the_other_save_before_they_leave(late: str) -> None:
    """K04: the second hears of it when the first is handing over already: together they save all the same."""
    world = running(2)
    _enter_steps(world, n0=4, n1=4)
    first, second = world.members["n0"], world.members["n1"]
    _drain(first)
    for _ in range(100):
        asked = first.view.handover
        if asked is not None and (late == "hold" or asked.record.step):
            break
        assert first.step() or second.step()
    _drain(second)
    world.settle()
    assert [first.alive, second.alive] == [False, False]
    asked = [d.handover for d in first.story if isinstance(d, WriteHandover)]
    assert asked[-1].save
    # Once the step has been agreed without it, they go on from that step's copy to save.
    resumed = [generation.memory.step for generation, _ in first.ran[1:] if generation.memory is not None]
    assert resumed == ([4] if late == "go" else [])


def test_a_failure_voids_a_handover() -> None:
    """A worker that fails while others hold: the generation is replaced as after any failure."""
    world = running(2)
    _enter_steps(world, n0=7, n1=7)
    stubborn = world.members["n1"]
    newcomer = world.add("n2")
    newcomer.step()
    world.now += 1.0
    stubborn.fail()
    world.settle()
    check_ranks(world, 2, ["n0", "n1", "n2"])
    assert world.members["n0"].ran[-1][0].kind == "failure"


def test_a_node_that_does_not_answer_a_hold_is_not_waited_for_long() -> None:
    """Two seconds without an answer, and the workers go on without the newcomer; it is let in when all answer."""
    world = running(2)
    _enter_steps(world, n0=7, n1=7)
    world.members["n1"].silent = True
    world.add("n2")
    world.pass_time(4.0)
    assert world.generations() == [1]
    assert "given up: n1 did not answer" in [each.reason for each in world.members["n0"].story]
    world.members["n1"].silent = False
    world.pass_time(4.0)
    assert 2 in world.generations()


def test_a_failure_after_a_handover_goes_back_to_its_step() -> None:
    """Before anything is committed, the copy that a generation resumed from serves the next one as well."""
    world = running(2)
    _enter_steps(world, n0=7, n1=7)
    world.add("n2")
    world.pass_time(1.0)
    kept = world.members["n0"].ran[-1][0].memory
    assert kept is not None
    world.members["n1"].report("failed", _failure("n1"), memory=kept)
    world.pass_time(1.0)
    check_ranks(world, 3, ["n1", "n0", "n2"])
    generation, seat = world.members["n1"].ran[-1]
    assert (generation.memory, generation.kind, seat.rank_offset) == (kept, "failure", 0)
