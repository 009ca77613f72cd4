"""Workers that run on when others have ended: when people are told, and when it has been too long."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrt import events
from elasticrt.event_log import EventLog
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.proc import cpu_s, state_of
from elasticrt.ipc.status_page import FIRST_BATCH, IN_PLACE, STACK_BEGINS, StatusPage
from elasticrt.ipc.time_bounds import STOPPED_S
from elasticrt.liveness.culprit import Position
from elasticrt.liveness.culprit_search import positions_in
from elasticrt.liveness.hang_monitor import HangMonitor, where
from elasticrt.liveness.stacks import StackAnswer, Stacks, main_thread
from elasticrt.liveness.stall_detector import IdleWorkers, stopped_since
from elasticrt.liveness.watched_workers import WatchedWorkers
from elasticrt.rendezvous.records import Seat
from elasticrt.workers.group_state import GroupState
from tests.unit.settings import settings_of

WAITS = asdict(Position(1, 5, True, "S", "collective", "train.py:9 in f", begun=3))
"""What the other node says of its worker: it waits in a collective."""
BUSY = asdict(Position(1, 5, True, "S", "code", "train.py:5 in g", begun=3))
"""... or it is in the script's own code."""


LINE, ALL_REDUCE = (
    '  File "/a/train.py", line 7 in f',
    '  File "/site-packages/torch/distributed/c10d.py", line 9 in all_reduce',
)
"""The place of a worker that waits in a collective, and the library's function."""


def monitor_of_one(
    directory: Path, page: StatusPage | None = None, *, rank: int = 0, hang_s: float | None = None, **parts: Any
) -> tuple[HangMonitor, list[Any]]:
    """A monitor of one worker, this process, which runs in generation 2; the events that it writes. `parts` are as in
    `WatchedWorkers`."""
    settings, event_log, kept = settings_of(directory), EventLog("n0", None), []
    if hang_s is not None:
        settings = replace(settings, options=replace(settings.options, hang_timeout_s=hang_s))
    event_log.follow(lambda record: kept.append(record.event))
    usual = {
        "say": lambda _: None,
        "put": lambda _: None,
        "group": SimpleNamespace(ask_for_stacks=lambda _: None, pids=lambda _: {0: os.getpid()}, page=lambda *_: page),
        "state": lambda: in_generation_2(rank),
        "pages": lambda: [page],
        "take_stacks": lambda *_: None,
        "state_of": lambda _: "S",
        "cpu_s": cpu_s,
    }
    return HangMonitor(WatchedWorkers(settings=settings, event_log=event_log, **usual | parts)), kept


def in_generation_2(rank: int = 0) -> GroupState:
    """One worker runs."""
    return GroupState(2, running=True, seated=frozenset([0]), ranks={0: rank})


@pytest.mark.parametrize(
    ("used_s", "limit_s", "said_at", "over_at"),
    [
        ([0.0] * 20, 10.0, 5, 10),
        ([0.0] * 20, 0.0, 5, None),
        ([0.5 * at for at in range(20)], 10.0, 5, None),  # It saves, or evaluates.
        ([0.001 * at for at in range(20)], 10.0, 5, 10),  # Threads that only wait.
        ([0.0] * 6 + [1.0] * 14, 10.0, 5, 16),
    ],
)
def test_a_worker_that_does_nothing_is_over(used_s, limit_s, said_at, over_at):
    """It is said after 5 s, and too long counts from the last work that it did."""
    waiting, said, over = IdleWorkers(0.0, 0.0, 0.0), None, None
    for at, used in enumerate(used_s):
        waiting = waiting.looked(used, float(at), limit_s)
        said = at if said is None and waiting.is_reported else said
        over = at if over is None and waiting.is_over else over
    assert (said, over) == (said_at, over_at)


@pytest.mark.parametrize(
    ("until", "away_s", "over_at"),
    [
        pytest.param(20.0, 0.0, 3.0, id="nobody continues it"),
        pytest.param(2.8, 0.0, None, id="it was continued"),
        pytest.param(20.0, 100.0, 3.6, id="the agent was away itself"),
    ],
)
def test_a_stopped_worker_is_given_up(until, away_s, over_at):
    """W08: one that is stopped at 2 s is given up a second later."""
    seen, looked_at, found = {}, 0.0, []
    for tick in range(1, 200):
        at = tick / 10
        now = at + (away_s if at > 2.5 else 0.0)
        seen, looked_at = stopped_since(seen, looked_at, [1] if 2.0 <= at < until else [], now), now
        found += [at] if now - seen.get(1, now) >= STOPPED_S else []
    assert found[:1] == ([] if over_at is None else [pytest.approx(over_at)])


def test_only_what_a_signal_has_stopped_is_meant():
    """W08: the kernel tells a stopped process from one that runs, waits, or has ended."""
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert state_of(process.pid) != "T"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert state_of(process.pid) == "T"
    finally:
        process.kill()
        process.wait()
    assert state_of(process.pid) == ""


def test_where_it_is():
    """The innermost line of the script in the main thread's stack; else whatever is known."""
    library = '  File "/site-packages/torch/distributed/distributed_c10d.py", line 4287 in all_gather'
    stack = [library, '  File "/x/a.py", line 4 in f', '  File "/x/b.py", line 1 in g']
    assert where(["Current thread 0x1 (most recent call first):", *stack]) == "a.py:4 in f"
    assert where(["it has not answered within 2 s: state S"]) == "it has not answered within 2 s: state S"


def test_an_answer_begins_with_a_stack_although_the_one_before_was_being_written():
    """W09: the rest of that one lacks the innermost frames, and would tell another place."""
    text = f'{STACK_BEGINS}\n  File "a.py", line 1 in stuck\n  File "a.py", line 9 in <module>\n'.encode()
    for before in (text, text[: len(text) // 2]):
        page = SimpleNamespace(text=lambda before=before: before, looks=1)
        answer = StackAnswer(os.getpid(), page)
        page.text = lambda: 2 * text
        assert [answer.is_complete() for _ in range(2)] == [False, True]
        found = answer.lines()
        assert main_thread(found)[0] == '  File "a.py", line 1 in stuck'
        assert len(found) == 3


def test_processor_time_is_of_whole_sessions():
    """Whatever runs in a worker's session counts as the worker's; a session that is gone has none."""
    before = cpu_s([os.getsid(0)])
    sum(range(10**6))
    assert cpu_s([os.getsid(0)]) >= before > 0.0
    assert cpu_s([]) == 0.0


@pytest.mark.parametrize(
    ("failure", "what"),
    [
        (Failure(1, -9, False, "rank 1 on n1: killed"), "rank 1 on n1: killed"),
        (
            Failure(0, 1, True, "rank 0 on n0: lost its process group"),
            "another node has lost a worker, and rank 0 on n0: lost its process group",
        ),
    ],
)
def test_a_loss_after_which_nothing_can_be_agreed_is_told_once(tmp_path: Path, failure: Failure, what: str) -> None:
    """After 3 s, with the time since the last step: a survivor does not seem to train while etcd is away."""
    page, now = StatusPage(StatusPage.create()), 1000.0
    monitor, kept = monitor_of_one(tmp_path, page)
    page.step, page.step_at_ns, page.entered, page.stepping = 5, int((now - 0.5) * 1e9), 6, 1
    monitor.search.look_closer(now, ask_s=[])
    for after_s in (1.0, 2.9, 3.0, 3.5, 60.0):
        monitor.search.report_unagreed(now + after_s, now, failure, 5, "etcd does not answer")
    said = f"{what}, and no new generation can be agreed: etcd does not answer"
    assert kept == [events.Culprit(2, 5, 3.5, (), (), said)]


def test_a_worker_that_does_not_end_is_told_as_a_hang(tmp_path: Path) -> None:
    """Its stacks are in the event. Before it has failed of it, a line says so to people only."""
    monitor, kept = monitor_of_one(tmp_path, rank=3)
    stacks = Stacks("waited_for", 2, 0, 12.0, False, {0: ("  File a.py",)}, ended="rank 1")
    assert monitor.report(stacks) is None
    assert kept == []
    assert monitor.report(replace(stacks, final=True)) is not None
    assert kept == [events.Stalled(2, 0, 12.0, True, {"3": ("  File a.py",)})]


def test_workers_that_do_not_end_behind_the_training_are_told_and_then_ended(tmp_path: Path) -> None:
    """All of them have left their Loop. One that works on is let be; one that does nothing fails in the end."""
    page, used_s = StatusPage(StatusPage.create()), [0.0]
    monitor, found, kept = monitor_of_one_that_is_stuck(tmp_path, page, hang_s=10.0, cpu_s=lambda _: used_s[0])
    page.step, page.step_at_ns, page.entered, page.over, page.pausing_ns = 30, 90 * 10**9, 31, 1, 90 * 10**9
    seen = []
    for at in range(100, 150):
        used_s[0] += 0.5 if at < 110 else 0.0
        monitor.steps.look(float(at), held=False)
        monitor.ask_if_stalled(float(at))
        monitor.ask_if_waited_for(float(at), [], {0: os.getpid()})
        while not found.empty():
            failure = monitor.report(found.get())
            seen.append((at, failure and failure.summary))
    ended = "rank 0 on n0 did not end, and did nothing for 30 s, after the training had"
    assert seen == [(114, None), (139, ended)]
    assert [(type(each), getattr(each, "nodes", None)) for each in kept] == [
        (events.Culprit, ("n0",)),
        (events.Culprit, ("n0",)),
        (events.Stalled, None),
    ]
    assert kept[0].reason == "rank 0 on n0 has not ended: train.py:7 in stuck"


def test_a_finding_is_written_once_a_look_with_its_age(tmp_path: Path) -> None:
    """The age is that of the moment when it is written, and a second round of answers adds no event.

    A node without rank 0 hears it from that of rank 0, writes the same, and passes it on. No age but that one is in
    the line: those of single ranks were taken at other times.
    """
    stacks: queue.SimpleQueue[Stacks] = queue.SimpleQueue()
    line = '  File "/a/train.py", line 7 in stuck'

    def take(_group: object, _put: object, blank: Stacks, _ranks: object) -> None:
        stacks.put(replace(blank, lines={0: (line,)}))

    page = StatusPage(StatusPage.create())
    monitor, kept = monitor_of_one(tmp_path, page, put=stacks.put, take_stacks=take)
    page.step, page.step_at_ns = 5, time.monotonic_ns() - 4 * 10**9
    page.entered, page.stepping = 6, 1
    others = {"n1": {"workers": [WAITS]}}

    monitor.search.look_closer(time.monotonic(), ask_s=[0.0])
    monitor.search.note_positions(stacks.get(timeout=10))
    assert monitor.search.is_to_ask(time.monotonic(), first=True)
    later = time.monotonic() + 1
    monitor.search.renew_answer(later, 0.0)
    for _ in range(2):
        monitor.search.find_culprit(later, {"n0": "", "n1": ""}, others, {})
    assert [(each.step, each.ranks) for each in kept if isinstance(each, events.Culprit)] == [(5, (0,))]
    assert kept[0].age_s >= 5.0

    monitor.search.renew_answer(later, 0.0)
    found = kept.pop()
    answer = json.loads(json.dumps(monitor.search.answer))
    for said in (answer, answer, {}, {"culprit": 7}, {"culprit": {"ranks": 1}}):
        monitor.search.adopt_finding(later, said)
    assert kept == [], "this node has said so itself"
    monitor.began(0.0)
    monitor.search.look_closer(time.monotonic(), ask_s=[4.5])
    monitor.search.note_positions(stacks.get(timeout=10))
    monitor.search.adopt_finding(later, answer)
    monitor.search.renew_answer(later, 0.0)
    assert json.loads(json.dumps(monitor.search.answer))["culprit"] == answer["culprit"]
    assert not re.search(r"\d s\b", found.reason), found.reason
    assert [(each.ranks, each.nodes, each.reason) for each in kept] == [(found.ranks, found.nodes, found.reason)]


def monitor_of_one_that_is_stuck(
    directory: Path, page: StatusPage, lines: Sequence[str] = ('  File "/a/train.py", line 7 in stuck',), **parts: Any
) -> tuple[HangMonitor, queue.SimpleQueue[Stacks], list[Any]]:
    """A monitor to which each look shows the same line, the stacks that it takes, and the events that it writes."""
    found: queue.SimpleQueue[Stacks] = queue.SimpleQueue()

    def take(_group: object, put: Callable[[Stacks], None], blank: Stacks, _ranks: object) -> None:
        put(replace(blank, lines={0: tuple(lines)}))

    monitor, kept = monitor_of_one(directory, page, put=found.put, take_stacks=take, **parts)
    return monitor, found, kept


def test_the_end_of_a_stand_is_seen_at_the_next_look(tmp_path: Path) -> None:
    """Once, with the first step after it; a step like any other is none."""
    page, now = StatusPage(StatusPage.create()), time.monotonic()
    monitor, _, _ = monitor_of_one_that_is_stuck(tmp_path, page)
    page.stepping = 1
    seen = []
    for after_s, step, age_s in ((0.0, 4, 0.0), (1.0, 5, 0.0), (5.0, 5, 4.0), (6.0, 6, 0.0), (6.3, 7, 0.0)):
        page.step, page.entered, page.step_at_ns = step, step + 1, int((now + after_s - age_s) * 1e9)
        seen.append(monitor.search.look_closer(now + after_s, ask_s=[0.0]))
    assert seen == [False, False, False, True, False]


def test_nobody_is_named_while_a_node_may_not_have_looked_yet(tmp_path: Path) -> None:
    """The first time the others are asked only answers of all nodes count, and none about collectives; later all do."""
    page = StatusPage(StatusPage.create())
    monitor, found, kept = monitor_of_one_that_is_stuck(tmp_path, page)
    page.step, page.step_at_ns, page.entered, page.stepping = 5, time.monotonic_ns() - 4 * 10**9, 6, 1
    began = time.monotonic()
    monitor.search.look_closer(began, ask_s=[0.0, 2.0])
    monitor.search.note_positions(found.get(timeout=10))
    waits = {"workers": [WAITS]}
    named = []
    for asked_at, others in ((0.0, {"n1": waits}), (0.0, {"n1": waits, "n2": {"workers": []}}), (2.0, {"n1": waits})):
        monitor.search.is_to_ask(began + asked_at, first=True)
        monitor.search.find_culprit(began + asked_at, {"n0": "", "n1": "", "n2": ""}, others, {})
        named.append([each.ranks for each in kept])
    assert named == [[], [], [(0,)]]


@pytest.mark.parametrize(
    ("first", "others", "probes"),
    [
        pytest.param(True, {}, True, id="another node does not answer the node of rank 0"),
        pytest.param(True, {"n1": {"generation": 2, "workers": [BUSY]}}, False, id="it does, and its rank is busy"),
        pytest.param(False, {}, True, id="the node of rank 0 does not answer"),
        pytest.param(False, {"n1": {"generation": 2}}, False, id="it does, and has found nothing"),
    ],
)
def test_who_does_not_answer_is_to_be_probed(tmp_path: Path, first: bool, others: dict[str, Any], probes: bool) -> None:
    """N02: also in an evaluation, where no step is expected; not once steps are made again."""
    page = StatusPage(StatusPage.create())
    seat = Seat(
        node="n0", incarnation="a" * 16, index=1 - first, rank_offset=1 - first, workers=1, address="n0", probe_port=1
    )
    state = replace(in_generation_2(1 - first), seat=seat)
    monitor, found, _ = monitor_of_one_that_is_stuck(tmp_path, page, [ALL_REDUCE, LINE], state=lambda: state)
    now = time.monotonic()
    page.step, page.step_at_ns, page.entered = 5, int((now - 4) * 1e9), 6
    monitor.search.look_closer(now, ask_s=[0.0])
    monitor.search.note_positions(found.get(timeout=10))
    assert monitor.search.asks_for_positions(now) == 2
    monitor.search.note_answers(now, 2, {"n0": "", "n1": ""}, others)
    assert monitor.search.unanswered_at == (now if probes else None)
    page.step, page.step_at_ns, page.entered = 6, int((now + 1) * 1e9), 7
    monitor.search.look_closer(now + 1, ask_s=[])
    assert monitor.search.unanswered_at is None


@pytest.mark.parametrize("wrong", [None, {}, [], 1, "x" * 8, {**WAITS, "rank": "1"}, {**WAITS, "more": 1}])
def test_what_another_agent_says_is_checked(wrong: object) -> None:
    """An answer with anything but positions is refused, and a position arrives as it is."""
    there = Position(3, 5, True, "S", "loader", "train.py:9 in f", begun=3)
    said = json.loads(json.dumps({"workers": [asdict(there)]}))
    assert dict(positions_in({"n1": said, "n2": {"workers": [wrong]}, "n3": {}})) == {"n1": [there], "n3": []}


@pytest.mark.parametrize("entered", [6, 0], ids=["with a Loop", "without"])
def test_steps_that_go_on_after_a_hang_are_told(tmp_path: Path, entered: int) -> None:
    """Once, with how long none was made, by an event and a sentence; nothing is said of one that was not told."""
    page, began, said = StatusPage(StatusPage.create()), time.monotonic(), list[str]()
    monitor, found, kept = monitor_of_one_that_is_stuck(tmp_path, page, say=said.append)
    waits = {"workers": [WAITS]}

    def step(number: int, at: float) -> None:
        page.step_at_ns, page.step, page.entered, page.stepping = int(at * 1e9), number, number + 1, 1
        if not entered:
            page.beat_at_ns, page.beats, page.step_at_ns, page.entered, page.stepping = page.step_at_ns, number, 0, 0, 0

    for number, at in ((5, began - 4), (6, began + 8), (7, began + 8.1)):
        step(number, at)
        monitor.search.look_closer(max(began, at), ask_s=[0.0])
        if number == 5:
            monitor.search.note_positions(found.get(timeout=10))
            assert monitor.search.is_to_ask(began, first=True)
            monitor.search.find_culprit(began, {"n0": "", "n1": ""}, {"n1": waits}, {})
    assert [type(each) for each in kept] == [events.Culprit, events.GoesOn]
    assert kept[1] == events.GoesOn(2, 5)
    assert said[1:] == ["the steps go on: none was made for 12 s after step 5"]


@pytest.mark.parametrize("within", [True, False], ids=["within a step", "between two steps"])
def test_a_stand_is_told_whole(tmp_path: Path, within: bool) -> None:
    """Where a look comes between the optimizer's part and the end of a step, and where none had begun."""
    page, began, said = StatusPage(StatusPage.create()), time.monotonic(), list[str]()
    monitor, found, _ = monitor_of_one_that_is_stuck(tmp_path, page, say=said.append)
    page.step, page.step_at_ns, page.entered, page.stepping = 5, int((began - 4) * 1e9), 5 + within, 1
    monitor.search.look_closer(began, ask_s=[0.0])
    monitor.search.note_positions(found.get(timeout=10))
    assert monitor.search.is_to_ask(began, first=True)
    monitor.search.find_culprit(began, {"n0": "", "n1": ""}, {"n1": {"workers": [WAITS]}}, {})
    if within:
        page.beats, page.beat_at_ns = 6, int((began + 7.9) * 1e9)
        monitor.search.look_closer(began + 7.95, ask_s=[])
        page.step, page.step_at_ns = 6, int((began + 8) * 1e9)
    page.entered += 1
    monitor.search.look_closer(began + 8, ask_s=[])
    assert said[1:] == [f"the steps go on: none was made for 12 s after step {4 + within}"]


def test_where_workers_stood_before_they_got_other_seats_says_nothing(tmp_path: Path) -> None:
    """L5: after a wait for nodes the same step is awaited anew, and nobody has been slow in it yet."""
    page, now = StatusPage(StatusPage.create()), time.monotonic()
    monitor, found, kept = monitor_of_one_that_is_stuck(tmp_path, page)
    page.entered, page.stepping, page.step = 6, 1, 5
    page.step_at_ns = page.restored_at_ns = int((now - 6) * 1e9)
    monitor.steps.look(now, held=False)
    monitor.search.look_closer(now, ask_s=[0.0, 0.4])
    monitor.search.note_positions(found.get(timeout=10))
    page.step_at_ns, page.restored_at_ns = 0, int((now + 0.2) * 1e9)
    monitor.search.look_closer(now + 0.3, ask_s=[])
    monitor.search.find_culprit(now + 0.5, {"n0": ""}, {}, {})
    assert not kept


@pytest.mark.parametrize(
    ("entered", "made", "named"),
    [
        pytest.param(6, True, [(0,), (0,)], id="after a step"),
        pytest.param(6, False, [(), (0,)], id="in the first step of a generation"),
        pytest.param(0, True, [(), ()], id="without a Loop"),
    ],
)
def test_a_run_of_one_worker_names_it(tmp_path: Path, entered: int, made: bool, named: list[tuple[int, ...]]) -> None:
    """Where a step of its Loop does not end; a first step is given until the second look."""
    page, now = StatusPage(StatusPage.create()), time.monotonic()
    monitor, found, kept = monitor_of_one_that_is_stuck(tmp_path, page)
    page.entered, page.stepping, page.restored_at_ns = entered, int(entered > 0), int((now - 6) * 1e9)
    page.beat_at_ns, page.beats = (0, 0) if entered else (int((now - 6) * 1e9), 5)
    page.step, page.step_at_ns = (5, int((now - 6) * 1e9)) if entered and made else (0, 0)
    seen = []
    for looked_at in (now, now + 10):
        monitor.steps.look(looked_at, held=False)
        monitor.search.look_closer(looked_at, ask_s=[0.0])
        monitor.search.note_positions(found.get(timeout=10))
        assert monitor.search.is_to_ask(looked_at, first=True)
        monitor.search.find_culprit(looked_at, {"n0": ""}, {}, {})
        seen.append(kept[-1].ranks if kept else ())
    assert seen == named


def test_a_node_that_was_slow_is_told_to_have_caught_up(tmp_path: Path) -> None:
    """W18: once each, by an event, so that nobody is called slow for ever."""
    pages = [StatusPage(StatusPage.create())]
    monitor, kept = monitor_of_one(tmp_path, pages[0])
    pages[0].entered, pages[0].stepping = 1, 1
    for look in range(1, 13):  # One every 25 s; each step takes 250 ms, in which n0 waits for 200 ms until the sixth.
        for step in range(100 * look - 99, 100 * look + 1):
            pages[0].step, pages[0].entered, pages[0].step_at_ns = step, step + 1, int((1000 + step / 4) * 1e9)
            monitor.steps.look(1000.0 + step / 4, held=False)
        # No two measurements are alike.
        monitor.search.renew_answer(1000.0 + 25 * look, 0.25 - (0.2 if look <= 6 else 0.002) + look / 1e6)
        monitor.search.compare({"n1": {"own_s": 0.248}, "n2": {"own_s": "1"}, "n3": {}})
    assert [(each.slow, each.step) for each in kept] == [("n1", 400), ("", 700)]


def test_a_wait_for_the_first_batch_is_a_hang_and_no_pause(tmp_path: Path) -> None:
    """L5: a restarted process that gets no first batch has failed after three times the limit, at the run's step."""
    kept: list[Stacks] = []
    page = StatusPage(StatusPage.create())

    def take(_group: object, _put: object, blank: Stacks, _ranks: object) -> None:
        kept.append(blank)

    monitor, _ = monitor_of_one(tmp_path, page, hang_s=12.0, state_of=lambda _: "T", take_stacks=take)
    page.entered, page.stepping = 119, FIRST_BATCH
    for tick in range(400):
        now = 100.0 + tick / 10
        monitor.steps.look(now, held=False)
        monitor.ask_if_stalled(now)
    asked = [(each.why, each.step, each.final, round(each.age_s)) for each in kept]
    assert asked == [("stalled", 118, False, 18), ("stalled", 118, True, 36)]
    found = []
    for tick in range(1, 4):
        found.append(monitor.stopped(now + tick / 2, [7]))
        monitor.began(0.0)
    assert found == [set(), set(), {7}], (
        "a worker that a signal has stopped is looked for, also when it gets another seat"
    )


@pytest.mark.parametrize(
    ("restored_at_s", "asked"), [(90, [("stalled", False, 18), ("stalled", True, 36)]), (110, [("paused", False, 12)])]
)
def test_a_group_that_is_never_made_is_a_hang_and_no_pause(
    tmp_path: Path, restored_at_s: int, asked: list[tuple[str, bool, int]]
) -> None:
    """N02: a survivor that waits for ever for the ranks of its new generation has failed; one behind that pauses."""
    kept: list[Stacks] = []
    page = StatusPage(StatusPage.create())

    def take(_group: object, _put: object, blank: Stacks, _ranks: object) -> None:
        kept.append(blank)

    monitor, _ = monitor_of_one(tmp_path, page, hang_s=12.0, take_stacks=take)
    page.entered, page.in_place = 119, IN_PLACE
    page.init_at_ns, page.restored_at_ns = int(100e9), int(restored_at_s * 1e9)
    for tick in range(400):
        now = 100.0 + tick / 10
        monitor.steps.look(now, held=False)
        monitor.ask_if_stalled(now)
    assert [(each.why, each.final, round(each.age_s)) for each in kept] == asked


def test_a_page_of_before_tells_nothing_of_the_pace(tmp_path: Path) -> None:
    """A survivor's page shows its last seat until it takes the next: its whole training is no usual step."""
    page = StatusPage(StatusPage.create())
    monitor, found, _ = monitor_of_one_that_is_stuck(tmp_path, page)
    page.in_place, page.stepping, page.entered, page.step = IN_PLACE, FIRST_BATCH, 101, 100
    now = time.monotonic()
    page.restored_at_ns, page.step_at_ns = 1, int((now - 0.01) * 1e9)  # Since the machine was started.
    monitor.began(now)
    monitor.steps.look(now + 0.1, held=False)
    page.step_at_ns, page.joined_at_ns = 0, int((now + 0.11) * 1e9)
    page.restored_at_ns = page.joined_at_ns
    for tick in range(2, 70):
        monitor.steps.look(now + tick / 10, held=False)
        monitor.search.look_closer(now + tick / 10, ask_s=[])
    assert not found.empty(), "the first step of a generation is looked at closely after five seconds"
