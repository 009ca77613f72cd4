"""Steps that move, stand and hang, as tables: what is seen at which time, and what is said of it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from elasticrt.ipc.status_page import StatusPage
from elasticrt.ipc.time_bounds import AWAY_S, LOOK_S
from elasticrt.liveness.stall_detector import StallDetector, WatchedStandstill
from elasticrt.liveness.step_watch import StepWatch


def _watched(
    step_s: float, until: float, *, quiet: tuple[float, float] = (0.0, 0.0), hang_s: float = 600.0
) -> StallDetector:
    """A pace after looks every LOOK_S until `until`: steps take `step_s`, from 100.0 on; none end in `quiet`.

    Steps go on after `quiet` as if it had been one long step.
    """
    pace, now, ends, end = StallDetector(hang_s), 100.0, [], 100.0
    while end < until:
        end += step_s
        if quiet[0] <= end < quiet[1]:
            end = quiet[1]
        ends.append(end)
    while now < until:
        done = [at for at in ends if at <= now]
        pace = pace.looked(len(done), done[-1] if done else 0.0, now, expected=bool(done), ready_at=100.0)
        now += LOOK_S
    return pace


@pytest.mark.parametrize(
    ("step_s", "stand_s", "stands"),
    [
        pytest.param(0.01, 0.7, False, id="fast steps: less than the least"),
        pytest.param(0.01, 0.8, True, id="fast steps: more than the least"),
        pytest.param(0.5, 1.9, False, id="slow steps: less than four"),
        pytest.param(0.5, 2.1, True, id="slow steps: more than four"),
        pytest.param(10.0, 39.0, False, id="very slow steps"),
        pytest.param(10.0, 41.0, True, id="very slow steps that stand"),
    ],
)
def test_standing(step_s: float, stand_s: float, stands: bool) -> None:
    """N11: steps stand when none has come for 0.75 s and for four usual steps."""
    pace = _watched(step_s, 100.0 + 12 * max(step_s, LOOK_S))
    assert (pace.standing_since(pace.since + stand_s) is not None) == stands


def test_a_stand_has_one_time() -> None:
    """L6: as long as steps stand the answer stays the same, so that one question is asked for one stand."""
    pace = _watched(0.1, 110.0)
    said = set()
    for tick in range(40):
        now = 110.0 + tick * LOOK_S
        pace = pace.looked(pace.step, pace.since, now, expected=True)
        said.add(pace.standing_since(now))
    assert said == {None, pace.since + 0.75}
    pace = pace.looked(pace.step + 1, 120.0, 120.1, expected=True)
    assert pace.standing_since(120.2) is None


def test_what_is_not_expected_does_not_stand() -> None:
    """L5: a pause is no stand, however long, and what follows it is counted from its end."""
    pace = _watched(0.1, 110.0, hang_s=5.0)
    step, at = pace.step, pace.since
    for tick in range(400):
        now = 110.0 + tick * LOOK_S
        pace = pace.looked(step, at, now, expected=False)
        assert pace.standing_since(now) is None
        assert pace.stalled_s(now) is None
    pace = pace.looked(step, at, 211.0, expected=True)
    assert pace.standing_since(211.7) is None
    assert pace.standing_since(211.8) == pytest.approx(211.75)
    assert pace.longest < 1.0, "the pause is not taken for a step"


def test_before_the_first_steps_nothing_is_said() -> None:
    """L5: a generation that is starting (imports, init, restore, the first step) has no pace yet."""
    pace = StallDetector(1.0)
    for tick in range(100):
        pace = pace.looked(0, 0.0, 100.0 + tick * LOOK_S, expected=False)
    assert pace.standing_since(1e6) is pace.stalled_s(1e6) is None
    pace = pace.looked(41, 125.0, 125.1, expected=True, ready_at=123.0)
    assert pace.standing_since(132.9) is None, "so far steps are known to take two seconds"
    assert pace.standing_since(133.1) == pytest.approx(133.0)


def test_a_script_without_a_loop_has_a_pace_from_the_first_look_on() -> None:
    """N11, L5: a machine may lose its power before the other agents have looked twice; they still see a stand."""
    fd = StatusPage.create()
    page = StatusPage(fd)
    os.close(fd)
    page.begun_at_ns, page.beat_at_ns, page.beats = int(100e9), int(103e9), 4
    options = SimpleNamespace(hang_timeout_s=600.0)
    watch = StepWatch(SimpleNamespace(settings=SimpleNamespace(options=options), pages=lambda: [page]))
    watch.look(103.4, held=False)
    pace = watch.detector
    assert pace.standing_since(114.9) is None, "three seconds may have been one step"
    assert pace.standing_since(115.1) == pytest.approx(115.0)


def test_whose_start_is_not_known_has_a_pace_from_the_second_step_on() -> None:
    """L5: one step that ended some time is no measure of the next."""
    pace = StallDetector(600.0).looked(3, 100.0, 100.1, expected=True)
    assert pace.standing_since(1e6) is None
    pace = pace.looked(5, 100.4, 100.5, expected=True)
    assert pace.recent == (pytest.approx(0.2),)
    assert pace.standing_since(101.1) is None
    assert pace.standing_since(101.3) == pytest.approx(101.2)


def test_a_stand_is_looked_at_closer_ever_more_rarely() -> None:
    """L5: after 3 s, 6 s, 12 s and so on; another step begins anew, and others are asked twice after a look."""
    stand, looks, asked = WatchedStandstill(), [], []
    for tick in range(1, 300):
        now = 100.0 + tick / 10
        step, at = (7, 100.0) if now < 120.0 else (8, 120.0)
        before, stand = stand, stand.looked(step, at, now, 3.0, (1.0, 4.5))
        if stand.looks > before.looks:
            looks.append(round(now - 100.0, 1))
        if stand.without_due_questions(now) != stand:
            stand = stand.without_due_questions(now)
            asked.append(round(now - 100.0, 1))
    assert looks == [3.0, 6.0, 12.0, 23.0, 26.0]
    assert asked == [4.0, 7.0, 7.5, 10.5, 13.0, 16.5, 24.0, 27.0, 27.5]


@pytest.mark.parametrize(
    ("hang_s", "until", "quiet", "age", "stalls"),
    [
        pytest.param(600.0, 160.0, (0, 0), 599.0, False, id="not yet ten minutes"),
        pytest.param(600.0, 160.0, (0, 0), 601.0, True, id="ten minutes"),
        pytest.param(600.0, 160.0, (105, 145), 601.0, False, id="a step of 40 s was seen before"),
        pytest.param(600.0, 160.0, (105, 145), 810.0, True, id="twenty times as long as that"),
        pytest.param(0.0, 160.0, (0, 0), 1e6, False, id="switched off"),
        pytest.param(1e3, 160.0, (0, 0), 601.0, False, id="told to wait longer"),
        pytest.param(600.0, 101.5, (0, 0), 1799.0, False, id="early in the generation"),
        pytest.param(600.0, 101.5, (0, 0), 1801.0, True, id="three times as long"),
    ],
)
def test_stalled(hang_s: float, until: float, quiet: tuple[float, float], age: float, stalls: bool) -> None:
    """W07, W08, W09, L5: a hang is said after ten minutes and twenty times the longest time between steps."""
    pace = _watched(0.1, until, quiet=quiet, hang_s=hang_s)
    found = pace.stalled_s(pace.since + age)
    assert found == (pytest.approx(age) if stalls else None)


def test_a_watcher_that_was_away_counts_from_its_return() -> None:
    """A06: a machine that stood still for an hour finds nothing wrong with its workers, which did so, too."""
    pace = _watched(0.1, 110.0)
    back = 110.0 + 3600.0
    assert back - pace.looked_at > AWAY_S
    pace = pace.looked(pace.step, pace.since, back, expected=True)
    assert pace.standing_since(back) is pace.stalled_s(back) is None
    assert pace.standing_since(back + 0.8) is not None


def test_behind_the_training_no_step_is_expected() -> None:
    """L5: neither of workers that are behind their Loop, nor of those that have ended after a last look in it."""
    fd = StatusPage.create()
    page = StatusPage(fd)
    os.close(fd)
    page.step, page.step_at_ns, page.entered, page.stepping = 30, int(100e9), 31, 1
    pages = [page]
    options = SimpleNamespace(hang_timeout_s=12.0)
    watch = StepWatch(SimpleNamespace(settings=SimpleNamespace(options=options), pages=lambda: pages))
    watch.look(100.1, held=False)
    watch.look(100.5, held=False)
    assert watch.detector.expected
    pages.clear()
    watch.look(101.0, held=False)
    assert watch.detector.stalled_s(1e6) is None
    assert not watch.is_over
    pages.append(page)
    page.stepping, page.over = 0, 1
    watch.look(102.5, held=False)
    assert watch.is_over
    assert watch.paused_since is None
    assert watch.detector.stalled_s(1e6) is None
