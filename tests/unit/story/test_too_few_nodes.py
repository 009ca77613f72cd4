"""What is told of a run that waits below its minimum, while it waits and afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticrt import events
from elasticrt.cli.change_run import _consequence
from elasticrt.cli.live_run import LiveRun
from elasticrt.cli.status import show
from elasticrt.rendezvous.leader_context import describe_loss
from elasticrt.rendezvous.records import Generation, Keys, Member, SpecRecord
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import Put, Txn
from elasticrt.story.buckets import totals
from elasticrt.story.changes import Changes
from elasticrt.story.failures import SILENT
from elasticrt.story.fold import Story
from elasticrt.story.report import changes, longest
from elasticrt.story.sentences import doing, now_at, state
from tests.memory_store import MemoryServer, MemoryStore
from tests.unit.story.told import THREE_STEPS, Entry, begun, record, started, story, warm

TWO_NEEDED: list[Entry] = [(at, node, replace(event, min_nodes=2)
    if isinstance(event, events.AgentStarted) else event) for at, node, event in THREE_STEPS]  # fmt: skip
WAITS = begun(2, "a", cause="b lost", waits=True)
BEGINS: list[Entry] = [
    *TWO_NEEDED,
    (10.0, "a", events.Step(1, 60, 0)),
    (10.5, "a", events.MemberLost("b", "b lost")),
    (10.5, "a", WAITS),
    (10.5, "a", events.Restarted(2, {"detect": 300.0, "agree": 200.0})),
    (10.6, "a", events.Committed(60, 2)),
]
GOES_ON: list[Entry] = [
    *BEGINS,
    (21.0, "c", started(2)),
    (22.0, "c", warm()),
    (26.0, "c", events.Ready(0)),
    (30.0, "a", begun(3, "ac", "join", "c joined")),
    (30.0, "c", begun(3, "ac", "join", "c joined")),
    (30.5, "a", events.FirstStep(3, 61, 60, 20.5, 0)),
    (30.5, "a", events.Recovery(3, 20.5, {"detect": 300.0, "agree": 19700.0, "script": 100.0, "first_step": 400.0})),
]


def test_the_wait_is_painted_as_waiting_while_it_lasts_and_afterwards() -> None:
    """From the moment in which it is agreed; before that are `detect` and `agree`, on the node and for the run."""
    for told, now, waited_s in ((story(BEGINS), 25.0, 14.5), (story(GOES_ON), 31.0, 19.5)):
        spent = totals(told.spans_by_node(now)["a"])
        assert spent["waiting for nodes"] - 1.0 == pytest.approx(waited_s), "and a second before the first generation"
        assert (spent["detect"], spent["agree"]) == pytest.approx((0.3, 0.2))
        assert told.spent(now)["waiting for nodes"] >= waited_s
    joiner = totals(story(GOES_ON).spans_by_node(31.0)["c"])
    assert "standby" not in joiner, "nobody trained without it"


def test_the_wait_is_no_phase_of_the_agreement() -> None:
    """The report of a change tells it by its own name, of workers that wait with their state as of new ones."""
    kept = story(GOES_ON).generations.all[-1]
    assert kept.phases == pytest.approx(
        {"detect": 0.3, "waiting for nodes": 19.5, "agree": 0.2, "script": 0.1, "first_step": 0.4}
    )
    assert sum(kept.phases.values()) == pytest.approx(kept.pause_s)
    assert longest(kept).startswith("waiting for nodes 19.50 s, ")
    anew = story(BEGINS_ANEW).generations.all[-1].phases
    assert (anew["waiting for nodes"], anew["agree"]) == pytest.approx((19.5, 0.0))


def test_a_change_with_enough_nodes_has_no_wait_for_them() -> None:
    """Also by the events of one node alone, which do not tell how long the others have lived."""
    at_ten = [(10.0, "a", begun(2, "ab", "failure", "rank 1 failed", in_place=False))]
    recovery = events.Recovery(2, 6.0, {"detect": 500.0, "agree": 100.0, "start": 2400.0, "first_step": 3000.0})
    for nodes in ("a", "ab"):
        told = story([*(each for each in TWO_NEEDED if each[1] in nodes), *at_ten, (16.0, "a", recovery)])
        assert told.generations.all[-1].phases["agree"] == pytest.approx(0.1)
        assert totals(told.spans_by_node()["a"])["waiting for nodes"] == pytest.approx(1.0), "before the first"


ENDS: list[Entry] = [
    *TWO_NEEDED,
    (10.0, "b", events.Progress(1, 60, 0.0, 0.0, 0.0)),
    (10.5, "a", events.WorkerEnded(1, 0, 11, 1, "rank 0 on a: a peer is gone", collateral=True, step=60)),
]
BEGINS_ANEW: list[Entry] = [
    *ENDS,
    (25.0, "c", started(2)),
    (26.0, "c", warm()),
    (30.0, "a", events.MemberLost("b", "b lost (agent ended)")),
    (30.0, "a", begun(2, "ac", "lost", "b lost (agent ended)", in_place=False)),
    (33.0, "a", events.Recovery(2, 23.0, {"detect": 500.0, "agree": 19500.0, "start": 1000.0, "first_step": 2000.0})),
]


def test_a_wait_without_a_worker_is_known_as_one_when_it_is_over() -> None:
    """No event tells before the next generation that a node was lost, so until then this is `agree`."""
    during, afterwards = (totals(story(each).spans_by_node(29.0)["a"]) for each in (ENDS, BEGINS_ANEW))
    assert (during["agree"], during["waiting for nodes"]) == pytest.approx((18.5, 1.0))
    assert "agree" not in afterwards
    assert (afterwards["detect"], afterwards["waiting for nodes"]) == pytest.approx((0.5, 1.0 + 19.5))


def test_a_wait_for_a_hung_worker_is_no_wait_for_nodes() -> None:
    """All nodes are told to leave, and a worker does not come to the save: until that is known it is `agree`."""
    saves = begun(2, "ab", "drain", "a, b drained", waits=True)
    told: list[Entry] = [*TWO_NEEDED, (10.0, "a", events.Step(1, 60, 0))]
    told += [(10.5, node, saves) for node in "ab"]
    told += [(10.6, "a", events.Restarted(2, {"detect": 300.0, "agree": 300.0}))]
    told += [(20.0, "c", started(2)), (20.5, "c", warm())]
    spent = totals(story(told).spans_by_node(30.0)["a"])
    assert (spent["waiting for nodes"], spent["agree"]) == pytest.approx((1.0, 19.7)), "one before the first"
    assert "waiting for nodes" not in totals(story(told).spans_by_node(30.0)["c"])
    hung: Entry = (26.0, "a", events.Culprit(2, 60, 16.0, (1,), ("b",), "rank 1 sleeps"))
    assert totals(story([*told, hung]).spans_by_node(30.0)["a"])["detect"] == pytest.approx(0.3 + 19.4)


def test_a_worker_that_dies_in_a_pause() -> None:
    """It is `pause` on its node, whose worker is replaced, and `detect` on the survivor, which recovers."""
    told = story([
        *THREE_STEPS,
        (10.0, "a", events.Step(1, 60, 0)),
        (14.0, "b", events.Progress(1, 60, 0.0, 0.0, 3.9)),
        (14.0, "b", events.WorkerEnded(1, 1, 12, -9, "killed")),
        (14.1, "a", events.Progress(1, 60, 0.0, 0.0, 4.0)),
        (14.2, "a", begun(2, "a", "failure")),
        (14.5, "a", events.FirstStep(2, 61, 60, 4.5, 0)),
        (14.5, "a", events.Recovery(2, 4.5, {"detect": 4100.0, "agree": 100.0, "script": 100.0, "first_step": 200.0})),
    ])  # fmt: skip
    spent = {node: totals(spans) for node, spans in told.spans_by_node(15.0).items()}
    assert (spent["a"]["detect"], spent["b"]["pause"]) == pytest.approx((4.1, 3.9))
    assert "pause" not in spent["a"]


def test_the_state_of_a_run_that_waits() -> None:
    """For how long, after which step, how many are here; the lost node is gone, and its loss is a failure."""
    told = story(BEGINS)
    assert state(told, 25.0) == "waiting for nodes for 14.5 s, after step 60: 1 of at least 2 here"
    assert told.lives.alive() == ("a",)
    assert [trouble.what for trouble in told.failures.all] == ["b lost"]
    assert state(story(GOES_ON), 31.0) == "running"
    stopped: Entry = (26.0, "a", events.AgentStopped(143))
    assert state(story([*BEGINS, stopped])).startswith("stopped; step 60 is saved; to go on: ")
    assert changes(story(GOES_ON)) == "2 changes of membership, the longest pause 20.50 s; no step lost"


LEAVES = events.Leaves("drained")


@pytest.mark.parametrize(
    ("how", "before", "failures"),
    [
        pytest.param("b lost (agent ended)", [LEAVES], 0, id="it was about to leave"),
        pytest.param("b lost", [LEAVES, events.WorkerEnded(1, 1, 12, -9)], 0, id="its workers take long to end"),
        pytest.param("b lost (no answer; power or network)", [LEAVES], 1, id="it was cut off"),
        pytest.param("b lost (agent ended)", [], 1, id="it was killed"),
    ],
)
def test_who_drains_below_the_minimum_has_not_failed(how: str, before: list[events.Event], failures: int) -> None:
    """Its last event may come after that of the leader, which knows only that the node is away."""
    lost: Entry = (10.5, "a", events.MemberLost("b", how))
    ends: Entry = (11.0, "b", events.AgentStopped(143))
    told = story([*BEGINS[:-4], *((10.5, "b", event) for event in before), lost, *BEGINS[-3:], ends])
    assert [trouble.what for trouble in told.failures.all] == [how] * failures
    assert told.lives.alive() == ("a",)


def test_the_silence_of_a_node_is_in_its_evidence() -> None:
    """The story knows it by the leader's words."""
    seat = SimpleNamespace(node="b", incarnation="b" * 16)
    view = SimpleNamespace(members={}, reports={}, verdicts={"b" * 16: SimpleNamespace(kind="silent")})
    assert SILENT in describe_loss(view, seat)


def test_the_wait_is_said_at_once() -> None:
    """It has no first step to wait for."""
    told = Changes(Story())
    said = [text for at, node, event in BEGINS if node == "a" for _, text in told.fold(record(at, node, event))]
    assert said[-1] == "generation 2: b lost, 1 node of at least 2: the run waits with the state after step 60"
    assert not told.tick(20.0)


def test_the_save_of_a_run_that_gives_up_is_said_as_what_is_to_come() -> None:
    """There are enough nodes, so nobody is waited for. It may not come to the save: they may be lost."""
    told, end = Changes(Story()), begun(2, "ab", cause="rank 1 raised (3 restarts used up)", waits=True)
    entries: list[Entry] = [*TWO_NEEDED, (10.0, "a", events.Step(1, 60, 0)), (10.5, "a", end)]
    said = [text for at, node, event in entries if node == "a" for _, text in told.fold(record(at, node, event))]
    assert said[-1].endswith("(3 restarts used up), 2 nodes: saving the state after step 60 first")
    assert doing(story(entries)) == "saves its state"
    assert state(story(entries), 12.0).startswith("saving the state for 1.5 s, after step 60")
    saved: list[Entry] = [*entries, (11.0, "a", events.Committed(60, 2))]
    assert doing(story(saved)) == "waits for new workers"
    assert state(story(saved), 12.0).startswith("waiting for new workers for 1.5 s, after step 60")


def test_the_bounds_of_a_run_are_those_of_its_last_resize() -> None:
    """In the last line of the terminal, and in what the state says."""
    told = story([*BEGINS, (12.0, "a", events.Resized(3, 5))])
    assert "1 node (3 to 5)" in now_at(told, 13.0)
    assert state(told, 13.0).endswith("1 of at least 3 here")


MEMBER = Member(node="a", incarnation="a" * 16, address="h", pid=7, workers=1, probe_port=9, port=8, warm=True)
SPEC = SpecRecord(
    spec=RunSpec(min_nodes=2, max_nodes=3, command=("script", "train.py"), join_timeout_s=60.0), attempt=1
)


def agreed(*, waits: bool) -> Generation:
    """A generation of one node."""
    return Generation(number=2, attempt=1, nodes=1, world_size=1, master_address="h", master_port=1, cause="b lost",
        kind="lost", in_place=True, waits=waits, nonce="b" * 16, chunks=1)  # fmt: skip


def live(generation: Generation, *members: Member) -> LiveRun:
    """A run with these keys in etcd."""
    run = LiveRun(MemoryStore(MemoryServer(lambda: 0.0)), Keys("r"), Path("runs"))
    records = {run.keys.spec: SPEC, run.keys.generation: generation}
    records |= {f"{run.keys.members}{member.node}": member for member in members}
    run.store.commit(Txn((), tuple(Put(key, each.encode()) for key, each in records.items()), why="a test"))
    return run


@pytest.mark.parametrize(
    ("waits", "runs", "told", "words"),
    [
        (True, 2, story(BEGINS), "waiting for nodes for 12.0 s, after step 60: 1 of at least 2 here"),
        (True, 2, None, "waits for 1 more node"),
        (False, 0, None, "waits for 1 more node"),
        (False, 2, None, "alive"),
    ],
    ids=["since-when", "without-its-directory", "workers-have-ended", "trains-until-the-next-change"],
)
def test_status_says_that_the_run_waits(waits: bool, runs: int, told: Story | None, words: str) -> None:
    """By etcd alone how many nodes lack; by the run's directory also since when."""
    run = live(agreed(waits=waits), MEMBER.model_copy(update={"generation": runs}))
    lines, _ = show(run, told, 22.5)
    assert lines[0] == f"run r: {words}"
    assert ("  a: waiting, " in lines[-1]) is (waits or not runs)
    assert any(line.startswith("last generation 2: ") for line in lines) is (not runs)


def test_status_shows_a_newcomer_that_sets_up() -> None:
    """There are enough nodes, and one of them cannot train yet."""
    members = [MEMBER.model_copy(update={"generation": 2}), MEMBER.model_copy(update={"node": "c", "warm": False})]
    lines, _ = show(live(agreed(waits=True), *members), story(BEGINS), 22.5)
    assert lines[0].startswith("run r: waiting for nodes for 12.0 s")
    assert lines[-1].startswith("  c: starting, ")


def test_what_follows_from_a_resize() -> None:
    """Workers that can live on stand still; others train on. Surplus nodes stand by."""
    lives = MEMBER.model_copy(update={"ready": 1, "has_state": True})
    assert _consequence(0, 0, []) == ""
    assert _consequence(0, 1, [(lives, None)]) == ": 1 node will stand by"
    assert _consequence(2, -2, [(lives, None)]) == ": it saves, and waits for 2 more nodes"
    assert "trains on" in _consequence(1, -1, [(MEMBER, None)])
