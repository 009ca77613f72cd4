"""Runs that end and go on later, and event files that are not whole."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticrt import events
from elasticrt.ipc.proc import machine
from elasticrt.story import run_dir
from elasticrt.story.board import board
from elasticrt.story.buckets import totals
from elasticrt.story.report import as_object, report
from elasticrt.story.sentences import cost, happened, state, steps_made
from elasticrt.text import json_text
from tests.unit.story.told import begun, started, story, warm, write

FIRST: list[Any] = [
    *((0.0, node, started(2)) for node in "ab"),
    *((1.0, node, warm()) for node in "ab"),
    *((2.0, node, begun(1, "ab", "start")) for node in "ab"),
    *((2.5, node, events.FirstStep(1, 1, 0, None, 0)) for node in "ab"),
    *((2.5, node, events.SetUp(1, {"start": 400, "first_step": 100})) for node in "ab"),
    (10.0, "a", events.Step(1, 20, 0, {})),
    (10.0, "a", events.Committed(20, 1, 5)),
]


def test_a_node_that_comes_back_alone_waits() -> None:
    """L3: in every view, and its time is a wait: nobody trains whom it could stand by."""
    told = story([*FIRST, (40.0, "a", started(2)), (41.0, "a", warm())])
    told.note_killed("b")
    now, said = 45.0, "waiting for nodes: 1 of at least 2 here"
    assert state(told, told.now_if_running(now)) == as_object(told, now)["state"] == board(told, now)["state"] == said
    nodes = {each["name"]: each["state"] for each in board(told, now)["nodes"]}
    assert nodes == {"a": "standing by", "b": "gone"}
    assert totals(told.spans_by_node(now)["a"])["waiting for nodes"] == pytest.approx(1.0 + 4.0)
    assert "standby" not in totals(told.spans_by_node(now)["a"])


def test_the_time_in_which_no_agent_ran_is_told() -> None:
    """L3: when they ended, how, and for how long nobody was there, after the run has gone on, too."""
    again = [
        (40.0, "a", started(2)), (41.0, "a", warm()), (43.0, "b", started(2)), (44.0, "b", warm()),
        *((45.0, node, begun(2, "ab", "lost", "a, b lost", in_place=False)) for node in "ab"),
    ]  # fmt: skip
    told = story([*FIRST, *again])
    assert (10.0, "bad", "all agents had ended (killed): none ran for 30.0 s") in happened(told, 46.0)
    assert totals(told.spans_by_node(46.0)["a"])["waiting for nodes"] == pytest.approx(1.0 + 4.0)
    stayed = story([*FIRST, (45.0, "a", begun(2, "a", "lost", "b lost"))])
    assert not stayed.lives.breaks


def test_a_checkpoint_that_was_passed_over_is_told() -> None:
    """D04: which one, and the steps are those of where the run stands, not of where it has been."""
    resumes = events.Generation(2, 1, "start", "start", 0, ("a",), 20)
    again = [(40.0, "a", started(1)), (41.0, "a", resumes), (42.0, "a", events.FirstStep(2, 13, 12, None, 8))]
    told = story([*FIRST, *again])
    assert cost(told.generations.all[-1]).startswith(
        "resumed after step 12, as the checkpoint of step 20 could not be used, first step after 1.00 s"
    )
    assert (steps_made(told), as_object(told)["step"], told.checkpoints.newest) == (13, 13, 12)


def test_numbers_that_are_none_are_texts_in_json() -> None:
    """A diverged loss is shown as such, and every parser takes the lines of events and the values of all views."""
    step = events.Step(1, 21, 0, {"loss": math.nan, "norm": math.inf})
    line = json_text({"v": events.VERSION, "event": "step", "node": "a", "at": 11.0,
                      "time": "1970-01-01T00:00:11+00:00", **vars(step)})  # fmt: skip

    def refuse(word: str) -> None:
        raise AssertionError(word)

    assert json.loads(line, parse_constant=refuse)["scalars"] == {"loss": "nan", "norm": "inf"}
    found = events.decode(line)
    assert isinstance(found.event, events.Step)
    assert math.isnan(found.event.scalars["loss"])
    told = story([*FIRST, (11.0, "a", found.event)])
    for value in (board(told, 12.0), as_object(told, 12.0)):
        json.loads(json_text(value), parse_constant=refuse)
    assert any("loss nan, norm inf" in each for each in report(told))
    assert events.decode(line.replace('"inf"', '"much"')) is None


def test_a_file_without_its_first_lines_is_read(tmp_path: Path) -> None:
    """L7: a full disk has taken the agent's start; what else the file has is shown, and no other run suffers."""
    write(tmp_path / "cut", FIRST)
    path = tmp_path / "cut" / "events-a.jsonl"
    path.write_bytes(b'{"v": 1, "event": "agent_st\n' + path.read_bytes().split(b"\n", 1)[1])
    (tmp_path / "cut" / "events-b.jsonl").unlink()
    told = run_dir.read(tmp_path / "cut")
    assert (told.run.run_id, steps_made(told), [life.node for life in told.lives.all]) == ("cut", 20, ["a"])


def test_who_follows_a_run_learns_that_its_agents_were_killed(tmp_path: Path) -> None:
    """L8: they have noted no end, and their processes are no more. Who begins to look then learns it at once."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        begins = events.AgentStarted(process.pid, "calm-fox", "etcd", "runs/calm-fox", machine(), 1, 4)
        write(tmp_path, [(0.0, "a", begins), (1.0, "a", warm()), (2.0, "a", begun(1, "a", "start"))])
        alive = list[tuple[str, ...]]()
        for number, (told, *_) in enumerate(run_dir.follow(tmp_path, lambda _: len(alive) == 3)):
            alive.append(told.lives.alive())
            if number == 0:
                process.kill()
                process.wait()
    assert alive[0] == ("a",)
    assert alive[1] == ()
    later, *_ = next(run_dir.follow(tmp_path, lambda _: True))
    assert later.lives.alive() == ()
