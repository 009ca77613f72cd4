"""Virtual time: one heap of events, and tasks that run production code as if it had a thread of its own.

A task is a real thread, but only one thing runs at any moment: the engine hands control to a task and gets it back when
the task waits. So the order of everything follows from the heap alone, and a seed gives the same run every time. All
times are multiples of 2**-10 s, so that a clock that is ten years off still counts exactly.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

TICKS = 1024
STORY_TAIL = 60
EVENTS_MAX = 30_000
SPIN_MAX = 3000
"""Events in one instant before we call it a livelock."""


def nanoseconds(seconds: float) -> int:
    """A time as an integer; exact, so that the difference of two does not depend on where a clock began."""
    return int(seconds * TICKS) * 10**9 // TICKS


INVARIANTS = {
    "S1": "there is one leader, one generation of each number, and each has the next number",
    "S2": "only the current generation commits, each time on top of the head that was there before",
    "S3": "each rank is given once, to a member with the run's options, and the number of nodes is within its limits",
    "S4": "a process group has workers of one generation",
    "S5": "each step counts once, and each sample once in an epoch",
    "S6": "a generation starts from the newest state, and all its ranks from the same",
    "S8": "what was said to be saved is saved",
    "S9": "shared data are published by the one node that has the claim",
    "S10": "no step that was reported is lost or done again",
    "S11": "nothing is deleted that is still in use",
    "S12": "an attempt has one result, and each agent's exit code agrees with it",
    "S13": "failures count as restarts once, lost nodes and planned changes never, and no run goes on without budget",
    "S16": "workers live only as long as their generation, their agent and its lease allow",
    "S18": "no finished step is lost while a worker that has its state lives",
    "S19": "the ranks of a generation begin from the same step, and do each step together",
    "S20": "a worker comes only to the process group in which it has a rank",
    "L1": "after a fault, training goes on soon, and ends",
    "L2": "agents and workers end soon after the result, or when told",
    "L3": "a run gives up for lack of nodes after `--join-timeout`, not before",
    "L4": "every healthy node gets a seat, and nobody who is cut off takes it from the others",
    "L6": "nothing changes for no reason, or more often than necessary",
    "L7": "who lives and can be reached is not left out, and an outage of etcd costs nobody a place",
    "L8": "nobody tries the same for ever",
    "L9": "healthy workers keep their processes",
}
"""What must hold, by the names that `Violation` and the docstrings of tests use: S is safety, L liveness."""


class Violation(AssertionError):  # noqa: N818  The protocol's word, not ours.
    """An invariant does not hold. `name` is its key in INVARIANTS."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


def require(holds: object, name: str, text: str) -> None:
    """An invariant, or the end of this run."""
    assert name in INVARIANTS, f"{name} is not among INVARIANTS"
    if not holds:
        raise Violation(name, text)


class Gone(BaseException):
    """The process this task belongs to does not exist any more."""


class Place(Protocol):
    """What a task belongs to: something that can be stopped for a while, and that has a clock."""

    gone: bool
    paused: bool
    deferred: list[tuple[Task, int]]

    def clock(self) -> float:
        """This place's monotonic clock."""


class Task:
    """Production code with blocking calls, run in virtual time."""

    def __init__(self, engine: Engine, place: Place, body: Callable[[], None], name: str) -> None:
        self.place = place
        self.token = 0
        self.done = False
        self._engine = engine
        self._body = body
        self._go = threading.Lock()  # Held, except for the moment in which control is handed over; so is `back`.
        self._go.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self.error: BaseException | None = None

    def resume(self, token: int) -> None:
        """Go on, if this is still what the task waits for. Called by the engine."""
        if self.done or token != self.token:
            return
        if self.place.paused and not self.place.gone:
            self.place.deferred.append((self, token))
            return
        self.token += 1
        self._engine.task = self
        if not self._started:
            self._started = True
            self._thread.start()
        else:
            self._go.release()
        self._engine.back.acquire()
        self._engine.task = None
        if self.done:
            self._thread.join()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def end(self) -> None:
        """The place is gone: unwind."""
        if not self._started:
            self.done = True
        while not self.done:
            self.resume(self.token)

    def park(self) -> None:
        """Wait for `resume`. Called by the task. Raises Gone."""
        self._engine.back.release()
        self._go.acquire()
        if self.place.gone:
            raise Gone

    def _run(self) -> None:
        try:
            if not self.place.gone:
                self._body()
        except Gone:
            pass  # This is how it ends.
        except BaseException as error:  # noqa: BLE001  Raised again by the engine, where somebody can see it.
            self.error = error
        self.done = True
        self._engine.back.release()


class Engine:
    """The heap, the story and whose code is running."""

    def __init__(self) -> None:
        self.now = 64.0
        self.events = 0
        self.story: list[str] = []
        self.check: Callable[[], None] = lambda: None
        self.heard: Callable[[str], None] = lambda _: None
        self.task: Task | None = None
        self.place: Place | None = None
        self.back = threading.Lock()
        self.back.acquire()
        self.tasks: list[Task] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._spin = 0
        self._until = 0.0

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Do something at a time (rounded up), after everything that was asked for that time before."""
        self._count += 1
        heapq.heappush(self._heap, (self._rounded(when), self._count, action, args))

    def _rounded(self, when: float) -> float:
        return max(self.now, math.ceil(when * TICKS) / TICKS)

    def after(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Do something after a delay in seconds."""
        self.at(self.now + delay, action, *args)

    def start(self, place: Place, body: Callable[[], None], name: str) -> Task:
        """A new task; it begins with the next event."""
        task = Task(self, place, body, name)
        self.tasks = [other for other in self.tasks if not other.done] + [task]
        self.after(0.0, task.resume, task.token)
        return task

    def end(self, place: Place) -> None:
        """The place is gone: none of its tasks goes on."""
        place.gone = True
        for task in [task for task in self.tasks if task.place is place]:
            task.end()

    def sleep(self, seconds: float) -> None:
        """Let time pass for the running task."""
        task = self.task
        assert task is not None, "only a task can sleep"
        if task.place.gone:
            raise Gone
        if not self.passes(self.now + seconds):
            self.after(seconds, task.resume, task.token)
            task.park()

    def passes(self, when: float) -> bool:
        """Let time pass for the running task, if nothing else happens before. Then its thread need not be left, which
        takes longer than most events."""
        when = self._rounded(when)
        if self.task is None or self.task.place.paused or when > self._until:
            return False
        if self._heap and self._heap[0][0] <= when:
            return False
        self._after_event()
        self._before_event(when)
        return True

    def clock(self) -> float:
        """The clock of whoever is running now."""
        place = self.task.place if self.task is not None else self.place
        return place.clock() if place is not None else self.now

    def on(self, place: Place, action: Callable[..., None], *args: Any) -> None:
        """Run a short piece of `place`'s code that does not wait."""
        before, self.place = self.place, place
        try:
            action(*args)
        finally:
            self.place = before

    def say(self, who: str, text: str) -> None:
        """One line of the story."""
        self.story.append(f"{self.now:10.3f}  {who:<7} {text}")
        self.heard(f"{who} {text}")

    def run(self, until: float) -> None:
        """Let everything happen up to a time."""
        self._until = until
        while self._heap and self._heap[0][0] <= until:
            when, _, action, args = heapq.heappop(self._heap)
            self._before_event(when)
            action(*args)
            self._after_event()
        self.now = max(self.now, until)

    def _before_event(self, when: float) -> None:
        self._spin = self._spin + 1 if when == self.now else 0
        self.now = when
        self.events += 1

    def _after_event(self) -> None:
        self.check()
        if self.events > EVENTS_MAX:
            raise Violation("L8", f"{EVENTS_MAX} events, where a run takes a few thousand")
        if self._spin > SPIN_MAX:
            raise Violation("L8", f"{SPIN_MAX} events and no time has passed")


class VirtualQueue:
    """`queue.SimpleQueue` in virtual time, for one reading task."""

    Empty: type[Exception]

    def __init__(self, engine: Engine, rate: Callable[[], float]) -> None:
        self._engine = engine
        self._rate = rate
        self._items: deque[Any] = deque()
        self._reader: Task | None = None

    def put(self, item: Any) -> None:
        """Add an item; a reader that waits goes on in this instant."""
        self._items.append(item)
        if self._reader is not None:
            self._engine.after(0.0, self._reader.resume, self._reader.token)

    def get(self, timeout: float | None = None) -> Any:
        """The next item. Raises queue.Empty."""
        task = self._engine.task
        assert task is not None, "only a task can wait"
        until = None if timeout is None else self._engine.now + timeout / self._rate()
        waited = False  # Even a wait that is over at once is an event: who waits so again and again spins.
        while not self._items:
            if until is not None and self._engine.now >= until and waited:
                raise self.Empty
            waited = True
            if until is not None and self._engine.passes(until):
                continue
            self._reader = task
            if until is not None:
                self._engine.at(until, task.resume, task.token)
            task.park()
            self._reader = None
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """The next item. Raises queue.Empty."""
        if not self._items:
            raise self.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        """Whether there is nothing."""
        return not self._items
