"""When an embedded server ends, as a table; and that the members are counted right."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from elasticrt.store.idle_shutdown import IdleShutdown, ends_at
from elasticrt.store.protocol import Broken, Delete, Put, Txn
from elasticrt.testing.memory_store import MemoryServer, MemoryStore


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1, False, 0.0, 0.0, 30.0), None),
        ((5, True, 0.0, 0.0, 30.0), None),
        ((0, False, 100.0, 0.0, 30.0), 130.0),
        ((0, False, 100.0, 120.0, 30.0), 150.0),
        ((0, True, 100.0, 0.0, 30.0), 101.0),
        # An agent of the same run id that has just found the server of the ended run needs time to register.
        ((0, True, 100.0, 99.0, 30.0), 104.0),
        ((0, True, 100.0, 100.0, 0.3), 100.3),
    ],
)
def test_end(given: tuple[int, bool, float, float, float], expected: float | None) -> None:
    """Never while there are members; a linger time after the last left or somebody asked; soon after a result."""
    members, result, left_at, found_at, linger_s = given
    ends = ends_at(members=members, result=result, left_at=left_at, found_at=found_at, linger_s=linger_s)
    assert ends == expected


def test_members_are_followed() -> None:
    """Members and results are counted from what the store says, through every kind of notice."""
    server = MemoryServer(lambda: 0.0)
    store = MemoryStore(server)
    news: SimpleQueue[Any] = SimpleQueue()
    attendance = IdleShutdown(store, "r", 0.0, news)

    def settle() -> bool:
        """Take in all news; whether the server is needed then."""
        news.put("done")
        assert attendance.wait() == "done"
        return attendance.due() is None

    def commit(*operations: Put | Delete) -> None:
        store.commit(Txn((), operations))

    commit(Put("/elasticrt/r/members/a", b""), Put("/elasticrt/other/members/x", b""))
    attendance.look()
    assert settle()
    commit(Delete("/elasticrt/r/members/a"))
    assert not settle()
    commit(Put("/elasticrt/r/members/b", b""))
    commit(Delete("/elasticrt/r/members/b"))
    commit(Put("/elasticrt/r/members/b", b""))
    assert settle()
    # A second reading makes the news that are still in the queue old.
    commit(Put("/elasticrt/r/members/c", b""))
    commit(Delete("/elasticrt/r/members/", prefix=True))
    attendance.look()
    assert not settle()
    news.put(Broken("no server"))
    assert not settle()
    commit(Put("/elasticrt/r/members/d", b""))
    server.replace("another")
    commit(Put("/elasticrt/r/members/e", b""))
    assert settle()
    commit(Put("/elasticrt/r/result/1", b""), Delete("/elasticrt/r/members/e"))
    assert not settle()


def test_nobody_comes() -> None:
    """Without members the waiting ends by itself."""
    attendance = IdleShutdown(MemoryStore(MemoryServer(lambda: 0.0)), "r", 0.05, SimpleQueue())
    attendance.look()
    assert attendance.wait() == ""
