"""When an embedded server ends: members are counted, and whoever may soon be one."""

from __future__ import annotations

from elasticrt.store.embedded_keeper import SILENT_S, ServerDemand
from elasticrt.store.protocol import Delete, Put, Txn
from tests.memory_store import MemoryServer, MemoryStore


def test_members_are_counted() -> None:
    """A run needs its server while it has members, a while after the last, and a while after an agent has found it."""
    store = MemoryStore(MemoryServer(lambda: 0.0))
    silent: list[str] = []

    def has_keys(prefix: str) -> bool:
        if silent:
            raise ConnectionRefusedError(prefix)
        return bool(store.read(prefix, limit=1).keys)

    demand = ServerDemand(has_keys, "r", 100.0)

    def commit(*operations: Put | Delete) -> None:
        store.commit(Txn((), operations))

    assert [demand.is_over(1, now) for now in (100.0, 129.9, 130.0)] == [False, False, True], "the first takes its time"
    commit(Put("/elasticrt/r/members/a", b""), Put("/elasticrt/other/members/x", b""))
    assert not demand.is_over(1, 200.0)
    commit(Delete("/elasticrt/r/members/a"))
    assert [demand.is_over(1, now) for now in (229.9, 230.0)] == [False, True]
    assert [demand.is_over(2, now) for now in (231.0, 260.9, 261.0)] == [False, False, True], "somebody has found it"
    commit(Put("/elasticrt/r/result/1", b""))
    assert [demand.is_over(3, now) for now in (262.0, 266.9, 267.0)] == [False, False, True]
    commit(Put("/elasticrt/r/members/a", b""))
    demand.note_leaving(500.0)
    assert not demand.is_over(3, 300.0)
    commit(Delete("/elasticrt/r/members/a"))
    assert demand.is_over(3, 300.1)
    commit(Put("/elasticrt/r/members/a", b""))
    silent.append("it does not answer")
    assert [demand.is_over(3, now) for now in (400.0, 500.0)] == [False, True], "until the members must have left"
    demand = ServerDemand(has_keys, "r", 1000.0)
    assert [demand.is_over(3, now) for now in (1000.0 + SILENT_S - 1.0, 1000.0 + SILENT_S)] == [False, True]


def test_a_run_with_its_result_needs_no_server() -> None:
    """Soon after the last member has left it is over; who has just found the server gets time to register."""
    store = MemoryStore(MemoryServer(lambda: 0.0))
    store.commit(Txn((), (Put("/elasticrt/r/members/a", b""), Put("/elasticrt/r/result/1", b""))))
    demand = ServerDemand(lambda prefix: bool(store.read(prefix, limit=1).keys), "r", 0.0)
    assert not demand.is_over(1, 100.0)
    store.commit(Txn((), (Delete("/elasticrt/r/members/a"),)))
    assert [demand.is_over(1, now) for now in (104.9, 105.0)] == [False, True]
    assert [demand.is_over(2, now) for now in (106.0, 110.9, 111.0)] == [False, False, True], "found at 106 s"
    store.commit(Txn((), (Put("/elasticrt/r/members/a", b""),)))
    assert not demand.is_over(2, 200.0)
    store.commit(Txn((), (Delete("/elasticrt/r/members/a"),)))
    assert [demand.is_over(2, now) for now in (204.9, 205.0)] == [False, True]
