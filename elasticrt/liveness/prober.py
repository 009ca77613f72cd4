"""Probes other agents, many at once, from one thread. `liveness.probe` answers.

A question is a line of JSON over TCP with a nonce. The answer repeats the nonce, and has the agent's incarnation and
the generation of its workers. An agent is

* "alive" when the right answer comes;
* "dead" when the connection is refused or reset, or another incarnation answers: the agent's process has ended;
* "silent" otherwise, also if it only accepts the connection: the kernel accepts for a stopped process too. Silence is
  no proof of death.

If an agent stays silent, the prober also asks witnesses about it (SWIM's indirect probe, Das et al. 2002): two agents
that both hear nothing may decide sooner than one.
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

# The maximum of open connections. The usual limit of open files of a process is 1,024.
OPEN_AT_ONCE = 256
# The number of agents that are asked about a seat that has not answered its first try.
WITNESSES = 2
LINE_MAX_BYTES = 512
# An answer with the positions of workers has up to a kilobyte for each worker.
ANSWER_MAX_BYTES = 1 << 16

Answer = Literal["alive", "dead", "silent"]
_Said = tuple[Answer, dict[str, Any]]
# Takes a seat, the answer of its agent, and when the question was put, in seconds of the monotonic clock.
Sink = Callable[[Seat, Answer, float], None]
# Takes a seat, the answer of its agent, and the answer's fields.
Done = Callable[[Seat, Answer, dict[str, Any]], None]
# Returns the agents that may be asked about a seat: other agents that know the seat.
Witnesses = Callable[[Seat], Sequence[Seat]]


def no_witnesses(_: Seat) -> Sequence[Seat]:
    """Return no witnesses: the agent that asks decides alone."""
    return ()


def new_question(about: str = "", *, workers: bool = False) -> tuple[str, bytes]:
    """A new nonce, and the line of a question with it.

    Args:
        about: the incarnation of a third agent, about which the witness is asked; "": the asked agent itself.
        workers: whether to ask for the positions of the agent's workers.
    """
    nonce = secrets.token_hex(8)
    more = {"about": about} if about else {"workers": True} if workers else {}
    return nonce, json.dumps({"nonce": nonce, **more}).encode() + b"\n"


def fields_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object in `line`; None for any other bytes.

    This function never raises: any process can connect and send any bytes.
    """
    try:
        fields = json.loads(line)
    # A RecursionError ends the parsing of brackets that are nested a thousand deep.
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def ask(address: str, port: int, incarnation: str) -> Answer:
    """Ask the agent at `address` and `port` whether it is `incarnation`, and wait for the answer, for about 1.5 s."""
    seat = Seat(
        node="asked", incarnation=incarnation, index=0, rank_offset=0, workers=1, address=address, probe_port=port
    )
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    prober = Prober(lambda _seat, answer, _at: answers.put(answer))
    try:
        prober.ask([seat])
        return answers.get(timeout=2 * PROBE_STEPS * PROBE_STEP_S)
    # The prober answers after half of this time at the latest, unless this machine is too busy to run its thread.
    except queue.Empty:
        return "silent"
    finally:
        prober.close()


@dataclass(eq=False)
class _Question:
    """A question to one seat: up to `steps` tries, one every PROBE_STEP_S, until a try is answered."""

    seat: Seat
    done: Done
    steps: int
    witnesses: Witnesses = no_witnesses
    # Whether the question is for the positions of workers.
    workers: bool = False
    # Whether it asks if the seat lives. It is dropped if that is being asked already, and good news may wait for the
    # answers of other seats.
    is_probe: bool = False
    # The number of tries so far, and those that are under way.
    made: int = 0
    open: list[_Try] = field(default_factory=list)
    # Whether a witness hears nothing either.
    agreed: bool = False
    # The node of a witness that does hear the seat; "" without one.
    reached_by: str = ""


@dataclass(eq=False)
class _Try:
    """One connection, to the question's own seat or to a witness. `talk`: the generator that talks over it."""

    question: _Question
    seat: Seat
    connection: socket.socket
    talk: Iterator[int]


def _talk(connection: socket.socket, address: Any, seat: Seat, nonce: str, text: bytes) -> Generator[int, None, _Said]:
    """Put a question to `seat` without blocking. Yields WRITE or READ, and goes on when the connection is ready for it.

    Returns the answer and its fields. An answer that comes late, not at all, or without the nonce counts as silence.
    """
    received = b""
    try:
        with contextlib.suppress(BlockingIOError):
            connection.connect(address)
        yield WRITE
        # The send buffer of a new connection has room for a line. `send` raises the error with which a non-blocking
        # `connect` has failed.
        connection.send(text)
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
    """Asks the agents of seats in the background. All methods but `check` may be called from any thread.

    One thread with a selector does all the work. After the loss of one of a thousand nodes, the leader asks all others
    before anything else can happen, and a pool of threads takes three times as long for that.

    Args:
        sink: takes the answers of `ask`, on the prober's thread.

    Attributes:
        thread: the prober's thread. The agent's `ProbeServer` answers there too.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # Answers for `sink` that wait for the answers of other seats.
        self._kept: list[tuple[Seat, Answer, float]] = []
        # Incarnations that are being probed, until their answer is passed on.
        self._probed: set[str] = set()
        # Questions without an answer, and those of them that wait for a free connection.
        self._questions: set[_Question] = set()
        self._waiting: deque[_Question] = deque()
        self._open: set[_Try] = set()
        self.thread = SelectorThread("elasticrt-probe", self._end)

    def ask(self, seats: Iterable[Seat], witnesses: Witnesses = no_witnesses) -> None:
        """Ask whether the agents of `seats` live. The answers go to the prober's `sink`.

        A seat that is being asked already is not asked again. `witnesses` are asked about a seat that stays silent.
        """
        asked_at = time.monotonic()

        def done(seat: Seat, answer: Answer, _: dict[str, Any]) -> None:
            self._kept.append((seat, answer, asked_at))
            # "alive" is kept until the last answer has come: while an answer is missing, nothing can be decided from
            # the news that other agents live, and the missing one may be the lost one of a thousand nodes. Each event
            # would cost the agent a turn of its loop.
            if answer == "alive" and any(each.is_probe for each in self._questions):
                return
            kept, self._kept = self._kept, []
            for each in kept:
                self._probed.discard(each[0].incarnation)
                self._sink(*each)

        self._put([_Question(seat, done, PROBE_STEPS, witnesses, is_probe=True) for seat in seats])

    def ask_for_generation(self, seats: Iterable[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        """Ask the agents of `seats` which generation of the run `run_id` they run.

        `heard` takes the number in each answer, on the prober's thread; 0 if no agent of the run answers at a seat.
        """

        def done(_seat: Seat, _: Answer, fields: dict[str, Any]) -> None:
            # The answer of another incarnation counts too: an agent that was left out and came back knows the newest
            # generation.
            number = fields.get("generation") if fields.get("run") == run_id else 0
            heard(number if type(number) is int and 0 <= number <= COUNT_MAX else 0)

        self._put([_Question(seat, done, LISTEN_STEPS) for seat in seats])

    def ask_for_workers(
        self,
        seats: Sequence[Seat],
        done: Callable[[dict[str, dict[str, Any]]], None],
        witnesses: Witnesses = no_witnesses,
    ) -> None:
        """Ask the agents of `seats` for the positions of their workers.

        Args:
            seats: the seats to ask.
            done: takes the answers by node, on the prober's thread, once all seats have answered or are silent. For a
                silent seat that a witness reaches, the answer is {"reached_by": the witness's node}.
            witnesses: returns the agents to ask about a silent seat.
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
        """Ask `seat` with a single try, on behalf of another agent. `done` takes the answer.

        Call this method on the prober's thread only.
        """
        self._begin([_Question(seat, lambda seat, answer, _: done(seat, answer), steps=1)])

    def close(self) -> None:
        """Drop the questions under way, and take no more questions."""
        self.thread.close()

    def _put(self, questions: Sequence[_Question]) -> None:
        self.thread.call(partial(self._begin, questions))

    # The methods below run on the prober's thread.

    def _begin(self, questions: Sequence[_Question]) -> None:
        for question in questions:
            if question.is_probe:
                if question.seat.incarnation in self._probed:
                    continue
                self._probed.add(question.seat.incarnation)
            self._questions.add(question)
            self._waiting.append(question)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._open) < OPEN_AT_ONCE:
            self._try(self._waiting.popleft())

    def _try(self, question: _Question) -> None:
        """Make the next try of `question`, or give up: its agent is silent."""
        if question not in self._questions:
            return
        if question.made == question.steps or (question.agreed and question.made >= AGREED_STEPS):
            self._answered(question, "silent", {"reached_by": question.reached_by} if question.reached_by else {})
            return
        # Tries overlap, because the kernel sends a lost SYN again only after a second, which is longer than three
        # tries.
        question.made += 1
        self.thread.after(PROBE_STEP_S, partial(self._try, question))
        self._connect(question, question.seat)
        if question.made == 2 and question in self._questions:
            # Only agents that have not to prove themselves that they live can be witnesses. They are drawn at random:
            # after the loss of a node all other agents ask at the same time, and should not all ask the same two.
            unsure = {each.seat.incarnation for each in self._questions}
            others = [seat for seat in question.witnesses(question.seat) if seat.incarnation not in unsure]
            for seat in random.sample(others, min(WITNESSES, len(others))):
                self._connect(question, seat)

    def _connect(self, question: _Question, seat: Seat) -> None:
        """Make a try with `seat`. A try for which there is no socket counts as silence."""
        # A question's own tries give way to its next one, if no more connections may be open.
        while question.open and len(self._open) >= OPEN_AT_ONCE:
            self._hang_up(question.open[0])
        try:
            # Agents announce IP addresses. A name would need DNS, which blocks.
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            found = socket.getaddrinfo(seat.address, seat.probe_port, type=socket.SOCK_STREAM, flags=flags)
            family, _, _, _, address = found[0]
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # The text is no IP address, or too many files are open.
        except (OSError, ValueError):
            return
        about = "" if seat is question.seat else question.seat.incarnation
        nonce, text = new_question(about, workers=question.workers)
        one = _Try(question, seat, connection, _talk(connection, address, seat, nonce, text))
        question.open.append(one)
        self._open.add(one)
        self._go_on(one)

    def _go_on(self, one: _Try) -> None:
        """Continue the talk of a try, which has just become possible."""
        try:
            self.thread.watch(one.connection, next(one.talk), partial(self._go_on, one))
        except StopIteration as end:
            self._tried(one, *end.value)

    def _tried(self, one: _Try, answer: Answer, fields: dict[str, Any]) -> None:
        """Take note that a try has ended with `answer`, from the seat or a witness.

        Silence of the seat decides nothing yet: other tries are under way, or follow.
        """
        self._hang_up(one)
        question = one.question
        if one.seat is question.seat:
            if answer != "silent":
                self._answered(question, answer, fields)
        elif answer == "alive" and fields.get("about") == "alive":
            question.reached_by = one.seat.node
        elif answer == "alive" and fields.get("about") == "silent":
            question.agreed = True
            # The question has had enough tries to give up. By the timer, answers that have arrived already are read
            # first.
            if question.made > AGREED_STEPS:
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
