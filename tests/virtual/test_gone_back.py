"""A store that has forgotten what it had acknowledged, as one restored from a backup has: nothing is built upon it."""

from __future__ import annotations

from dataclasses import replace

from elasticrt.errors import EXIT_STORE
from elasticrt.rendezvous.decide import decide
from elasticrt.rendezvous.decision import End, Finish, Halt
from elasticrt.store.protocol import RangeRead
from tests.memory_store import MemoryStore
from tests.virtual.world import running


class Restored(MemoryStore):
    """Answers as a store does that is some revisions younger."""

    def read(self, range_: str, *, limit: int = 0, by_create: bool = False) -> RangeRead:
        """See `protocol.Store`."""
        found = super().read(range_, limit=limit, by_create=by_create)
        return replace(found, revision=found.revision - 1)


def test_who_sees_the_store_go_back_stops() -> None:
    """E20, E05: a read that is older than what was read before is proof; the leader ends the run for all, code 4."""
    world = running(2)
    leader, follower = world.members["n0"], world.members["n1"]
    for member in (leader, follower):
        assert not member.view.data_loss
        member.connect(Restored(world.server))
        member.run(member.member.replica.refresh())
        assert "was at" in member.view.data_loss
    finish = decide(leader.me, leader.view, world.now)
    assert isinstance(finish, Finish)
    assert (finish.status, finish.code) == ("failed", EXIT_STORE)
    assert "data lost" in finish.reason
    halt = decide(follower.me, follower.view, world.now)
    assert isinstance(halt, Halt)
    assert halt.code == EXIT_STORE


def test_who_does_not_see_it_is_told() -> None:
    """E20: one member alone has seen more than the store knows now: it leads, and the others end with its result."""
    world = running(2)
    leader = world.members["n0"]
    leader.connect(Restored(world.server))
    leader.run(leader.member.replica.refresh())
    world.settle()
    for member in world.members.values():
        assert isinstance(member.ended, End)
        assert member.ended.result.code == EXIT_STORE
    assert world.generations() == [1]
