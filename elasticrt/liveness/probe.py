"""Answering agents that ask whether this one lives. `prober` asks, and says what answers mean.

A question may name a third life: the agent then asks that one once, if it knows its seat, and says what came of it.
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

QUESTION_S = PROBE_STEPS * PROBE_STEP_S
"""After that an answer is not waited for any more."""

CHECKS_MAX = 4
"""So many others an agent asks at a time because it was asked about them."""

NONCE_MAX = 64
CONNECTIONS_MAX = 128


class ProbeServer:
    """Answers probes from `start` until `close`, on the thread that asks them as well.

    The port is bound before anything is answered, because it is a part of what its agent says of itself; questions of
    that time wait.

    Args:
        prober: of the same agent; closed later than this.
        address: where to listen, at any free `port`.
        run_id: the agent's run.
        state: gives (incarnation, generation), from any thread.
        seats: those that it may be asked about: never does it connect to an address that came with a question.
        workers: what is to be said of its workers, as JSON values: where they are, how long they wait.

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
        self._checks: dict[str, list[tuple[Client, dict[str, object]]]] = {}  # Who waits for a word about whom.
        self._server = RequestServer(
            prober.thread,
            listener,
            self._asked,
            ends=b"\n",
            bytes_max=LINE_MAX_BYTES,
            request_s=QUESTION_S,
            clients_max=CONNECTIONS_MAX,
        )

    def start(self) -> None:
        """Answer from now on."""
        self._server.start()

    def close(self) -> None:
        """Stop answering: from now on the port refuses."""
        self._server.close()

    def _asked(self, client: Client, line: bytes) -> None:
        """Answer a question, now or when the answer is known; nothing to what is no question."""
        question = fields_in(line) or {}
        nonce = question.get("nonce")
        if not isinstance(nonce, str) or len(nonce) > NONCE_MAX:
            log.debug("a probe that was none: %r", line[:80])
            self._server.hang_up(client)
            return
        incarnation, generation = self._state()
        answer = {"nonce": nonce, "run": self._run_id, "incarnation": incarnation, "generation": generation}
        if "about" not in question:
            self._answer(client, {**answer, "workers": [], **self._workers()} if "workers" in question else answer)
        elif not self._check(client, answer, question["about"]):
            self._answer(client, {**answer, "about": "unknown"})

    def _check(self, client: Client, answer: dict[str, object], about: object) -> bool:
        """Ask that life, once for all who ask about it meanwhile. False: it is unknown, or too many are being asked."""
        seat = next((seat for seat in self._seats() if seat.incarnation == about), None)
        if seat is None or (seat.incarnation not in self._checks and len(self._checks) >= CHECKS_MAX):
            return False
        asked = seat.incarnation in self._checks
        self._checks.setdefault(seat.incarnation, []).append((client, answer))
        if not asked:
            self._prober.check(seat, self._checked)
        return True

    def _checked(self, seat: Seat, found: Answer) -> None:
        for client, answer in self._checks.pop(seat.incarnation):
            self._answer(client, {**answer, "about": found})

    def _answer(self, client: Client, answer: dict[str, object]) -> None:
        self._server.answer(client, json.dumps(answer).encode() + b"\n")
