"""What is said of a run without a result: that it is running, was stopped, or has fallen silent."""

from __future__ import annotations

import pytest

from elasticrt import events
from elasticrt.story.board import board
from elasticrt.story.fold import SILENT_S
from elasticrt.story.report import as_object, report, state
from tests.unit.story.told import THREE_STEPS, Entry, story

SAVED: list[Entry] = [*THREE_STEPS, (5.0, "a", events.Committed(3, 1))]


def test_a_run_that_goes_on_is_running() -> None:
    """The report, the object for programs and the dashboard say the same."""
    told = story(SAVED)
    now = told.present(10.0)
    assert now == 10.0
    assert report(told, now)[0] == "run calm-fox: running"
    assert as_object(told, now)["state"] == board(told, 10.0)["state"] == "running"


def test_a_silent_run_is_not_called_running() -> None:
    """Its agents may have been killed with their machine."""
    told = story(SAVED)
    assert told.present(5.0 + SILENT_S) is None
    assert state(told).startswith("no end is told; its last event is of 1970-01-01 00:00:05")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (SAVED, "stopped; step 3 is saved; to go on: the same command, with --run-id calm-fox"),
        (THREE_STEPS, "stopped; to go on: the same command, with --run-id calm-fox"),
    ],
    ids=["saved", "nothing-saved"],
)
def test_a_run_whose_nodes_have_all_been_told_to_leave_was_stopped(entries: list[Entry], words: str) -> None:
    """By `stop`, Ctrl-C or SIGTERM: it says how to go on. A node that was lost before does not change that."""
    both: list[Entry] = [(6.0, name, events.AgentStopped(143)) for name in "ab"]
    assert state(story([*entries, *both])) == words
    assert story([*entries, *both]).present(7.0) is None
    lost: list[Entry] = [(5.5, "a", events.MemberLost("b", "b lost")), both[0]]
    assert state(story([*entries, *lost])) == words


def test_a_run_that_failed_was_not_stopped() -> None:
    """One of its agents has another code."""
    entries: list[Entry] = [*SAVED, (6.0, "a", events.AgentStopped(143)), (6.0, "b", events.AgentStopped(4))]
    assert state(story(entries)) == "ended without a result (code 143, code 4)"
