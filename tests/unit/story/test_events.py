"""The schema of events: what is written is what is read."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from elasticrt import events
from elasticrt.event_log import PIECE_BYTES, EventLog, Sparse, files, newest_result, records

VALUES = {"int": 3, "float": 0.5, "str": "text", "bool": True, "float | None": None, "int | None": None}
LISTS = {"tuple[str, ...]": ("a", "b"), "tuple[int, ...]": (1, 2), "tuple[float, ...]": (0.5,)}
OBJECTS = {"dict[str, float]": {"loss": 0.5}, "dict[str, tuple[str, ...]]": {"0": ["line"]}}
NOON = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)


def of_kind(kind):
    """An event of this kind, with something in each field."""
    return kind(**{field.name: {**VALUES, **LISTS, **OBJECTS}[field.type] for field in fields(kind)})


@pytest.mark.parametrize("kind", events.KINDS.values(), ids=events.KINDS)
def test_each_kind_comes_back(kind):
    """An event of each kind is the same after it was written and read, and so are its node and its times."""
    event = of_kind(kind)
    assert events.decode(events.encode(event, "n1", 12.5, NOON)) == events.Record(event, "n1", 12.5, NOON.timestamp())


LINE = json.loads(events.encode(events.Committed(7, 2), "n1", 12.5, NOON))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"v": 1, "event": "comm',
        b"7",
        json.dumps({**LINE, "v": 2}),
        json.dumps({**LINE, "event": "unheard_of"}),
        json.dumps({**LINE, "step": "7"}),
        json.dumps({**LINE, "step": True}),
        json.dumps({**LINE, "time": "noon"}),
        json.dumps({**LINE, "time": "9999-12-31T23:59:59+00:00"}),
        json.dumps({**LINE, "at": 10**400}),
        json.dumps({**LINE, "at": float("inf")}),
        json.dumps({**LINE, "at": float("nan")}),
        json.dumps({name: value for name, value in LINE.items() if name != "generation"}),
    ],
)
def test_what_says_nothing_is_left_out(line):
    """Half a line, another version, an unknown kind, fields that are missing or of another type, impossible times."""
    assert events.decode(line) is None


def test_fields_of_a_later_schema_are_left_out():
    """A field that this schema does not have is no error; one with a default may be missing."""
    record = events.decode(json.dumps({**LINE, "more": 1}))
    assert record is not None
    assert record.event == events.Committed(7, 2)


def test_a_file_is_read_to_its_end(tmp_path):
    """What a log has written is read from its file, past a line that was left half; the last result counts."""
    log = EventLog("n1", tmp_path)
    log.write(events.Result("failed", 1, "once"))
    with files(tmp_path)[0].open("a") as file:
        file.write("{half\n")
    log.write(events.Result("succeeded", 0, "at last"))
    log.close()
    assert [record.event.status for record in records(files(tmp_path)[0])] == ["failed", "succeeded"]
    assert newest_result(tmp_path) == events.Result("succeeded", 0, "at last")


def test_half_a_line_costs_the_next_agent_nothing(tmp_path):
    """What an agent writes begins a line of its own, also behind the half one of an agent that was killed."""
    for node in ("n1", "n1", "n2"):
        log = EventLog(node, tmp_path)
        log.write(events.Committed(7, 2))
        log.close()
        with (tmp_path / "events-n1.jsonl").open("a") as file:
            file.write('{"v": 1, "event": "comm')
    first, second = files(tmp_path)
    assert [record.event for record in records(first)] == [events.Committed(7, 2)] * 2
    assert second.read_bytes().startswith(b"{")


def test_nothing_follows_half_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A destination that takes a part of an event only gets no later one, with one warning."""
    reads, writes = os.pipe2(os.O_NONBLOCK)
    log = EventLog("n1", None, writes)
    log.write(events.Committed(7, 2))
    log.write(events.Failure("as long as this " * PIECE_BYTES))
    whole, half = os.read(reads, PIECE_BYTES).split(b"\n")
    log.write(events.Committed(8, 2))
    with pytest.raises(BlockingIOError):
        os.read(reads, PIECE_BYTES)
    assert (events.decode(whole).event, events.decode(half)) == (events.Committed(7, 2), None)
    assert caplog.text.count("no further events are written") == 1
    for each in (reads, writes):
        os.close(each)


def test_a_directory_that_is_deleted_is_missed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Events of a run that goes on are no longer kept then, which one warning says."""
    log = EventLog("n1", tmp_path / "run")
    log.write(events.Committed(7, 2))
    shutil.rmtree(tmp_path / "run")
    for step in (8, 9):
        log.write(events.Committed(step, 2))
    log.close()
    assert caplog.text.count(f"no further events are written: {tmp_path / 'run'} was deleted") == 1


STARTED = events.AgentStarted(7, "calm-fox", "etcd", "runs/calm-fox")
SUCCEEDED = events.Result("succeeded", 0, "all ended well")
LONG = [events.Copied(2, step, 1) for step in range(PIECE_BYTES // 64)]
"""More than is read of a file."""


@pytest.mark.parametrize(
    ("lives", "found"),
    [
        ([("n1", STARTED), ("n1", SUCCEEDED), ("n1", events.AgentStopped(0))], "all ended well"),
        ([("n1", STARTED), ("n1", SUCCEEDED), ("n1", STARTED), ("n1", events.AgentStopped(143))], ""),
        ([("n1", STARTED), ("n2", STARTED), ("n2", SUCCEEDED), ("n1", STARTED)], ""),
        ([("n2", STARTED), ("n2", SUCCEEDED), ("n1", STARTED), *(("n1", each) for each in LONG)], ""),
        ([("n1", STARTED), *(("n1", each) for each in LONG), ("n2", STARTED), ("n2", SUCCEEDED)], "all ended well"),
    ],
    ids=["succeeded", "begun again", "by another node", "for long", "a node that was killed before"],
)
def test_a_run_that_was_begun_again_has_not_succeeded(tmp_path: Path, lives: Any, found: str) -> None:
    """Its newest attempt counts, however long that was, and whichever node has made it."""
    logs = {node: EventLog(node, tmp_path) for node, _ in lives}
    for node, event in lives:
        logs[node].write(event)
    for log in logs.values():
        log.close()
    result = newest_result(tmp_path)
    assert (result.reason if result is not None else "") == found


def test_a_file_has_few_of_those_that_come_often():
    """Of a week of steps it gets a few thousand, the more of them the younger it is, and a change finds the newest."""
    sparse, week = Sparse(), range(0, 7 * 86_400, 60)
    kept = [at for at in week if sparse.due(events.Step, b"step", at)]
    assert kept[:1000] == [*week[:1000]]
    assert 2000 < len(kept) < 3500
    assert sparse.due(events.Step, b"newest,", week[-1] + 1) == b""
    assert sparse.due(events.MemberLost, b"lost", week[-1] + 2) == b"newest,lost"
    assert sparse.rest() == b""


def test_only_regular_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A link to nothing, a directory and a FIFO are left out, each with one warning."""
    (tmp_path / "events-link.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "events-dir.jsonl").mkdir()
    os.mkfifo(tmp_path / "events-fifo.jsonl")
    (tmp_path / "events-a.jsonl").touch()
    for _ in range(2):
        assert files(tmp_path) == [tmp_path / "events-a.jsonl"]
    assert sorted(caplog.text.count(f"events-{name}.jsonl") for name in ("link", "dir", "fifo")) == [1, 1, 1]


def test_a_file_that_another_agent_writes(tmp_path, caplog):
    """An agent in another etcd may have the same names by mistake: its events wait until the file is free."""
    first, second = EventLog("n1", tmp_path), EventLog("n1", tmp_path)
    first.write(events.Committed(7, 2))
    second.write(events.Committed(8, 2))
    assert "another agent writes events-n1.jsonl" in caplog.text
    assert [each.event.step for each in records(tmp_path / "events-n1.jsonl")] == [7]
    first.close()
    second.write(events.AgentStopped(0))
    second.close()
    kinds = [events.kind_of(each.event) for each in records(tmp_path / "events-n1.jsonl")]
    assert kinds == ["committed", "committed", "agent_stopped"]
