"""Answers the probes of other agents. `prober` asks, and defines what answers mean.

A question may be about a third agent. This one then probes it once, if it knows its seat, and passes the result on.
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

# After this time the answer comes too late.
QUESTION_S = PROBE_STEPS * PROBE_STEP_S
# The number of seats that are probed at a time for other agents.
CHECKS_MAX = 4

NONCE_MAX = 64
CONNECTIONS_MAX = 128


class ProbeServer(RequestServer):
    """Answers probes at a free `port` of `address`, from `start` until `close`, on the thread of the agent's `prober`.

    The port is bound at once, because the agent announces it before `start`. Questions that come before that wait.

    Args:
        prober: closed later than this.
        state: gives (incarnation, generation), from any thread.
        seats: the agents it may be asked about. It never connects to an address that came with a question.
        workers: the positions and the waits of its workers, as JSON values.

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
        self._checks: dict[str, list[tuple[Client, dict[str, object]]]] = {}  # By incarnation: who asks.
        super().__init__(
            prober.thread,
            listener,
            self._question,
            ends=b"\n",
            bytes_max=LINE_MAX_BYTES,
            request_s=QUESTION_S,
            clients_max=CONNECTIONS_MAX,
        )

    def _question(self, client: Client, line: bytes) -> None:
        """Answer a question, now or when its answer is known. Anything else gets no answer."""
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
            self._say(client, {**answer, "workers": [], **self._workers()} if "workers" in question else answer)

    def _check(self, client: Client, answer: dict[str, object], about: object) -> None:
        """Probe the incarnation `about`, once for all clients that ask meanwhile."""
        seat = next((seat for seat in self._seats() if seat.incarnation == about), None)
        waiting = self._checks.get(seat.incarnation) if seat is not None else None
        if waiting is not None:
            waiting.append((client, answer))
        elif seat is None or len(self._checks) >= CHECKS_MAX:
            self._say(client, {**answer, "about": "unknown"})
        else:
            self._checks[seat.incarnation] = [(client, answer)]
            self._prober.check(seat, self._checked)

    def _checked(self, seat: Seat, found: Answer) -> None:
        for client, answer in self._checks.pop(seat.incarnation):
            self._say(client, {**answer, "about": found})

    def _say(self, client: Client, answer: dict[str, object]) -> None:
        self.answer(client, json.dumps(answer).encode() + b"\n")
