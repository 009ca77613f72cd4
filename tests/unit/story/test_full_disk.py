"""Events of an agent whose disk is full for a time, or until its end: what is kept, and what is said of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt import events
from elasticrt.event_log import KEPT, EventLog, files, records
from elasticrt.story.report import changes, paces, report
from elasticrt.story.sentences import missing_events, state
from tests.full_disk import full_disk
from tests.unit.story.told import THREE_STEPS, Entry, story


def commits(path: Path) -> list[int]:
    """The steps of the checkpoints that a file tells of."""
    return [each.event.step for each in records(path) if isinstance(each.event, events.Committed)]


@pytest.mark.parametrize("more", [0, 1, 5])
def test_events_go_on_when_there_is_room_again(
    tmp_path: Path, more: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that takes nothing, or a part of a line, gets each event once there is room, in order, and is tried anew
    then only."""
    monkeypatch.setattr("elasticrt.event_log.RETRY_S", 0.0)
    log = EventLog("n1", tmp_path)
    log.write(events.Committed(1, 1))
    (path,) = files(tmp_path)
    with full_disk(path.stat().st_size + more):
        for step in (2, 3):
            log.write(events.Committed(step, 1))
        assert commits(path) == [1]
    log.write(events.Committed(4, 1))
    log.close()
    assert commits(path) == [1, 2, 3, 4]
    gap = next(each.event for each in records(path) if isinstance(each.event, events.Unwritten))
    assert (gap.over, gap.missing, gap.reason) == (True, 0, "File too large")
    assert caplog.text.count("cannot be written: File too large") == 1


def test_of_a_long_time_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: older events are dropped and counted."""
    monkeypatch.setattr("elasticrt.event_log.RETRY_S", 0.0)
    log = EventLog("n1", tmp_path)
    with full_disk(0):
        for step in range(KEPT + 3):
            log.write(events.Committed(step, 1))
    log.write(events.Result("succeeded", 0, "well"))
    log.close()
    told = [each.event for each in records(files(tmp_path)[0])]
    assert commits(files(tmp_path)[0]) == [*range(3, KEPT + 3)]
    assert (told[-2].missing, told[-1]) == (3, events.Result("succeeded", 0, "well"))


FULL = """\
import json, os, sys
from pathlib import Path
from elasticrt import event_log, events
event_log.RETRY_S = 0.0
place = Path(sys.argv[1])
log = event_log.EventLog("n1", place)
log.write(events.Committed(1, 1))
with (place / "filler").open("wb", buffering=0) as filler:
    try:
        while filler.write(bytes(1024)):
            pass
    except OSError:
        pass
for step in range(2, 90):
    log.write(events.Committed(step, 1))
path = place / "events-n1.jsonl"
during = [each.event for each in event_log.records(path)]
if "again" in sys.argv:
    (place / "filler").unlink()
log.write(events.Result("succeeded", 0, "well"))
log.write(events.AgentStopped(0))
log.close()
after = [each.event for each in event_log.records(path)]
told = [[[events.kind_of(each), vars(each)] for each in some] for some in (during, after)]
print(json.dumps([*told, path.stat().st_blocks * 512 - path.stat().st_size]))
"""


@pytest.mark.parametrize("again", [True, False], ids=["there is room again", "until the end"])
def test_last_words_have_room_on_a_full_disk(tmp_path: Path, again: bool) -> None:
    """A file on a full disk says so at once; in the end it has all events, or the newest checkpoint and the result."""
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace, which this machine does not give")
    inside = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1" "$4"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", inside, "sh", str(tmp_path), sys.executable, FULL, "again" if again else ""],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    during, after, room = json.loads(done.stdout)
    kind, gap = during[-1]
    assert (kind, gap["reason"], gap["over"]) == ("unwritten", "No space left on device", False)
    steps = [each["step"] for kind, each in after if kind == "committed"]
    assert [kind for kind, _ in after[-2:]] == ["result", "agent_stopped"]
    assert steps == ([*range(1, 90)] if again else [*steps[:-1], 89])
    missing = [each["missing"] for kind, each in after if kind == "unwritten"][-1]
    assert missing == 89 - len(steps)
    assert room < 4096, "no room is kept for a file that has ended"


def gap(for_s: float, missing: int = 0, *, over: bool = False) -> events.Unwritten:
    """The disk is full, or there is room again."""
    return events.Unwritten(for_s, "No space left on device", missing, over)


DARK: list[Entry] = [*THREE_STEPS, (8.0, "a", events.Committed(1, 1)), (10.0, "a", gap(0.0)), (10.5, "b", gap(0.0))]


def test_an_end_that_could_not_be_written_is_not_known() -> None:
    """Of agents that are killed while their disk is full, neither an end nor unsaved steps are claimed."""
    told = story(DARK)
    for node in "ab":
        told.note_killed(node)
    assert state(told).startswith("how it ended is not known, as a, b could not write events: No space left on")
    assert "at least step 1 is saved" in state(told)
    assert "not saved" not in changes(told)
    assert "newest known checkpoint: step 1" in paces(told)
    assert "events of a from 00:00:10 UTC on are missing: No space left on device" in report(told)


def test_a_run_whose_disk_is_full_does_not_stand_still() -> None:
    """While nothing is written, it is said since when, and not that there is no step."""
    told = story(DARK)
    assert "no step for" not in paces(told, 30.0)
    assert told.now_if_running(50.0) == 50.0, "no word does not mean no life"


def test_a_gap_that_is_over_is_told_once() -> None:
    """Afterwards the story is whole; of events that were dropped it says how many, and from when until when."""
    over: list[Entry] = [(14.0, node, gap(4.0, missing, over=True)) for node, missing in (("a", 0), ("b", 7))]
    told = story([*DARK, *over, (20.0, "a", events.Result("succeeded", 0, "well"))])
    assert state(told) == "succeeded: well"
    (missing,) = map(missing_events, told.lives.gaps)
    assert missing == "events of b from 00:00:10 to 00:00:14 UTC are missing (7): No space left on device"
    assert report(told).count(missing) == 1
