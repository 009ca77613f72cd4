"""Asking an agent whether it lives, and answering.

A probe sends a nonce over TCP and wants this life's incarnation and the same nonce back, from a thread that does
nothing else: an accepted connection alone is silence (the kernel accepts for a stopped process too). What can be said:

* the right answer: "alive";
* refused, reset, or another life answers: "dead", at once; the process that held this port is gone;
* anything else, three times within 1.5 s: "silent". That is no proof; `rendezvous.decide` says what may follow.

The answer also names the generation that the agent has workers of. An agent that cannot reach etcd asks for that: when
others of its run are in a newer generation, its own is over.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from elasticrt.rendezvous.records import Seat

log = logging.getLogger(__name__)

TRIES = 3
TRY_S = 0.5
LINE_MAX_BYTES = 512
ASK_AT_ONCE = 32

Answer = Literal["alive", "dead", "silent"]


class ProbeServer:
    """Answers probes on `address` until closed. `state` gives (incarnation, generation) from any thread."""

    def __init__(self, address: str, run_id: str, state: Callable[[], tuple[str, int]]) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=128)
        self._run_id = run_id
        self._state = state
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="elasticrt-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: from now on the port refuses."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # Closed.
            with connection:
                connection.settimeout(TRY_S)
                try:
                    question = json.loads(_read_line(connection))
                    incarnation, generation = self._state()
                    answer = {"nonce": question["nonce"], "run": self._run_id}
                    answer |= {"incarnation": incarnation, "generation": generation}
                    connection.sendall(json.dumps(answer).encode() + b"\n")
                except (OSError, ValueError, KeyError, TypeError) as error:
                    log.debug("a probe that was none: %s", error)


class Gathering:
    """Answers on their way from many threads to one, which thinks about all of them whenever it gets one.

    That nodes live is passed on when the last of those that are being asked has answered, and not node by node: of a
    thousand nodes any one may be the lost one, and while an answer is missing nothing else can be decided. That a node
    does not live is passed on at once, with all that is known by then.
    """

    def __init__(self, sink: Callable[[Seat, Answer, float], None]) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._missing = 0
        self._kept: list[tuple[Seat, Answer, float]] = []

    def asked(self) -> None:
        """One more is being asked."""
        with self._lock:
            self._missing += 1

    def answered(self, seat: Seat, answer: Answer, asked_at: float) -> None:
        """One of them has answered, or has not within its time."""
        with self._lock:
            self._missing -= 1
            self._kept.append((seat, answer, asked_at))
            if self._missing and answer == "alive":
                return
            kept, self._kept = self._kept, []
        for each in kept:
            self._sink(*each)


class Prober:
    """Asks seats in the background; each seat is asked once at a time. `sink` is called from other threads."""

    def __init__(self, sink: Callable[[Seat, Answer, float], None]) -> None:
        self._sink = sink
        self._answers = Gathering(self._heard)
        self._asking: set[str] = set()  # Until its answer is passed on: one that is kept back must not be asked again.
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=ASK_AT_ONCE, thread_name_prefix="elasticrt-ask")

    def ask(self, seats: Iterable[Seat]) -> None:
        """Start asking those that are not being asked already."""
        for seat in seats:
            with self._lock:
                if seat.incarnation in self._asking:
                    continue
                self._asking.add(seat.incarnation)
            self._answers.asked()
            self._pool.submit(self._ask, seat, time.monotonic())

    def listen(self, seats: Iterable[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        """Ask those seats once, in the background, which generation they run; `heard` gets what they say."""
        for seat in seats:
            with self._lock:
                if seat.incarnation in self._asking:
                    continue
                self._asking.add(seat.incarnation)
            self._pool.submit(self._listen, seat, run_id, heard)

    def close(self) -> None:
        """Take no more questions; those under way end by themselves within 1.5 s."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, seat: Seat, asked_at: float) -> None:
        self._answers.answered(seat, ask(seat.address, seat.probe_port, seat.incarnation), asked_at)

    def _heard(self, seat: Seat, answer: Answer, asked_at: float) -> None:
        with self._lock:
            self._asking.discard(seat.incarnation)
        self._sink(seat, answer, asked_at)

    def _listen(self, seat: Seat, run_id: str, heard: Callable[[int], None]) -> None:
        number = generation_of(seat.address, seat.probe_port, run_id)
        with self._lock:
            self._asking.discard(seat.incarnation)
        heard(number)


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
    return number if isinstance(number, int) else 0


def _ask_once(address: str, port: int, incarnation: str) -> Answer:
    answer = _exchange(address, port)
    if isinstance(answer, str):
        return answer
    return "alive" if answer.get("incarnation") == incarnation else "dead"


def _exchange(address: str, port: int) -> dict[str, Any] | Literal["dead", "silent"]:
    """One question; an agent's answer, or what its absence means."""
    nonce = secrets.token_hex(8)
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as connection:
            connection.sendall(json.dumps({"nonce": nonce}).encode() + b"\n")
            answer = json.loads(_read_line(connection))
    except (ConnectionRefusedError, ConnectionResetError):
        return "dead"
    except (OSError, ValueError):
        return "silent"
    if not isinstance(answer, dict) or answer.get("nonce") != nonce:
        return "silent"
    return answer


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(LINE_MAX_BYTES)
        if not piece or len(line) > LINE_MAX_BYTES:
            raise ValueError("the connection ended before the line did")
        line += piece
    return line
