"""Asking an agent whether it lives, and answering.

A probe sends a nonce over TCP and wants this life's incarnation and the same nonce back, from a thread that does
nothing else: an accepted connection alone is silence (the kernel accepts for a stopped process too). What can be said:

* the right answer: "alive";
* refused, reset, or another life answers: "dead", at once; the process that held this port is gone;
* anything else, to three questions that come one after the other: "silent". That is no proof; `rendezvous.decide` says
  what may follow.

The answer also names the generation that the agent has workers of. An agent that cannot reach etcd asks for that: when
others of its run are in a newer generation, its own is over.
"""

from __future__ import annotations

import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from elasticrt.agent.ports import listen
from elasticrt.contract.bell import Bell

log = logging.getLogger(__name__)

TRIES = 3
TRY_S = 0.5
"""Between two questions to the same agent."""

QUESTION_S = TRIES * TRY_S
"""After that nobody waits for an answer any more."""

LINE_MAX_BYTES = 512
NONCE_MAX = 64
GENERATION_MAX = 2**53
CONNECTIONS_MAX = 128
"""Open at a time; a further one takes the place of the oldest."""

SHORT_S = 0.05
"""The pause of a process that has no descriptor left for another connection."""

CLOSE_S = 2.0

Answer = Literal["alive", "dead", "silent"]


@dataclass(eq=False)
class _Asking:
    """One connection; what it has said so far, and when its time is over."""

    connection: socket.socket
    ends: float
    text: bytes = b""


class ProbeServer:
    """Answers probes on `address` from `start` until `close`. `state` gives (incarnation, generation) from any thread.

    One thread serves all connections, each until a deadline of its own: what one of them sends, or does not send,
    delays no other. The port is bound before anything is answered, because it is a part of what its agent says of
    itself; questions of that time wait.
    """

    def __init__(self, address: str, run_id: str, state: Callable[[], tuple[str, int]]) -> None:
        self._socket = listen(address, CONNECTIONS_MAX)
        self._socket.setblocking(False)
        self._run_id = run_id
        self._state = state
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._bell = Bell()
        self._asking: list[_Asking] = []  # In order of `ends`: all have equally long.
        self._short = self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer from now on."""
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="elasticrt-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: from now on the port refuses."""
        self._closed = True
        self._socket.close()
        if self._thread is None:
            self._end()
        else:
            self._bell.ring()
            self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        while not self._closed:
            timeout_s = max(0.0, self._asking[0].ends - time.monotonic()) if self._asking else None
            for key, _ in self._selector.select(timeout_s):
                if isinstance(key.data, _Asking):
                    self._hear(key.data)
                elif key.fileobj is self._socket and not self._closed:
                    self._accept()
            while self._asking and self._asking[0].ends <= time.monotonic():
                self._drop(self._asking[0])
        self._end()

    def _accept(self) -> None:
        if len(self._asking) >= CONNECTIONS_MAX:
            self._drop(self._asking[0])
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return  # It has gone again.
        except OSError as error:
            if self._asking:
                self._drop(self._asking[0])
            elif not self._closed:
                if not self._short:
                    log.warning("no probe can be accepted: %s; trying again", error)
                self._short = True
                time.sleep(SHORT_S)
            return
        self._short = False
        connection.setblocking(False)
        asking = _Asking(connection, time.monotonic() + QUESTION_S)
        self._asking.append(asking)
        self._selector.register(connection, selectors.EVENT_READ, asking)

    def _hear(self, asking: _Asking) -> None:
        if asking.connection.fileno() < 0:
            return  # Dropped since it was selected.
        try:
            piece = asking.connection.recv(LINE_MAX_BYTES)
            asking.text += piece
            if piece and b"\n" not in asking.text and len(asking.text) < LINE_MAX_BYTES:
                return
            answer = self._answer(asking.text)
            if answer:
                asking.connection.send(answer)  # A fresh connection has room for a line.
        except OSError as error:
            log.debug("a probe that broke off: %s", error)
        self._drop(asking)

    def _answer(self, text: bytes) -> bytes:
        """The line that answers what somebody has said; nothing to what is no question."""
        question = _fields(text.partition(b"\n")[0])
        nonce = question.get("nonce") if question is not None else None
        if not isinstance(nonce, str) or len(nonce) > NONCE_MAX:
            log.debug("a probe that was none: %r", text[:80])
            return b""
        incarnation, generation = self._state()
        answer = {"nonce": nonce, "run": self._run_id, "incarnation": incarnation, "generation": generation}
        return json.dumps(answer).encode() + b"\n"

    def _drop(self, asking: _Asking) -> None:
        self._asking.remove(asking)
        self._selector.unregister(asking.connection)
        asking.connection.close()

    def _end(self) -> None:
        for asking in list(self._asking):
            self._drop(asking)
        self._selector.close()
        self._bell.close()


def ask(address: str, port: int, incarnation: str) -> Answer:
    """Probe one agent, up to three times within 1.5 s."""
    for _ in range(TRIES):
        deadline = time.monotonic() + TRY_S
        answer = _ask_once(address, port, incarnation)
        if answer != "silent":
            return answer
        # A failure that came early (no route, say) is not asked again in the same instant.
        time.sleep(max(0.0, deadline - time.monotonic()))
    return "silent"


def generation_of(address: str, port: int, run_id: str) -> int:
    """The newest generation that this run's agent there has had workers in; 0 when no agent of this run answers.

    In whatever life: an agent that was left out and came back knows best that the generation has moved on.
    """
    answer = _exchange(address, port)
    if isinstance(answer, str) or answer.get("run") != run_id:
        return 0
    number = answer.get("generation")
    return number if type(number) is int and 0 <= number <= GENERATION_MAX else 0


def new_question() -> tuple[str, bytes]:
    """A nonce, and the line that asks with it."""
    nonce = secrets.token_hex(8)
    return nonce, json.dumps({"nonce": nonce}).encode() + b"\n"


def fields_of(line: bytes, nonce: str) -> dict[str, Any] | None:
    """What a line answers to the question with this nonce; None when it is no answer to it."""
    fields = _fields(line)
    return fields if fields is not None and fields.get("nonce") == nonce else None


def answer_of(fields: dict[str, Any] | None, incarnation: str) -> Answer:
    """What `fields_of` an answer says about one life."""
    if fields is None:
        return "silent"
    return "alive" if fields.get("incarnation") == incarnation else "dead"


def _ask_once(address: str, port: int, incarnation: str) -> Answer:
    answer = _exchange(address, port)
    return answer if isinstance(answer, str) else answer_of(answer, incarnation)


def _exchange(address: str, port: int) -> dict[str, Any] | Literal["dead", "silent"]:
    """One question; an agent's answer, or what its absence means."""
    nonce, text = new_question()
    deadline = time.monotonic() + TRY_S
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as connection:
            connection.sendall(text)
            answer = fields_of(_read_line(connection, deadline), nonce)
    except (ConnectionRefusedError, ConnectionResetError):
        return "dead"
    except (OSError, ValueError):
        return "silent"
    return "silent" if answer is None else answer


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time was over before the line was")
        connection.settimeout(left_s)
        piece = connection.recv(LINE_MAX_BYTES)
        if not piece or len(line) > LINE_MAX_BYTES:
            raise ValueError("the connection ended before the line did")
        line += piece
    return line


def _fields(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line holds; None for any other bytes. Total: anybody can connect, and say anything."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # Brackets, a thousand deep.
        return None
    return fields if isinstance(fields, dict) else None
