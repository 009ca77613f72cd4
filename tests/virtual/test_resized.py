"""The protocol as stories: a live run is changed from outside, by drain and resize."""

from __future__ import annotations

import pytest

from elasticrt.errors import DuplicateError
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.decision import Halt, Rejoin
from elasticrt.rendezvous.records import Member, SpecRecord, decode
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import Txn
from tests.virtual.world import VirtualMember, World, check_ranks, running


def _resize(world: World, least: int, most: int) -> None:
    store = world.members["n0"].store
    keys = world.members["n0"].keys
    found = store.read(keys.spec).keys[0]
    record = decode(SpecRecord, keys.spec, found.value)
    spec = record.spec.model_copy(update={"min_nodes": least, "max_nodes": most})
    txn = transactions.change_spec(keys, record.model_copy(update={"spec": spec, "resized": True}), found.mod_revision)
    assert store.commit(txn).succeeded


def _ask_to_drain(member: VirtualMember) -> None:
    key = member.keys.member(member.name)
    found = member.store.read(key).keys[0]
    record = decode(Member, key, found.value).model_copy(update={"draining": True})
    assert member.store.commit(transactions.drain(member.keys, found, record)).succeeded


def _stop(world: World) -> None:
    """`elasticrt stop`: all that have a key are asked, and the run remembers it, in one transaction."""
    store, keys = world.members["n0"].store, world.members["n0"].keys
    found = store.read(keys.spec).keys[0]
    stopped = decode(SpecRecord, keys.spec, found.value).model_copy(update={"stopped": True})
    asked = [transactions.change_spec(keys, stopped, found.mod_revision)]
    for key in store.read(keys.members).keys:
        record = decode(Member, key.key, key.value).model_copy(update={"draining": True})
        asked.append(transactions.drain(keys, key, record))
    whole = Txn(
        tuple(compare for each in asked for compare in each.compares),
        tuple(operation for each in asked for operation in each.operations),
        why="stop",
    )
    assert store.commit(whole).succeeded


def _step(world: World, step: int) -> None:
    for member in world.members.values():
        member.entered = step


def test_a_node_that_is_asked_to_drain_hands_over_and_leaves() -> None:
    """Drained from outside it does what it does after SIGTERM: nobody loses a step, its lease stays its own."""
    world = running(3)
    _step(world, 5)
    leases = {name: member.member.lease_id for name, member in world.members.items()}
    _ask_to_drain(world.members["n1"])
    world.settle()
    check_ranks(world, 2, ["n0", "n2"])
    generation, _ = world.members["n0"].ran[-1]
    assert generation.memory is not None
    assert (generation.kind, generation.memory.step) == ("drain", 5)
    assert not world.members["n1"].alive
    assert leases == {name: member.member.lease_id for name, member in world.members.items()}


def test_a_run_that_may_have_fewer_nodes_hands_over_to_those_with_the_lowest_ranks() -> None:
    """The surplus stands by: it neither leaves nor loses anybody a step."""
    world = running(3)
    _step(world, 5)
    _resize(world, 1, 2)
    world.settle()
    check_ranks(world, 2, ["n0", "n1"])
    generation, _ = world.members["n0"].ran[-1]
    assert generation.memory is not None
    assert (generation.kind, generation.memory.step) == ("resize", 5)
    assert any(isinstance(decision, Rejoin) for decision in world.members["n2"].story)
    world.pass_time(5.0)
    assert world.members["n2"].ended is None
    assert world.generations() == [1, 2]


def test_a_run_that_may_have_more_nodes_takes_its_standby_nodes() -> None:
    """Nodes above max-nodes wait; after a resize they join by a handover."""
    world = running(2, max_nodes=2)
    _step(world, 5)
    world.add("n2")
    world.pass_time(2.0)
    assert world.generations() == [1]
    _resize(world, 1, 3)
    world.pass_time(2.0)
    check_ranks(world, 2, ["n0", "n1", "n2"])
    assert world.members["n0"].ran[-1][0].memory is not None


def test_newcomers_to_a_resized_run_need_not_know_its_size() -> None:
    """Who comes with the first command line is let in under the options as they are now; any other option counts."""
    world = running(2, max_nodes=2)
    first = world.spec
    _resize(world, 1, 3)
    world.settle()
    late = VirtualMember(world, "n2")
    assert late.enter() is None
    assert (late.me.spec.max_nodes, first.max_nodes) == (3, 2)
    world.spec = RunSpec(**{**first.model_dump(), "command": ("script", "other.py")})
    with pytest.raises(DuplicateError, match=r"command: .* here"):
        VirtualMember(world, "n3").enter()


def test_newcomers_with_another_size_are_refused_unless_it_was_changed() -> None:
    """Two command lines that disagree are a mistake as long as nobody has resized the run."""
    world = running(2, max_nodes=2)
    world.spec = RunSpec(**{**world.spec.model_dump(), "max_nodes": 3})
    with pytest.raises(DuplicateError, match="--max-nodes"):
        VirtualMember(world, "n2").enter()


def test_other_options_than_the_number_of_nodes_still_end_a_member() -> None:
    """A member that finds another command in the store must not go on (S1)."""
    world = running(1)
    store, keys = world.members["n0"].store, world.members["n0"].keys
    found = store.read(keys.spec).keys[0]
    record = decode(SpecRecord, keys.spec, found.value)
    other = record.model_copy(update={"spec": record.spec.model_copy(update={"command": ("script", "x.py")})})
    assert store.commit(transactions.change_spec(keys, other, found.mod_revision)).succeeded
    world.settle()
    assert isinstance(world.members["n0"].ended, Halt)


def test_who_is_cut_off_when_the_run_is_stopped_does_not_go_on_alone() -> None:
    """N03: it hears of the stop when it is back, though all others have left long ago, and leaves as well."""
    world = running(3)
    _step(world, 5)
    world.members["n2"].silent = True
    world.pass_time(6.0)
    assert "n2" not in world.members["n0"].view.members
    before = len(world.generations())
    _stop(world)
    world.pass_time(6.0)
    assert not world.members["n0"].alive
    assert not world.members["n1"].alive
    world.members["n2"].silent = False
    world.pass_time(30.0)
    assert not world.members["n2"].alive
    assert len(world.generations()) <= before + 1, "none but the one in which the state is saved"


def test_who_comes_while_a_run_stops_leaves_with_it() -> None:
    """A node that has been setting up meanwhile does not go on without the others."""
    world = running(2)
    _step(world, 5)
    world.members["n1"].silent = True  # So that the run is still there.
    _stop(world)
    world.add("late", warm=False)
    world.pass_time(1.0)
    assert not world.members["late"].alive
    world.members["n1"].silent = False
    world.pass_time(30.0)
    assert not any(member.alive for member in world.members.values())


def test_a_stopped_run_goes_on_when_it_is_submitted_again() -> None:
    """The first node that comes when no other lives takes the stop back."""
    world = running(2)
    _step(world, 5)
    _stop(world)
    world.pass_time(30.0)
    assert not any(member.alive for member in world.members.values())
    again = world.add("n7")
    world.pass_time(5.0)
    record = again.view.spec
    assert record is not None
    assert (record.record.stopped, record.record.attempt) == (False, 1)
    assert again.ran
