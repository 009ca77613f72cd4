"""When an embedded server ends, as a table; and that the members are counted right."""

from __future__ import annotations

import pytest

from elasticrt.store.embedded_supervisor import Need, ends_at
from elasticrt.store.protocol import Delete, Put, Txn
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


def test_members_are_counted() -> None:
    """A run needs its server while it has members, a while after the last, and a while after an agent has found it."""
    server = MemoryServer(lambda: 0.0)
    store = MemoryStore(server)
    need = Need(store, "r", 2.0, 100.0)

    def commit(*operations: Put | Delete) -> None:
        store.commit(Txn((), operations))

    assert [need.over(1, now) for now in (100.0, 104.9, 105.0)] == [False, False, True], "the first takes its time"
    commit(Put("/elasticrt/r/members/a", b""), Put("/elasticrt/other/members/x", b""))
    assert not need.over(1, 200.0)
    commit(Delete("/elasticrt/r/members/a"))
    assert [need.over(1, now) for now in (201.9, 202.0)] == [False, True]
    assert [need.over(2, now) for now in (203.0, 204.9, 205.0)] == [False, False, True], "somebody has found it"
    commit(Put("/elasticrt/r/result/1", b""))
    assert [need.over(3, now) for now in (206.0, 207.9, 208.0)] == [False, False, True]
    commit(Put("/elasticrt/r/members/a", b""))
    need.leave()
    assert not need.over(3, 300.0)
    commit(Delete("/elasticrt/r/members/a"))
    assert need.over(3, 300.1)
    commit(Put("/elasticrt/r/members/a", b""))
    store.close()
    assert not need.over(3, 400.0), "a store that does not answer is needed"
