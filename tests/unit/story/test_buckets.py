"""Where the time of a life went: sequences of events, and exactly what is painted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from elasticrt import events
from elasticrt.story.buckets import SPANS_MAX, together, totals
from elasticrt.story.fold import Series
from tests.unit.story.told import THREE_STEPS, begun, started, story, warm

PAUSE = {"detect": 100, "agree": 200, "stop": 0, "script": 50, "init": 50, "restore": 100, "first_step": 500}
START = {"start": 1.0, "waiting for nodes": 1.0, "set-up": 1.0, "re-form": 0.25, "restore": 0.25}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        pytest.param([], {**START, "train": 0.5}, id="to the first step"),
        pytest.param(
            [(10.0, "a", events.Progress(1, 50, 1.0, 0.5, 0.25)), (14.0, "a", events.AgentStopped(0))],
            {**START, "data wait": 1.0, "checkpoint stall": 0.5, "pause": 0.25, "train": 8.75},
            id="what the workers count is taken from training",
        ),
        pytest.param(
            [(10.0, "a", events.Progress(1, 50, 99.0, 99.0, 0.0)), (10.0, "a", events.AgentStopped(0))],
            {**START, "train": 0.5, "data wait": 6.0},
            id="never more than there was",
        ),
        pytest.param(
            [
                *((at, "a", events.Progress(1, 50, 0.0, 0.0, 0.0)) for at in (5.0, 10.0, 15.0, 20.0)),
                (24.0, "a", events.Progress(1, 50, 0.0, 18.0, 0.0)),
                (24.0, "a", events.AgentStopped(0)),
            ],
            {**START, "train": 2.5, "checkpoint stall": 18.0},
            id="what took long is counted when it is over",
        ),
        pytest.param(
            [
                (5.0, "a", events.Progress(1, 50, 0.0, 0.0, 0.0)),
                (10.0, "a", events.Progress(1, 50, 0.0, 0.0, 4.5)),
                (15.0, "a", events.Progress(1, 50, 0.0, 0.0, 9.5)),
            ],
            {**START, "train": 2.0, "pause": 9.5},
            id="a pause under way",
        ),
        pytest.param(
            [(10.0, "a", begun(2, "a")), (10.5, "a", events.Recovery(2, 1.0, PAUSE))],
            {**START, "train": 6.5, "detect": 0.1, "agree": 0.2, "re-form": 0.35, "restore": 0.35},
            id="a pause begins before it is told",
        ),
        pytest.param(
            [
                (9.0, "a", events.Progress(1, 50, 1.0, 0.0, 0.0)),
                (9.8, "a", events.Progress(1, 55, 2.5, 0.0, 0.0)),
                (10.0, "a", begun(2, "a")),
                (10.5, "a", events.Recovery(2, 1.0, PAUSE)),
            ],
            {**START, "train": 5.0, "data wait": 1.5, "detect": 0.1, "agree": 0.2, "re-form": 0.35, "restore": 0.35},
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
                "train": 7.5,
                "redone steps": 2.5,
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
            {**START, "train": 4.5, "agree": 2.0, "start": 1.25},
            id="a run that fails",
        ),
        pytest.param(
            [
                (8.0, "a", events.WorkerEnded(1, 0, 11, -9, "rank 0 on a: killed by SIGKILL")),
                (9.0, "a", events.Ready(0)),
                (11.0, "a", begun(3, "ba", "join")),
                (12.0, "a", events.SetUp(3, {"agree": 0, "script": 250, "init": 250, "restore": 500, "first_step": 0})),
            ],
            {**START, "train": 4.5, "set-up": 2.0, "standby": 2.0, "re-form": 0.75, "restore": 0.75},
            id="a node that has lost its worker sets up, stands by and is let in",
        ),
    ],
)
def test_a_life_is_painted(more, expected):
    """Each moment of a life is in one bucket, as the events tell, and all of them are the life."""
    told = story([*THREE_STEPS, *more])
    spans = told.spans_of(told.lives[0])
    spent = totals(spans)
    assert spent == {name: pytest.approx(seconds) for name, seconds in expected.items()}
    assert sum(spent.values()) == pytest.approx(told.lives[0].last - told.lives[0].begin)
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


def test_the_run_is_in_the_best_bucket_of_its_nodes():
    """While one node trains the run trains; where no agent was, there is no time of the run."""
    more = [
        (6.0, "b", events.AgentStopped(143)),
        (8.0, "a", events.AgentStopped(143)),
        (20.0, "a", started()),
        (21.0, "a", events.AgentStopped(143)),
    ]
    told = story([*THREE_STEPS, *more])
    spans = told.spans()
    assert totals(spans)["train"] == pytest.approx(4.5)
    assert sum(totals(spans).values()) == pytest.approx(8.0 + 1.0)
    assert told.goodput() == pytest.approx(0.5)
    assert together([]) == []


def test_the_present_counts_while_a_node_lives():
    """With `now`, a life that has not ended reaches to it; one that has been taken out does not."""
    told = story([*THREE_STEPS, (5.0, "a", events.MemberLost("b", "b lost"))])
    a, b = told.lives
    assert (told.spans_of(a, 10.0)[-1].end, told.spans_of(b, 10.0)[-1].end) == (10.0, 4.0)


def test_a_long_life_is_kept_in_few_spans():
    """However long a node trains, what is kept of it is bounded, and no second is lost."""
    ticks = [(10.0 + 5 * n, "a", events.Progress(1, 50 * (n + 1), 1.0 * n, 0.5 * n, 0.25 * n)) for n in range(1500)]
    told = story([*THREE_STEPS, *ticks])
    spans = told.spans_of(told.lives[0])
    assert len(spans) < SPANS_MAX
    spent = totals(spans)
    assert (spent["data wait"], spent["pause"]) == (pytest.approx(1499.0), pytest.approx(374.75))
    assert sum(spent.values()) == pytest.approx(told.last)
    assert all(left.end == pytest.approx(right.begin) for left, right in pairwise(spans))


@pytest.mark.parametrize("count", [0, 1, 8, 9, 10, 17, 100, 1001])
def test_a_long_series_is_thinned_out_evenly(count):
    """It keeps at most eight values, as far from each other from its beginning on, and always the newest."""
    series = Series(8)
    for value in range(count):
        series.add(value)
    assert len(series) <= 8 or count == 0
    assert series[-1:] == [count - 1] * (count > 0)
    assert len({after - before for before, after in pairwise(series[:-1])}) <= 1
