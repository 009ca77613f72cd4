"""Times in which etcd did not answer, and what happened in them: told by all views."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from elasticrt import events
from elasticrt.agent.console import Console
from elasticrt.event_log import EventLog
from elasticrt.story.board import board
from elasticrt.story.buckets import totals
from elasticrt.story.fold import cause_of
from elasticrt.story.report import as_object, report, summary
from elasticrt.story.sentences import state
from tests.unit.story.told import THREE_STEPS, Entry, begun, started, story

AWAY: list[Entry] = [
    *THREE_STEPS,
    (8.0, "a", events.EtcdAway(2.0, "no answer")),
    (7.0, "b", events.EtcdAway(0.0, "no answer")),
]
"""Two nodes train, and etcd has not answered since second 6."""

BACK: list[Entry] = [*AWAY, (9.0, "a", events.EtcdAway(3.0)), (9.5, "b", events.EtcdAway(2.5))]

DEATH = "rank 1 on b: killed by SIGKILL"


def test_that_etcd_does_not_answer_is_told_while_it_lasts():
    """As long as it has lasted for the first node that misses it."""
    told, said = story(AWAY), "etcd has not answered for 4 s: no commits, no changes of membership"
    assert state(told, 10.0) == as_object(told, 10.0)["state"] == board(told, 10.0)["state"] == f"running; {said}"
    assert "etcd did not answer once, for 4.0 s" in report(told, 10.0)
    ended = story([*AWAY, (8.5, "a", events.AgentStopped(4)), (8.5, "b", events.AgentStopped(4))])
    assert ended.lives.times_without_etcd(20.0) == [(6.0, 8.5)], "who has ended does not miss it"


def test_times_without_etcd_are_summed_up():
    """What several nodes have missed at once is one time; the summary at an agent's end has its own."""
    told = story([*BACK, (20.0, "a", events.EtcdAway(1.5))])
    assert told.lives.times_without_etcd(30.0) == [(6.0, 9.5), (18.5, 20.0)]
    assert state(told, 30.0) == "running"
    assert "etcd did not answer 2 times, for 5.0 s in all" in report(told, 30.0)
    assert [6.0, "bad", "etcd did not answer for 3.5 s"] in board(told, 30.0)["sentences"]
    assert "etcd did not answer once, for 2.5 s" in summary(story([entry for entry in BACK if entry[1] == "b"]))
    assert not any("etcd" in line for line in report(story(THREE_STEPS), 30.0))


def test_a_wait_for_an_agreement_after_a_loss_is_no_training():
    """A survivor that knows of no failure but its own lost group says that it waits, and all its time is `detect`."""
    said = f"{DEATH}, and no new generation can be agreed: etcd does not answer"
    lost = events.Culprit(1, 20, 6.0, (), (), said)
    told = story([entry for entry in [*AWAY, (14.0, "a", lost)] if entry[1] == "a"])
    assert state(told, 20.0).startswith(f"no step for 12 s after step 20: {said}")
    assert totals(told.spans_by_node(20.0)["a"])["detect"] == 12.0
    agreed = story([*AWAY, (14.0, "a", lost), *((20.0, node, begun(2, "ab", "failure", DEATH)) for node in "ab")])
    assert agreed.generations.newest.cause == f"{DEATH}; agreed only after 12 s: etcd does not answer"


def test_who_has_replaced_its_worker_waits_for_the_next_generation_with_the_others():
    """Nobody trains without it while nothing can be agreed, so it does not stand by; afterwards it may."""
    ready = [*AWAY, (8.0, "b", events.WorkerEnded(1, 1, 12, -9, DEATH)), (9.0, "b", events.Ready(0))]
    lasts, agreed = (
        story(ready),
        story([*ready, (11.9, "a", begun(2, "ab", "failure")), (12.0, "b", begun(2, "ab", "failure"))]),
    )
    assert totals(lasts.spans_by_node(12.0)["a"])["agree"] == 4.0, "a has made no step since then"
    for told in (lasts, agreed):
        spent = totals(told.spans_by_node(12.0)["b"])
        assert (spent["agree"], spent.get("standby", 0.0)) == (3.0, 0.0)
    left = [(12.0, "a", begun(2, "a", "failure")), (12.5, "b", events.StandsBy(**vars(begun(2, "a", "failure"))))]
    spent = totals(story([*ready, *left]).spans_by_node(14.0)["b"])
    assert (spent["agree"], spent["standby"]) == (3.0, 2.0)


@pytest.mark.parametrize("missed", [True, False])
def test_the_death_of_the_bundled_etcd_is_the_cause_of_what_follows(missed):
    """Whether a request had failed before its agents found it dead, or not."""
    fresh = [(9.0, node, events.EtcdAway(3.0, fresh=True)) for node in "ab"]
    told = story([*(AWAY if missed else THREE_STEPS), *fresh, (9.5, "a", begun(2, "ab", "start", in_place=False))])
    assert told.generations.newest.cause == "etcd had died, and a fresh one was started"
    assert told.lives.times_without_etcd() == [(6.0, 9.0)]
    assert cause_of(told, 2, "start") == told.generations.newest.cause
    assert cause_of(told, 3, "start") == cause_of(None, 2, "start") == "start", "of which the story does not tell"


def console_of_b(tmp_path):
    """The console of node b."""
    options = SimpleNamespace(events_fd=-1, quiet=False, log_format="text")
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    return Console(SimpleNamespace(node="b", run_dir=tmp_path, run_id="calm-fox", options=options), edges)


def stand_by(console, number, nodes):
    """Let b stand by in a generation of `nodes`."""
    new = SimpleNamespace(number=number, attempt=1, nodes=len(nodes), world_size=1, cause="start", waits=False)
    seats = [SimpleNamespace(node=name, incarnation=name * 16) for name in nodes]
    view = SimpleNamespace(
        generation=SimpleNamespace(record=new), generation_number=number, roster_known=True,
        seat_of=lambda *_: None, seats_in_rank_order=lambda: seats, leader_node="a",
        members={"a": SimpleNamespace(record=SimpleNamespace(incarnation="a" * 16, generation=number))},
        seats={seat.node: seat for seat in seats},
    )  # fmt: skip
    me = SimpleNamespace(record=SimpleNamespace(node="b", incarnation="c" * 16), attempt=1)
    me.spec = SimpleNamespace(join="budget", max_nodes=1)

    def stands_by(_, names):
        console.events.write(events.StandsBy(**vars(begun(number, names, "start", in_place=False))))

    console.announce_standby(view, me, stands_by)


def test_a_node_that_stands_by_tells_the_same_cause(tmp_path, capsys):
    """It had seen etcd die, and the leader's own word for what follows is "start".

    The sentence about the generation before, which waited for its cost, comes first.
    """
    console = console_of_b(tmp_path)
    for event in (started(), begun(1, "ab", "start"), events.EtcdAway(3.0, fresh=True)):
        console.events.write(event)
    for _ in range(2):
        stand_by(console, 2, "a")
    console.events.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" (standing by")[0] for line in said] == [
        "elasticrt: generation 1: 2 nodes, world size 2",
        "elasticrt: generation 2: etcd had died, and a fresh one was started, 1 node, world size 1",
    ]


def test_an_agent_does_not_take_its_predecessors_generation_for_its_own(tmp_path, capsys):
    """A09: the node is among those of that generation, and its new agent only stands by."""
    console = console_of_b(tmp_path)
    console.events.write(started())
    stand_by(console, 1, "ab")
    console.tick(time.monotonic() + 600, None)
    console.events.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("elasticrt: generation 1: start, 2 nodes, world size 1 (standing by here")
