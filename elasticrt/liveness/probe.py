"""Asking an agent whether it lives, and answering.

A probe sends a nonce over TCP and wants this life's incarnation and the same nonce back, from a thread that does
nothing else: an accepted connection alone is silence (the kernel accepts for a stopped process too). What can be said:

* the right answer: "alive";
* refused, reset, or another life answers: "dead", at once; the process that held this port is gone;
* anything else, to questions that come one after the other: "silent". That is no proof; `rendezvous.decide` says what
  may follow.

A question may name a third life: the agent then asks that one once, if it knows its seat, and says what came of it.

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
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from elasticrt.ipc.wakeup import Wakeup
from elasticrt.rendezvous.records import Seat
from elasticrt.workers.store_ports import listen

log = logging.getLogger(__name__)

TRIES = 3
TRY_S = 0.5
"""Between two questions to the same agent."""

QUESTION_S = TRIES * TRY_S
"""After that nobody waits for an answer any more."""

WITNESS_S = 0.3
"""How long an agent waits for a third one's answer when it is asked about it."""

CHECKS_MAX = 4
"""So many others an agent asks at a time because it was asked about them."""

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
    """One connection; what it has said so far, when its time is over, and the answer once it has asked."""

    connection: socket.socket
    ends: float
    text: bytes = b""
    answer: dict[str, object] = field(default_factory=dict)


class ProbeServer:
    """Answers probes on `address` from `start` until `close`. `state` gives (incarnation, generation) from any thread,
    and `seats` those that it may be asked about: never does it connect to an address that came with a question.

    One thread serves all connections, each until a deadline of its own: what one of them sends, or does not send,
    delays no other. The port is bound before anything is answered, because it is a part of what its agent says of
    itself; questions of that time wait.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        state: Callable[[], tuple[str, int]],
        seats: Callable[[], Iterable[Seat]] = tuple,
    ) -> None:
        self._socket = listen(address, CONNECTIONS_MAX)
        self._socket.setblocking(False)
        self._run_id = run_id
        self._state = state
        self._seats = seats
        self.port: int = self._socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._bell = Wakeup()
        self._asking: list[_Asking] = []  # In order of `ends`: all have equally long.
        self._checks: dict[str, list[_Asking]] = {}  # Who waits for a word about whom.
        self._checked: deque[tuple[str, Answer]] = deque()
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
                elif key.fileobj is self._bell:
                    self._bell.heard()
                    self._pass_on()
                elif not self._closed:
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
        except OSError as error:
            log.debug("a probe that broke off: %s", error)
            self._drop(asking)
            return
        asking.text += piece
        if asking.answer:  # It has asked, and goes before it is answered, or says too much.
            self._drop(asking)
        elif not piece or b"\n" in asking.text or len(asking.text) >= LINE_MAX_BYTES:
            self._understand(asking)

    def _understand(self, asking: _Asking) -> None:
        """Answer what somebody has said, now or when it is known; nothing to what is no question."""
        question = _fields(asking.text.partition(b"\n")[0]) or {}
        nonce = question.get("nonce")
        if not isinstance(nonce, str) or len(nonce) > NONCE_MAX:
            log.debug("a probe that was none: %r", asking.text[:80])
            self._drop(asking)
            return
        incarnation, generation = self._state()
        asking.answer = {"nonce": nonce, "run": self._run_id, "incarnation": incarnation, "generation": generation}
        if "about" not in question:
            self._answer(asking)
        elif not self._check(asking, question["about"]):
            self._answer(asking, "unknown")

    def _check(self, asking: _Asking, about: object) -> bool:
        """Ask that life, once for all who ask about it meanwhile. False: it is unknown, or too many are being asked."""
        seat = next((seat for seat in self._seats() if seat.incarnation == about), None)
        if seat is None:
            return False
        if seat.incarnation not in self._checks:
            if len(self._checks) >= CHECKS_MAX:
                return False
            self._checks[seat.incarnation] = []
            threading.Thread(target=self._ask, args=(seat,), name="elasticrt-witness", daemon=True).start()
        self._checks[seat.incarnation].append(asking)
        return True

    def _ask(self, seat: Seat) -> None:
        """On a thread of its own: it may have to wait for a name."""
        answer = _ask_once(seat.address, seat.probe_port, seat.incarnation, WITNESS_S)
        self._checked.append((seat.incarnation, answer))
        self._bell.ring()

    def _pass_on(self) -> None:
        """Answer those who wait for a word about somebody, and are still there."""
        while self._checked:
            life, answer = self._checked.popleft()
            for asking in self._checks.pop(life):
                if asking.connection.fileno() >= 0:
                    self._answer(asking, answer)

    def _answer(self, asking: _Asking, about: str = "") -> None:
        answer = {**asking.answer, "about": about} if about else asking.answer
        try:
            asking.connection.send(json.dumps(answer).encode() + b"\n")  # A fresh connection has room for a line.
        except OSError as error:
            log.debug("a probe that broke off: %s", error)
        self._drop(asking)

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


def new_question(about: str = "") -> tuple[str, bytes]:
    """A nonce, and the line that asks with it, `about` another life if that is given."""
    nonce = secrets.token_hex(8)
    return nonce, json.dumps({"nonce": nonce, "about": about} if about else {"nonce": nonce}).encode() + b"\n"


def fields_of(line: bytes, nonce: str) -> dict[str, Any] | None:
    """What a line answers to the question with this nonce; None when it is no answer to it."""
    fields = _fields(line)
    return fields if fields is not None and fields.get("nonce") == nonce else None


def answer_of(fields: dict[str, Any] | None, incarnation: str) -> Answer:
    """What `fields_of` an answer says about one life."""
    if fields is None:
        return "silent"
    return "alive" if fields.get("incarnation") == incarnation else "dead"


def _ask_once(address: str, port: int, incarnation: str, limit_s: float = TRY_S) -> Answer:
    answer = _exchange(address, port, limit_s)
    return answer if isinstance(answer, str) else answer_of(answer, incarnation)


def _exchange(address: str, port: int, limit_s: float = TRY_S) -> dict[str, Any] | Literal["dead", "silent"]:
    """One question; an agent's answer, or what its absence means."""
    nonce, text = new_question()
    deadline = time.monotonic() + limit_s
    try:
        with socket.create_connection((address, port), timeout=limit_s) as connection:
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
