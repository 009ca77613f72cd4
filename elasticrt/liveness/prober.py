"""Asking many agents at once whether they live, from one thread. `probe` says what is asked, and what answers mean.

A thread per question would be simpler. But after the loss of one of a thousand nodes all others are asked before
anything else can happen: threads that take turns need three times as long for that. And where half of a cluster is cut
off, hundreds of questions wait for their time to end; they do so together, and not a few at a time.

Who does not answer at once is asked about (the indirect probe of SWIM, Das et al. 2002): two agents that both hear
nothing agree sooner than one alone may be sure.
"""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from elasticrt.ipc.wakeup import Wakeup
from elasticrt.liveness.probe import (
    LINE_MAX_BYTES,
    QUESTION_S,
    Answer,
    answer_of,
    fields_of,
    generation_of,
    new_question,
)
from elasticrt.rendezvous.records import Seat

OPEN_AT_ONCE = 256
"""Connections. An agent's usual limit of open files is 1,024."""

STEPS = 5
STEP_S = QUESTION_S / STEPS
"""Between two tries of a question; after the last of them it is given up."""

WITNESSES = 2
"""So many others are asked about a seat that has not answered within a step."""

AGREED_STEPS = 2
"""After so many steps a seat is silent if a witness says so, too."""

Witnesses = Callable[[Seat], Sequence[Seat]]
"""Who may be asked about a seat: agents that know it, without the one that asks."""


def nobody(_: Seat) -> Sequence[Seat]:
    """Witnesses where one agent's word has to do."""
    return ()


THREADS = 32
"""For what may have to wait for a name to be resolved, and for questions of another kind."""


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


_To = tuple[socket.AddressFamily, tuple[object, ...]]


@dataclass(eq=False)
class _Question:
    """One seat's: every STEP_S a try, `made` so far. Those under way are all `open` until one of them is answered.

    `agreed`: a witness has heard nothing either.
    """

    seat: Seat
    asked_at: float
    to: _To
    witnesses: Witnesses
    made: int = 0
    open: list[_Try] = field(default_factory=list)
    agreed: bool = False
    answered: bool = False


@dataclass(eq=False)
class _Try:
    """One connection, to the question's seat or to a witness's; its nonce when that was asked, and what it has said."""

    question: _Question
    seat: Seat
    connection: socket.socket
    nonce: str = ""
    text: bytes = b""


class Prober:
    """Asks seats in the background; each seat is asked once at a time. `sink` is called from other threads."""

    def __init__(self, sink: Callable[[Seat, Answer, float], None]) -> None:
        self._sink = sink
        self._answers = Gathering(self._heard)
        self._asking: set[str] = set()  # Until its answer is passed on: one that is kept back must not be asked again.
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="elasticrt-ask")
        self._new: deque[_Question] = deque()
        self._open = 0
        self._due: deque[tuple[float, _Question]] = deque()  # When each is tried again, or given up; in that order.
        self._selector = selectors.DefaultSelector()
        self._bell = Wakeup()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, seats: Iterable[Seat], witnesses: Witnesses = nobody) -> None:
        """Start asking those that are not being asked already.

        Who says nothing is silent after 1.5 s; after 0.6 s if one of its `witnesses` hears nothing of it either.
        """
        now = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="elasticrt-ask", daemon=True)
            self._thread.start()
        for seat in self._not_asked(seats):
            self._answers.asked()
            to = _found(seat, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
            if to is None:
                self._submit(self._look_up, seat, now, witnesses)
            else:
                self._new.append(_Question(seat, now, to, witnesses))
        self._bell.ring()

    def listen(self, seats: Iterable[Seat], run_id: str, heard: Callable[[int], None]) -> None:
        """Ask those seats once, in the background, which generation they run; `heard` gets what they say."""
        for seat in self._not_asked(seats):
            self._submit(self._listen, seat, run_id, heard)

    def close(self) -> None:
        """Take no more questions; those under way are dropped, or end by themselves within 1.5 s."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._closed = True
        if self._thread is None:
            self._end()
        else:
            self._bell.ring()

    def _not_asked(self, seats: Iterable[Seat]) -> Iterator[Seat]:
        """Those that are not being asked already; from now on they are."""
        for seat in seats:
            with self._lock:
                if seat.incarnation in self._asking:
                    continue
                self._asking.add(seat.incarnation)
            yield seat

    def _heard(self, seat: Seat, answer: Answer, asked_at: float) -> None:
        with self._lock:
            self._asking.discard(seat.incarnation)
        self._sink(seat, answer, asked_at)

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        """Let a thread of the pool do it, and die of what it dies of: a pool would keep that to itself."""

        def do() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001  Passed on.
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))

        self._pool.submit(do)

    def _look_up(self, seat: Seat, asked_at: float, witnesses: Witnesses) -> None:
        for _ in range(STEPS):
            to = _found(seat)
            if to is not None:
                self._new.append(_Question(seat, asked_at, to, witnesses))
                self._bell.ring()
                return
            time.sleep(STEP_S)
        self._answers.answered(seat, "silent", asked_at)

    def _listen(self, seat: Seat, run_id: str, heard: Callable[[int], None]) -> None:
        number = generation_of(seat.address, seat.probe_port, run_id)
        with self._lock:
            self._asking.discard(seat.incarnation)
        heard(number)

    # On the thread

    def _work(self) -> None:
        while not self._closed:
            while self._new and self._open < OPEN_AT_ONCE:
                self._try(self._new.popleft())
            timeout_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for key, _ in self._selector.select(timeout_s):
                if key.data is None:
                    self._bell.heard()
                elif key.data in key.data.question.open:  # Not hung up since it was selected.
                    self._go_on(key.data)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                _, question = self._due.popleft()
                if not question.answered:
                    self._try(question)
        self._end()

    def _try(self, question: _Question) -> None:
        """Connect once more, or give it up."""
        if question.made == STEPS or (question.agreed and question.made >= AGREED_STEPS):
            self._answered(question, "silent")
            return
        question.made += 1
        self._due.append((time.monotonic() + STEP_S, question))
        self._connect(question, question.seat, question.to)
        if question.made == 2:
            self._ask_witnesses(question)

    def _ask_witnesses(self, question: _Question) -> None:
        """Ask some about a seat, of those that are not being asked themselves. A name is not waited for here."""
        unsure = {each.seat.incarnation for _, each in self._due if not each.answered}
        others = [seat for seat in question.witnesses(question.seat) if seat.incarnation not in unsure]
        for seat in random.sample(others, min(WITNESSES, len(others))):
            to = _found(seat, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
            if to is not None:
                self._connect(question, seat, to)

    def _connect(self, question: _Question, seat: Seat, to: _To) -> None:
        """What comes of it, if not at once, the selector tells."""
        while question.open and self._open >= OPEN_AT_ONCE:
            self._hang_up(question.open[0])
        family, address = to
        try:
            one = _Try(question, seat, socket.socket(family, socket.SOCK_STREAM))
        except OSError:  # Too many open files, say.
            return
        question.open.append(one)
        self._open += 1
        try:
            one.connection.setblocking(False)
            failure = one.connection.connect_ex(address)
            if failure in (0, errno.EINPROGRESS):
                self._selector.register(one.connection, selectors.EVENT_WRITE, one)
                return
        except OSError as error:
            failure = error.errno or 0
        self._failed(one, failure)

    def _go_on(self, one: _Try) -> None:
        """The connection stands, or has failed, or brings an answer."""
        try:
            if not one.nonce:
                failure = one.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failure:
                    self._failed(one, failure)
                    return
                one.nonce, text = new_question("" if one.seat is one.question.seat else one.question.seat.incarnation)
                one.connection.send(text)  # A fresh connection has room for a line.
                self._selector.modify(one.connection, selectors.EVENT_READ, one)
                return
            piece = one.connection.recv(LINE_MAX_BYTES)
        except OSError as error:
            self._failed(one, error.errno or 0)
            return
        one.text += piece
        if one.text.endswith(b"\n"):
            fields = fields_of(one.text, one.nonce)
            self._tried(one, answer_of(fields, one.seat.incarnation), fields is not None and fields.get("about"))
        elif not piece or len(one.text) > LINE_MAX_BYTES:
            self._tried(one, "silent")

    def _failed(self, one: _Try, failure: int) -> None:
        self._tried(one, "dead" if failure in (errno.ECONNREFUSED, errno.ECONNRESET) else "silent")

    def _tried(self, one: _Try, answer: Answer, about: object = None) -> None:
        """An answer, or a witness's; or nothing of use, and the other tries still may bring one."""
        self._hang_up(one)
        question = one.question
        if one.seat is question.seat:
            if answer != "silent":
                self._answered(question, answer)
        elif answer == "alive" and about == "silent":
            question.agreed = True
            if question.made > AGREED_STEPS:  # It is time; but what else has come by now is heard first.
                self._due.appendleft((0.0, question))

    def _answered(self, question: _Question, answer: Answer) -> None:
        question.answered = True
        while question.open:
            self._hang_up(question.open[0])
        self._answers.answered(question.seat, answer, question.asked_at)

    def _hang_up(self, one: _Try) -> None:
        one.question.open.remove(one)
        with contextlib.suppress(KeyError):  # It was never selected.
            self._selector.unregister(one.connection)
        one.connection.close()
        self._open -= 1

    def _end(self) -> None:
        for _, question in self._due:
            while question.open:
                self._hang_up(question.open[0])
        self._selector.close()
        self._bell.close()


def _found(seat: Seat, flags: int = 0) -> _To | None:
    """Where to connect; None when there is no such address, or a name where `flags` say that only numbers count."""
    try:
        found = socket.getaddrinfo(seat.address, seat.probe_port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, ValueError):  # Text that is no name either.
        return None
    return found[0][0], found[0][4]
