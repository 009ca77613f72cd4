"""Events of an agent whose disk is full for a time: what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrt import events
from elasticrt.event_log import KEPT, EventLog, files, records
from tests.full_disk import full_disk


def commits(path: Path) -> list[int]:
    """The steps of the checkpoints that a file tells of."""
    return [each.event.step for each in records(path) if isinstance(each.event, events.Committed)]


@pytest.mark.parametrize("more", [0, 1, 5])
def test_events_go_on_when_there_is_room_again(tmp_path: Path, more: int, caplog: pytest.LogCaptureFixture) -> None:
    """A file that takes nothing, or a part of a line, gets each event once there is room, in order."""
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
    assert caplog.text.count("cannot be written: File too large") == 1


def test_of_a_long_time_the_newest_are_kept(tmp_path: Path) -> None:
    """Memory is bounded: older events are dropped."""
    log = EventLog("n1", tmp_path)
    with full_disk(0):
        for step in range(KEPT + 3):
            log.write(events.Committed(step, 1))
    log.write(events.Result("succeeded", 0, "well"))
    log.close()
    told = [each.event for each in records(files(tmp_path)[0])]
    # The result takes the place of one of them.
    assert commits(files(tmp_path)[0]) == [*range(4, KEPT + 3)]
    assert told[-1] == events.Result("succeeded", 0, "well")
