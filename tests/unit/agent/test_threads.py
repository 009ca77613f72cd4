"""No thread of an agent ends in silence, and none ends because of what a worker asks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elasticrt.agent.agent import Agent
from elasticrt.agent.event_loop import ThreadDied
from elasticrt.agent.store_proxy import BuilderEnded, StoreProxy, StoreRequest
from elasticrt.errors import StoreError
from elasticrt.ipc.messages import BuildDone, ClaimBuild, Reply, Save
from elasticrt.liveness.prober import Prober
from elasticrt.rendezvous.records import Keys, Seat, SpecRecord
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import Put, StoreUnavailable, Txn, TxnResult
from elasticrt.store.watcher import Watcher
from elasticrt.torchrun.participant import Participant
from tests.memory_store import MemoryServer, MemoryStore
from tests.servers import wait_until
from tests.unit.settings import settings_of

if TYPE_CHECKING:
    from elasticrt.store.connection import Connections

KEYS = Keys("r")
SPEC = RunSpec(min_nodes=1, max_nodes=1, command=("script", "x.py"))
TEXTS = {
    "long": "v" * 200,
    "CJK": "漢" * 100,
    "NUL": "\0" * 99,
    "surrogate": "caf\udce9",
    "empty": "",
    "huge": "x" * 10**6,
}


@pytest.fixture(name="agent")
def _agent(tmp_path: Path) -> Iterator[Agent]:
    before = threading.excepthook
    settings = settings_of(tmp_path)
    agent = Agent(settings, SPEC)
    agent.loop.watch_threads()
    yield agent
    agent.loop.unwatch_threads()
    assert threading.excepthook == before
    agent.loop.prober.close()


def _proxy() -> tuple[StoreProxy, bytes, MemoryStore]:
    store, record = MemoryStore(MemoryServer(lambda: 0.0)), SpecRecord(spec=SPEC, attempt=1).encode()
    store.commit(Txn((), (Put(KEYS.generation, record),)))
    return StoreProxy(store, KEYS, lambda _: None, ""), record, store


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_proxy_answers_whatever_is_asked(text):
    """A version, a name, a build's error of any size and characters: each request is answered, and so is the next."""
    proxy, record, _ = _proxy()
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def ask(request) -> Reply:
        proxy.send(StoreRequest(request, 1, record, 1, "n0", "0" * 16, 0, replies.put))
        return replies.get(timeout=10)

    assert ask(ClaimBuild(1, f"name-{text}", text)).ok
    assert ask(ClaimBuild(2, f"name-{text}", text)).ok  # It is its own.
    assert ask(BuildDone(3, f"name-{text}", text)).ok
    assert ask(ClaimBuild(4, f"name-{text}", text)) == Reply(4, False, refusal="done")
    assert ask(ClaimBuild(5, f"name-{text}", text + "2")).ok
    assert ask(BuildDone(6, f"name-{text}", text + "2", text or "x")).ok
    assert ask(ClaimBuild(7, f"name-{text}", text + "2")).refusal == "failed"
    assert not ask(BuildDone(8, "x", text)).ok
    assert not ask(Save(9, {"step": text}, "")).ok
    proxy.close(5)


class Away(MemoryStore):
    """A client that etcd does not answer while `away`."""

    away = False

    def commit(self, txn: Txn) -> TxnResult:
        """See `Store`."""
        if self.away:
            raise StoreUnavailable("no answer")
        return super().commit(txn)


def test_a_claim_whose_builder_has_ended_is_given_up_when_etcd_is_back():
    """D01: the agent lives on, and so does its lease; no worker is left to ask again."""
    store, record = Away(MemoryServer(lambda: 0.0)), SpecRecord(spec=SPEC, attempt=1).encode()
    store.commit(Txn((), (Put(KEYS.generation, record),)))
    proxy = StoreProxy(store, KEYS, lambda _: None, "")
    replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def asked(request, life: str = "0", local_rank: int = 1) -> StoreRequest:
        return StoreRequest(request, 1, record, 1, "n0", life * 16, 0, replies.put, local_rank)

    def claims(*who) -> bool:
        proxy.send(asked(ClaimBuild(1, "data", "1"), *who))
        return replies.get(timeout=10).ok

    assert [claims(), claims("0", 0), claims("1")] == [True, False, False]
    proxy.worker_ended(asked(BuilderEnded(), local_rank=0))
    assert not claims("1"), "it was another worker"
    store.away = True
    proxy.worker_ended(asked(BuilderEnded()))
    assert replies.get(timeout=10).refusal == "unsure"
    store.away = False
    wait_until(lambda: replies.get(timeout=10).ok, "the claim is given up")
    assert claims("1")
    proxy.close(5)


def test_a_dead_proxy_ends_the_agent(agent):
    """Whatever the proxy's thread dies of, the agent's loop hears of it and ends with the reason."""
    proxy, record, _ = _proxy()

    def broken(_: Reply) -> None:
        raise LookupError("a bug")

    proxy.send(StoreRequest(ClaimBuild(1, "x", "1"), 1, record, 1, "n0", "0" * 16, 0, broken))
    event = agent.queue.get(timeout=10)
    assert isinstance(event, ThreadDied)
    with pytest.raises(RuntimeError, match=r"elasticrt-store-proxy of this agent has ended: LookupError\('a bug'\)"):
        agent.loop.handle(event)
    proxy.close(5)


def test_a_thread_that_asks_and_dies_is_heard_of(agent, monkeypatch):
    """Whatever the thread that asks other agents dies of, the agent's loop hears of it."""

    def broken(*_: object) -> str:
        raise LookupError("a bug")

    monkeypatch.setattr(Prober, "_try", broken)
    prober = Prober(lambda *_: None)
    named = Seat(node="n1", incarnation="1" * 16, index=0, rank_offset=0, workers=1, address="127.0.0.1", probe_port=1)
    prober.ask_for_generation([named], "r", lambda _: None)
    event = agent.queue.get(timeout=10)
    assert isinstance(event, ThreadDied)
    assert event.name.startswith("elasticrt-probe")
    prober.close()


def test_a_participant_ends_with_what_a_thread_of_its_own_has_died_of(monkeypatch):
    """The other side has its workers go, hears the reason instead of waiting, and the other nodes see it leave."""
    before, server = threading.excepthook, MemoryServer(time.monotonic)
    one = Participant(MemoryStore(server), "r", SPEC, node="n0", address="127.0.0.1")
    one.open(30.0)
    turn = one.take_turn(after=0)
    assert turn is not None
    assert turn.listen is not None
    turn.listen.close()
    assert not one.must_stop(after=turn.generation.number)

    def broken(*_: object) -> str:
        raise LookupError("a bug")

    monkeypatch.setattr(Prober, "_try", broken)
    one.loop.prober.ask_for_generation([turn.seat.model_copy(update={"incarnation": "1" * 16})], "r", lambda _: None)
    # Asked before, it might as well make another generation first: its workers have gone.
    wait_until(lambda: one.must_stop(after=turn.generation.number), "the end of the thread is known")
    with pytest.raises(StoreError, match=r"thread elasticrt-probe of this agent has ended: LookupError\('a bug'\)"):
        one.take_turn(after=turn.generation.number)
    one.close(run_too=False)
    assert not MemoryStore(server).read(KEYS.members).keys
    assert threading.excepthook == before


def test_a_watch_thread_that_dies_ends_the_agent(agent):
    """The agent hears of it, with its name."""
    watcher = Watcher(cast("Connections", SimpleNamespace(store_id="")))  # There is nothing to connect to.
    watcher.add("/x/", lambda _: None, from_revision=1)
    event = agent.queue.get(timeout=10)
    assert isinstance(event, ThreadDied)
    assert event.name == "elasticrt-watch"
    watcher.close()


def test_all_threads_of_an_agent_are_named_as_ours():
    """The agent hears of the end of threads by their names, so each that the package starts for it has one."""
    package = Path(__file__).parents[3] / "elasticrt"
    for folder in ("agent", "workers", "liveness", "store"):
        for path in (package / folder).glob("*.py"):
            if path.name == "embedded_keeper.py":  # A process of its own.
                continue
            text = path.read_text()
            named = text.count('name="elasticrt-') + text.count('name=f"elasticrt-')
            named += text.count('SelectorThread("elasticrt-')
            assert text.count("threading.Thread(") + text.count("= SelectorThread(") == named, path
