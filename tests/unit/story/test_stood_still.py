"""Time in which no step was made is no training: hangs, and nodes that the others have gone on without."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from elasticrt import events
from elasticrt.cli.status import show
from elasticrt.ipc.wording import ANEW, slow_node
from elasticrt.story.board import board
from elasticrt.story.buckets import totals
from elasticrt.story.report import as_object, report
from elasticrt.story.sentences import doing, happened, now_at, state
from tests.unit.story.test_too_few_nodes import MEMBER, agreed, live
from tests.unit.story.told import THREE_STEPS, begun, started, story, warm

PAUSE = {"detect": 30_000.0, "agree": 200.0, "script": 300.0, "restore": 250.0, "first_step": 250.0}
AT_SIX = (6.0, "a", events.Step(1, 20, 0, {}))


def culprit(step, age_s):
    """Rank 1 is waited for."""
    return events.Culprit(1, step, age_s, (1,), ("b",), "rank 1 sleeps")


def progress(step, pause_s=0.0):
    """Of a node in the first generation."""
    return events.Progress(1, step, 0.0, 0.0, pause_s)


HANG = [
    *THREE_STEPS,
    AT_SIX,
    *((at, node, progress(20)) for at in (8.0, 13.0, 18.0) for node in "ab"),
    (9.5, "a", culprit(20, 3.0)),
    (12.0, "a", culprit(20, 6.0)),
]


@pytest.mark.parametrize(
    ("more", "node", "expected"),
    [
        pytest.param([], "a", {"train": 2.0, "detect": 12.0}, id="while it lasts"),
        pytest.param([], "b", {"train": 2.0, "detect": 12.0}, id="on the node that is waited for as well"),
        pytest.param(
            [(19.0, "a", events.Step(1, 21, 0, {})), (23.0, "a", progress(60)), (23.0, "b", progress(60))],
            "b",
            {"train": 6.0, "detect": 13.0},
            id="until the steps go on",
        ),
        pytest.param(
            [
                (36.0, "b", events.WorkerEnded(1, 1, 12, -9, "rank 1 on b: killed by SIGKILL")),
                (38.0, "b", events.Ready(0)),
            ],
            "b",
            {"train": 2.0, "detect": 30.0, "set-up": 1.5 + 2.0},
            id="until its worker was killed",
        ),
        pytest.param(
            [
                (36.3, "a", begun(2, "a")),
                (37.0, "a", events.Recovery(2, 31.0, PAUSE)),
                (37.0, "a", events.AgentStopped(0)),
            ],
            "a",
            {"train": 2.0, "detect": 30.0},
            id="as the pause says that follows",
        ),
    ],
)
def test_a_hang_is_no_training(more, node, expected):
    """From the last step on, once somebody has noticed."""
    spent = totals(story([*HANG, *more]).spans_by_node()[node])
    assert {name: spent.get(name, 0.0) for name in expected} == pytest.approx(expected)


WENT_ON = [
    *HANG,
    (9.6, "b", culprit(20, 3.6)),
    (19.0, "a", events.Step(1, 21, 0, {})),
    *((at, node, progress(step)) for at, step in ((19.1, 21), (23.0, 60), (28.0, 110)) for node in "ab"),
]


def test_a_hang_is_drawn_where_it_was():
    """In the middle of the training around it, on both nodes; waits for data are not moved into it."""
    told = story(WENT_ON)
    for spans in told.spans_by_node().values():
        drawn = [(span.begin, span.end, span.bucket) for span in spans if span.end > 4.0]
        assert drawn == [(4.0, 6.0, "train"), (6.0, 19.0, "detect"), (19.0, 28.0, "train")]
    waited = [(at, node, replace(event, data_s=0.5) if isinstance(event, events.Progress) else event)
        for at, node, event in WENT_ON if at >= 13.0]  # fmt: skip
    drawn = story([*THREE_STEPS, AT_SIX, (9.5, "a", culprit(20, 3.0)), *waited]).spans_by_node()["a"]
    assert [(span.begin, span.end) for span in drawn if span.bucket == "detect"] == [(6.5, 19.0)]


def test_a_hang_is_told_after_it_with_whom_the_others_have_waited_for():
    """Once, with all of its time, by its beginning: in the report as text and as a page, and on the dashboard."""
    sentence = "no step for 13 s after step 20: rank 1 sleeps"
    again = (12.5, "b", events.Culprit(1, 20, 6.5, (1,), ("b",), "rank 1 sleeps"))
    told = story([*WENT_ON, again, (30.0, "a", events.Result("succeeded", 0, "")), (31.0, "a", events.AgentStopped(0))])
    assert [each for each in happened(told) if each.kind == "bad"] == [(6.0, "bad", sentence)]
    assert report(told).count(f"1970-01-01 00:00:06  {sentence}") == 1
    assert board(told, 99.0)["sentences"][2] == [6.0, "bad", sentence]
    ended = story([*HANG, *both_stalled(20, 30.0), (36.3, "a", begun(2, "ab", "failure", "no progress for 30 s"))])
    bad = [each.text for each in happened(ended) if each.kind == "bad"]
    assert bad == ["no step for 30 s after step 20: rank 1 sleeps"], "its failure is the same again"


@pytest.mark.parametrize("ends", [[(20.0, node, events.AgentStopped(143)) for node in "ab"], []])
def test_a_hang_ends_with_the_agents_of_its_run(ends):
    """Whether they were stopped or killed: the time until the run is begun again is no part of it."""
    again = [(4000.0, node, started()) for node in "ab"] + [(4001.0, "a", begun(2, "ab", "start", ANEW))]
    told = story([*HANG, *ends, *again])
    (stood,) = (each.text for each in happened(told) if each.text.startswith("no step for "))
    assert stood == f"no step for {14 if ends else 12} s after step 20: rank 1 sleeps"
    assert stood.replace(" after step 20", "") in told.generations.newest.cause


def test_a_hang_of_the_only_worker_is_in_every_view():
    """It is `detect` from the last step to the end of the agent, and no training."""
    one = [each for each in THREE_STEPS if each[1] == "a" and not isinstance(each[2], events.Generation)]
    hang = events.Culprit(1, 20, 3.5, (0,), ("a",), "rank 0 on a is in the script's own code: t.py:7 in f")
    told = [*one, (2.0, "a", begun(1, "a", "start")), AT_SIX, (8.0, "a", progress(20)), (9.5, "a", hang),
        (18.0, "a", progress(20))]  # fmt: skip
    lasts = story(sorted(told, key=lambda each: each[0]))
    text = f"no step for 12 s after step 20: {hang.reason}"
    assert (state(lasts, 18.0), lasts.standstill_s(18.0), doing(lasts)) == (text, 12.0, "stands still")
    assert text in board(lasts, 18.0)["state"]
    over = story([*sorted(told, key=lambda each: each[0]), (20.0, "a", events.AgentStopped(5))]).spent()
    assert over["detect"] == pytest.approx(14.0)


PLAIN = [each for each in THREE_STEPS if not isinstance(each[2], events.FirstStep)]


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_hang_without_a_loop_is_in_every_view_until_the_steps_go_on(node):
    """Of one node as of the run: that it stands, since when, and its time; afterwards that it does not."""
    hang = [(at, each, culprit(20, at - 6.0)) for at in (9.5, 12.0) for each in "ab"]
    ends = [(20.0, each, events.GoesOn(1, 20)) for each in "ab"]
    own, whole = ([each for each in PLAIN if each[1] in nodes] for nodes in (node, "ab"))
    for begins in (own, whole):
        nodes = {each[1] for each in begins}
        lasts = story([*begins, *(each for each in hang if each[1] in nodes)])
        text = "no step for 12 s: rank 1 sleeps"  # Only the steps of the present processes are known.
        assert (state(lasts, 18.0), lasts.standstill_s(18.0), doing(lasts)) == (text, 12.0, "stands still")
        assert text in now_at(lasts, 18.0, None)
        assert totals(lasts.spans_by_node(18.0)[node])["detect"] == pytest.approx(12.0)
        over = story([*begins, *(each for each in hang + ends if each[1] in nodes)])
        assert (state(over, 25.0), over.standstill_s(25.0), doing(over)) == ("running", 0.0, "trains")
        spent = totals(over.spans_by_node(25.0)[node])
        assert (spent["detect"], spent["train"]) == pytest.approx((14.0, 2.0 + 5.0))


def test_a_pause_is_no_hang():
    """Time in `loop.pause` counts as that, although there is no step."""
    entries = [
        *THREE_STEPS,
        AT_SIX,
        (8.0, "a", progress(20, 2.0)),
        (9.0, "a", culprit(20, 3.0)),
        (13.0, "a", progress(20, 7.0)),
    ]
    spent = totals(story(entries).spans_by_node()["a"])
    assert (spent["pause"], spent["train"], spent.get("detect", 0.0)) == pytest.approx((7.0, 2.0, 0.0))


IN_PAUSE = [
    *THREE_STEPS,
    AT_SIX,
    *((at, node, replace(progress(20, at - 6.0), pausing=True)) for at in (8.0, 13.0) for node in "ab"),
    *((9.0, node, culprit(20, 3.0)) for node in "ab"),
]


@pytest.mark.parametrize("now", [8.0, 8.9, 12.9, 13.1, 17.0])
def test_a_pause_is_one_while_it_lasts_and_afterwards(now):
    """Also where agents tell who is waited for there, as far as that is told."""
    entries = sorted((each for each in IN_PAUSE if each[0] <= now), key=lambda each: each[0])
    lasts = story(entries)
    for spans in lasts.spans_by_node(now).values():
        spent = totals(spans)
        assert (spent["pause"], spent.get("detect", 0.0)) == pytest.approx((now - 6.0, 0.0))
    ends = [(now + 0.1, node, progress(40, now - 6.0)) for node in "ab"]
    spent = totals(story([*entries, *ends]).spans_by_node()["a"])
    assert (spent["pause"], spent.get("detect", 0.0)) == pytest.approx((now - 6.0, 0.0), abs=0.11)


def test_the_goodput_does_not_rise_in_the_last_save():
    """Its time is a checkpoint's from the first report on, and not training until it is over."""
    saves = [(8.0, node, replace(progress(20), save_s=2.0, saving=True)) for node in "ab"]
    told = story([*THREE_STEPS, AT_SIX, *saves])
    assert told.goodput(9.0) > told.goodput(20.0)
    assert totals(told.spans_by_node(20.0)["a"])["checkpoint stall"] == pytest.approx(14.0)


def test_steps_end_a_pause_at_once():
    """Before the next event tells how long it was."""
    told = story([*THREE_STEPS, AT_SIX, (8.0, "a", replace(progress(20, 2.0), pausing=True)),
        (9.0, "a", events.Step(1, 21, 0, {}))])  # fmt: skip
    assert totals(told.spans_by_node(11.0)["a"])["pause"] == pytest.approx(2.0)


PACED = [*THREE_STEPS, *((4.0 + at, "a", events.Step(1, 1 + 10 * at, 0, {})) for at in range(1, 5))]


@pytest.mark.parametrize(
    ("step", "frozen_s"),
    [
        pytest.param(42, 59.9, id="with their workers"),
        pytest.param(141, 50.0, id="which had made some steps"),
        pytest.param(641, 0.0, id="while their workers trained"),
    ],
)
def test_frozen_agents_do_not_train(step, frozen_s):
    """All agents were silent for a minute, and the steps after it tell for how long no step was made."""
    woken = [(68.0, "a", events.Step(1, step, 0, {})), *((70.0, node, progress(step + 20)) for node in "ab")]
    told = story([*PACED, *((8.0, node, progress(41)) for node in "ab"), *woken])
    for spans in told.spans_by_node(70.0).values():
        assert totals(spans).get("detect", 0.0) == pytest.approx(frozen_s)
        assert totals(spans)["train"] == pytest.approx(66.0 - frozen_s)


def test_a_step_from_before_a_silence_does_not_end_it():
    """The first event after it tells of the last step before it, of which no event had told."""
    woken = [(68.0, node, replace(progress(42), age_s=59.9)) for node in "ab"]
    woken += [(68.5, "a", events.Step(1, 43, 0, {})), *((70.0, node, progress(58)) for node in "ab")]
    told = story([*PACED, *((8.0, node, progress(41)) for node in "ab"), *woken])
    for spans in told.spans_by_node(70.0).values():
        assert totals(spans).get("detect", 0.0) == pytest.approx(60.0, abs=0.5)


def test_a_long_start_is_no_standstill():
    """Before the first step agents may have nothing to tell for long."""
    late = [(at + (at >= 4.0) * 60.0, node, event) for at, node, event in THREE_STEPS]
    assert "detect" not in totals(story(late).spans_by_node(65.0)["a"])


def test_slow_steps_are_no_standstill():
    """Where each step takes half a minute, the agents tell of their progress meanwhile."""
    alive = [(at, node, progress(1)) for at in (9.0, 14.0, 19.0, 24.0, 29.0) for node in "ab"]
    told = story([*THREE_STEPS, *alive, (34.0, "a", events.Step(1, 2, 0, {}))])
    assert "detect" not in totals(told.spans_by_node(35.0)["a"])


def test_a_hang_is_told_by_its_newest_finding():
    """While it lasts and after it."""
    moved = replace(culprit(20, 11.0), reason="rank 1 evaluates")
    lasts = story([*HANG, *((17.0, node, moved) for node in "ab")])
    assert lasts.standstill_sentence(18.0) == "no step for 12 s after step 20: rank 1 evaluates"
    over = story([*HANG, *((17.0, node, moved) for node in "ab"), (19.0, "a", events.Step(1, 21, 0, {}))])
    bad = [each.text for each in happened(over) if each.kind == "bad"]
    assert bad == ["no step for 13 s after step 20: rank 1 evaluates"]


def test_the_last_step_is_as_old_as_its_node_says():
    """It may be told when it is long over: what stands still counts from the step itself."""
    told = story([*THREE_STEPS, AT_SIX, (9.0, "b", replace(progress(23), age_s=2.5))])
    assert (told.steps.newest, told.steps.last_at) == (23, 6.5)
    assert now_at(told, 15.0) == "generation 1  2 nodes (1 to 4)  step 23  no step for 8 s  epoch 0"


def test_who_was_left_out_does_not_train():
    """A frozen node finds out late: until the others went on it is `detect`, then it stands by, until it is back."""
    again = begun(2, "a")
    entries = [
        *THREE_STEPS,
        (5.0, "b", progress(15)),
        AT_SIX,
        (9.5, "a", events.MemberLost("b", "b lost (no answer; power or network)")),
        (9.5, "a", again),
        (10.0, "a", events.Recovery(2, 4.0, {**PAUSE, "detect": 3000.0})),
        (29.9, "b", events.Step(1, 20, 0, {})),  # It tells of its last steps when it wakes up.
        (30.0, "b", progress(20)),
        (30.5, "b", events.StandsBy(**vars(again), age_s=24.5)),
    ]
    back = (31.0, "b", begun(3, "ab", "join"))
    for known, now, standby in ((entries, 30.9, 21.4), ([*entries, back], 31.0, 21.5)):
        told = story(known)
        expected = {"train": 2.0, "detect": 3.5, "standby": standby}
        spent = totals(told.spans_by_node(now)["b"])
        assert {name: spent[name] for name in expected} == pytest.approx(expected)
        assert sum(spent.values()) == pytest.approx(now - 0.5)
        own = story([entry for entry in known if entry[1] == "b"])
        alone = totals(own.spans_by_node(now)["b"])
        assert (alone["train"], alone["standby"]) == pytest.approx((2.0, 0.5 - (known == entries) * 0.1)), (
            "its own view"
        )
        assert [chapter.number for chapter in own.generations.all] == [
            chapter.number for chapter in told.generations.all
        ]


def both_stalled(step, age_s):
    """Both nodes give up after no step for so long."""
    stacks = {"0": ("  File train.py, line 12 in step",)}
    return [
        (36.0 + late, node, events.Stalled(1, step, age_s + late, True, stacks))
        for late, node in ((0, "a"), (0.1, "b"))
    ]


@pytest.mark.parametrize(
    ("more", "failures"),
    [
        pytest.param([], {}, id="nothing is a failure before it is final"),
        pytest.param(
            [*both_stalled(20, 30.0)],
            {"b": "no progress for 30 s after step 20: rank 1 sleeps"},
            id="one hang is one failure, of the node that is waited for",
        ),
        pytest.param(
            [*both_stalled(25, 27.0)],
            {"": "no progress for 27 s after step 25"},
            id="where it is not known who is waited for, of no node",
        ),
        pytest.param(
            [*both_stalled(25, 27.0), (36.2, "a", culprit(25, 27.2)), (36.3, "b", culprit(25, 27.3))],
            {"b": "no progress for 27 s after step 25: rank 1 sleeps"},
            id="of the one that is found before it has ended",
        ),
        pytest.param(
            [(30.0, "b", progress(22)), (34.0, "a", culprit(23, 11.0)), *both_stalled(22, 12.0)],
            {"b": "no progress for 12 s after step 22: rank 1 sleeps"},
            id="also where the one that has found it had made one step more",
        ),
        pytest.param(
            [
                (9.0, "b", events.Stalled(1, 20, 3.0, True, {})),
                (9.1, "b", events.WorkerEnded(1, 1, 12, -9, "rank 1 on b is stopped (SIGSTOP)")),
            ],
            {"b": "rank 1 on b is stopped (SIGSTOP)"},
            id="of a worker that a signal has stopped its end tells",
        ),
    ],
)  # fmt: skip
def test_a_hang_that_ends_its_generation_is_a_failure(more, failures):
    """L5: in the failures by node it counts once, whether the run goes on after it or not."""
    ends = [(37.0, "a", events.Result("failed", 1, "no progress"))]
    for told in (story([*HANG, *more]), story([*HANG, *more, *ends])):
        assert {each.node: each.what for each in told.failures.all} == failures
        assert len(told.failures.all) == len(failures)


REASON = "no step for 12 s after step 20: rank 1 sleeps"


def test_all_views_say_that_no_step_is_made_while_it_lasts():
    """The state, the object for programs, the dashboard and `status`, in the terminal's sentence, as old as it is."""
    told = story(HANG)
    now = 18.4
    assert state(told, told.now_if_running(now)) == as_object(told, now)["state"] == board(told, now)["state"] == REASON
    assert as_object(told, now)["standing"]["ranks"] == (1,)
    shown = board(told, now)
    assert [(each["name"], each["state"]) for each in shown["nodes"]] == [("a", "standing still"), ("b", "waited for")]
    assert [6.0, "bad", REASON] in shown["sentences"]
    lines, _ = show(live(agreed(waits=False), MEMBER, MEMBER.model_copy(update={"node": "b"})), told, now)
    assert lines[0] == f"run r: {REASON}"
    goes_on = story([*HANG, (19.0, "a", events.Step(1, 21, 0, {}))])
    assert (state(goes_on, 20.0), goes_on.standstill_sentence(20.0)) == ("running", "")


BEFORE = [
    *(entry for entry in THREE_STEPS if entry[0] < 4.0),
    (6.5, "a", events.Culprit(1, 40, 3.0, (1,), ("b",), "rank 1 sleeps")),
    (6.6, "b", events.Culprit(1, 40, 3.0, (1,), ("b",), "rank 1 sleeps")),
    *((at, node, progress(0)) for at in (7.5, 12.5, 17.5) for node in "ab"),
]
"""Two nodes have the state after step 40 since second 3.5, and make no step."""


def test_a_hang_before_the_first_step_is_one():
    """All views say so while it lasts, its time is found, and what ends it has the cause."""
    told, now, said = story(BEFORE), 18.4, "no step for 15 s after step 40: rank 1 sleeps"
    assert state(told, told.now_if_running(now)) == as_object(told, now)["state"] == board(told, now)["state"] == said
    assert (doing(told), now_at(told, now)) == ("stands still", f"generation 1  2 nodes (1 to 4)  {said}")
    assert totals(told.spans_by_node(now)["a"]) == pytest.approx(
        {"start": 1.0, "set-up": 1.5, "detect": now - 3.5, "waiting for nodes": 1.0}
    )
    step = events.FirstStep(1, 41, 40, None, 0)
    went_on = story([*BEFORE, (19.0, "a", step), (19.0, "a", events.SetUp(1, {"start": 500, "first_step": 15_500}))])
    assert (state(went_on, 20.0), totals(went_on.spans_by_node(20.0)["a"])["detect"]) == ("running", 15.5)
    again = story(
        [*BEFORE, (19.0, "a", begun(2, "a", "drain", "b left")), (20.0, "a", events.SetUp(2, {"start": 500}))]
    )
    assert again.generations.newest.cause == "b left; before that no step for 16 s: rank 1 sleeps"
    assert totals(again.spans_by_node(20.0)["a"])["detect"] == 15.5


def test_a_step_that_the_others_made_before_they_waited_ends_no_hang():
    """A rank hangs after its gradients were exchanged: the others finish that step, and tell it later."""
    ahead = [(13.5, "a", progress(21)), (13.5, "b", progress(20))]
    assert story([*HANG, *ahead]).standstill_sentence(18.4) == REASON
    told = story([*THREE_STEPS, (6.0, "a", events.Step(1, 21, 0, {})), (9.5, "a", culprit(20, 3.5))])
    assert told.standstill_sentence(18.0) == REASON
    assert totals(told.spans_by_node(18.0)["a"])["detect"] == pytest.approx(12.0)
    assert story([*HANG, (18.0, "b", progress(21))]).standstill_sentence(18.4) == ""


@pytest.mark.parametrize(
    ("more", "failures", "cause"),
    [
        pytest.param(
            [(18.0, "b", events.AgentStopped(143)), (18.0, "a", begun(2, "a", "drain", "b left"))],
            {"b": 1},
            "b left; before that no step for 12 s: rank 1 sleeps",
            id="drained",
        ),
        pytest.param(
            [(17.9, "a", events.MemberLost("b", "b lost")), (18.0, "a", begun(2, "a", "lost", "b lost"))],
            {"b": 2},
            "b lost; before that no step for 12 s: rank 1 sleeps",
            id="killed, which is a failure as well",
        ),
        pytest.param(
            [
                *[(18.0, each, events.Stalled(1, 20, 12.0, True, {"0": ("x",)})) for each in "ab"],
                (18.1, "a", begun(2, "ab", "failure", "no progress for 12 s after step 20: rank 1 sleeps")),
            ],
            {"b": 1},
            "no progress for 12 s after step 20: rank 1 sleeps",
            id="by the hang timeout",
        ),
    ],
)
def test_what_has_ended_a_hang_names_it(more, failures, cause):
    """In the row of the next generation, and once among the failures of the node that was waited for."""
    told = story([*HANG, *more])
    assert told.generations.newest.cause == cause
    assert Counter(each.node for each in told.failures.all) == failures
    assert sum(each.hang for each in told.failures.all) == 1


def _blames(generation, age_s, said="rank 1 sleeps"):
    return events.Culprit(generation, 20, age_s, (1,), ("b",), said)


OUTLIVES_ITS_GENERATION = [
    *THREE_STEPS,
    (5.0, "c", started()),
    (5.5, "c", warm()),
    (5.6, "c", events.StandsBy(**vars(begun(1, "ab", "start", in_place=False)))),
    AT_SIX,
    *((9.5, each, _blames(1, 3.5)) for each in "ab"),
    *((66.0, each, begun(2, "abc", "join", "c joined")) for each in "abc"),
    *((67.0, each, _blames(2, 61.0, "rank 1 sleeps on")) for each in "ab"),
    (67.5, "c", _blames(2, 61.5, "rank 1 sleeps on")),
]
"""A node joins two of which one hangs: neither the handover nor the next generation comes to a step."""

SEVENTY = {"detect": 60_000.0, "agree": 0.0, "stop": 0.0, "script": 10_300.0, "restore": 200.0, "first_step": 500.0}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        pytest.param([], "no step for 70 s after step 20: rank 1 sleeps on", id="its worker does not take its seat"),
        pytest.param(
            [(75.9, each, events.Stalled(2, 20, 69.9, True, {"0": ("x",)})) for each in "ab"],
            "no progress for 70 s after step 20: rank 1 sleeps on",
            id="the hang timeout is over",
        ),
    ],
)
def test_a_hang_that_outlives_its_generation_is_one_and_all_of_it_is_detected(more, said):
    """In the generation that nobody came to a step in as well: while it lasts, after it, and on who was left out."""
    entries = [*OUTLIVES_ITS_GENERATION, *more]
    assert totals(story(entries).spans_by_node(76.0)["a"])["detect"] == pytest.approx(70.0)
    third = begun(3, "ac", "failure")
    entries += [
        *((76.0, each, third) for each in "ac"),
        (76.0, "b", events.StandsBy(**vars(third), age_s=70.0)),
        (77.0, "a", events.FirstStep(3, 21, 20, 71.0, 0)),
        (77.0, "a", events.Recovery(3, 71.0, SEVENTY)),
        (77.0, "c", events.FirstStep(3, 21, 20, None, None)),
        (77.0, "c", events.SetUp(3, {"detect": 0.0, "agree": 0.0, "script": 10_300.0, "first_step": 700.0})),
    ]
    told = story(entries)
    spent = {node: totals(spans) for node, spans in told.spans_by_node(77.0).items()}
    assert [spent[node]["detect"] for node in "abc"] == pytest.approx([70.0, 70.0, 10.0])
    assert spent["a"]["re-form"] == pytest.approx(0.25 + 0.3)
    assert spent["c"]["standby"] == pytest.approx(60.4)
    assert [(each.node, each.what) for each in told.failures.all if each.hang] == [("b", said)]
    assert (told.generations.newest.pause_s, told.generations.newest.redone) == (71.0, 0)


def test_another_hang_is_another_failure():
    """Steps were made between the two: both are told."""
    entries = [
        *HANG,
        *((18.0, each, begun(2, "ab", "join", "b joined")) for each in "ab"),
        (19.0, "a", events.FirstStep(2, 21, 20, 13.0, 0)),
        (19.0, "a", events.Recovery(2, 13.0, {"detect": 12_000.0, "first_step": 1000.0})),
        (23.0, "a", events.Culprit(2, 21, 4.0, (1,), ("b",), "rank 1 sleeps")),
        (30.0, "a", begun(3, "a", "drain", "b left")),
    ]
    assert [each.what for each in story(entries).failures.all] == [
        "no step for 12 s after step 20: rank 1 sleeps",
        "no step for 11 s after step 21: rank 1 sleeps",
    ]


def test_nodes_that_do_not_answer_are_lost_and_have_not_hung():
    """Their loss is the failure, and the cause."""
    silent = events.Culprit(1, 20, 3.0, (), ("b",), "b does not answer")
    told = story([*THREE_STEPS, AT_SIX, (9.0, "a", silent), (11.0, "a", events.MemberLost("b", "b lost")),
        (11.0, "a", begun(2, "a", "lost", "b lost"))])  # fmt: skip
    assert (told.generations.newest.cause, len(told.failures.all)) == ("b lost", 1)


def test_a_slow_node_is_told_in_its_generation():
    """In the report, and on the dashboard; until it has caught up."""
    entries = [*THREE_STEPS, (5.0, "a", events.Straggler(1, 10, "b", 0.04, 0.01))]
    text = "b is slow: its own work takes 40 ms of a step, that of the others 10 ms, and they wait for it"
    assert text == slow_node("b", 0.04, 0.01), "as the terminal says"
    told = story(entries)
    assert text in report(told, 6.0)
    assert [5.0, "bad", text] in board(told, 6.0)["sentences"]
    assert as_object(told, 6.0)["slow"]["slow"] == "b"
    assert text not in report(told), "after its end nobody waits"
    assert f"1970-01-01 00:00:05  {text}" in report(told), "but it has happened"
    assert text not in report(story([*entries, (7.0, "a", begun(2, "a"))]), 8.0)
    caught_up = report(story([*entries, (7.0, "a", events.Straggler(1, 30, "", 0.0, 0.0))]), 8.0)
    assert text not in caught_up
    assert caught_up[-1] == "1970-01-01 00:00:07  no node is slow any more"


def test_a_slow_node_that_was_drained_was_slow():
    """The cause of the next generation says so, and that of one that leaves another way does not."""
    entries = [*THREE_STEPS, (5.0, "a", events.Straggler(1, 10, "b", 0.04, 0.01))]
    drained = story([*entries, (9.0, "a", begun(2, "ac", "drain", "b drained"))])
    assert drained.generations.newest.cause == "b drained; c joined; b was slow"
    assert f"generation 2: {drained.generations.newest.cause}, 2 nodes" in "\n".join(
        each.text for each in happened(drained)
    )
    assert story([*entries, (9.0, "a", begun(2, "a", "lost", "b lost"))]).generations.newest.cause == "b lost"
    assert story([*entries, (9.0, "a", begun(2, "b", "drain", "a drained"))]).generations.newest.cause == "a drained"
