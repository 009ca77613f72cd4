"""Where the time of a life went: sequences of events, and exactly what is painted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elasticrt import events
from elasticrt.story.buckets import SPANS_MAX, Span, coarse, totals
from elasticrt.story.report import columns, worth
from elasticrt.story.steps import Series
from tests.unit.story.told import THREE_STEPS, begun, started, story, warm

PAUSE = {"detect": 100, "agree": 200, "stop": 0, "script": 50, "init": 50, "restore": 100, "first_step": 500}
START = {"start": 1.0, "waiting for nodes": 1.0, "set-up": 1.5, "re-form": 0.25, "restore": 0.25}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        pytest.param([], START, id="to the first step"),
        pytest.param(
            [(10.0, "a", events.Progress(1, 50, 1.0, 0.5, 0.25)), (14.0, "a", events.AgentStopped(0))],
            {**START, "data wait": 1.0, "checkpoint stall": 0.5, "pause": 0.25, "train": 8.25},
            id="what the workers count is taken from training",
        ),
        pytest.param(
            [(10.0, "a", events.Progress(1, 50, 99.0, 99.0, 0.0)), (10.0, "a", events.AgentStopped(0))],
            {**START, "data wait": 6.0},
            id="never more than there was",
        ),
        pytest.param(
            [
                *((at, "a", events.Progress(1, 50, 0.0, 0.0, 0.0)) for at in (5.0, 10.0, 15.0, 20.0)),
                (24.0, "a", events.Progress(1, 50, 0.0, 18.0, 0.0)),
                (24.0, "a", events.AgentStopped(0)),
            ],
            {**START, "train": 2.0, "checkpoint stall": 18.0},
            id="what took long is counted when it is over",
        ),
        pytest.param(
            [
                (5.0, "a", events.Progress(1, 50, 0.0, 0.0, 0.0)),
                (10.0, "a", events.Progress(1, 50, 0.0, 0.0, 4.5)),
                (15.0, "a", events.Progress(1, 50, 0.0, 0.0, 9.5)),
            ],
            {**START, "train": 1.5, "pause": 9.5},
            id="a pause under way",
        ),
        pytest.param(
            [(10.0, "a", begun(2, "a")), (10.5, "a", events.Recovery(2, 1.0, PAUSE))],
            {**START, "train": 5.5, "set-up": 2.0, "detect": 0.1, "agree": 0.2, "re-form": 0.35, "restore": 0.35},
            id="a pause begins before it is told",
        ),
        pytest.param(
            [
                (10.0, "a", begun(2, "a")),
                (12.5, "a", events.Recovery(2, 3.0, {"detect": 100, "start": 500, "loop": 1900, "restore": 500})),
            ],
            {**START, "train": 5.5, "detect": 0.1, "set-up": 1.5 + 2.4, "restore": 0.25 + 0.5},
            id="a tokenizer before the loop",
        ),
        pytest.param(
            [
                (9.0, "a", events.Progress(1, 50, 1.0, 0.0, 0.0)),
                (9.8, "a", events.Progress(1, 55, 2.5, 0.0, 0.0)),
                (10.0, "a", begun(2, "a")),
                (10.5, "a", events.Recovery(2, 1.0, PAUSE)),
            ],
            {
                **START,
                "train": 4.5,
                "set-up": 2.0,
                "data wait": 1.0,
                "detect": 0.1,
                "agree": 0.2,
                "re-form": 0.35,
                "restore": 0.35,
            },
            id="what is counted within the pause is no part of the training before",
        ),
        pytest.param(
            [
                (10.0, "a", begun(2, "a")),
                (10.5, "a", events.FirstStep(2, 31, 30, 1.0, 20)),
                (10.5, "a", events.Recovery(2, 1.0, PAUSE)),
                (12.5, "a", events.Step(2, 50, 0, {})),
                (14.0, "a", events.AgentStopped(0)),
            ],
            {
                **START,
                "train": 7.0,
                "set-up": 2.0,
                "redone steps": 2.0,
                "detect": 0.1,
                "agree": 0.2,
                "re-form": 0.35,
                "restore": 0.35,
            },
            id="until the run is where it was, steps are done again",
        ),
        pytest.param(
            [
                (8.0, "a", events.WorkerEnded(1, 0, 11, -9, "rank 0 on a: killed by SIGKILL")),
                (10.0, "a", events.Result("failed", 1, "spent")),
                (10.25, "a", events.AgentStopped(1)),
            ],
            {**START, "train": 4.0, "agree": 2.0, "start": 1.25},
            id="a run that fails",
        ),
        pytest.param(
            [
                (8.0, "a", events.WorkerEnded(1, 0, 11, -9, "rank 0 on a: killed by SIGKILL")),
                (9.0, "a", events.Ready(0)),
                (11.0, "a", begun(3, "ba", "join")),
                (12.0, "a", events.SetUp(3, {"agree": 0, "script": 250, "init": 250, "restore": 500, "first_step": 0})),
            ],
            {**START, "train": 4.0, "set-up": 2.5, "standby": 2.0, "re-form": 0.75, "restore": 0.75},
            id="a node that has lost its worker sets up, stands by and is let in",
        ),
        pytest.param(
            [
                (8.0, "a", events.WorkerEnded(1, 0, 11, -9, "rank 0 on a: killed by SIGKILL")),
                (8.25, "a", events.StandsBy(**vars(begun(2, "b", "failure")))),
                (9.0, "a", events.Ready(0)),
                (15.0, "a", events.AgentStopped(0)),
            ],
            {**START, "train": 4.0, "detect": 0.25, "set-up": 2.25, "standby": 6.0},
            id="the same, until the end: the others have gone on before its replacement was ready",
        ),
        pytest.param(
            [
                (6.0, "a", events.StandsBy(**vars(begun(2, "b", "failure")), age_s=2.0)),
                (7.0, "a", events.Ready(0)),
                (10.0, "a", begun(3, "ab", "join")),
                (10.5, "a", events.WorkerEnded(3, 0, 13, 1, "rank 0 on a: exit code 1")),
                (11.0, "a", events.StandsBy(**vars(begun(4, "b", "failure")))),
                (12.0, "a", events.Ready(0)),
                (15.0, "a", events.AgentStopped(0)),
            ],
            {**START, "set-up": 2.5, "detect": 2.0, "standby": 8.0},
            id="a node whose worker fails before its first step stands by until it is let in again",
        ),
        pytest.param(
            [
                (5.0, "a", begun(2, "ab", "failure", in_place=False)),
                (20.0, "a", events.Recovery(2, 16.0, {"detect": 500, "agree": 500, "first_step": 15_000})),
                (21.5, "a", events.AgentStopped(0)),
            ],
            {**START, "train": 1.5, "detect": 0.5, "agree": 0.5, "set-up": 1.5 + 15.0},
            id="all is set-up until the first step, as while it lasts",
        ),
    ],
)
def test_a_life_is_painted(more, expected):
    """Each moment of a life is in one bucket, as the events tell, and all of them are the life."""
    told = story([*THREE_STEPS, *more])
    spans = told.lives.spans_of(told.lives.all[0])
    spent = totals(spans)
    assert spent == {name: pytest.approx(seconds) for name, seconds in expected.items()}
    assert sum(spent.values()) == pytest.approx(told.lives.all[0].last - told.lives.all[0].begin)
    assert all(left.end == right.begin for left, right in pairwise(spans))


def test_too_few_nodes_are_waited_for():
    """Where fewer nodes are left than the run needs, agreeing is waiting for nodes."""
    pause = {"detect": 100.0, "agree": 3000.0, "stop": 0.0, "restore": 100.0, "first_step": 300.0}
    more = [
        (7.0, "b", started(2)),
        (8.0, "b", warm()),
        (9.0, "a", begun(2, "ab", "lost")),
        (9.5, "a", events.Recovery(2, 3.5, pause)),
    ]
    before = [
        (at, node, started(2) if isinstance(event, events.AgentStarted) else event) for at, node, event in THREE_STEPS
    ]
    told = story([*before, *more])
    assert totals(told.spans_by_node()["a"])["waiting for nodes"] == pytest.approx(1.0 + 3.0)


def test_where_no_agent_was_there_is_no_time_of_the_run():
    """A run that was submitted again has the time of both attempts."""
    more = [
        (6.0, "b", events.AgentStopped(143)),
        (8.0, "a", events.AgentStopped(143)),
        (20.0, "a", started()),
        (21.0, "a", events.AgentStopped(143)),
    ]
    told = story([*THREE_STEPS, *more])
    spans = told.spans_by_node()["a"]
    assert totals(spans)["train"] == pytest.approx(4.0)
    assert sum(totals(spans).values()) == pytest.approx(8.0 + 1.0)


def test_the_time_of_a_run_is_that_of_its_nodes():
    """Summed, without the time in which a node stood by. So the agent of one node and the report say the same."""
    told = story([*THREE_STEPS, (6.0, "b", events.StandsBy(**vars(begun(2, "a")))), (6.0, "a", begun(2, "a"))])
    nodes = [totals(spans) for spans in told.spans_by_node(16.0).values()]
    names = {name for spent in nodes for name in spent}
    assert "standby" in names
    sums = {name: sum(spent.get(name, 0.0) for spent in nodes) for name in names - {"standby"}}
    assert told.spent(16.0) == pytest.approx(sums)
    assert told.goodput(16.0) == pytest.approx(sums["train"] / sum(sums.values()))
    assert columns(told, 16.0)["all nodes"] == told.spent(16.0)
    assert story([]).goodput() == 0.0


def test_the_agent_and_the_report_say_the_same_goodput():
    """The time of a run and of each node ends with the result; that an agent then takes its leave is no part of it."""
    result = events.Result("succeeded", 0, "")
    ends = [*THREE_STEPS, (14.0, "a", result), (14.25, "b", result)]
    later = [*ends, (14.5, "a", events.AgentStopped(0)), (15.0, "b", events.AgentStopped(0))]
    assert worth(story(ends)) == worth(story(later))
    for node in "ab":
        column, own = columns(story(later))[node], story([each for each in later if each[1] == node])
        assert own.goodput() == pytest.approx(column["train"] / sum(column.values()))


def test_sums_reach_the_present_while_the_run_goes_on():
    """As long as its agents write; a run that fell silent has ended with its last event."""
    told = story(THREE_STEPS)
    assert (told.now_if_running(10.0), told.now_if_running(100.0)) == (10.0, None)
    assert story([*THREE_STEPS, (5.0, "a", events.Result("failed", 1, ""))]).now_if_running(5.5) is None


def test_the_present_counts_while_a_node_lives():
    """With `now`, a life that has not ended reaches to it; one that has been taken out ends then."""
    told = story([*THREE_STEPS, (5.0, "a", events.MemberLost("b", "b lost"))])
    a, b = told.lives.all
    assert (told.lives.spans_of(a, 10.0)[-1].end, told.lives.spans_of(b, 10.0)[-1].end) == (10.0, 5.0)


KILLED = [
    *THREE_STEPS,
    (6.0, "b", events.Progress(1, 20, 0.0, 0.0, 0.0)),
    (12.0, "a", events.Step(1, 80, 0)),
    (13.5, "a", events.MemberLost("b", "b lost (no answer; power or network)")),
    (13.6, "a", begun(2, "a")),
    (14.0, "a", events.FirstStep(2, 81, 80, 2.0, 0)),
    (14.0, "a", events.Recovery(2, 2.0, {"detect": 900, "agree": 700, "script": 200, "first_step": 200})),
]


def test_a_killed_node_ends_when_the_others_have_noticed():
    """Its last event is up to 5 s older. It trained until the last step of all; in between nobody knew."""
    for told in (story(KILLED), story([*KILLED, (20.0, "a", events.AgentStopped(0))])):
        spans = told.lives.spans_of(told.lives.all[1])
        spent = totals(spans)
        assert (spans[0].begin, spans[-1].end) == (0.5, 13.5)
        assert (spent["train"], spent["detect"]) == (pytest.approx(8.0), pytest.approx(1.5))
        assert sum(spent.values()) == pytest.approx(13.0)
        assert all(left.end == right.begin for left, right in pairwise(spans))


def test_a_node_that_is_killed_in_a_change_was_setting_up():
    """It had a seat in the next generation, and did not stand by."""
    lost = [(16.0, "a", events.MemberLost("b", "b lost")), (16.0, "a", begun(3, "a"))]
    told = story([*KILLED[:-4], (13.0, "a", begun(2, "ab")), (13.0, "b", begun(2, "ab")), *lost])
    spent = totals(told.lives.spans_of(told.lives.all[1]))
    assert (spent["set-up"], "standby" in spent) == (pytest.approx(1.5 + 3.0), False)
    assert sum(spent.values()) == pytest.approx(15.5)


def test_where_no_node_was_left_to_notice_a_life_ends_with_its_last_event():
    """All were killed, and others begin anew an hour later: that hour is nobody's time."""
    others = [(3600.0, "c", started()), (3601.0, "c", events.MemberLost("b", "b lost")), (3601.0, "c", begun(2, "c"))]
    told = story([*KILLED[:-4], *others])
    assert [told.lives.spans_of(life)[-1].end for life in told.lives.all[:2]] == [12.0, 6.0]


def test_a_node_that_comes_back_was_not_gone():
    """One that was frozen goes on with its own events, and its time reaches to its last one."""
    told = story([*KILLED, (30.0, "b", events.Progress(1, 80, 0.0, 0.0, 0.0))])
    spans = told.lives.spans_of(told.lives.all[1])
    assert spans[-1].end == 30.0
    assert totals(spans)["train"] == pytest.approx(8.0)


def test_a_generation_has_the_nodes_that_its_leader_tells():
    """In a large run a member knows the seats of its chunk only, and may be the first to tell of a generation."""
    told = story(
        [(1.0, "b", started()), (2.0, "b", begun(1, "b")), (2.1, "a", begun(1, "abc")), (2.2, "c", begun(1, "c"))]
    )
    assert [chapter.nodes for chapter in told.generations.all] == [("a", "b", "c")]


def test_a_long_life_is_kept_in_few_spans():
    """However long a node trains, what is kept of it is bounded, and no second is lost."""
    ticks = [(10.0 + 5 * n, "a", events.Progress(1, 50 * (n + 1), 1.0 * n, 0.5 * n, 0.25 * n)) for n in range(1500)]
    told = story([*THREE_STEPS, *ticks])
    spans = told.lives.spans_of(told.lives.all[0])
    assert len(spans) < SPANS_MAX
    spent = totals(spans)
    assert (spent["data wait"], spent["pause"]) == (pytest.approx(1499.0), pytest.approx(374.75))
    assert sum(spent.values()) == pytest.approx(told.last)
    assert all(left.end == pytest.approx(right.begin) for left, right in pairwise(spans))


def test_many_spans_become_few():
    """A piece of time is divided between its buckets, a long span stays whole, and no second is lost."""
    short = [(float(at), float(at + 1)) for at in range(3000)]
    short += [(at + 4000, until + 4000) for at, until in short]
    spans = [Span(begin, end, ("train", "data wait")[int(begin) % 2]) for begin, end in short]
    spans.insert(3000, Span(3000.0, 4000.0, "detect"))
    found = coarse(spans, 100)
    assert len(found) < 250
    assert totals(found) == pytest.approx(totals(spans))
    assert all(left.end == right.begin for left, right in pairwise(found))
    assert spans[3000] in found
    assert coarse([], 100) == []


@pytest.mark.parametrize("count", [0, 1, 8, 9, 10, 17, 100, 1001])
def test_a_long_series_is_thinned_out_evenly(count):
    """It keeps at most eight values, as far from each other from its beginning on, and always the newest."""
    series = Series(8)
    for value in range(count):
        series.add(value)
    assert len(series) <= 8 or count == 0
    assert series[-1:] == [count - 1] * (count > 0)
    assert len({after - before for before, after in pairwise(series[:-1])}) <= 1


def test_a_hang_behind_the_training_takes_nothing_from_it():
    """Two nodes train until 8 s and do not end. One hears of the next generation after the other; both have trained."""
    hangs = []
    for node, rank in (("a", 0), ("b", 1)):
        culprit = events.Culprit(1, 60, 5.0, (rank,), (node,), f"rank {rank} has not ended")
        pauses = [(at, events.Progress(1, 60, 0.0, 0.0, at - 8.0, pausing=True)) for at in (9.0, 14.0, 20.0)]
        hangs += [(8.0, node, events.Step(1, 60, 0, {})), *((at, node, each) for at, each in pauses)]
        hangs += [(13.0, node, culprit), (20.0, node, events.Stalled(1, 60, 12.0, True, {str(rank): ("x",)}))]
    hangs += [(20.25, "a", begun(2, "ab", "failure")), (20.5, "b", begun(2, "ab", "failure"))]
    told = story(sorted([*THREE_STEPS, *hangs], key=lambda entry: entry[0]))
    for node, spans in told.spans_by_node().items():
        spent = totals(spans)
        assert spent["train"] == pytest.approx(4.0, abs=0.3), node
        assert spent["pause"] == pytest.approx(12.0, abs=0.5), node
