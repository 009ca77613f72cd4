"""Probes other agents, many at once, from one thread. `probe` answers.

A question is a line of JSON over TCP with a nonce. The answer repeats the nonce, and has the agent's incarnation and
the generation of its workers. An agent is

* "alive" when the right answer comes;
* "dead" when the connection is refused or reset, or another incarnation answers: the process has ended;
* "silent" otherwise, also when it only accepts: the kernel accepts for a stopped process. That is no proof of death.

A silent agent is asked about as well (SWIM's indirect probe, Das et al. 2002): two agents that both hear nothing may
decide sooner than one.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from elasticrt.ipc.env import COUNT_MAX
from elasticrt.ipc.selector_thread import READ, WRITE, SelectorThread
from elasticrt.ipc.time_bounds import AGREED_STEPS, LISTEN_STEPS, PROBE_STEP_S, PROBE_STEPS, WORKERS_STEPS
from elasticrt.rendezvous.records import Seat

# Open connections at most. An agent's usual limit of open files is 1,024.
OPEN_AT_ONCE = 256
# The number of agents that are asked about a seat that has not answered within a step.
WITNESSES = 2
LINE_MAX_BYTES = 512
# An answer with the positions of workers has up to a kilobyte for each.
ANSWER_MAX_BYTES = 1 << 16

Answer = Literal["alive", "dead", "silent"]
_Said = tuple[Answer, dict[str, Any]]
# Takes a seat, its answer, and when the question was put, in seconds of the monotonic clock.
Sink = Callable[[Seat, Answer, float], None]
# Takes a seat, its answer, and the answer's fields.
Done = Callable[[Seat, Answer, dict[str, Any]], None]
# The agents that may be asked about a seat: those that know it, without the one that asks.
Witnesses = Callable[[Seat], Sequence[Seat]]


def no_witnesses(_: Seat) -> Sequence[Seat]:
    """No witnesses: one agent decides alone."""
    return ()


def new_question(about: str = "", *, workers: bool = False) -> tuple[str, bytes]:
    """A nonce and the line that asks with it: `about` another incarnation, or for the positions of `workers`."""
    nonce = secrets.token_hex(8)
    more = {"about": about} if about else {"workers": True} if workers else {}
    return nonce, json.dumps({"nonce": nonce, **more}).encode() + b"\n"


def fields_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`; None for any other bytes. It never raises: any process can connect."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # Brackets may be a thousand deep.
        return None
    return fields if isinstance(fields, dict) else None


def ask(address: str, port: int, incarnation: str) -> Answer:
    """Ask the agent at `address` and `port` whether it is `incarnation`, and wait for the answer, about 1.5 s."""
    seat = Seat(
        node="asked", incarnation=incarnation, index=0, rank_offset=0, workers=1, address=address, probe_port=port
    )
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    prober = Prober(lambda _seat, answer, _at: answers.put(answer))
    try:
        prober.ask([seat])
        return answers.get(timeout=2 * PROBE_STEPS * PROBE_STEP_S)
    except queue.Empty:  # This machine is too busy.
        return "silent"
    finally:
        prober.close()


@dataclass(eq=False)
class _Question:
    """A question to one seat: `steps` tries, one every PROBE_STEP_S, until one of them is answered."""

    seat: Seat
    done: Done
    steps: int
    witnesses: Witnesses = no_witnesses
    workers: bool = False
    # `once`: it is dropped if its seat is being asked already; `gathered`: its answer may wait for others.
    once: bool = False
    gathered: bool = False
    made: int = 0  # The number of tries so far, `open`: those under way.
    open: list[_Try] = field(default_factory=list)
    # `agreed`: a witness hears nothing either; `reached_by`: the node of one that does hear the seat.
    agreed: bool = False
    reached_by: str = ""


@dataclass(eq=False)
class _Try:
    """One connection to `seat`: the question's, or a witness."""

    question: _Question
    seat: Seat
    connection: socket.socket
    talk: Iterator[int]


def _talk(connection: socket.socket, address: Any, seat: Seat, nonce: str, text: bytes) -> Generator[int, None, _Said]:
    """Put a question to `seat`, without waiting: yields whether to go on when one can write or read, returns what came.

    An answer that comes late, not at all, or from somebody else counts as silence.
    """
    received = b""
    try:
        with contextlib.suppress(BlockingIOError):
            connection.connect(address)
        yield WRITE
        connection.send(text)  # It has room for a line. Raises what `connect` would have.
        while not received.endswith(b"\n"):
            yield READ
            piece = connection.recv(LINE_MAX_BYTES)
            received += piece
            if not piece or len(received) > ANSWER_MAX_BYTES:
                return "silent", {}
    except (ConnectionRefusedError, ConnectionResetError):
        return "dead", {}
    except OSError:
        return "silent", {}
    fields = fields_in(received) or {}
    if fields.get("nonce") != nonce:
        return "silent", {}
    return "alive" if fields.get("incarnation") == seat.incarnation else "dead", fields


class Prober:
    """Asks seats in the background. Calls `sink` on its thread. All methods but `check` may be called from any thread.

    It is one thread with a selector, because after the loss of one of a thousand nodes all others are asked before
    anything else can happen. Threads that take turns need three times as long.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._kept: list[tuple[Seat, Answer, float]] = []  # Answers that wait for others, for `sink`.
        self._asking: set[str] = set()  # Incarnations that are asked `once`, until the answer was passed on.
        self._questions: set[_Question] = set()  # Those without an answer.
        self._waiting: deque[_Question] = deque()  # Those of them that wait for a connection.
        self._open: set[_Try] = set()
        # Where it works. The agent's `ProbeServer` answers there.
        self.thread = SelectorThread("elasticrt-probe", self._end)

    def ask(self, seats: Iterable[Seat], witnesses: Witnesses = no_witnesses) -> None:
        """Ask those of `seats` that are not being asked already whether they live, and their `witnesses` about them."""
        asked_at = time.monotonic()

        def done(seat: Seat, answer: Answer, _: dict[str, Any]) -> None:
            self._kept.append((seat, answer, asked_at))
            # While an answer is missing, no decision can follow from the news that others are alive. So these wait for
            # the last answer: one of a thousand nodes may be the lost one.
            if answer == "alive" and any(each.gathered for each in self._questions):
                return
            kept, self._kept = self._kept, []
            for each in kept:
                self._asking.discard(each[0].incarnation)
                self._sink(*each)

        self._put([_Question(seat, done, PROBE_STEPS, witnesses, once=True, gathered=True) for seat in seats])

    def listen(self, seats: Iterable[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        """Ask the agents of `seats` which generation they run.

        `heard` takes each answer, on the prober's thread; 0 if no agent of the run answers.
        """

        def done(seat: Seat, _: Answer, fields: dict[str, Any]) -> None:
            self._asking.discard(seat.incarnation)
            # Another incarnation's answer counts too: an agent that was left out and came back knows the newest one.
            number = fields.get("generation") if fields.get("run") == run_id else 0
            heard(number if type(number) is int and 0 <= number <= COUNT_MAX else 0)

        self._put([_Question(seat, done, LISTEN_STEPS, once=True) for seat in seats])

    def ask_for_workers(
        self,
        seats: Sequence[Seat],
        done: Callable[[dict[str, dict[str, Any]]], None],
        witnesses: Witnesses = no_witnesses,
    ) -> None:
        """Ask the agents of `seats` for the positions of their workers.

        `done` takes their answers by node, on the prober's thread, when all have answered or are silent. For a silent
        one that a witness reaches, the answer is {"reached_by": the witness's node}.
        """
        answers: dict[str, dict[str, Any]] = {}
        missing = {seat.incarnation for seat in seats}

        def one(seat: Seat, answer: Answer, fields: dict[str, Any]) -> None:
            missing.discard(seat.incarnation)
            if (answer == "alive" and "workers" in fields) or "reached_by" in fields:
                answers[seat.node] = fields
            if not missing:
                done(answers)

        if not seats:
            self.thread.call(partial(done, answers))
        self._put([_Question(seat, one, WORKERS_STEPS, witnesses, workers=True) for seat in seats])

    def check(self, seat: Seat, done: Callable[[Seat, Answer], None]) -> None:
        """Ask `seat` once, on behalf of another agent. Call it on the prober's thread; `done` takes the answer."""
        self._begin([_Question(seat, lambda seat, answer, _: done(seat, answer), steps=1)])

    def close(self) -> None:
        """Drop the questions under way, and take no more."""
        self.thread.close()

    def _put(self, questions: Sequence[_Question]) -> None:
        self.thread.call(partial(self._begin, questions))

    # On the thread.

    def _begin(self, questions: Sequence[_Question]) -> None:
        for question in questions:
            if question.once and question.seat.incarnation in self._asking:
                continue
            if question.once:
                self._asking.add(question.seat.incarnation)
            self._questions.add(question)
            self._waiting.append(question)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._open) < OPEN_AT_ONCE:
            self._try(self._waiting.popleft())

    def _try(self, question: _Question) -> None:
        """Make the next try, or give up."""
        if question not in self._questions:
            return
        if question.made == question.steps or (question.agreed and question.made >= AGREED_STEPS):
            self._answered(question, "silent", {"reached_by": question.reached_by} if question.reached_by else {})
            return
        # Tries overlap. A lost SYN is sent again by the kernel only after a second, which is longer than three tries.
        question.made += 1
        self.thread.after(PROBE_STEP_S, partial(self._try, question))
        self._connect(question, question.seat)
        if question.made == 2 and question in self._questions:
            # Only agents that are not being asked themselves. At random: after the loss of a node all others ask at
            # once, and should not all ask the same two.
            unsure = {each.seat.incarnation for each in self._questions}
            others = [seat for seat in question.witnesses(question.seat) if seat.incarnation not in unsure]
            for seat in random.sample(others, min(WITNESSES, len(others))):
                self._connect(question, seat)

    def _connect(self, question: _Question, seat: Seat) -> None:
        """Make a try with `seat`. If not even a socket can be had, it counts as silence."""
        while question.open and len(self._open) >= OPEN_AT_ONCE:
            self._hang_up(question.open[0])
        try:
            # Agents announce IP addresses. A name would need DNS, which blocks.
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            found = socket.getaddrinfo(seat.address, seat.probe_port, type=socket.SOCK_STREAM, flags=flags)
            family, _, _, _, address = found[0]
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except (OSError, ValueError):  # The text is no address, or too many files are open.
            return
        about = "" if seat is question.seat else question.seat.incarnation
        nonce, text = new_question(about, workers=question.workers)
        one = _Try(question, seat, connection, _talk(connection, address, seat, nonce, text))
        question.open.append(one)
        self._open.add(one)
        self._go_on(one)

    def _go_on(self, one: _Try) -> None:
        try:
            self.thread.watch(one.connection, next(one.talk), partial(self._go_on, one))
        except StopIteration as end:
            self._tried(one, *end.value)

    def _tried(self, one: _Try, answer: Answer, fields: dict[str, Any]) -> None:
        """A try has ended with `answer`, from the seat or a witness. After "silent" other tries may bring more."""
        self._hang_up(one)
        question = one.question
        if one.seat is question.seat:
            if answer != "silent":
                self._answered(question, answer, fields)
        elif answer == "alive" and fields.get("about") == "alive":
            question.reached_by = one.seat.node
        elif answer == "alive" and fields.get("about") == "silent":
            question.agreed = True
            if question.made > AGREED_STEPS:  # It is time. Answers that have arrived already are read first.
                self.thread.after(0.0, partial(self._try, question))

    def _answered(self, question: _Question, answer: Answer, fields: dict[str, Any]) -> None:
        self._questions.remove(question)
        while question.open:
            self._hang_up(question.open[0])
        question.done(question.seat, answer, fields)

    def _hang_up(self, one: _Try) -> None:
        one.question.open.remove(one)
        self._open.remove(one)
        self.thread.forget(one.connection)
        one.connection.close()
        if self._waiting:
            self.thread.after(0.0, self._begin_waiting)

    def _end(self) -> None:
        for one in self._open:
            one.connection.close()
