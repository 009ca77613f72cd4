"""Asking agents whether they live, many at once, from one thread. `probe` answers.

A question is a line of JSON over TCP with a nonce; the answer has the same nonce, and this life's incarnation. An
accepted connection alone is silence (the kernel accepts for a stopped process too). What can be said of an agent:

* "alive": the right answer came;
* "dead": refused, reset, or another life answered; the process that held this port has ended;
* "silent": anything else, to questions that come one after the other. That is no proof; `rendezvous.decide` says what
  may follow.

The answer also names the generation that the agent has workers of. An agent that cannot reach etcd asks for that: when
others of its run are in a newer generation, its own is over.

A thread per question would be simpler. But after the loss of one of a thousand nodes all others are asked before
anything else can happen: threads that take turns need three times as long for that. And where half of a cluster is cut
off, hundreds of questions wait for their time to end; they do so together, and not a few at a time.

An agent that does not answer at once is asked about (the indirect probe of SWIM, Das et al. 2002): two agents that both
hear nothing agree sooner than one alone may be sure.
"""

from __future__ import annotations

import errno
import json
import queue
import random
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from elasticrt.ipc.selector_thread import READ, WRITE, SelectorThread
from elasticrt.ipc.time_bounds import AGREED_STEPS, LISTEN_STEPS, PROBE_STEP_S, PROBE_STEPS
from elasticrt.rendezvous.records import Seat

OPEN_AT_ONCE = 256
"""Connections. An agent's usual limit of open files is 1,024."""

WITNESSES = 2
"""So many others are asked about a seat that has not answered within a step."""

LINE_MAX_BYTES = 512
ANSWER_MAX_BYTES = 1 << 16
"""Of an answer that says where an agent's workers are: up to a kilobyte for each."""

GENERATION_MAX = 2**53
CLOSE_S = 2.0

Answer = Literal["alive", "dead", "silent"]
Sink = Callable[[Seat, Answer, float], None]
"""Gets an answer, and when it was asked for, in seconds of the monotonic clock."""

Witnesses = Callable[[Seat], Sequence[Seat]]
"""Which agents may be asked about a seat: those that know it, without the one that asks."""


def nobody(_: Seat) -> Sequence[Seat]:
    """Witnesses where one agent's word has to do."""
    return ()


def new_question(about: str = "", *, workers: bool = False) -> tuple[str, bytes]:
    """A nonce, and the line that asks with it, `about` another life, or where the `workers` are, if that is given."""
    nonce = secrets.token_hex(8)
    more = {"about": about} if about else {"workers": True} if workers else {}
    return nonce, json.dumps({"nonce": nonce, **more}).encode() + b"\n"


def fields_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object that a line holds; None for any other bytes. Total: any process can connect, and say anything."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # Brackets, a thousand deep.
        return None
    return fields if isinstance(fields, dict) else None


def ask(address: str, port: int, incarnation: str) -> Answer:
    """Ask the agent at `address` and `port` whether it is `incarnation`, and wait for its answer, at most 1.5 s."""
    seat = Seat(
        node="asked", incarnation=incarnation, index=0, rank_offset=0, workers=1, address=address, probe_port=port
    )
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    prober = Prober(lambda _seat, answer, _at: answers.put(answer))
    try:
        prober.ask([seat])
        return answers.get(timeout=2 * PROBE_STEPS * PROBE_STEP_S)
    except queue.Empty:  # Of a machine that has no time for us.
        return "silent"
    finally:
        prober.close()


class Gathering:
    """Answers on their way to a `sink` that thinks about all of them whenever it gets one.

    That nodes live is passed on when the last of those that are being asked has answered, and not node by node: of a
    thousand nodes any one may be the lost one, and while an answer is missing nothing else can be decided. That a node
    does not live is passed on at once, with all that is known by then.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._missing = 0
        self._kept: list[tuple[Seat, Answer, float]] = []

    def asked(self) -> None:
        """One more is being asked."""
        self._missing += 1

    def answered(self, seat: Seat, answer: Answer, asked_at: float) -> None:
        """`seat`, asked at `asked_at`, has answered, or has not within its time."""
        self._missing -= 1
        self._kept.append((seat, answer, asked_at))
        if not self._missing or answer != "alive":
            kept, self._kept = self._kept, []
            for each in kept:
                self._sink(*each)


@dataclass(eq=False)
class _Question:
    """One seat's: every PROBE_STEP_S a try, `made` so far of `steps`. Those under way are `open` until one is answered.

    `done` gets the answer, and its fields. `agreed`: a witness has heard nothing either. `workers`: where those are is
    asked as well.
    """

    seat: Seat
    done: Callable[[Answer, dict[str, Any]], None]
    steps: int
    witnesses: Witnesses = nobody
    workers: bool = False
    made: int = 0
    open: list[_Try] = field(default_factory=list)
    agreed: bool = False


@dataclass(eq=False)
class _Try:
    """One connection, to the question's seat or to a witness's; its nonce when that was asked, and what it has said."""

    question: _Question
    seat: Seat
    connection: socket.socket
    nonce: str = ""
    text: bytes = b""


class Prober:
    """Asks seats in the background; each seat is asked once at a time. `sink` is called from its thread.

    Attributes:
        thread: where it works; the agent's `ProbeServer` answers there.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._answers = Gathering(self._pass_on)
        self._asking: set[str] = set()  # Until its answer is passed on: one that is kept back must not be asked again.
        self._questions: set[_Question] = set()  # Without an answer so far.
        self._waiting: deque[_Question] = deque()  # Those of them that wait for a connection.
        self._open: set[_Try] = set()
        self.thread = SelectorThread("elasticrt-probe", self._end)

    def ask(self, seats: Iterable[Seat], witnesses: Witnesses = nobody) -> None:
        """Start asking those of `seats` that are not being asked already. From any thread.

        An agent that says nothing is silent after five tries, 0.3 s each; after 0.6 s if one of its `witnesses` hears
        nothing of it either.
        """
        self.thread.call(partial(self._ask, tuple(seats), witnesses, time.monotonic()))

    def listen(self, seats: Iterable[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        """Ask which generation those seats' agents run; `heard` gets what each says, 0 if no agent of `run_id` does.

        In whatever life: an agent that was left out and came back knows best that the generation has moved on. From any
        thread; `heard` is called from the prober's.
        """
        self.thread.call(partial(self._listen, tuple(seats), run_id, heard))

    def ask_for_workers(self, seats: Sequence[Seat], done: Callable[[dict[str, object]], None]) -> None:
        """Ask where those seats' agents see their workers; `done` gets what they say, by node, when all have answered.

        From any thread; `done` is called from the prober's.
        """
        self.thread.call(partial(self._ask_for_workers, tuple(seats), done))

    def check(self, seat: Seat, done: Callable[[Seat, Answer], None]) -> None:
        """Ask a seat once, for another agent, besides all else; `done` gets the answer. For the prober's thread."""
        self._begin(_Question(seat, lambda answer, _: done(seat, answer), steps=1))

    def close(self) -> None:
        """Take no more questions; those under way are dropped."""
        self.thread.close(CLOSE_S)

    # On the thread.

    def _ask(self, seats: Sequence[Seat], witnesses: Witnesses, asked_at: float) -> None:
        for seat in self._not_asked(seats):
            self._answers.asked()

            def done(answer: Answer, _: dict[str, Any], seat: Seat = seat) -> None:
                self._answers.answered(seat, answer, asked_at)

            self._begin(_Question(seat, done, PROBE_STEPS, witnesses))

    def _listen(self, seats: Sequence[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        for seat in self._not_asked(seats):

            def done(_: Answer, fields: dict[str, Any], life: str = seat.incarnation) -> None:
                self._asking.discard(life)
                number = fields.get("generation") if fields.get("run") == run_id else 0
                heard(number if type(number) is int and 0 <= number <= GENERATION_MAX else 0)

            self._begin(_Question(seat, done, LISTEN_STEPS))

    def _ask_for_workers(self, seats: Sequence[Seat], done: Callable[[dict[str, object]], None]) -> None:
        said: dict[str, object] = {}
        missing = {seat.incarnation for seat in seats}
        if not seats:
            done(said)
        for seat in seats:

            def one(answer: Answer, fields: dict[str, Any], seat: Seat = seat) -> None:
                missing.discard(seat.incarnation)
                if answer == "alive" and "workers" in fields:
                    said[seat.node] = fields
                if not missing:
                    done(said)

            self._begin(_Question(seat, one, LISTEN_STEPS, workers=True))

    def _not_asked(self, seats: Iterable[Seat]) -> list[Seat]:
        """Those that are not being asked already; from now on they are."""
        found = [seat for seat in seats if seat.incarnation not in self._asking]
        self._asking |= {seat.incarnation for seat in found}
        return found

    def _pass_on(self, seat: Seat, answer: Answer, asked_at: float) -> None:
        self._asking.discard(seat.incarnation)
        self._sink(seat, answer, asked_at)

    def _begin(self, question: _Question) -> None:
        self._questions.add(question)
        self._waiting.append(question)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._open) < OPEN_AT_ONCE:
            self._try(self._waiting.popleft())

    def _try(self, question: _Question) -> None:
        """Connect once more, or give it up."""
        if question not in self._questions:
            return
        if question.made == question.steps or (question.agreed and question.made >= AGREED_STEPS):
            self._answered(question, "silent", {})
            return
        question.made += 1
        self.thread.after(PROBE_STEP_S, partial(self._try, question))
        self._connect(question, question.seat)
        if question.made == 2 and question in self._questions:
            self._ask_witnesses(question)

    def _ask_witnesses(self, question: _Question) -> None:
        """Ask some about a seat, of those that are not being asked themselves."""
        unsure = {each.seat.incarnation for each in self._questions}
        others = [seat for seat in question.witnesses(question.seat) if seat.incarnation not in unsure]
        for seat in random.sample(others, min(WITNESSES, len(others))):
            self._connect(question, seat)

    def _connect(self, question: _Question, seat: Seat) -> None:
        """What comes of it, if not at once, the thread's selector tells. Where that is impossible, nothing is heard."""
        while question.open and len(self._open) >= OPEN_AT_ONCE:
            self._hang_up(question.open[0])
        try:
            # Agents announce IP addresses: a name, which would have to be waited for, is nobody's.
            flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            found = socket.getaddrinfo(seat.address, seat.probe_port, type=socket.SOCK_STREAM, flags=flags)
            family, _, _, _, address = found[0]
            connection = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, ValueError):  # Text that is no name either; too many open files.
            return
        one = _Try(question, seat, connection)
        question.open.append(one)
        self._open.add(one)
        try:
            connection.setblocking(False)
            failure = connection.connect_ex(address)
        except OSError as error:
            failure = error.errno or errno.EIO
        if failure in (0, errno.EINPROGRESS):
            self.thread.watch(connection, WRITE, partial(self._connected, one))
        else:
            self._failed(one, failure)

    def _connected(self, one: _Try) -> None:
        """The connection stands, or has failed."""
        failure = one.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self._failed(one, failure)
            return
        question = one.question
        about = "" if one.seat is question.seat else question.seat.incarnation
        one.nonce, text = new_question(about, workers=question.workers)
        try:
            one.connection.send(text)  # A fresh connection has room for a line.
        except OSError as error:
            self._failed(one, error.errno or errno.EIO)
        else:
            self.thread.watch(one.connection, READ, partial(self._heard, one))

    def _heard(self, one: _Try) -> None:
        """An answer has come, or a part of it."""
        try:
            piece = one.connection.recv(LINE_MAX_BYTES)
        except OSError as error:
            self._failed(one, error.errno or errno.EIO)
            return
        one.text += piece
        if one.text.endswith(b"\n"):
            fields = fields_in(one.text) or {}
            if fields.get("nonce") != one.nonce:
                self._tried(one, "silent", {})
            else:
                self._tried(one, "alive" if fields.get("incarnation") == one.seat.incarnation else "dead", fields)
        elif not piece or len(one.text) > ANSWER_MAX_BYTES:
            self._tried(one, "silent", {})

    def _failed(self, one: _Try, failure: int) -> None:
        self._tried(one, "dead" if failure in (errno.ECONNREFUSED, errno.ECONNRESET) else "silent", {})

    def _tried(self, one: _Try, answer: Answer, fields: dict[str, Any]) -> None:
        """An answer, or a witness's; or nothing of use, and the other tries still may bring one."""
        self._hang_up(one)
        question = one.question
        if one.seat is question.seat:
            if answer != "silent":
                self._answered(question, answer, fields)
        elif answer == "alive" and fields.get("about") == "silent":
            question.agreed = True
            if question.made > AGREED_STEPS:  # It is time; but what else has come by now is heard first.
                self.thread.after(0.0, partial(self._try, question))

    def _answered(self, question: _Question, answer: Answer, fields: dict[str, Any]) -> None:
        self._questions.remove(question)
        while question.open:
            self._hang_up(question.open[0])
        question.done(answer, fields)

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
