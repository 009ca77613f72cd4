"""A probe port that anybody can reach: whatever comes there, or is answered, the next question gets its answer."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import resource
import select
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from elasticrt.liveness.probe import CHECKS_MAX, CONNECTIONS_MAX
from elasticrt.liveness.prober import LINE_MAX_BYTES, Prober, ask, fields_in, new_question
from elasticrt.rendezvous.records import Seat
from tests.servers import answering, wait_until
from tests.unit.liveness.answering import AnsweringAgent

LIFE = "a" * 16
DEEP = b"[" * (2 * LINE_MAX_BYTES - 1) + b"\n"
NESTED = b'{"nonce":' * 50 + b"1" + b"}" * 50 + b"\n"

HOSTILE = [
    b"",
    b"\n",
    b"\0" * 100 + b"\n",
    b"\xff\xfe\xfd\n",
    b"[]\n",
    b"null\n",
    b'"nonce"\n',
    b"{}\n",
    b'{"nonce": {}}\n',
    b'{"nonce": ' + b"1" * 480 + b"}\n",
    b'{"nonce": "' + b"\xc3\xa9" * 200 + b'"}\n',
    b'{"nonce": "\\ud800"}\n',
    b"[" * LINE_MAX_BYTES,
    DEEP,
    NESTED,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"x" * 100_000,
]


@pytest.fixture
def server() -> Iterator[AnsweringAgent]:
    """One that answers for a life."""
    served = AnsweringAgent(LIFE)
    served.start()
    yield served
    served.close()


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def _say(port: int, *pieces: bytes) -> None:
    """Say it, piece by piece, and see the connection end."""
    with _connect(port) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            while connection.recv(4096):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass  # It was cut off in the middle of what it said.


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: repr(text[:16]))
def test_any_bytes(server: AnsweringAgent, text: bytes) -> None:
    """L1: whatever a connection says, in one piece or two, it ends, and an agent that asks next is answered."""
    _say(server.port, text)
    _say(server.port, text[:LINE_MAX_BYTES], text[LINE_MAX_BYTES:])
    assert ask("127.0.0.1", server.port, LIFE) == "alive"


def test_random_bytes(server: AnsweringAgent) -> None:
    """L1: neither random bytes nor damaged questions keep the port from answering."""
    draw = random.Random(16)
    question = json.dumps({"nonce": "0" * 16}).encode() + b"\n"
    for _ in range(300):
        damaged = bytearray(question if draw.random() < 0.5 else draw.randbytes(draw.randrange(2 * LINE_MAX_BYTES)))
        for _ in range(draw.randrange(4)):
            damaged[draw.randrange(len(damaged) or 1) : draw.randrange(len(damaged) + 1)] = draw.randbytes(2)
        with _connect(server.port) as connection:
            try:
                connection.sendall(bytes(damaged))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass
            except OSError:
                pass  # Cut off.
    assert ask("127.0.0.1", server.port, LIFE) == "alive"


def test_those_who_say_nothing_delay_nobody(server: AnsweringAgent) -> None:
    """L1: more silent connections than are kept at once, and one that never comes to its end: others are answered."""
    silent = [_connect(server.port) for _ in range(CONNECTIONS_MAX + 20)]
    try:
        assert ask("127.0.0.1", server.port, LIFE) == "alive"
        with _connect(server.port) as dripping:
            with pytest.raises(ConnectionError):  # Cut off, however often it shows that it is still there.
                while True:
                    dripping.sendall(b" ")
            assert ask("127.0.0.1", server.port, LIFE) == "alive"
        assert [connection.recv(1) for connection in silent] == [b""] * len(silent), "each ends at its deadline"
    finally:
        for connection in silent:
            connection.close()


def test_a_question_before_the_agent_knows_itself() -> None:
    """The port is there before the agent knows who it is; a question of that time is answered when it does."""
    server = AnsweringAgent(LIFE)
    try:
        with _connect(server.port) as connection:
            connection.sendall(b'{"nonce": "7"}\n')
            server.start()
            fields = fields_in(connection.recv(LINE_MAX_BYTES))
        assert fields == {"nonce": "7", "run": "run", "incarnation": LIFE, "generation": 3}
    finally:
        server.close()


def test_closed_is_closed() -> None:
    """After `close` the port refuses at once, without a last connection that is taken, and the thread has ended."""
    before = set(threading.enumerate())
    server = AnsweringAgent(LIFE)
    server.start()
    assert ask("127.0.0.1", server.port, LIFE) == "alive"
    server.close()
    assert ask("127.0.0.1", server.port, LIFE) == "dead"
    assert set(threading.enumerate()) <= before
    unused = AnsweringAgent(LIFE)
    unused.close()
    assert ask("127.0.0.1", unused.port, LIFE) == "dead"


def test_no_descriptors_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    """G10: a process without free descriptors accepts nobody; when it has some again it answers who waited."""
    server = AnsweringAgent(LIFE)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _connect(server.port) as connection:
        connection.sendall(b'{"nonce": "7"}\n')
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (connection.fileno() + 1, limits[1]))
            held = _all_descriptors()
            with caplog.at_level(logging.WARNING):
                server.start()
                wait_until(lambda: "no connection can be accepted at port" in caplog.text, "it is short of descriptors")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert fields_in(connection.recv(LINE_MAX_BYTES))
    for each in held:
        each.close()
    server.close()


def _all_descriptors() -> list[socket.socket]:
    held: list[socket.socket] = []
    try:
        while True:
            held.append(socket.socket())
    except OSError:
        return held


LIES = [
    *HOSTILE,
    b'{"nonce": "%s", "run": "run", "incarnation": [], "generation": 1e999}\n',
    b'{"nonce": "%s", "run": "run", "incarnation": null, "generation": true}\n',
    b'{"nonce": "%s", "run": "run", "incarnation": 7, "generation": -4}\n',
    b'{"nonce": "%s", "run": "run", "incarnation": "\\ud800", "generation": ' + b"9" * 300 + b"}\n",
]


def test_lying_answers() -> None:
    """L1: an answer of any bytes is no sign of life and names no generation; the thread that asks goes on asking."""
    heard: SimpleQueue[tuple[str, str]] = SimpleQueue()
    prober = Prober(lambda seat, answer, _: heard.put((seat.incarnation, answer)))
    with contextlib.ExitStack() as stack:
        stack.callback(prober.close)
        ports = [stack.enter_context(answering(functools.partial(_lie, text))) for text in LIES]
        generations: SimpleQueue[int] = SimpleQueue()
        prober.ask_for_generation(
            [_seat(f"{99 + index:016x}", port) for index, port in enumerate(ports)], "run", generations.put
        )
        assert {generations.get(timeout=30) for _ in ports} == {0}
        prober.ask(_seat(f"{index:016x}", port) for index, port in enumerate(ports))
        answers = dict(heard.get(timeout=30) for _ in ports)
        assert set(answers.values()) <= {"silent", "dead"}
        server = AnsweringAgent(LIFE)
        stack.callback(server.close)
        server.start()
        prober.ask([_seat(LIFE, server.port)])
        assert heard.get(timeout=30) == (LIFE, "alive")


def _lie(text: bytes, connection: socket.socket) -> None:
    nonce = json.loads(connection.recv(LINE_MAX_BYTES))["nonce"].encode()
    connection.sendall(text.replace(b"%s", nonce))


def _seat(life: str, port: int) -> Seat:
    return Seat(node=life, incarnation=life, index=0, rank_offset=0, workers=1, address="127.0.0.1", probe_port=port)


def test_an_answer_that_never_ends() -> None:
    """L1: an agent that answers byte by byte is silent when the time of the question is over."""

    def drip(connection: socket.socket) -> None:
        while True:
            connection.sendall(b" ")
            ended.wait(0.01)

    ended = threading.Event()
    with answering(drip) as port:
        assert ask("127.0.0.1", port, LIFE) == "silent"
        ended.set()


class Witness:
    """An agent that can be asked about the seats that it knows."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self.server = AnsweringAgent(LIFE, lambda: tuple(self.seats))
        self.server.start()

    def asked(self, stack: contextlib.ExitStack, about: Any) -> Any:
        """Ask it; what it says comes when it is called for."""
        connection = stack.enter_context(_connect(self.server.port))
        _, line = new_question("?")
        connection.sendall(line.replace(b'"?"', json.dumps(about).encode()))
        return lambda: (fields_in(connection.recv(LINE_MAX_BYTES)) or {}).get("about")


@pytest.fixture
def witness() -> Iterator[Witness]:
    """One."""
    one = Witness()
    yield one
    one.server.close()


def test_what_an_agent_says_about_another(witness: Witness) -> None:
    """N11: alive, dead, silent, itself or unknown, by the seats that it knows; an address in a question is nothing."""
    with contextlib.ExitStack() as stack:
        other = AnsweringAgent("b" * 16)
        stack.callback(other.close)
        other.start()
        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            refusing = free.getsockname()[1]
        ports = {LIFE: witness.server.port, "b" * 16: other.port, "c" * 16: other.port, "d" * 16: refusing}
        witness.seats = [_seat(life, port) for life, port in {**ports, "e" * 16: mute}.items()]
        lives = [*ports, "e" * 16, "f" * 16, "127.0.0.1", "", None, 7, [], {}]
        said = [witness.asked(stack, about)() for about in lives]
        assert said == ["alive", "alive", "dead", "dead", "silent", *["unknown"] * 7]
        assert "about" not in _plain(witness.server.port)


def _plain(port: int) -> dict[str, Any]:
    with _connect(port) as connection:
        _, line = new_question()
        connection.sendall(line)
        return fields_in(connection.recv(LINE_MAX_BYTES)) or {}


def test_a_flood_of_questions_about_others(witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """N11: many ask about one silent node, and it is asked once; only a few are at a time; others get answers."""
    monkeypatch.setattr("elasticrt.liveness.prober.PROBE_STEP_S", 30.0)  # Until the silent ones are gone.
    with contextlib.ExitStack() as stack:
        mute = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(CHECKS_MAX + 2)]
        lives = [f"{index:016x}" for index in range(len(mute))]
        witness.seats = [_seat(life, each.getsockname()[1]) for life, each in zip(lives, mute, strict=True)]
        said = [witness.asked(stack, lives[0]) for _ in range(50)]
        with contextlib.ExitStack() as hasty:
            witness.asked(hasty, lives[0])  # Asks, and hangs up.
        wait_until(lambda: mute[0] in select.select(mute, [], [], 0)[0], "it asks the silent one")
        more = [witness.asked(stack, life) for life in lives[1:]]
        assert [each() for each in more[CHECKS_MAX - 1 :]] == ["unknown", "unknown"]
        assert _plain(witness.server.port)["incarnation"] == LIFE
        mute[0].setblocking(False)
        mute[0].accept()[0].close()
        with pytest.raises(BlockingIOError):
            mute[0].accept()
        for each in mute:
            each.close()
        assert {each() for each in said} <= {"dead", "silent"}
