"""Answering agents that ask whether this one lives. `prober` asks, and says what answers mean.

A question may name a third life: the agent then asks that one once, if it knows its seat, and says what came of it.
"""

from __future__ import annotations

import json
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elasticrt.ipc.time_bounds import PROBE_STEP_S, PROBE_STEPS
from elasticrt.ipc.wakeup import Wakeup
from elasticrt.liveness.prober import LINE_MAX_BYTES, Answer, Prober, fields_in
from elasticrt.rendezvous.records import Seat
from elasticrt.workers.store_ports import listen

log = logging.getLogger(__name__)

QUESTION_S = PROBE_STEPS * PROBE_STEP_S
"""After that an answer is not waited for any more."""

CHECKS_MAX = 4
"""So many others an agent asks at a time because it was asked about them."""

NONCE_MAX = 64
CONNECTIONS_MAX = 128
"""Open at a time; a further one takes the place of the oldest."""

SHORT_S = 0.05
"""The pause of a process that has no descriptor left for another connection."""

CLOSE_S = 2.0


@dataclass(eq=False)
class _Asking:
    """One connection; what it has said so far, when its time is over, and the answer once it has asked."""

    connection: socket.socket
    ends: float
    text: bytes = b""
    answer: dict[str, object] = field(default_factory=dict)


class ProbeServer:
    """Answers probes from `start` until `close`.

    One thread serves all connections, each until a deadline of its own: what one of them sends, or does not send,
    delays no other. The port is bound before anything is answered, because it is a part of what its agent says of
    itself; questions of that time wait.

    Args:
        address: where to listen, at any free `port`.
        run_id: the agent's run.
        state: gives (incarnation, generation), from any thread.
        seats: those that it may be asked about: never does it connect to an address that came with a question.
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
        self._wakeup = Wakeup()
        self._asking: list[_Asking] = []  # In order of `ends`: all have equally long.
        self._prober = Prober(self._checked)
        self._checks: dict[str, list[_Asking]] = {}  # Who waits for a word about whom.
        self._words: deque[tuple[str, Answer]] = deque()
        self._short = self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Answer from now on."""
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="elasticrt-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: from now on the port refuses."""
        self._closed = True
        self._socket.close()
        self._prober.close()
        if self._thread is None:
            self._end()
        else:
            self._wakeup.ring()
            self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        while not self._closed:
            timeout_s = max(0.0, self._asking[0].ends - time.monotonic()) if self._asking else None
            for key, _ in self._selector.select(timeout_s):
                if isinstance(key.data, _Asking):
                    self._hear(key.data)
                elif key.fileobj is self._wakeup:
                    self._wakeup.heard()
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
            return  # It has hung up again.
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
        if asking.answer:  # It has asked, and hangs up before it is answered, or says too much.
            self._drop(asking)
        elif not piece or b"\n" in asking.text or len(asking.text) >= LINE_MAX_BYTES:
            self._understand(asking)

    def _understand(self, asking: _Asking) -> None:
        """Answer a question, now or when the answer is known; nothing to what is no question."""
        question = fields_in(asking.text.partition(b"\n")[0]) or {}
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
        if seat is None or (seat.incarnation not in self._checks and len(self._checks) >= CHECKS_MAX):
            return False
        if seat.incarnation not in self._checks:
            self._checks[seat.incarnation] = []
            self._prober.ask([seat], steps=1)
        self._checks[seat.incarnation].append(asking)
        return True

    def _checked(self, seat: Seat, answer: Answer, _: float) -> None:
        self._words.append((seat.incarnation, answer))
        self._wakeup.ring()

    def _pass_on(self) -> None:
        """Answer those who wait for a word about another life, and have not hung up."""
        while self._words:
            life, answer = self._words.popleft()
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
        self._wakeup.close()
