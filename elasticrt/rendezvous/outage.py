"""How a member rides out an etcd that does not answer or takes no writes. Pure.

Workers run on and nothing is committed. An agent that cannot reach etcd asks the other agents of its generation once a
second which generation they are in. If one of them is in a newer generation, this agent's own is over, and `decide`
ends its workers. When etcd is full, a necessary write is tried again until there is space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elasticrt.errors import StoreError
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.rendezvous.records import Seat
from elasticrt.rendezvous.requests import Conversation, Pause
from elasticrt.store.protocol import StoreBlocked, StoreUnavailable

RIDE_THROUGH_S = 900.0
"""How many seconds workers train on without etcd. A longer outage ends the member."""

RETRY_S = 0.5
"""Seconds between two tries to read everything again, or to repeat a refused write."""
ASK_INTERVAL_S = 1.0
"""Seconds between two questions to the other agents for their generation."""

T = TypeVar("T")


@dataclass(frozen=True)
class GenerationAnswer:
    """The answer of another agent of this run: the `generation` that it is in, 0 for no answer."""

    generation: int


class Outage:
    """The state of the way to etcd, as one member sees it. Times are on the member's clock, in seconds.

    Args:
        say: takes messages for people.

    Attributes:
        since: since when the view of the store may be old; None while it is not.
        problem: the first error of a request since then; "" before one has failed.
        alone_since: since when no other agent has answered either; None while one does, or none is asked.
        retry_at: when to read everything again.
        refused_since: since when writes have been refused; None while they are not, as far as is known.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.refused_since: float | None = None
        self._ask_at = 0.0
        self.since: float | None = None
        self.problem = ""
        self.alone_since: float | None = None
        self.retry_at = 0.0

    def begin(self, error: StoreError, now: float) -> None:
        """Take note of a request that was not answered, or of a read that was refused."""
        self.since = self.since if self.since is not None else now
        # People are told once for each outage, by the first error.
        if not self.problem:
            self.problem = str(error)
            self._say(f"etcd does not answer ({error}); workers run on, nothing is committed")
        self.retry_at = now + RETRY_S

    def suspect(self, now: float) -> None:
        """Read everything again, now, before anything is written: other members may have decided without this one."""
        self.retry_at = now
        self.since = self.since if self.since is not None else now

    def end(self, now: float) -> None:
        """Take note that everything has been read again."""
        if self.since is not None and self.problem:
            # The time for which the first request waited is not in this figure.
            lasted_s = now - self.since
            self._say("etcd answers again" + (f" after {lasted_s:.1f} s" if lasted_s >= RETRY_S else ""))
        self.since, self.problem, self.alone_since = None, "", None

    def is_due(self, now: float) -> bool:
        """Whether to read everything again now."""
        return self.since is not None and now >= self.retry_at

    def seats_to_ask(self, seats: Sequence[Seat], now: float) -> Sequence[Seat]:
        """The seats to ask for their generation now: all `seats`, the others of the generation, once a second."""
        if now < self._ask_at:
            return ()
        self._ask_at = now + ASK_INTERVAL_S
        if seats and self.alone_since is None:
            self.alone_since = now
        return seats

    def note_answer(self, answer: GenerationAnswer) -> None:
        """Take note of an answer to that question."""
        if answer.generation:
            self.alone_since = None

    def note_refusal(self, error: StoreBlocked, now: float) -> float:
        """Take note of a write that was refused, for lack of space or of a permission that this login had before.

        Returns when to try again. Raises `error` after RIDE_THROUGH_S of refusals.
        """
        if self.refused_since is None:
            self.refused_since = now
            self._say(f"{error}; workers run on, without a change of membership until etcd takes writes again")
        if now - self.refused_since > RIDE_THROUGH_S:
            raise error
        return now + RETRY_S

    def note_write(self) -> None:
        """Take note that a write has succeeded."""
        self.refused_since = None


def ride_out(ask: Callable[[], Conversation[T]], wait_s: float, note: Callable[[str], None]) -> Conversation[T]:
    """Repeat a conversation until etcd answers: a newcomer waits for etcd as members do.

    Args:
        ask: begins the conversation. It may be repeated although its effect is unknown, so it must be idempotent.
        wait_s: the seconds for which etcd may not answer.
        note: takes messages that an operator may want to see.

    Raises StoreError after `wait_s`, and any other error of `ask` at once.
    """
    # A pause of 0 s only asks the driver for the time.
    _, since = yield Pause(0.0)
    said = False
    while True:
        try:
            return (yield from ask())
        except StoreUnavailable as error:
            _, now = yield Pause(0.0)
            if now - since >= wait_s:
                raise _no_answer(error, wait_s) from error
            if not said:
                note(f"etcd does not answer: {error}; waiting for up to {wait_s:g} s")
                said = True
        yield Pause(LOOK_AGAIN_S)


def _no_answer(error: StoreUnavailable, wait_s: float) -> StoreError:
    return StoreError(
        f"etcd has not answered for {wait_s:g} s",
        "--etcd",
        got=error,
        expected="an answer within --etcd-wait",
        remedy="Check that it runs, that most of its members do, and that the way to it is open",
    )
