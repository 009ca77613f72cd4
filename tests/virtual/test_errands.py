"""Commits whose answers are lost: what a worker is told is what has happened (S8)."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from elasticrt.agent.store_proxy import StoreProxy, StoreRequest
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import ClaimBuild, Reply, Save
from elasticrt.rendezvous.records import Keys
from elasticrt.store.protocol import StoreBlocked, StoreUnavailable, Txn, TxnResult
from tests.memory_store import MemoryServer, MemoryStore


class LossyStore(MemoryStore):
    """Loses the answers of the first transactions; those take effect now, never, or just before the next one."""

    def __init__(self, server: MemoryServer, script: list[str]) -> None:
        super().__init__(server)
        self.script = script
        self.belated: list[Txn] = []

    def commit(self, txn: Txn) -> TxnResult:
        """See `protocol.Store`."""
        for late in self.belated:
            super().commit(late)
        self.belated = []
        how = self.script.pop(0) if self.script else "heard"
        if how in ("full", "forbidden"):
            raise StoreBlocked(f"etcd is {how}")
        if how == "late":
            self.belated.append(txn)
        if how in ("heard", "unheard"):
            done = super().commit(txn)
            if how == "heard":
                return done
        raise StoreUnavailable("no answer")


def _save(script: list[str]) -> tuple[Reply, int]:
    """What a worker is told in the end that asks again as long as the outcome is unsure."""
    server = MemoryServer(lambda: 0.0)
    heads: list[object] = []
    errands = StoreProxy(LossyStore(server, script), Keys("run"), heads.append, "")
    commit = Commit(1, 0, 1, "a" * 16, "", "/ckpt", "step-1", "d" * 64, 1)
    request = Save(1, asdict(commit), "")
    asked = StoreRequest(request, 1, b"", 1, "n0", "b" * 16, 0, lambda _: None)
    while (reply := errands.carry_out(asked)).refusal == "unsure":
        assert not heads
    assert len(heads) == int(reply.ok)
    return reply, len(server.read(Keys("run").checkpoint).keys)


def test_a_commit_that_happened_unheard_is_found() -> None:
    """The answer is lost, the effect is there: reading back says so."""
    assert _save(["unheard"]) == (Reply(1, True), 1)


def test_a_commit_of_another_generation_is_refused() -> None:
    """S2: a worker that asked, and was given another generation before its agent had read that, has not committed."""
    commit = Commit(1, 0, 1, "a" * 16, "", "/ckpt", "step-1", "d" * 64, 1)
    server = MemoryServer(lambda: 0.0)
    errands = StoreProxy(server, Keys("run"), lambda _: None, "")
    reply = errands.carry_out(StoreRequest(Save(1, asdict(commit), ""), 2, b"", 1, "n0", "b" * 16, 0, lambda _: None))
    assert reply == Reply(1, False, "generation 1 is over", refusal="over")
    assert not server.read(Keys("run").checkpoint).keys


def test_a_commit_that_took_effect_between_reading_and_trying_again_is_found() -> None:
    """The first try arrives late and makes the second one fail: that is no refusal."""
    assert _save(["late"]) == (Reply(1, True), 1)


def test_a_commit_is_asked_about_until_its_outcome_is_known() -> None:
    """More lost answers than anybody would count: a worker that was told "refused" could never commit again."""
    assert _save(["never"] * 40) == (Reply(1, True), 1)


@pytest.mark.parametrize("how", ["full", "forbidden"])
def test_a_store_that_takes_no_writes_makes_a_preparation_wait_and_a_save_fail(how: str) -> None:
    """E07: no data can be prepared without the claim, while training goes on without a save, which is repeated."""
    assert _save([how]) == (Reply(1, False, f"etcd is {how}", refusal="blocked"), 0)
    errands = StoreProxy(LossyStore(MemoryServer(lambda: 0.0), [how]), Keys("run"), lambda _: None, "")
    assert [_claim(errands, "b", 0) for _ in range(2)] == [f"unsure: etcd is {how}", "yes"]


def _claim(errands: StoreProxy, life: str, lease: int) -> str:
    told = errands.carry_out(
        StoreRequest(ClaimBuild(1, "data", "1"), 1, b"", 1, "n0", life * 16, lease, lambda _: None)
    )
    return "yes" if told.ok else f"{told.refusal}: {told.reason}"


def test_a_claim_ends_with_the_lease_of_the_life_that_made_it() -> None:
    """S9: until then all others wait, a later life of the same node included."""
    server = MemoryServer(lambda: 0.0)
    errands = StoreProxy(MemoryStore(server), Keys("run"), lambda _: None, "")
    former, later = server.grant(5.0).lease_id, server.grant(5.0).lease_id
    assert _claim(errands, "a", former) == "yes"
    assert _claim(errands, "a", later) == "yes", "the same life, with a new lease"
    assert _claim(errands, "b", later) == "wait: n0"
    server.revoke(former)
    assert _claim(errands, "b", later) == "yes"


def test_a_claim_is_asked_for_again_when_the_lease_has_ended() -> None:
    """S9: the agent gets another lease, with which the claim that its worker asks for again succeeds."""
    server = MemoryServer(lambda: 0.0)
    errands = StoreProxy(MemoryStore(server), Keys("run"), lambda _: None, "")
    former, later = server.grant(5.0).lease_id, server.grant(5.0).lease_id
    server.revoke(former)
    assert _claim(errands, "a", former).startswith("unsure: lease ")
    assert _claim(errands, "a", later) == "yes"


def test_a_commit_that_happened_is_no_refusal_after_its_worker_has_moved_on() -> None:
    """S8: the answer was lost, and the worker has another seat when it asks again: it is told what has happened."""
    server = MemoryServer(lambda: 0.0)
    errands = StoreProxy(LossyStore(server, ["unheard"]), Keys("run"), lambda _: None, "")
    save = Save(1, asdict(Commit(1, 0, 1, "a" * 16, "", "/ckpt", "step-1", "d" * 64, 1)), "")
    first, second = (
        errands.carry_out(StoreRequest(save, generation, b"", 1, "n0", "b" * 16, 0, lambda _: None))
        for generation in (1, 2)
    )
    assert first.refusal == "unsure"
    assert second == Reply(1, True)
