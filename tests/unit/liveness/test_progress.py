"""What a change has cost a node, as it tells it."""

from __future__ import annotations

import time

from elasticrt import events
from elasticrt.event_log import EventLog
from elasticrt.ipc.messages import Step
from elasticrt.ipc.status_page import PAGE_BYTES, StatusPage
from elasticrt.liveness.progress import Progress

SECOND = 1_000_000_000


class Words(StatusPage):
    """A page in this process's own memory."""

    def __init__(self) -> None:
        self.words = memoryview(bytearray(PAGE_BYTES)).cast("Q")


class Kept(EventLog):
    """Events that are kept here."""

    def __init__(self) -> None:
        super().__init__("n0", None)
        self.found: list[events.Event] = []

    def write(self, event: events.Event) -> None:
        """Keep it."""
        self.found.append(event)


def _pauses(*generations: int) -> list[float | None]:
    """A node has seats in these generations: in each it makes a step at second N, and one at N + 0.5."""
    page, kept = Words(), Kept()
    progress = Progress(lambda: [page], kept, lambda text: None, time)
    for number in generations:
        progress.replaced(number)
        progress.began()
        progress.stepped(number, Step(2 * number, 0, number * SECOND, 2 * number - 1, True))
        page.finished(2 * number + 1, number * SECOND + SECOND // 2)
        progress.remember()
        page.step_at_ns = 0
    return [each.pause_s for each in kept.found if isinstance(each, events.FirstStep)]


def test_the_pause_is_between_two_steps_of_those_that_trained_before() -> None:
    """From the last step in one generation to the first in the next."""
    assert _pauses(1, 2, 3) == [None, 0.5, 0.5]


def test_who_comes_back_has_no_pause() -> None:
    """A node that was left out of a generation, and is in again, tells none: the training has gone on without it."""
    assert _pauses(1, 3, 4) == [None, None, 0.5]
    assert _pauses(5) == [None]
