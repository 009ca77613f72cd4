"""The narration: sequences of events and exactly what is told about them."""

from __future__ import annotations

import pytest

from elasticrt import events
from elasticrt.playground.narration import Narration
from elasticrt.story.report import report


def record(event, node, at):
    """An event as an agent would send it; all of them are on one machine, whose clocks agree."""
    return events.Record(event, node, at, at)


def started(node, pid, at=100.1):
    """The agent of `node` runs under `pid`."""
    return record(events.AgentStarted(pid, "calm-fox", "embedded", "runs/x", "a machine", 1, 9), node, at)


def generation(node, number, nodes, cause, at, *, resume_step=0):
    """`node` starts this generation."""
    return record(events.Generation(number, len(nodes), cause, "lost", 0, tuple(nodes), resume_step), node, at)


def first_step(node, number, step, at, *, pause_s=None, redone=0):
    """`node` has finished its first step of generation `number`."""
    return record(events.FirstStep(number, step, step - 1, pause_s, redone), node, at)


def step(number, at, generation=1, epoch=0, **scalars):
    """Rank 0's node has finished a step."""
    return record(events.Step(generation, number, epoch, scalars), "node-0", at)


def exited(node, code, at):
    """Not an event: the agent of `node` has ended."""
    return node, code, at


def result(status, code, at, reason=""):
    """The run has a result."""
    return record(events.Result(status, code, reason), "node-0", at)


def passes(at):
    """Not an event: time passes."""
    return at


THREE = ["node-0", "node-1", "node-2"]
BEGIN = [
    *(started(node, 4800 + i) for i, node in enumerate(THREE)),
    *(generation(node, 1, THREE, "start", 102.0) for node in THREE),
    *(first_step(node, 1, 1, 102.5) for node in THREE),
]
BEGIN_TOLD = [
    "-- run calm-fox, etcd embedded, logs in runs/x",
    "-- generation 1: 3 nodes, world size 3, first step 1 after 0.50 s",
]
TWO = ["node-0", "node-1"]
KILLED = [
    step(412, 103.0),
    exited("node-2", -9, 103.1),
    generation("node-0", 2, TWO, "node-2 lost", 103.3, resume_step=406),
    generation("node-1", 2, TWO, "node-2 lost", 103.3, resume_step=406),
    first_step("node-0", 2, 407, 103.4, pause_s=0.39, redone=6),
    first_step("node-1", 2, 407, 103.4, pause_s=0.41, redone=6),
]
KILLED_TOLD = [
    "-- generation 2: node-2 lost, 2 nodes, world size 2, paused 0.41 s after step 412, 6 steps done again",
]


def told(history):
    """Fold all of it; the narration and what it said, each own line as its text."""
    narration = Narration(started_at=100.0)
    said = []
    for each in history:
        match each:
            case events.Record():
                lines = narration.tell(each)
            case (node, code, _):
                lines = narration.exited(node, code)
            case now:
                lines = narration.tick(now)
        said += lines
    return narration, said


@pytest.mark.parametrize(
    ("history", "lines"),
    [
        pytest.param(BEGIN, BEGIN_TOLD, id="the start is one line, when all members have stepped"),
        pytest.param([*BEGIN, *KILLED], [*BEGIN_TOLD, *KILLED_TOLD], id="a lost node is one line with its cost"),
        pytest.param(
            [
                *BEGIN,
                step(20, 103.0),
                started("node-3", 4803),
                generation("node-0", 2, [*THREE, "node-3"], "node-3 joined", 103.3, resume_step=20),
                first_step("node-3", 2, 21, 103.4),
                first_step("node-0", 2, 21, 103.4, pause_s=0.2),
                passes(104.5),
            ],
            [
                *BEGIN_TOLD,
                "-- generation 2: node-3 joined, 4 nodes, world size 4, paused 0.20 s after step 20, no step lost",
            ],
            id="a join loses nothing, and a member that is slow to report delays the line by a second at most",
        ),
        pytest.param(
            [
                *BEGIN,
                step(20, 103.0),
                generation("node-0", 2, ["node-0", "node-2"], "node-1 left", 103.3, resume_step=20),
                first_step("node-0", 2, 21, 103.4, pause_s=0.2),
                first_step("node-2", 2, 21, 103.4, pause_s=0.2),
                exited("node-1", 143, 103.5),
            ],
            [
                *BEGIN_TOLD,
                "-- generation 2: node-1 left, 2 nodes, world size 2, paused 0.20 s after step 20, no step lost",
            ],
            id="a drained node has left, not been lost",
        ),
        pytest.param(
            [
                *BEGIN,
                step(20, 103.0),
                generation("node-0", 2, ["node-0", "node-2"], "rank 1 on node-1: killed by SIGKILL", 103.3),
                first_step("node-0", 2, 21, 103.4, pause_s=0.2),
                first_step("node-2", 2, 21, 103.4, pause_s=0.2),
            ],
            [
                *BEGIN_TOLD,
                "-- generation 2: rank 1 on node-1: killed by SIGKILL, 2 nodes, world size 2, paused 0.20 s "
                "after step 20, no step lost",
            ],
            id="a node whose only worker was killed has not left",
        ),
        pytest.param(
            [
                *BEGIN,
                step(20, 103.0),
                generation("node-0", 2, THREE, "rank 1 on node-1: killed by SIGKILL", 103.3, resume_step=10),
                *(first_step(node, 2, 11, 103.4, pause_s=0.15, redone=10) for node in THREE),
            ],
            [
                *BEGIN_TOLD,
                "-- generation 2: rank 1 on node-1: killed by SIGKILL, 3 nodes, world size 3, paused 0.15 s "
                "after step 20, 10 steps done again",
            ],
            id="with the same members the leader's words tell the cause",
        ),
        pytest.param(
            [*BEGIN[:6], passes(104.9), passes(105.1)],
            [
                BEGIN_TOLD[0],
                "-- generation 1: 3 nodes, world size 3",
                ".. generation 1  3 nodes (1 to 9)",
            ],
            id="a script that reports no steps gets its line after three seconds, without a cost",
        ),
        pytest.param(
            [*BEGIN[:6], passes(105.1), *(first_step(node, 1, 1, 109.0) for node in THREE)],
            [
                BEGIN_TOLD[0],
                "-- generation 1: 3 nodes, world size 3",
                ".. generation 1  3 nodes (1 to 9)",
                "-- generation 1: first step 1 after 7.00 s",
            ],
            id="a late first step is told late",
        ),
        pytest.param(
            [
                *BEGIN,
                exited("node-2", -9, 103.1),
                generation("node-0", 2, TWO, "node-2 lost", 103.3),
                exited("node-1", -9, 103.4),
                generation("node-0", 3, ["node-0"], "node-1 lost", 103.5),
                first_step("node-0", 3, 2, 103.6, pause_s=1.1, redone=0),
            ],
            [
                *BEGIN_TOLD,
                "-- generation 2: node-2 lost, 2 nodes, world size 2",
                "-- generation 3: node-1 lost, 1 node, world size 1, paused 1.10 s after step 1, no step lost",
            ],
            id="a generation that never stepped is told before the next",
        ),
        pytest.param(
            [*BEGIN, step(81, 104.5, 1, 3, loss=0.12345), passes(105.1), passes(106.0), passes(110.2)],
            [
                *BEGIN_TOLD,
                ".. generation 1  3 nodes (1 to 9)  step 81  40.0 steps/s  epoch 3  loss 0.1235",
                ".. generation 1  3 nodes (1 to 9)  step 81  no step for 6 s  epoch 3  loss 0.1235",
            ],
            id="a status line every five seconds",
        ),
        pytest.param(
            [*BEGIN, *KILLED, passes(105.0), step(417, 106.0, 2), passes(110.0)],
            [
                *BEGIN_TOLD,
                *KILLED_TOLD,
                ".. generation 2  2 nodes (1 to 9)  step 407  epoch 0",
                ".. generation 2  2 nodes (1 to 9)  step 417  3.8 steps/s  epoch 0",
            ],
            id="while steps are done again, the status line shows the step that was made last",
        ),
        pytest.param(
            [
                *BEGIN,
                record(events.Culprit(1, 1, 3.2, (1,), ("node-1",), "rank 1 on node-1 sleeps"), "node-0", 106.0),
                record(events.Culprit(1, 1, 6.4, (1,), ("node-1",), "rank 1 on node-1 sleeps"), "node-0", 109.0),
            ],
            [*BEGIN_TOLD, "-- no step for 3 s after step 1: rank 1 on node-1 sleeps"],
            id="whom the others wait for, once",
        ),
        pytest.param(
            [
                *BEGIN[:-3],
                *(record(events.SetUp(1, {"first_step": 500.0}), node, 102.5) for node in THREE),
                record(events.Culprit(1, 37, 3.2, (1,), ("node-1",), "rank 1 on node-1 sleeps"), "node-0", 106.0),
            ],
            [
                BEGIN_TOLD[0],
                "-- generation 1: 3 nodes, world size 3, first step after 0.50 s",
                "-- no step for 3 s: rank 1 on node-1 sleeps",
            ],
            id="without a Loop steps have no numbers",
        ),
        pytest.param(
            [passes(104.9), passes(105.0)], [".. waiting for nodes: 0 of at least 1 here"], id="waiting is told too"
        ),
        pytest.param(
            [record(events.Failure("rank 1 failed\n  ValueError: no"), "node-0", 1.0)],
            ["rank 1 failed", "  ValueError: no"],
            id="the failure report is printed as it is",
        ),
        pytest.param(
            [result("succeeded", 0, 1.0), result("succeeded", 0, 1.0)], ["-- the run succeeded"], id="one result, once"
        ),
        pytest.param(
            [
                *BEGIN,
                generation("node-0", 2, TWO, "node-2 lost", 103.3),
                result("failed", 1, 103.5, "x"),
                passes(108.0),
            ],
            [
                *BEGIN_TOLD,
                "-- generation 2: node-2 lost, 2 nodes, world size 2",
                "-- the run failed (code 1): x",
                ".. 8 s: the run has ended; still there: node-0, node-1, node-2",
            ],
            id="a generation without a step is told before the end",
        ),
        pytest.param(
            [*BEGIN, exited("node-0", 0, 103.0), result("succeeded", 0, 103.0), passes(106.0)],
            [*BEGIN_TOLD, "-- the run succeeded", ".. 6 s: the run has ended; still there: node-1, node-2"],
            id="after the end it says who is waited for",
        ),
        pytest.param(
            [*BEGIN[:6], record(events.SetUp(1, {"first_step": 90.0}), "node-0", 104.0), passes(105.1)],
            [
                BEGIN_TOLD[0],
                "-- generation 1: 3 nodes, world size 3, first step after 2.00 s",
                ".. generation 1  3 nodes (1 to 9)",
            ],
            id="steps without a Loop are not counted",
        ),
        pytest.param(
            [
                *BEGIN,
                generation("node-0", 2, ["node-0", "node-1", "node-3"], "node-2 lost", 103.3),
                *(first_step(node, 2, 2, 103.5, pause_s=0.2, redone=0) for node in ("node-0", "node-1", "node-3")),
            ],
            [
                *BEGIN_TOLD,
                "-- generation 2: node-2 lost; node-3 joined, 3 nodes, world size 3, paused 0.20 s after step 1, "
                "no step lost",
            ],
            id="who joins when another one is lost is named",
        ),
        pytest.param(
            [result("failed", 3, 1.0, "1 of 2 nodes came")],
            ["-- the run failed (code 3): 1 of 2 nodes came"],
            id="a failed run says why",
        ),
        pytest.param(
            [exited("node-0", 2, 1.0), exited("node-1", -11, 1.0)],
            ["-- the agent of node-0 ended (code 2)", "-- the agent of node-1 ended (SIGSEGV)"],
            id="an agent that ends before there is a run is told",
        ),
        pytest.param(
            [*BEGIN[:4], generation("node-2", 1, THREE, "start", 102.1), *BEGIN[4:], first_step("node-1", 7, 3, 4.0)],
            ["-- run calm-fox, etcd embedded, logs in runs/x", BEGIN_TOLD[1]],
            id="repeated and unknown generations are not told twice",
        ),
    ],
)
def test_events_are_told(history, lines):
    """A sequence of events gives exactly these lines."""
    assert told(history)[1] == lines


ALL_WELL = [*BEGIN, *(exited(node, 0, 110.0) for node in THREE)]


@pytest.mark.parametrize(
    ("history", "code", "words"),
    [
        (ALL_WELL, 0, "succeeded"),
        ([*BEGIN, *KILLED, exited("node-0", 0, 110.0), exited("node-1", 0, 110.0)], 0, "succeeded"),
        ([*BEGIN, exited("node-1", 143, 104.0), exited("node-0", 0, 110.0), exited("node-2", 0, 110.0)], 0, "succ"),
        ([*BEGIN, exited("node-0", 0, 110.0), exited("node-1", 7, 110.0)], 7, "node-1 ended with code 7"),
        ([*BEGIN, result("failed", 5, 109.0, "bad checkpoint"), *(exited(n, 5, 110.0) for n in THREE)], 5, "bad check"),
        ([*BEGIN, result("failed", 0, 109.0, "odd"), *(exited(n, 0, 110.0) for n in THREE)], 1, "odd"),
        ([*BEGIN, *(exited(node, -9, 110.0) for node in THREE)], 1, "no agent survived"),
        ([*BEGIN, *(exited(node, 143, 110.0) for node in THREE)], 143, "no agent survived"),
        ([], 1, "no agent survived"),
    ],
)
def test_only_a_run_that_succeeded_gives_zero(history, code, words):
    """The exit code is 0 only when the agents that were left all ended with 0."""
    verdict_code, sentence = told(history)[0].verdict()
    assert verdict_code == code
    assert words in sentence


@pytest.mark.parametrize(
    ("more", "stopped_by", "last"),
    [
        ([result("succeeded", 0, 109.0), exited("node-0", 0, 110.0)], "", []),
        ([result("succeeded", 0, 109.0), exited("node-0", 7, 110.0)], "", ["the agent of node-0 ended with code 7"]),
        ([exited("node-0", -9, 110.0)], "", ["no agent survived: the run did not end, it stopped"]),
        ([], "SIGINT", ["stopped by SIGINT"]),
    ],
    ids=["succeeded", "an-agent-failed", "all-killed", "stopped"],
)
def test_a_simulation_ends_with_the_report_of_its_run(more, stopped_by, last):
    """The same lines; then only what no report knows."""
    narration, _ = told([*BEGIN, *KILLED, *more])
    lines = narration.summary(stopped_by)
    assert lines == ["", *report(narration.story), *(["", *last] if last else [])]
    assert "2           node-2 lost  2      2           406        0.41 s  6" in lines


def test_workers_of_an_older_generation_are_not_named():
    """Only a rank of the newest generation has a pid to kill."""
    narration, _ = told([*BEGIN, record(events.WorkersStarted(1, (2, 3), (11, 12)), "node-1", 102.1)])
    assert (narration.story.generations.worker(3), narration.story.generations.worker(0)) == (12, None)
    narration.tell(generation("node-0", 2, THREE, "x", 104.0))
    assert narration.story.generations.worker(3) is None
