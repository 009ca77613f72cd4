"""Whether an agent is well: what follows from what it has noted, and how it is asked over HTTP."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from elasticrt import events
from elasticrt.agent.health_server import CLIENTS_MAX, REQUEST_MAX_BYTES, HealthServer, names_of
from elasticrt.agent.health_state import (
    CUT_OFF_S,
    LIVE_S,
    Finding,
    HealthState,
    live,
    member,
    readiness,
    ready,
)
from elasticrt.errors import ConfigError
from elasticrt.ipc.failure import Failure
from elasticrt.liveness.probe import ProbeServer
from elasticrt.liveness.prober import Prober
from elasticrt.rendezvous.decision import Me
from elasticrt.rendezvous.outage import GenerationAnswer, Outage
from elasticrt.rendezvous.records import Member, Report, Seat
from elasticrt.rendezvous.view import Stored, View
from elasticrt.spec import RunSpec
from elasticrt.story.fold import Story
from tests.unit.story.test_too_few_nodes import agreed
from tests.unit.story.told import Entry, begun, started, story

TRAINS = HealthState(
    run_id="digits",
    node="alpha",
    phase="member",
    turned_at=100.0,
    limit_s=LIVE_S,
    readiness=Finding(True, "trains in generation 3"),
    lease="connected",
    generation=3,
    nodes=2,
    world_size=4,
    ranks=(2, 3),
    step=41,
)
RECORD = Member(
    node="alpha", incarnation="0123456789abcdef", address="127.0.0.1", pid=7, workers=2, probe_port=5, port=6, warm=True
)
SPEC = RunSpec(min_nodes=1, max_nodes=2, command=("script", "train.py"))
SEAT = Seat(node="alpha", incarnation="0" * 16, index=1, rank_offset=2, workers=2, address="127.0.0.1", probe_port=5)


@pytest.mark.parametrize(
    ("changes", "after_s", "expected", "reason"),
    [
        ({}, 0.2, True, "main loop ran 0.2 s ago"),
        ({}, LIVE_S, True, "main loop ran"),
        ({}, LIVE_S + 1, False, "not run for 61 s (phase: member)"),
        ({"phase": "joining", "limit_s": 600.0 + LIVE_S}, 500, True, "main loop ran"),
        ({"phase": "joining", "limit_s": 600.0 + LIVE_S}, 700, False, "not run for 700 s (phase: joining)"),
        ({"phase": "ending", "limit_s": 10.0 + LIVE_S}, 71, False, "not run for 71 s (phase: ending)"),
        ({"lease": "lost", "etcd_away_s": 800.0}, 0.2, True, "main loop ran"),
    ],
)
def test_live(changes: dict[str, Any], after_s: float, expected: bool, reason: str) -> None:
    """An agent is alive as long as its loop goes round, whatever etcd does; each phase may take its time."""
    finding = live(replace(TRAINS, **changes), 100.0 + after_s)
    assert finding.ok is expected
    assert reason in finding.reason


STANDS = (9.5, "alpha", events.Culprit(2, 20, 3.5, (0,), ("alpha",), "rank 0 on alpha sleeps"))
SLOW = (9.5, "alpha", events.Straggler(2, 20, "beta", 0.04, 0.01))
SLOW_TOO = "beta is slow: its own work takes 40 ms of a step, that of the others 10 ms, and they wait for it"


@pytest.mark.parametrize(
    ("more", "draining", "reason", "standing_s", "slow"),
    [
        ([], False, "trains in generation 2", 0.0, None),
        (
            [STANDS],
            False,
            "stands still in generation 2; no step for 24 s after step 20: rank 0 on alpha sleeps",
            24.0,
            None,
        ),
        ([STANDS, (20.0, "alpha", events.Step(2, 21, 0, {}))], False, "trains in generation 2", 0.0, None),
        ([STANDS], True, "leaving: draining", 24.0, None),
        ([SLOW], False, f"trains in generation 2; {SLOW_TOO}", 0.0, ("beta", 4.0)),
    ],
    ids=["trains", "stands-still", "a-step-was-made", "not-ready-for-another-reason", "slow"],
)
def test_the_reason_is_what_the_story_of_the_run_says(
    more: list[Entry], draining: bool, reason: str, standing_s: float, slow: tuple[str, float] | None
) -> None:
    """The node stays ready, and the reason and the metrics have what `status` says, from the same fold of events."""
    begins = replace(begun(2, "ab"), nodes=("alpha", "beta"))
    steps = (6.0, "alpha", events.Step(2, 20, 0, {}))
    told = story([(0.0, "alpha", started()), (2.0, "alpha", begins), steps, *more])
    seen = Stored(agreed(waits=False), 1, 1, 0.0)
    view = View("alpha", generation=seen, seats={"alpha": SEAT}, roster_nonce=seen.record.nonce)
    record = RECORD.model_copy(update={"draining": draining, "incarnation": SEAT.incarnation})
    me = Me(record=record, spec=SPEC, lease="connected", running_generation=2)
    noted = member(me, view, Outage(lambda _: None), 530.0, story=told, told_at=30.0, step=20)
    finding = ready(noted, 530.0)
    assert (finding.ok, finding.reason) == (not draining, reason)
    assert (noted.run_id, noted.standing_s, noted.slow) == ("calm-fox", standing_s, slow)


@pytest.mark.parametrize(("since", "led", "standing_s"), [(520.0, False, 10.0), (529.0, False, 0.0), (None, True, 0.0)])
def test_a_stand_that_nobody_explains(since: float | None, led: bool, standing_s: float) -> None:
    """A node that is cut off hears no reason, and says that it makes no step. Who led before counts no members."""
    told = story([(0.0, "alpha", started()), (2.0, "alpha", replace(begun(2, "ab"), nodes=("alpha", "beta")))])
    view = View("alpha", too_few_since=500.0 if led else None)
    me = Me(record=RECORD, spec=SPEC, lease="connected", standing_since=since)
    noted = member(me, view, Outage(lambda _: None), 530.0, story=told, told_at=30.0, step=20)
    assert (view.members_complete, noted.standing_s) == (False, standing_s)


def test_what_was_lost_while_etcd_is_away_is_told() -> None:
    """No generation can follow a failure then: the reason has what this node's workers have seen of it."""
    told = story([(0.0, "alpha", started()), (2.0, "alpha", replace(begun(2, "ab"), nodes=("alpha", "beta")))])
    seen = Stored(agreed(waits=False), 1, 1, 0.0)
    view = View("alpha", generation=seen, seats={"alpha": SEAT}, roster_nonce=seen.record.nonce)
    failure = Failure(0, 1, True, "rank 0 on alpha: a peer is gone")
    report = Report(generation=2, node="alpha", incarnation="a" * 16, status="failed", failure=failure)
    record = RECORD.model_copy(update={"incarnation": SEAT.incarnation})
    me = Me(record=record, spec=SPEC, lease="suspended", running_generation=2, report=report)
    outage = Outage(lambda _: None)
    outage.since = 510.0
    finding = ready(member(me, view, outage, 530.0, story=told, told_at=30.0, step=20), 530.0)
    reason = "stands still in generation 2; etcd has not answered for 20 s; "
    reason += "no step since this failure: rank 0 on alpha: a peer is gone"
    assert (finding.ok, finding.reason) == (True, reason)


STANDS_BY: dict[str, Any] = {"seat": None, "running_generation": 0}
CUT_OFF: dict[str, Any] = {"lease": "suspended", "away_s": 170.0, "alone_s": 168.0}


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({}, True, "trains in generation 3"),
        ({"lease": "suspended", "away_s": 7.2}, True, "trains in generation 3; etcd has not answered for 7 s"),
        ({"lease": "lost"}, False, "not a member of the run: its lease in etcd is gone"),
        ({"running_generation": 2}, True, "starts its workers of generation 3"),
        ({"running_generation": 0}, True, "starts its workers of generation 3"),
        ({"running_generation": 0, "warm": False}, False, "still importing what its workers need"),
        ({"running_generation": 0, "away_s": 3.0}, False, "its workers of generation 3 have ended"),
        (CUT_OFF, False, "cut off in generation 3: neither etcd nor another node has answered for 168 s"),
        ({**CUT_OFF, "alone_s": CUT_OFF_S}, True, "trains in generation 3; etcd has not answered for 170 s"),
        ({"leave_reason": "SIGTERM received"}, False, "leaving: SIGTERM received"),
        ({"draining": True}, False, "leaving: draining"),
        (STANDS_BY, True, "stands by: generation 3 runs without it"),
        ({**STANDS_BY, "generation": 0}, True, "stands by: waits for nodes"),
        ({**STANDS_BY, "warm": False}, False, "stands by, but is still importing"),
        ({**STANDS_BY, "lease": "suspended", "away_s": 3.0}, False, "stands by, but cannot join"),
    ],
)
def test_readiness(changes: dict[str, Any], expected: bool, reason: str) -> None:
    """N03: ready is who trains, also while etcd is away, or could at once; in a change of generation nobody flaps."""
    own = {"seat": SEAT, "generation": 3, "away_s": None, "alone_s": 0.0}
    own |= {name: changes[name] for name in own if name in changes}
    record = RECORD.model_copy(update={name: changes[name] for name in ("warm", "draining") if name in changes})
    state = {name: changes[name] for name in ("lease", "leave_reason", "running_generation") if name in changes}
    me = Me(record=record, spec=SPEC, **{"lease": "connected", "running_generation": 3, **state})
    finding = readiness(me, own.pop("seat"), own.pop("generation"), **own)
    assert finding.ok is expected
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("changes", "expected", "reason"),
    [
        ({}, True, "trains in generation 3"),
        ({"phase": "joining"}, False, "joining: not a member"),
        ({"phase": "ending"}, False, "ending: not a member"),
        ({"turned_at": 0.0}, False, "not run for 100 s (phase: member)"),
    ],
)
def test_ready(changes: dict[str, Any], expected: bool, reason: str) -> None:
    """N03: an agent that is stuck, or no member, is not ready, whatever it has noted before."""
    finding = ready(replace(TRAINS, **changes), 100.0)
    assert finding.ok is expected
    assert reason in finding.reason


def test_what_a_member_notes() -> None:
    """A newcomer's notes are its own state: no generation, no ranks, no steps, and since when etcd is away."""
    me = Me(record=RECORD.model_copy(update={"draining": True}), spec=SPEC)
    outage = Outage(lambda _: None)
    outage.since, outage.alone_since = 48.0, 49.0
    noted = member(me, View("alpha"), outage, 50.0, story=Story(), told_at=50.0, step=None)
    assert (noted.phase, noted.turned_at, noted.etcd_away_s) == ("member", 50.0, 2.0)
    assert noted.readiness == Finding(False, "leaving: draining")
    assert (noted.generation, noted.ranks, noted.step) == (0, None, None)


def test_since_when_a_node_hears_nobody() -> None:
    """N03: while etcd is away the other nodes are asked; an answer ends their silence, and so does etcd's return."""
    heard: SimpleQueue[GenerationAnswer] = SimpleQueue()
    prober = Prober(lambda *_: None)
    other = ProbeServer(prober, "127.0.0.1", "digits", lambda: ("b" * 16, 3))
    with socket.create_server(("127.0.0.1", 0)) as free:
        refusing = free.getsockname()[1]
    try:
        other.start()
        alone = Outage(lambda _: None)
        alone.suspect(time.monotonic())
        assert not alone.seats_to_ask([], time.monotonic())
        assert alone.alone_since is None, "a run of one node has nobody to hear"
        for port, answers in ((refusing, False), (other.port, True)):
            outage = Outage(lambda _: None)
            outage.suspect(time.monotonic())
            asked = outage.seats_to_ask([_seat(port)], time.monotonic())
            prober.ask_for_generation(asked, "digits", lambda number: heard.put(GenerationAnswer(number)))
            assert outage.alone_since is not None
            outage.note_answer(heard.get(timeout=30))
            assert (outage.alone_since is None) is answers
            outage.end(time.monotonic())
            assert (outage.since, outage.alone_since) == (None, None)
    finally:
        other.close()
        prober.close()


def _seat(port: int) -> Seat:
    return Seat(
        node="beta", incarnation="b" * 16, index=1, rank_offset=2, workers=2, address="127.0.0.1", probe_port=port
    )


@pytest.fixture
def server() -> Iterator[HealthServer]:
    """One on loopback, about an agent whose loop has just gone round."""
    served = HealthServer("127.0.0.1", 0, replace(TRAINS, turned_at=time.monotonic()))
    yield served
    served.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "elasticrt-health"]


def ask(url: str, method: str = "GET") -> tuple[int, Any]:
    """Status and body."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")


def test_questions_and_answers(server: HealthServer) -> None:
    """200 and 503 with a reason and the whole state as JSON; whatever else is asked is refused in the same form."""
    status, body = ask(f"{server.url}/ready")
    assert (status, body["ok"], body["generation"], body["ranks"], body["step"]) == (200, True, 3, [2, 3], 41)
    assert ask(f"{server.url}/live?verbose")[0] == 200
    server.state = replace(server.state, readiness=Finding(False, "leaving: SIGTERM received"))
    assert ask(f"{server.url}/ready")[0] == 503
    assert ask(f"{server.url}/live")[0] == 200
    server.state = replace(server.state, turned_at=time.monotonic() - LIVE_S - 1)
    status, body = ask(f"{server.url}/live")
    assert (status, body["ok"]) == (503, False)
    assert "main loop has not run" in body["reason"]
    assert ask(f"{server.url}/else") == (404, {"questions": ["/live", "/metrics", "/ready"]})
    assert ask(f"{server.url}/live", "POST") == (405, {"methods": ["GET", "HEAD"]})
    assert ask(f"{server.url}/ready", "HEAD") == (503, None)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (None, 200),
        ("127.0.0.1:8471", 200),
        ("[::1]:8471", 200),
        ("10.1.2.3", 200),
        ("LocalHost:1", 200),
        (socket.gethostname(), 200),
        ("evil.example", 403),
        ("evil.example:8471", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost\r\nHost: evil.example", 403),
    ],
)
def test_host_that_is_asked_for(server: HealthServer, host: str | None, status: int) -> None:
    """SEC14: a page whose own name leads to this port gets no answer; addresses and this machine's names do."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as client:
        field = "" if host is None else f"Host: {host}\r\n"
        client.sendall(f"GET /live HTTP/1.1\r\n{field}\r\n".encode())
        assert client.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("hosts", "resolv", "full"),
    [
        ("", "", set()),
        ("127.0.1.1 Node7.cluster.example node7 # evil.example\n10.0.0.8 node8.cluster.example node8\n", "",
         {"node7.cluster.example"}),
        ("node7 evil.example\n#10.0.0.7 node7 evil.example\n127.0.0.1 localhost\n", "", set()),
        ("", "nameserver 10.0.0.1\ndomain old.example\nsearch cluster.example. example\noptions ndots:5\n",
         {"node7.cluster.example", "node7.example"}),
    ],
)  # fmt: skip
def test_full_names_of_a_machine(hosts: str, resolv: str, full: set[str]) -> None:
    """SEC14: those that its own files give it, and none that DNS does."""
    assert names_of("Node7", hosts, resolv) == {"node7", *full}


def test_bad_clients_hold_nobody_up(server: HealthServer) -> None:
    """Clients that say nothing, nonsense or too much are cut off, and others are answered meanwhile."""
    port = int(server.url.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(CLIENTS_MAX - 2)]
    try:
        assert ask(f"{server.url}/live")[0] == 200
        for nonsense in (b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                client.sendall(nonsense)
                assert client.recv(1000).startswith(b"HTTP/1.1 404 ")
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(b"GET /live HTTP/1.1\r\nx: " + b"x" * 2 * REQUEST_MAX_BYTES)
            assert _read_to_end(client) == b"", "cut off without an answer"
        assert ask(f"{server.url}/live")[0] == 200
        assert [_read_to_end(client) for client in silent] == [b""] * len(silent), "cut off after a while"
    finally:
        for client in silent:
            client.close()


def test_one_client_too_many_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's descriptors are for its workers: of 65 at once the one that came first is cut off."""
    monkeypatch.setattr("elasticrt.agent.health_server.REQUEST_S", 60.0)
    server = HealthServer("127.0.0.1", 0, replace(TRAINS, turned_at=time.monotonic()))
    where = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    silent = [socket.create_connection(where, timeout=10) for _ in range(CLIENTS_MAX)]
    try:
        assert ask(f"{server.url}/live")[0] == 200
        assert _read_to_end(silent[0]) == b""
        silent[-1].sendall(b"GET /live HTTP/1.1\r\n\r\n")
        assert silent[-1].recv(100).startswith(b"HTTP/1.1 200")
    finally:
        server.close()
        for client in silent:
            client.close()


def _read_to_end(client: socket.socket) -> bytes:
    try:
        return client.recv(1000)
    except ConnectionResetError:
        return b""


def test_a_port_in_use_is_a_mistake_of_the_user(server: HealthServer) -> None:
    """Two agents never share a port: the second one is told, with the remedy."""
    with pytest.raises(ConfigError, match=r"health port cannot be used.*Choose another one"):
        HealthServer("127.0.0.1", int(server.url.rpartition(":")[2]), TRAINS)


@pytest.mark.parametrize("host", ["caf\udce9", "x" * 300])
def test_what_is_no_host_name_is_a_mistake_of_the_user(host: str) -> None:
    """An option's value in any bytes is refused in words."""
    with pytest.raises(ConfigError, match="health port cannot be used"):
        HealthServer(host, 0, TRAINS)


def test_an_address_of_another_machine(server: HealthServer) -> None:
    """An address that this machine does not have is refused before anything starts."""
    with pytest.raises(ConfigError, match="health port cannot be used"):
        HealthServer("192.0.2.1", 0, server.state)
