"""What a change has cost a node, as it tells it."""

from __future__ import annotations

import time

import pytest

from elasticrt import events
from elasticrt.event_log import EventLog
from elasticrt.ipc.messages import Step
from elasticrt.ipc.status_page import StatusPage
from elasticrt.liveness.progress import OwnWork, Progress

SECOND = 1_000_000_000


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
    page, kept = StatusPage(-1), Kept()
    progress = Progress(lambda: [page], kept, time)
    for number in generations:
        progress.replaced(number)
        progress.began()
        progress.stepped(number, Step(2 * number, 0, number * SECOND, 2 * number - 1, True))
        page.finished(2 * number + 1, number * SECOND + SECOND // 2)
        progress.note_last_step()
        page.step_at_ns = 0
    return [each.pause_s for each in kept.found if isinstance(each, events.FirstStep)]


def test_the_pause_is_between_two_steps_of_those_that_trained_before() -> None:
    """From the last step in one generation to the first in the next."""
    assert _pauses(1, 2, 3) == [None, 0.5, 0.5]


def test_who_comes_back_has_no_pause() -> None:
    """A node that was left out of a generation, and is in again, tells none: the training has gone on without it."""
    assert _pauses(1, 3, 4) == [None, None, 0.5]
    assert _pauses(5) == [None]


def test_the_phases_of_who_comes_back_begin_with_its_seat() -> None:
    """The time for which it has stood by is none of them."""
    kept, clock = Kept(), Second()
    progress = Progress(lambda: [StatusPage(-1)], kept, clock)
    progress.replaced(1)
    progress.stepped(1, Step(1, 0, SECOND, 0, True))
    clock.at = 2
    progress.generation_ending()
    clock.at = 40
    progress.replaced(3)
    progress.stepped(3, Step(9, 0, 41 * SECOND, 8, True))
    (_, set_up) = [each for each in kept.found if isinstance(each, events.SetUp)]
    assert sum(set_up.phases.values()) == 1000.0


def test_what_a_script_does_before_its_loop_is_no_restoring() -> None:
    """A tokenizer runs for 15 s between `elasticrt.init` and the Loop; one that goes on in place comes to no Loop."""
    page, kept, clock = StatusPage(-1), Kept(), Second()
    progress = Progress(lambda: [page], kept, clock)
    progress.replaced(1)
    progress.started(1, 2 * SECOND)
    page.init_at_ns, page.joined_at_ns, page.loop_at_ns, page.restored_at_ns = (at * SECOND for at in (3, 4, 19, 20))
    progress.stepped(1, Step(1, 0, 22 * SECOND, 0, True))
    page.finished(5, 30 * SECOND)
    progress.note_last_step()
    clock.at = 31
    progress.replaced(2)
    page.init_at_ns, page.joined_at_ns, page.loop_at_ns, page.restored_at_ns = (at * SECOND for at in (32, 33, 0, 34))
    progress.stepped(2, Step(6, 0, 35 * SECOND, 5, True))
    first, second = [each.phases for each in kept.found if isinstance(each, (events.SetUp, events.Recovery))]
    assert (first["init"], first["loop"], first["restore"]) == (1000.0, 15_000.0, 1000.0)
    assert (second["init"], second["restore"]) == (1000.0, 1000.0)
    assert "loop" not in second


def after_one_step() -> tuple[StatusPage, Kept, Second, Progress]:
    """One worker has made the first step of generation 1: its page, the events, the clock, and its progress."""
    page, kept, clock = StatusPage(-1), Kept(), Second()
    progress = Progress(lambda: [page], kept, clock)
    progress.replaced(1)
    page.entered = 1
    progress.stepped(1, Step(1, 0, SECOND, 0, True))
    return page, kept, clock, progress


def test_the_last_step_is_told_when_no_other_follows() -> None:
    """Once, with its age and whether it is followed by a pause."""
    page, kept, clock, progress = after_one_step()
    clock.at = 10
    progress.look(1, 10.0)
    page.finished(7, 10 * SECOND)
    page.pausing_ns = 11 * SECOND
    for now in (10, 11, 12, 13):
        clock.at = now
        progress.look(1, float(now))
    told = [(each.step, each.age_s, each.pausing) for each in kept.found if isinstance(each, events.Progress)]
    assert told[1:] == [(7, 1.0, True)]


def test_a_save_under_way_counts() -> None:
    """The last one of a run may take minutes, in which no step tells of it."""
    page, kept, clock, progress = after_one_step()
    with page.halted():
        page.halted_ns = 12 * SECOND
        clock.at = 15
        progress.look_and_write()
        page.halted_ns = time.monotonic_ns()
    told = [event for event in kept.found if isinstance(event, events.Progress)][-1]
    assert (told.save_s, told.saving, page.halted_ns) == (3.0, True, 0)


def test_a_pause_before_the_first_step_is_set_up() -> None:
    """An evaluation that is done again after a restart is no part of what the workers spend from then on."""
    page, kept = StatusPage(-1), Kept()
    progress = Progress(lambda: [page], kept, time)
    progress.replaced(1)
    progress.started(1, SECOND)
    page.pause_ns = 6 * SECOND
    progress.stepped(1, Step(1, 0, 9 * SECOND, 0, True))
    assert [type(each) for each in kept.found[-2:]] == [events.FirstStep, events.SetUp]
    progress.look_and_write()
    told = [each.pause_s for each in kept.found if isinstance(each, events.Progress)]
    assert told == [0.0]


def test_the_last_step_outlives_a_generation_without_one() -> None:
    """Workers that go on in place fail in their first step, and all restart from step 5: 15 steps are done again."""
    page, kept = StatusPage(-1), Kept()
    progress = Progress(lambda: [page], kept, time)
    page.entered = 1
    progress.replaced(1)
    progress.stepped(1, Step(1, 0, SECOND, 0, True))
    page.finished(20, 2 * SECOND)
    progress.note_last_step()
    progress.replaced(2)
    page.step_at_ns, page.beat_at_ns = 0, 3 * SECOND  # The optimizer's step, in a step that is not finished.
    progress.generation_ending()
    progress.note_last_step()
    progress.replaced(3)
    progress.stepped(3, Step(6, 0, 4 * SECOND, 5, True))
    last = [each for each in kept.found if isinstance(each, events.FirstStep)][-1]
    assert (last.pause_s, last.redone) == (2.0, 15)


def test_who_does_not_know_claims_nothing() -> None:
    """A new agent, and one that was left out of a generation, do not know the last step of the run."""
    page, kept = StatusPage(-1), Kept()
    progress = Progress(lambda: [page], kept, time)
    for number in (1, 3):
        progress.replaced(number)
        progress.stepped(number, Step(10, 0, number * SECOND, 9, True))
        page.finished(40, number * SECOND + SECOND // 2)
        progress.note_last_step()
    assert [each.redone for each in kept.found if isinstance(each, events.FirstStep)] == [None, None]


def test_the_only_step_of_a_generation_is_no_pause() -> None:
    """A script without a Loop makes one step and ends: workers were remembered before their first step was told of."""
    page, other, kept = StatusPage(-1), StatusPage(-1), Kept()
    progress = Progress(lambda: [page, other], kept, time)
    progress.replaced(1)
    progress.began()
    progress.started(1, SECOND)
    page.beat_at_ns = page.first_beat_at_ns = 2 * SECOND
    other.beat_at_ns = other.first_beat_at_ns = 3 * SECOND
    progress.note_last_step()
    progress.look(1, 4.0)
    assert [type(each) for each in kept.found if not isinstance(each, events.Progress)] == [events.SetUp]


class Second:
    """A clock that stands still at a second until it is set."""

    at = 0

    def monotonic(self) -> float:
        """In seconds."""
        return float(self.at)

    def monotonic_ns(self) -> int:
        """In nanoseconds."""
        return self.at * SECOND


@pytest.mark.parametrize(
    ("go", "step", "stepped_at", "failed_at", "expected"),
    [
        pytest.param(0, 7, 1, None, (69, 0), id="they hang before a step was agreed after which they leave"),
        pytest.param(8, 7, 1, None, (69, 0), id="they do not come to it"),
        pytest.param(8, 7, 1, 40, (39, 30), id="until they were given up"),
        pytest.param(8, 8, 3, None, (0, 67), id="they have come to it, and the others were waited for"),
    ],
)
def test_a_hang_is_none_of_the_agreement_on_a_handover(
    go: int, step: int, stepped_at: int, failed_at: int | None, expected: tuple[int, int]
) -> None:
    """L5: a handover is asked for at second 2, and the next generation comes at 70: in between the workers stand."""
    page, kept, clock = StatusPage(-1), Kept(), Second()
    progress = Progress(lambda: [page], kept, clock)
    progress.replaced(1)
    page.entered = 1
    progress.stepped(1, Step(1, 0, SECOND // 2, 0, True))
    page.finished(7, SECOND)
    clock.at = 2
    progress.generation_ending()
    page.stop, page.go = 1, go
    page.finished(step, stepped_at * SECOND)
    if failed_at is not None:
        clock.at = failed_at
        progress.generation_ending()
    clock.at = 70
    progress.replaced(2)
    progress.note_last_step()
    page.stop = page.go = 0
    clock.at = 80
    progress.replaced(3)
    progress.stepped(3, Step(8, 0, 81 * SECOND, 7, True))
    (recovery,) = [each for each in kept.found if isinstance(each, events.Recovery)]
    assert (recovery.phases["detect"], recovery.phases["agree"]) == tuple(1000 * each for each in expected)
    assert sum(recovery.phases.values()) == 1000 * recovery.pause_s


def test_what_a_change_in_place_costs_those_that_let_others_in() -> None:
    """Neither a failure nor a step: of 3 s from step to step there are 0.5 s left, after a restart all 3."""
    for restarts, cost_s in ((False, 0.5), (True, 3.0)):
        page, clock = StatusPage(-1), Second()
        progress = Progress(lambda: [page], Kept(), clock)  # noqa: B023  It is used in this round only.
        progress.replaced(1)
        progress.stepped(1, Step(1, 0, SECOND // 2, 0, True))
        page.finished(2, SECOND)
        clock.at = 2
        progress.generation_ending()
        progress.note_last_step()
        progress.replaced(2)
        if restarts:
            progress.started(2, 2 * SECOND + 1)
        page.init_at_ns, page.joined_at_ns, page.restored_at_ns = (round(each * SECOND) for each in (2.1, 2.4, 2.5))
        progress.stepped(2, Step(3, 0, 4 * SECOND, 2, True))
        assert progress.pause_s == pytest.approx(cost_s)


MS = 1_000_000


@pytest.mark.parametrize(
    ("looks", "own_ms"),
    [
        pytest.param([(10, 1000, 0, 0, 0)], 0, id="nothing was measured"),
        pytest.param([(10, 1000, 0, 60, 2)], 70, id="a step of 100 ms, 30 of them waiting"),
        pytest.param([(10, 1000, 0, 60, 2), (20, 2000, 0, 60, 2)], 70, id="the newest measurement holds"),
        pytest.param([(10, 1000, 0, 60, 2), (20, 2000, 0, 80, 3)], 80, id="until the next"),
        pytest.param([(10, 1000, 0, 60, 2), (10, 9000, 0, 60, 2)], 70, id="no step since"),
        pytest.param([(10, 1500, 500, 60, 2)], 70, id="half a second of it in a pause"),
        pytest.param([(10, 100, 0, 600, 2)], 0, id="never less than nothing"),
    ],
)
def test_what_a_workers_own_work_takes(looks: list[tuple[int, int, int, int, int]], own_ms: float) -> None:
    """Of a step, all but the waiting for others, pauses and saves: (step, at, besides, waited, waits), in ms."""
    work = OwnWork(0, 0, 0, 0, 0)
    for step, at, besides, waited, waits in looks:
        work = work.looked(step, at * MS, besides * MS, waited * MS, waits)
    assert work.own_s * 1e3 == pytest.approx(own_ms)


def test_the_own_work_of_a_node_is_that_of_its_slowest_worker() -> None:
    """As far as DDP has measured it, and of the workers that still run."""
    pages, clock = [StatusPage(-1) for _ in range(3)], Second()
    progress = Progress(lambda: pages, Kept(), clock)
    progress.started(1, SECOND)
    for page, wait_ms in zip(pages, (600, 800, 900), strict=True):
        page.step, page.step_at_ns, page.waits, page.waited_ns = 10, 11 * SECOND, 1, wait_ms * MS
    clock.at = 11
    progress.look_and_write()
    assert progress.own_s == pytest.approx(0.4)
    del pages[0]
    assert progress.own_s == pytest.approx(0.2)
