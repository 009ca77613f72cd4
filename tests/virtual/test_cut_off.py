"""Members that are cut off from etcd or from each other: who is left out, who lets others lead, who comes back how."""

from __future__ import annotations

from dataclasses import replace

from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import Fence, Probe, Rejoin, Wait
from elasticrt.store.lease_session import SessionState
from tests.virtual.world import World, running, spec


def _world(nodes: int, **changes: object) -> World:
    """A world in which `nodes` members run generation 1."""
    world = World(spec(max_nodes=nodes, **changes))
    for index in range(nodes):
        world.add(f"n{index}")
    world.settle()
    return world


def _newest(world: World) -> list[str]:
    """Who has a seat in the newest generation."""
    number = max(world.generations())
    return sorted(name for name, member in world.members.items() if member.ran[-1][0].number == number)


def test_a_follower_that_nobody_reaches_is_left_out_once() -> None:
    """N02: fenced, it registers again at once (etcd it reaches); it is not let in before it answers."""
    world = _world(3)
    world.cuts = [{"n2", "n0"}, {"n2", "n1"}]
    for member in world.members.values():
        member.fail(collateral=True)
    world.settle()
    world.pass_time(20.0)
    assert world.generations() == [1, 2]
    assert _newest(world) == ["n0", "n1"]
    assert "n2" in world.members["n0"].view.members
    world.cuts = []
    world.pass_time(6.0)
    assert _newest(world) == ["n0", "n1", "n2"]
    assert world.generations() == [1, 2, 3]


def test_who_was_out_of_reach_is_asked_again_while_it_is_needed() -> None:
    """N02: below the minimum the leader waits for a node that did not answer, and asks it once a lease term.

    It neither gives up on it (the run would end at its deadline, with every node alive) nor asks it all the time.
    """
    world = _world(3, min_nodes=3)
    world.cuts = [{"n2", "n0"}, {"n2", "n1"}]
    for member in world.members.values():
        member.fail(collateral=True)
    world.settle()
    world.pass_time(22.0)
    assert world.generations() == [1]
    again = [d for d in world.members["n0"].story if isinstance(d, Probe) and d.reason == "can they be reached by now?"]
    assert 3 <= len(again) <= 5, "once in five seconds"
    world.cuts = []
    world.pass_time(5.5)
    assert world.generations() == [1, 2]
    assert _newest(world) == ["n0", "n1", "n2"]


def test_a_leader_that_nobody_reaches_lets_another_lead() -> None:
    """N02: it hears neither of the others and evicts nobody; they fence it, and go on at once though it registers."""
    world = _world(3)
    world.cuts = [{"n0", "n1"}, {"n0", "n2"}]
    for member in world.members.values():
        member.fail(collateral=True)
    world.settle()
    assert not any(isinstance(decision, Fence) for decision in world.members["n0"].story)
    assert _newest(world) == ["n1", "n2"]
    world.pass_time(20.0)
    assert any(isinstance(decision, Rejoin) for decision in world.members["n0"].story)
    assert world.generations() == [1, 2]
    assert world.members["n1"].life == world.members["n2"].life == 0, "the healthy majority keeps its lives"
    world.cuts = []
    world.pass_time(6.0)
    assert _newest(world) == ["n0", "n1", "n2"]


def test_two_halves_that_both_reach_etcd_settle_on_one() -> None:
    """N02, S1: two of four hear each other only; the leader's half goes on, the other waits to be reachable."""
    world = _world(4)
    world.cuts = [{a, b} for a in ("n0", "n1") for b in ("n2", "n3")]
    for member in world.members.values():
        member.fail(collateral=True)
    world.settle()
    world.pass_time(6.0)
    assert _newest(world) == ["n0", "n1"]
    assert world.members["n0"].life == world.members["n1"].life == 0
    world.pass_time(34.0)
    assert world.generations() == [1, 2]
    world.cuts = []
    world.pass_time(6.0)
    assert _newest(world) == ["n0", "n1", "n2", "n3"]


def test_left_out_is_fenced_whether_workers_run_or_not() -> None:
    """N01: a member whose workers have failed meanwhile comes back as somebody new as well (identity, rule 2)."""
    world = _world(2)
    cut_off = world.members["n1"]
    cut_off.silent = True  # It keeps nothing alive and hears nothing.
    world.pass_time(12.0)
    assert world.generations() == [1, 2]
    cut_off.me = replace(cut_off.me, running_generation=0)
    cut_off.silent = False
    cut_off.step()
    assert cut_off.life == 1


def test_whose_lease_is_overdue_asks_its_peers_although_etcd_has_answered_since() -> None:
    """What comes after one answer may be out of reach again, and peers may be in a newer generation."""
    world = running(2)
    member, now = world.members["n0"].member, world.clock()
    assert not member.seats_to_ask(now)
    member.handle(SessionState("suspended", member.lease_id, "no answer"), now)
    member.outage.end(now)
    assert [seat.node for seat in member.seats_to_ask(now)] == ["n1"]
    assert member.outage.alone_since == now
    member.handle(SessionState("connected", member.lease_id, "etcd answers"), now)
    assert not member.seats_to_ask(now + 1.0)
    assert member.outage.alone_since is None


def test_a_member_without_etcd_stops_when_a_peer_has_moved_on() -> None:
    """Own lease, first row: suspended, workers run on; a peer names a newer generation, and they are ended."""
    world = _world(2)
    member = world.members["n1"]
    suspended = replace(member.me, lease="suspended")
    view = member.view
    assert isinstance(decide(suspended, view, world.clock()), Wait)
    assert isinstance(decide(replace(suspended, heard_generation=1), view, world.clock()), Wait)
    assert isinstance(decide(replace(suspended, heard_generation=2), view, world.clock()), Rejoin)
    assert isinstance(
        decide(replace(suspended, heard_generation=2, running_generation=0, seated_generation=0), view, world.clock()),
        Wait,
    )
