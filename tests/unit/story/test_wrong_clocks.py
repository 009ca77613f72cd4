"""Machines whose wall clocks disagree: what happened, and in which order, is told as if they agreed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from elasticrt import events
from elasticrt.story import run_dir
from elasticrt.story.fold import Story
from elasticrt.story.report import report
from tests.unit.story.told import Entry, begun, started

CLOCKS = [20.0, -120.0, 120.0, -35e6]
START = 1e9

BEGIN: list[Entry] = [
    *((at, node, started()) for at, node in ((0.0, "a"), (0.4, "b"), (0.5, "c"))),
    *((2.0, node, begun(1, "abc", "start", in_place=False)) for node in "abc"),
]
RUN: list[Entry] = [
    *BEGIN,
    *((2.5, node, events.WorkersStarted(1, (rank,), (11,))) for rank, node in enumerate("abc")),
    *((3.0, node, events.FirstStep(1, 1, 0, None, 0)) for node in "abc"),
    *((5.0 + step / 10, "a", events.Step(1, step, 0)) for step in range(10, 70, 10)),
    (12.0, "a", events.Committed(60, 1, 5)),
    *((12.1, node, events.Progress(1, 60, 0.0, 0.0, 0.0)) for node in "abc"),
    (13.0, "c", events.WorkerEnded(1, 2, 11, -9, "killed by SIGKILL", step=60)),
    *((13.2, node, begun(2, "abc", "failure", "rank 2 on c: killed by SIGKILL")) for node in "abc"),
    *((13.4, node, events.FirstStep(2, 61, 60, 0.4, 0)) for node in "abc"),
    (14.0, "c", events.Leaves("drained")),
    (14.1, "c", events.AgentStopped(0)),
    *((14.2, node, begun(3, "ab", "drain", "c drained")) for node in "ab"),
    *((14.3, node, events.FirstStep(3, 80, 79, 0.1, 0)) for node in "ab"),
    *((20.0, node, events.Result("succeeded", 0, "")) for node in "ab"),
    *((20.1, node, events.AgentStopped(0)) for node in "ab"),
]  # fmt: skip


def write(directory: Path, entries: Iterable[Entry], ahead: Mapping[str, float]) -> None:
    """Write events of nodes that have a machine each, whose wall clocks are `ahead` by so many seconds."""
    directory.mkdir(exist_ok=True)
    for at, node, event in entries:
        told = replace(event, machine=f"that of {node}") if isinstance(event, events.AgentStarted) else event
        wall = datetime.fromtimestamp(START + at + ahead.get(node, 0.0), timezone.utc)
        with (directory / f"events-{node}.jsonl").open("ab") as file:
            file.write(events.encode(told, node, at + 1000.0 * ord(node), wall) + b"\n")


def read(directory: Path, entries: Iterable[Entry], ahead: Mapping[str, float]) -> Story:
    """The story of such events. No two calls are given the same `directory`."""
    write(directory, entries, ahead)
    return run_dir.read(directory)


def begins(story: Story) -> dict[str, float]:
    """When each agent started, by the story."""
    return {life.node: round(life.begin - START, 3) for life in story.lives.all}


@pytest.mark.parametrize("ahead", CLOCKS)
@pytest.mark.parametrize("off", "abc")
def test_one_of_three_wall_clocks_is_wrong(tmp_path: Path, off: str, ahead: float) -> None:
    """The report is that of clocks that agree, and has the times of most machines."""
    told = read(tmp_path / "calm-fox", RUN, {off: ahead})
    assert [chapter.number for chapter in told.generations.all] == [1, 2, 3]
    assert report(told) == report(read(tmp_path / "agreed", RUN, {}))


@pytest.mark.parametrize("ahead", CLOCKS)
@pytest.mark.parametrize("off", "abc")
def test_the_order_of_lines(tmp_path: Path, off: str, ahead: float) -> None:
    """They are given in the order in which their events happened."""
    write(tmp_path, RUN, {off: ahead})
    ((_, lines, _),) = run_dir.follow(tmp_path, lambda _: True)
    told = [record for line in lines if (record := events.decode(line)) is not None]
    ats = [record.at - 1000.0 * ord(record.node) for record in told]
    assert ats == pytest.approx(sorted(at for at, *_ in RUN))


@pytest.mark.parametrize("ahead", CLOCKS)
@pytest.mark.parametrize("off", "abc")
def test_before_the_first_step(tmp_path: Path, off: str, ahead: float) -> None:
    """Of a run that has only begun nobody is told as lost, either."""
    told = read(tmp_path, BEGIN, {off: ahead})
    assert (len(told.generations.all), told.failures.all, told.lives.alive()) == (1, [], ("a", "b", "c"))
    assert begins(told) == pytest.approx({"a": 0.0, "b": 0.4, "c": 0.5})


def test_all_wall_clocks_differ(tmp_path: Path) -> None:
    """One of them is taken; what the machines tell together is as long as it was."""
    told, agreed = read(tmp_path / "off", RUN, {"a": -3600.0, "c": 90.0}), read(tmp_path / "agreed", RUN, {})
    assert [chapter.number for chapter in told.generations.all] == [1, 2, 3]
    assert told.last - told.begin == pytest.approx(agreed.last - agreed.begin)
    assert told.goodput() == pytest.approx(agreed.goodput())


def test_clocks_that_are_nearly_right(tmp_path: Path) -> None:
    """They stay as they are, beside one that is wrong."""
    told = read(tmp_path, RUN, {"a": 20.0, "c": 1.5})
    assert begins(told) == pytest.approx({"a": 1.5, "b": 0.4, "c": 2.0})


def test_machines_that_only_know_each_other_by_a_third(tmp_path: Path) -> None:
    """Two that were never in the same generation are compared by one that was with both."""
    entries: list[Entry] = [
        *((0.0, node, started()) for node in "ac"),
        *((2.0, node, begun(1, "ac", "start")) for node in "ac"),
        (9.0, "a", events.AgentStopped(0)),
        (9.1, "c", begun(2, "c", "drain")),
        (20.0, "b", started()),
        *((22.0, node, begun(3, "bc", "join")) for node in "bc"),
    ]
    told = read(tmp_path, entries, {"b": -60.0, "c": -30.0})
    assert [chapter.number for chapter in told.generations.all] == [1, 2, 3]
    assert begins(told) == pytest.approx({"a": -30.0, "c": -30.0, "b": -10.0})


def test_a_node_that_is_late(tmp_path: Path) -> None:
    """It begins a generation when its workers of the one before have ended. Clocks that agree are left as they are."""
    late: list[Entry] = [(10.0 + 25.0 * (node == "c"), node, begun(2, "abc", in_place=False)) for node in "abc"]
    told = read(tmp_path / "second", [*BEGIN, *late], {"a": 0.5, "c": -0.7})
    assert begins(told) == pytest.approx({"a": 0.5, "b": 0.4, "c": -0.2})
    steps: list[Entry] = [(40.0, node, events.FirstStep(2, 1, 0, None, 0)) for node in "abc"]
    told = read(tmp_path / "only", [*BEGIN[:3], *late, *steps], {"a": 0.5, "c": -0.7})
    assert begins(told) == pytest.approx({"a": 0.5, "b": 0.4, "c": -0.2})


def test_a_generation_that_began_before_the_agent(tmp_path: Path) -> None:
    """A newcomer tells late that it stands by: its clock agrees. Where it is wrong the next generation tells."""
    runs: list[Entry] = [*BEGIN[:2], *((2.0, node, begun(1, "ab", "start")) for node in "ab")]
    comes: list[Entry] = [(60.0, "c", started()), (61.0, "c", events.StandsBy(**vars(begun(1, "ab", "start"))))]
    assert begins(read(tmp_path / "agreed", [*runs, *comes], {}))["c"] == 60.0
    joins: list[Entry] = [(70.0, node, begun(2, "abc", "join")) for node in "abc"]
    assert begins(read(tmp_path / "off", [*runs, *comes, *joins], {"c": 30.0}))["c"] == pytest.approx(60.0)
    leaves: list[Entry] = [(80.0, node, begun(3, "ab", "drain")) for node in "ab"]
    back: list[Entry] = [(95.0, "c", started()), (96.0, "c", events.StandsBy(**vars(begun(3, "ab", "drain"))))]
    told = read(tmp_path / "back", [*runs, *comes, *joins, *leaves, *back], {"c": 30.0})
    assert [life.begin - START for life in told.lives.all if life.node == "c"] == pytest.approx([60.0, 95.0])


def test_generations_that_look_alike(tmp_path: Path) -> None:
    """With another etcd numbers begin anew: what one attempt has told is not taken for the other's."""
    first = [(at, node, event) for at, node, event in BEGIN if node != "c"]
    again = [(at + 500.0, node, event) for at, node, event in BEGIN if node != "a"]
    assert begins(read(tmp_path / "both", [*first, *again], {}))["c"] == 500.5
    apart: list[Entry] = [(0.0, "a", started()), (2.0, "a", begun(1, "a", "start"))]
    apart += [(500.0, "b", started()), (502.0, "b", begun(1, "b", "start"))]
    assert begins(read(tmp_path / "apart", apart, {})) == {"a": 0.0, "b": 500.0}


def test_one_node_knows_the_others_of_a_large_generation(tmp_path: Path) -> None:
    """Each of the others knows some."""
    known = {"a": "abc", "b": "b", "c": "c"}
    entries = [*BEGIN[:3], *((2.0, node, replace(begun(1, known[node], "start"), world_size=3)) for node in "abc")]
    assert begins(read(tmp_path, entries, {"b": 20.0})) == pytest.approx({"a": 0.0, "b": 0.4, "c": 0.5})


@pytest.mark.parametrize("ahead", CLOCKS)
def test_who_follows_a_run_learns_of_it(tmp_path: Path, ahead: float) -> None:
    """The story begins anew when a newcomer's clock turns out to be wrong; each line is given once."""
    write(tmp_path, [entry for entry in RUN if entry[0] < 12.5 and entry[1] != "c"], {})
    later: list[list[Entry]] = [
        [(12.6, "c", started()), (12.7, "c", events.StandsBy(**vars(begun(1, "abc", "start"))))],
        [(13.0, node, begun(2, "abc", "join")) for node in "abc"],
        [(14.0, node, events.FirstStep(2, 61, 60, 0.4, 0)) for node in "abc"],
    ]
    given, stories = list[str](), list[Story]()
    expected = sum(each[0] < 12.5 and each[1] != "c" for each in RUN) + sum(map(len, later))
    for story, lines, _ in run_dir.follow(tmp_path, lambda _: not later):
        given += lines
        stories.append(story)
        if later:
            write(tmp_path, later.pop(0), {"c": ahead})
    assert [chapter.number for chapter in stories[-1].generations.all] == [1, 2]
    assert begins(stories[-1])["c"] == pytest.approx(12.6)
    assert len(given) == len(set(given)) == expected
