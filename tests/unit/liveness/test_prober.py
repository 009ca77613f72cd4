"""Many agents asked at once, by real sockets: each gets its own answer, whatever the others do."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticrt.ipc.time_bounds import PROBE_STEPS
from elasticrt.liveness.prober import OPEN_AT_ONCE, Prober
from elasticrt.rendezvous.records import Seat
from tests.servers import answering
from tests.unit.liveness.answering import AnsweringAgent

LIFE, OTHER = "a" * 16, "b" * 16


def _seat(life: str, port: int, address: str = "127.0.0.1") -> Seat:
    return Seat(node=f"n-{life}", incarnation=life, index=0, rank_offset=0, workers=1, address=address, probe_port=port)


def _reset(connection: socket.socket) -> None:
    connection.recv(512)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _hang_up(connection: socket.socket) -> None:
    connection.recv(512)


def _say(text: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(512)
        connection.sendall(text)

    return answer


class Heard:
    """What a prober says, and the prober."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str]] = {}
        self._changed = threading.Condition()
        self.prober = Prober(self._heard)

    def _heard(self, seat: Seat, answer: str, at: float) -> None:
        with self._changed:
            self.answers.setdefault(seat.incarnation, []).append(answer)
            self._changed.notify_all()

    def wait(self, number: int) -> dict[str, list[str]]:
        """Until so many have answered."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.answers) >= number, 60), self.answers
            return dict(self.answers)


@pytest.fixture
def heard() -> Iterator[Heard]:
    """A prober, closed at the end."""
    each = Heard()
    yield each
    each.prober.close()


def test_everyone_gets_an_answer_of_their_own(heard: Heard) -> None:
    """L1: alive, dead and silent agents asked together; each is told once, as it is; a name is no address."""
    with contextlib.ExitStack() as stack:
        alive = AnsweringAgent(LIFE)
        alive.start()
        stack.callback(alive.close)
        ways = {
            "silent": lambda connection: connection.recv(512) and connection.recv(512),
            "garbage": _say(b"\xff{\n"),
            "endless": _say(b"x" * 4096),
            "wrong nonce": _say(b'{"nonce": "0", "incarnation": "' + LIFE.encode() + b'"}\n'),
            "no object": _say(b"[]\n"),
            "too deep": _say(b"[" * 1023 + b"\n"),
            "hangs up": _hang_up,
            "resets": _reset,
        }
        ports = {name: stack.enter_context(answering(way)) for name, way in ways.items()}
        with socket.create_server(("127.0.0.1", 0)) as free:
            refusing = free.getsockname()[1]
        lives = {name: f"{index:016x}" for index, name in enumerate(ways)}
        seats = [_seat(lives[name], ports[name]) for name in ways]
        seats += [_seat(LIFE, alive.port), _seat(OTHER, alive.port), _seat("c" * 16, refusing)]
        heard.prober.ask(seats)
        heard.prober.ask(seats[:1])  # Who keeps silent is being asked still, and is not asked again.
        found = heard.wait(len(seats))
        assert found == {
            **{lives[name]: ["dead" if name == "resets" else "silent"] for name in ways},
            LIFE: ["alive"],
            OTHER: ["dead"],
            "c" * 16: ["dead"],
        }
        heard.answers.clear()
        names = {"d" * 16: "no.such.host.invalid", "e" * 16: "e" * 64}
        heard.prober.ask([_seat(life, 1, name) for life, name in names.items()])
        assert heard.wait(2) == {life: ["silent"] for life in names}


def test_an_answer_to_an_earlier_question_counts(heard: Heard) -> None:
    """L1: an agent on a busy machine answers the first question when the second has come: it lives."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as first:
                nonce = json.loads(first.recv(512))["nonce"]
                with listener.accept()[0]:
                    first.sendall(json.dumps({"nonce": nonce, "incarnation": LIFE}).encode() + b"\n")
                    first.recv(1)

        late = threading.Thread(target=answer)
        late.start()
        heard.prober.ask([_seat(LIFE, listener.getsockname()[1])])
        assert heard.wait(1) == {LIFE: ["alive"]}
        late.join(20)


def test_where_workers_are_is_told_by_all_that_answer(heard: Heard) -> None:
    """L5: what each agent says of its workers arrives by node, at once for all; who says nothing is left out."""
    many = [[rank, 25, 3.5, True, "S", "gradients", "train.py:40 in main", 7] for rank in range(64)]
    found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        there = AnsweringAgent(LIFE, workers=lambda: {"workers": many})
        there.start()
        stack.callback(there.close)
        silent = stack.enter_context(answering(lambda connection: connection.recv(512) and connection.recv(512)))
        seats = [_seat(LIFE, there.port), _seat(OTHER, there.port), _seat("c" * 16, silent)]
        heard.prober.ask_for_workers(seats, found.put)
        (said,) = found.get(timeout=20).items()
        assert (said[0], said[1]["workers"]) == (seats[0].node, many)
    heard.prober.ask_for_workers([], found.put)
    assert found.get(timeout=20) == {}


def test_more_are_asked_than_may_be_connected_at_once(heard: Heard) -> None:
    """L1: hundreds live and one of them does not; all are told, though only some are connected at a time."""
    server = AnsweringAgent(LIFE)
    server.start()
    try:
        number = 2 * OPEN_AT_ONCE + 10
        with socket.create_server(("127.0.0.1", 0)) as free:
            refusing = free.getsockname()[1]
        seats = [_seat(f"{index:016x}", server.port) for index in range(number)]
        heard.prober.ask([*seats, _seat("f" * 16, refusing), _seat(LIFE, server.port)])
        found = heard.wait(number + 2)
        assert found.pop(LIFE) == ["alive"]
        assert set(map(tuple, found.values())) == {("dead",)}  # Another life lives there.
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answers", "passed_on"),
    [
        pytest.param("a", ["a"], id="one alone"),
        pytest.param("aaa", ["", "", "aaa"], id="all live"),
        pytest.param("ada", ["", "ad", "a"], id="one is dead"),
        pytest.param("daa", ["d", "", "aa"], id="the first is dead"),
    ],
)
def test_what_is_passed_on_when(answers: str, passed_on: list[str]) -> None:
    """L1: good news wait for the last answer; bad news wait for nothing, and take along what came before."""
    heard, taken = list[str](), queue.SimpleQueue[None]()
    prober = Prober(lambda _seat, answer, _at: heard.append(answer[0]))
    may_say = [threading.Event() for _ in answers]

    def agent(index: int) -> Callable[[socket.socket], None]:
        def answer(connection: socket.socket) -> None:
            fields = json.loads(connection.recv(512))
            may_say[index].wait(60)
            life = f"{index:016x}" if answers[index] == "a" else LIFE
            connection.sendall(json.dumps({**fields, "incarnation": life}).encode() + b"\n")
            connection.recv(1)  # The end: it was read.
            taken.put(None)

        return answer

    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.callback(prober.close)
        patch.setattr("elasticrt.liveness.prober.PROBE_STEP_S", 60.0)  # One try each.
        ports = [stack.enter_context(answering(agent(index))) for index in range(len(answers))]
        prober.ask([_seat(f"{index:016x}", port) for index, port in enumerate(ports)])
        for event, expected in zip(may_say, passed_on, strict=True):
            before = len(heard)
            event.set()
            taken.get(timeout=60)
            prober.thread.wait_for(lambda: None, 60)  # It has come back from the answer.
            assert "".join(heard[before:]) == expected


def test_a_prober_that_is_closed_leaves_nothing() -> None:
    """G16: closed while it asks, and unused: its thread ends."""
    with answering(lambda connection: connection.recv(512) and connection.recv(512)) as port:
        before = set(threading.enumerate())
        unused, busy = Heard(), Heard()
        busy.prober.ask([_seat(LIFE, port)])
        unused.prober.close()
        busy.prober.close()
        assert set(threading.enumerate()) == before


def _says(about: str, life: str = OTHER) -> Callable[[socket.socket], None]:
    """A witness that says so at once, and only when it is asked about somebody."""

    def answer(connection: socket.socket) -> None:
        question = json.loads(connection.recv(512))
        said = {"nonce": question["nonce"], "incarnation": life}
        connection.sendall(json.dumps({**said, "about": about} if "about" in question else said).encode() + b"\n")

    return answer


def _tries(listener: socket.socket) -> int:
    """How often somebody has connected to who never answers."""
    listener.setblocking(False)
    number = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            number += 1
    return number


def test_two_that_hear_nothing_agree_before_one_is_sure(heard: Heard) -> None:
    """N11: a second agent that hears nothing either saves the last tries; whatever else it says, all are made."""
    with contextlib.ExitStack() as stack:
        witnesses: dict[str, list[Seat]] = {}
        mute: dict[str, socket.socket] = {}

        def silent(name: str) -> Seat:
            mute[name] = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            return _seat(f"{len(mute):016x}", mute[name].getsockname()[1])

        def scripted(way: Callable[[socket.socket], None]) -> Seat:
            return _seat(OTHER, stack.enter_context(answering(way)))

        ways = {word: _says(word) for word in ("silent", "alive", "dead", "unknown")}
        ways |= {"another life": _says("silent", "d" * 16), "no answer": _hang_up, "reset": _reset}
        ways |= {"other nonce": _say(json.dumps({"nonce": "", "incarnation": OTHER, "about": "silent"}).encode())}
        seats = {name: silent(name) for name in ways}
        witnesses |= {seats[name].incarnation: [scripted(way)] for name, way in ways.items()}
        seats["alone"] = silent("alone")
        seats |= {name: silent(name) for name in ("suspect", "its witness")}
        witnesses[seats["suspect"].incarnation] = [seats["its witness"]]
        witnesses[seats["its witness"].incarnation] = [seats["suspect"]]
        seats["real"] = silent("real")
        real = AnsweringAgent(LIFE, lambda: (seats["real"],))
        stack.callback(real.close)
        real.start()
        witnesses[seats["real"].incarnation] = [_seat(LIFE, real.port), scripted(_says("alive"))]

        heard.prober.ask(seats.values(), lambda seat: witnesses.get(seat.incarnation, []))
        assert heard.wait(len(seats)) == {seat.incarnation: ["silent"] for seat in seats.values()}
        tries = {name: _tries(listener) for name, listener in mute.items()}
        agreed = {"silent": tries.pop("silent"), "real": tries.pop("real") - 1}  # One was the real witness's.
        assert max(agreed.values()) < PROBE_STEPS, agreed
        assert tries == dict.fromkeys(tries, PROBE_STEPS)


def test_a_silent_agent_that_a_witness_reaches(heard: Heard) -> None:
    """Asked for workers, it has not answered; which other node it does answer is known."""
    found: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    with (
        socket.create_server(("127.0.0.1", 0)) as cut,
        socket.create_server(("127.0.0.1", 0)) as frozen,
        answering(_says("alive")) as reaches,
        answering(_says("silent")) as agrees,
    ):
        ways = {LIFE: (cut, reaches), "c" * 16: (frozen, agrees)}
        seats = [_seat(life, listener.getsockname()[1]) for life, (listener, _) in ways.items()]
        heard.prober.ask_for_workers(seats, found.put, lambda seat: [_seat(OTHER, ways[seat.incarnation][1])])
        assert found.get(timeout=20) == {f"n-{LIFE}": {"reached_by": f"n-{OTHER}"}}


def test_a_late_answer_counts_more_than_a_witness(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    """N11: a witness has heard nothing, and before two agree for long enough the node answers: it lives."""
    monkeypatch.setattr("elasticrt.liveness.prober.PROBE_STEP_S", 2.0)
    said = threading.Event()

    def witness(connection: socket.socket) -> None:
        _says("silent")(connection)
        connection.recv(1)  # Until it has been heard.
        said.set()

    def late(connection: socket.socket) -> None:
        nonce = json.loads(connection.recv(512))["nonce"]
        said.wait(20)
        connection.sendall(json.dumps({"nonce": nonce, "incarnation": LIFE}).encode() + b"\n")

    with answering(witness) as beside, answering(late) as port:
        heard.prober.ask([_seat(LIFE, port)], lambda _: [_seat(OTHER, beside)])
        assert heard.wait(1) == {LIFE: ["alive"]}
        assert said.is_set()
