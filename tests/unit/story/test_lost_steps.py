"""What a change has cost in steps, and whose fault it was, by the events of all nodes together."""

from __future__ import annotations

import pytest

from elasticrt import events
from elasticrt.ipc.failure import ENDED_EARLY
from elasticrt.story import sentences
from elasticrt.story.report import changes
from tests.unit.story.told import THREE_STEPS, Entry, begun, started, story

SET_UP = {"start": 500.0, "script": 500.0, "first_step": 500.0}
TWENTY = (6.0, "a", events.Step(1, 20, 0, {}))


def first(generation, resumed_from, redone=None, pause_s=None):
    """The first step after `resumed_from`."""
    return events.FirstStep(generation, resumed_from + 1, resumed_from, pause_s, redone)


KILLED = [
    *THREE_STEPS,
    (5.0, "a", events.Step(1, 49, 0, {})),
    (10.0, "c", started()),
    (12.0, "c", events.MemberLost("a", "a lost")),
    (12.0, "c", events.MemberLost("b", "b lost")),
    (12.0, "c", begun(2, "c", "lost", "a, b lost", in_place=False)),
    (13.0, "c", first(2, 20)),
]
AGAIN = [
    *THREE_STEPS,
    TWENTY,
    (7.0, "a", events.AgentStopped(143)),
    (7.0, "b", events.AgentStopped(143)),
    (10.0, "a", started()),
    (10.0, "b", started()),
    (12.0, "a", begun(2, "ab", "lost", "a, b left", in_place=False)),
    (13.0, "a", first(2, 20)),
]


@pytest.mark.parametrize(
    ("entries", "redone", "said"),
    [
        pytest.param(
            [
                *THREE_STEPS,
                TWENTY,
                (6.5, "a", begun(2, "a", "failure")),
                (7.0, "a", begun(3, "ab", "failure", in_place=False)),
                (8.0, "b", first(3, 0)),
                (8.0, "a", first(3, 0, 0, 2.0)),
            ],
            20,
            "paused 2.00 s after step 20, 20 steps done again",
            id="a generation that never stepped hides nothing",
        ),
        pytest.param(
            KILLED, 29, "resumed after step 20, first step after 1.00 s, 29 steps done again", id="all nodes are new"
        ),
        pytest.param(
            [
                *THREE_STEPS,
                (5.0, "a", events.Step(1, 20, 0, {})),
                (6.0, "b", events.WorkerEnded(1, 1, 12, -9, "rank 1 on b: killed by SIGKILL", step=26)),
                (7.0, "a", begun(2, "ab", "failure", in_place=False)),
                (8.0, "a", first(2, 20, 0, 2.0)),
            ],
            6,
            "paused 2.00 s after step 26, 6 steps done again",
            id="what a worker had finished when it ended",
        ),
        pytest.param(
            [
                *THREE_STEPS,
                TWENTY,
                (10.0, "a", started()),
                (10.0, "b", started()),
                (12.0, "a", begun(1, "ab", "start", in_place=False)),
                (13.0, "a", first(1, 5)),
            ],
            15,
            "resumed after step 5, first step after 1.00 s, 15 steps done again",
            id="numbers that begin anew with another etcd",
        ),
        pytest.param(
            [*THREE_STEPS, TWENTY, (9.0, "a", begun(4, "a")), (9.5, "a", first(4, 18))],
            None,
            "resumed after step 18, first step after 0.50 s",
            id="no claim where generations are not known",
        ),
        pytest.param(
            [
                *THREE_STEPS,
                TWENTY,
                (7.0, "a", begun(2, "ab", "failure", in_place=False)),
                (8.0, "a", first(2, 10, 10, 1.0)),
                (9.0, "a", events.Step(2, 15, 0, {})),
                (9.5, "a", begun(3, "ab", "failure", in_place=False)),
                (10.0, "a", first(3, 15, 0, 0.5)),
            ],
            0,
            "paused 0.50 s after step 15, no step lost",
            id="steps that an earlier change has lost count there",
        ),
    ],
)
def test_steps_done_again(entries, redone, said):
    """The highest step that any node tells of, less the step that the generation goes on from."""
    told = story(entries)
    assert told.generations.newest.redone == redone
    assert sentences.cost(told.generations.newest) == said


def test_an_agent_claims_nothing_that_it_does_not_know():
    """In its own events alone, and in its last lines."""
    alone = story([entry for entry in KILLED if entry[1] == "c"])
    assert (alone.generations.newest.redone, changes(alone)) == (None, "0 changes of membership")
    assert changes(story(KILLED)) == "1 change of membership; 29 steps done again"


STORM: list[Entry] = [
    *THREE_STEPS,
    TWENTY,
    (7.0, "a", begun(2, "ab", "failure")),
    (7.1, "a", begun(3, "a", "failure")),
    (8.0, "a", first(3, 20, 0, 2.0)),
]


def test_a_generation_that_makes_no_step_loses_none():
    """Where faults follow each other closely. While the newest has made none, nothing is claimed."""
    assert changes(story(STORM)) == "2 changes of membership, the longest pause 2.00 s; no step lost"
    assert "lost" not in changes(story([*STORM, (9.0, "a", begun(4, "a", "failure"))]))
    away = [*STORM, (9.0, "a", begun(4, "b")), (10.0, "a", begun(5, "a", "join")), (11.0, "a", first(5, 30, 0))]
    assert "lost" not in changes(story([each for each in away if each[1] == "a"]))


def test_workers_that_go_on_in_place_begin_where_they_stood():
    """Also in a generation that ends before its first step."""
    assert story([*THREE_STEPS, TWENTY, (7.0, "a", begun(2, "a"))]).generations.newest.resume_step == 20


def handed_over(third, later=()):
    """Node a drains, b takes its state over in generation 3, makes its first step at second 8, and tells more."""
    alone = [each for each in THREE_STEPS if each[1] == "a" and not isinstance(each[2], events.Generation)]
    return story(
        [
            *alone[:2],
            (2.0, "a", begun(1, "a", "start", in_place=False)),
            *alone[2:],
            (5.0, "b", started()),
            (6.0, "a", events.Step(1, 20, 0, {})),
            (7.0, "b", begun(2, "ab", "drain", waits=True)),
            (7.1, "a", events.Progress(1, 21, 0.0, 0.0, 0.0)),
            (7.2, "a", begun(2, "ab", "drain", waits=True)),
            (7.2, "a", events.Restarted(2, {"detect": 50.0, "agree": 50.0})),
            (7.5, "b", third),
            (8.0, "b", first(3, 21)),
            (8.0, "b", events.SetUp(3, {"agree": 500.0, "script": 200.0, "restore": 100.0, "first_step": 200.0})),
            *later,
        ]
    )


def test_a_run_that_begins_again_has_no_pause():
    """Where no agent was there with the state, the time until a new one has loaded it is none of the training."""
    assert story(AGAIN).generations.newest.pause_s is None


def test_one_machine_of_two_where_numbers_begin_anew():
    """The story of one of its directories goes on with the first step after a stop."""
    told = story(
        [
            *(each for each in THREE_STEPS if each[1] == "a"),
            (6.0, "a", begun(2, "ab", "failure")),
            (7.0, "a", first(2, 10, 0, 1.0)),
            (8.0, "a", events.AgentStopped(143)),
            (10.0, "a", started()),
            (12.0, "a", begun(1, "ab", "start", in_place=False)),
            (13.0, "a", first(1, 11)),
        ]
    )
    assert [chapter.pause_s for chapter in told.generations.all] == [None, 1.0, None]
    assert told.steps.newest == 12


def test_what_is_told_late_moves_the_beginning_of_the_generations_in_place_that_follow():
    """A node may tell of its last step when another one has already begun the next generation."""
    assert [chapter.resume_step for chapter in handed_over(begun(3, "b")).generations.all] == [0, 21, 21]


@pytest.mark.parametrize("known", [events.AgentStopped(143), events.Leaves("drained")], ids=["ended", "still ends"])
def test_who_has_left_in_order_has_not_failed(known):
    """The next agents take over what the others have left."""
    told = story([(at, node, known if isinstance(event, events.AgentStopped) else event) for at, node, event in AGAIN])
    assert (told.generations.newest.kind, told.generations.newest.cause, told.failures.all) == ("lost", "a, b left", [])
    assert "no step lost" in changes(told)


def test_who_was_killed_is_named():
    """By the node that takes over, or where all have died with their etcd by their own events, which have no end."""
    told, etcd_too = story(KILLED), story([*KILLED[:-4], (12.0, "c", begun(1, "c", "start", in_place=False))])
    assert (told.generations.newest.kind, told.generations.newest.cause) == ("lost", "a, b lost; c joined")
    assert [(each.node, each.what) for each in told.failures.all] == [("a", "a lost"), ("b", "b lost")]
    assert (etcd_too.generations.newest.kind, etcd_too.generations.newest.cause) == ("lost", "a, b lost (killed)")
    assert [(each.node, each.what) for each in etcd_too.failures.all] == [
        (each, f"{each} lost (killed)") for each in "ab"
    ]


def test_a_survivor_that_was_replaced_is_told_of():
    """It is no cause, and a healthy process all the same. Other collateral failures are not told of."""
    ends = [
        events.WorkerEnded(1, rank, 7, 1, f"rank {rank} on a: {what}", collateral=True)
        for rank, what in (
            (0, "connection closed by peer"),
            (1, "was replaced: gloo kept waiting after the connection was closed"),
        )
    ]
    told = story([*THREE_STEPS, *((7.0, "a", each) for each in ends)])
    assert [each.what for each in told.failures.all] == [
        "rank 1 on a: was replaced: gloo kept waiting after the connection was closed"
    ]


def test_a_worker_that_ends_with_code_0_too_early_has_failed() -> None:
    """W12: only the leader sees that, and says so in the cause of the next generation."""
    what = f"rank 1 on b: {ENDED_EARLY}"
    told = story([*THREE_STEPS, *((5.0, node, begun(2, "ab", "failure", what)) for node in "ab")])
    assert [(each.node, each.what, each.generation) for each in told.failures.all] == [("b", what, 1)]
