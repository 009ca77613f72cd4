"""Answers the probes of other agents. `liveness.prober` asks, and defines what the answers mean.

A question may be about a third agent. The asked agent then probes the third one once, if it knows the seat, and passes
the result on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping

from elasticrt.ipc.request_server import Client, RequestServer
from elasticrt.ipc.time_bounds import PROBE_STEP_S, PROBE_STEPS
from elasticrt.liveness.prober import LINE_MAX_BYTES, Answer, Prober, fields_in
from elasticrt.rendezvous.records import Seat
from elasticrt.workers.store_ports import listen

log = logging.getLogger(__name__)

# After this time the asking agent has given up, so an answer is useless.
QUESTION_S = PROBE_STEPS * PROBE_STEP_S
# The maximum of seats that are probed at a time for other agents.
CHECKS_MAX = 4

NONCE_MAX = 64
CONNECTIONS_MAX = 128


class ProbeServer(RequestServer):
    """Answers probes from `start` until `close`, on the thread of the agent's `prober`.

    The port is bound at once, because the agent announces it before `start`. Questions that come earlier wait in the
    kernel's backlog.

    Args:
        prober: the agent's prober. Close it after this server.
        address: the IP address of this machine at which to listen, on a free port.
        run_id: the run's name.
        state: returns the agent's incarnation and the generation that it has started last. Called on the prober's
            thread.
        seats: returns the seats about which this agent may be asked. The server never connects to an address that came
            with a question.
        workers: returns the positions and the own work of the agent's workers, as JSON values.

    Attributes:
        port: the port at which the server listens.

    Raises ConfigError when the address is not this machine's.
    """

    def __init__(  # noqa: PLR0917  Each has a type of its own: they cannot be taken for each other.
        self,
        prober: Prober,
        address: str,
        run_id: str,
        state: Callable[[], tuple[str, int]],
        seats: Callable[[], Iterable[Seat]] = tuple,
        workers: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        listener = listen(address, CONNECTIONS_MAX)
        self.port: int = listener.getsockname()[1]
        self._prober = prober
        self._run_id = run_id
        self._state = state
        self._seats = seats
        self._workers = workers
        # By the incarnation that is being probed: the clients that wait for the result, with their answers so far.
        self._checks: dict[str, list[tuple[Client, dict[str, object]]]] = {}
        super().__init__(
            prober.thread,
            listener,
            self._on_question,
            ends=b"\n",
            bytes_max=LINE_MAX_BYTES,
            request_s=QUESTION_S,
            clients_max=CONNECTIONS_MAX,
        )

    def _on_question(self, client: Client, line: bytes) -> None:
        """Answer a question, at once or when the third agent has answered. Other bytes get no answer."""
        question = fields_in(line) or {}
        nonce = question.get("nonce")
        if not isinstance(nonce, str) or len(nonce) > NONCE_MAX:
            log.debug("not a probe: %r", line[:80])
            self.hang_up(client)
            return
        incarnation, generation = self._state()
        answer = {"nonce": nonce, "run": self._run_id, "incarnation": incarnation, "generation": generation}
        if "about" in question:
            self._check(client, answer, question["about"])
        else:
            self._send(client, {**answer, "workers": [], **self._workers()} if "workers" in question else answer)

    def _check(self, client: Client, answer: dict[str, object], about: object) -> None:
        """Probe the agent with the incarnation `about`, once for all clients that ask about it meanwhile."""
        seat = next((seat for seat in self._seats() if seat.incarnation == about), None)
        waiting = self._checks.get(seat.incarnation) if seat is not None else None
        if waiting is not None:
            waiting.append((client, answer))
        elif seat is None or len(self._checks) >= CHECKS_MAX:
            self._send(client, {**answer, "about": "unknown"})
        else:
            self._checks[seat.incarnation] = [(client, answer)]
            self._prober.check(seat, self._checked)

    def _checked(self, seat: Seat, found: Answer) -> None:
        for client, answer in self._checks.pop(seat.incarnation):
            self._send(client, {**answer, "about": found})

    def _send(self, client: Client, answer: dict[str, object]) -> None:
        self.answer(client, json.dumps(answer).encode() + b"\n")
