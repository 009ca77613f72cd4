"""`elasticrt doctor --listen` and `--peer`: whether two machines reach each other, both ways, at ports like a run's.

Each connection carries one question and one answer. The listener connects to no host but the one that asks.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

from elasticrt.cli.doctor_findings import Finding, peer
from elasticrt.ipc.proc import listening
from elasticrt.ipc.std_streams import write
from elasticrt.store.protocol import bracketed

PORTS = 3
STEP_S = 3.0
"""For a connection to one port."""

LISTEN_S = 600.0
LINE_MAX_BYTES = 4096


def answer_peers(address: str) -> None:
    """Answer questions at `address`, for ten minutes."""
    until = time.monotonic() + LISTEN_S
    with ExitStack() as opened:
        sockets = [opened.enter_context(listening(address)) for _ in range(1 + PORTS)]
        asked, *ports = (each.getsockname()[1] for each in sockets)
        write(sys.stdout, f"on the other machine: elasticrt doctor --peer {bracketed(address)}:{asked}\n")
        while (left := until - time.monotonic()) > 0:
            sockets[0].settimeout(left)
            with suppress(OSError, ValueError, TypeError, KeyError):  # A malformed question gets no answer.
                connection, (host, *_) = sockets[0].accept()
                with connection:
                    connection.settimeout(STEP_S)
                    wanted = json.loads(connection.makefile("rb").readline(LINE_MAX_BYTES))["ports"]
                    errors = [_why_not_reached(host, int(port)) for port in wanted[:PORTS]]
                    answer = {"seen": host, "ports": ports, "errors": errors, "time": time.time()}
                    connection.sendall(json.dumps(answer).encode() + b"\n")


def ask_peer(host: str, port: int) -> Finding:
    """Whether this machine and the one that listens there reach each other. Raises OSError, ValueError."""
    times = []
    for _ in range(5):
        began = time.monotonic()
        own, answer = _ask(host, port, [])
        times.append(time.monotonic() - began)
    ahead_s = time.time() - answer["time"]
    with ExitStack() as opened:
        ours = [opened.enter_context(listening(own)).getsockname()[1] for _ in range(PORTS)]
        found = dict(zip(ours, _ask(host, port, ours)[1]["errors"], strict=True))
    errors = {f"from there to {own}:{each}": error for each, error in found.items()}
    errors |= {f"from here to port {each}": _why_not_reached(host, each) for each in answer["ports"]}
    rtt_s = sorted(times)[2] / 2  # Once for the connection, once for the answer.
    return peer(f"{host}:{port}", errors, seen_as=answer["seen"], own=own, rtt_s=rtt_s, ahead_s=ahead_s)


def _ask(host: str, port: int, ours: list[int]) -> tuple[str, dict[str, Any]]:
    """Our address on the way there, and the answer."""
    with socket.create_connection((host, port), STEP_S) as connection:
        connection.settimeout(STEP_S * (PORTS + 1))  # It tries one after the other.
        connection.sendall(json.dumps({"ports": ours}).encode() + b"\n")
        answer = None
        with suppress(ValueError):
            answer = json.loads(connection.makefile("rb").readline(LINE_MAX_BYTES))
        if not isinstance(answer, dict) or not {"seen", "ports", "errors", "time"} <= answer.keys():
            raise ValueError(f"something else than `elasticrt doctor --listen` answers there ({host}:{port})")
        return connection.getsockname()[0], answer


def _why_not_reached(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), STEP_S).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""
