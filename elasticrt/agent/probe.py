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
from collections.abc import Callable
from typing import Any, Literal

from elasticrt.agent.ports import listen

log = logging.getLogger(__name__)

TRIES = 3
TRY_S = 0.5
LINE_MAX_BYTES = 512

Answer = Literal["alive", "dead", "silent"]


class ProbeServer:
    """Answers probes on `address` until closed. `state` gives (incarnation, generation) from any thread."""

    def __init__(self, address: str, run_id: str, state: Callable[[], tuple[str, int]]) -> None:
        self._socket = listen(address, 128)
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


def new_question() -> tuple[str, bytes]:
    """A nonce, and the line that asks with it."""
    nonce = secrets.token_hex(8)
    return nonce, json.dumps({"nonce": nonce}).encode() + b"\n"


def fields_of(line: bytes, nonce: str) -> dict[str, Any] | None:
    """What a line answers to the question with this nonce; None when it is no answer to it."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and fields.get("nonce") == nonce else None


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
    try:
        with socket.create_connection((address, port), timeout=TRY_S) as connection:
            connection.sendall(text)
            answer = fields_of(_read_line(connection), nonce)
    except (ConnectionRefusedError, ConnectionResetError):
        return "dead"
    except (OSError, ValueError):
        return "silent"
    return "silent" if answer is None else answer


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(LINE_MAX_BYTES)
        if not piece or len(line) > LINE_MAX_BYTES:
            raise ValueError("the connection ended before the line did")
        line += piece
    return line
