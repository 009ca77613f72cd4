"""What is said of a run without a result: that it is running, was stopped, or has fallen silent."""

from __future__ import annotations

import pytest

from elasticrt import events
from elasticrt.story.board import board
from elasticrt.story.fold import SILENT_S
from elasticrt.story.report import as_object, changes, report, speed, sums
from elasticrt.story.sentences import happened, now_at, state
from tests.unit.story.told import THREE_STEPS, Entry, begun, started, story

SAVED: list[Entry] = [*THREE_STEPS, (5.0, "a", events.Committed(3, 1))]


def test_a_run_that_goes_on_is_running() -> None:
    """The report, the object for programs and the dashboard say the same."""
    told = story(SAVED)
    now = told.now_if_running(10.0)
    assert now == 10.0
    assert report(told, now)[0] == "run calm-fox: running"
    assert as_object(told, now)["state"] == board(told, 10.0)["state"] == "running"


def test_a_silent_run_is_not_called_running() -> None:
    """Its agents may have been killed with their machine."""
    told = story(SAVED)
    assert told.now_if_running(5.0 + SILENT_S) is None
    assert state(told) == "no event since 1970-01-01 00:00:05 UTC, and no end was recorded"


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
    assert story([*entries, *both]).now_if_running(7.0) is None
    lost: list[Entry] = [(5.5, "a", events.MemberLost("b", "b lost")), both[0]]
    assert state(story([*entries, *lost])) == words


def test_a_run_that_was_killed_after_it_had_been_stopped_before() -> None:
    """It was submitted again with one node, and that was killed: how a node ended before says nothing of that."""
    both: list[Entry] = [(6.0, name, events.AgentStopped(143)) for name in "ab"]
    again: list[Entry] = [
        (7.0, "a", started()),
        (8.0, "a", begun(2, "a", "start")),
        (8.5, "a", events.FirstStep(2, 4, 3, None, 0)),
        (9.0, "a", events.Step(2, 9, 0, {})),
    ]
    told = story([*SAVED, *both, *again])
    assert told.lives.alive() == ("a",)
    told.note_killed("a")
    assert state(told).startswith("ended without a result (code 143, killed); step 3 is saved; to go on")
    assert changes(told).endswith("; 6 steps not saved")


def test_a_save_that_failed_is_told_of_until_one_succeeds() -> None:
    """The report and the object for programs name the step and the reason; the next checkpoint ends that."""
    missed: Entry = (6.0, "a", events.Unsaved(9, 1, "No space left on device"))
    told = story([*SAVED, missed])
    assert "newest checkpoint: step 3; step 9 could not be saved: No space left on device" in "\n".join(report(told))
    assert as_object(told)["unsaved"] == {"step": 9, "generation": 1, "reason": "No space left on device"}
    saved = story([*SAVED, missed, (7.0, "a", events.Committed(12, 1))])
    assert as_object(saved)["unsaved"] is None
    assert [6.0, "bad", "step 9 could not be saved: No space left on device"] in board(saved, 8.0)["sentences"]
    assert [7.0, "good", "step 12 is saved: checkpoints can be saved again"] in board(saved, 8.0)["sentences"]


def test_saves_that_fail_one_after_the_other_are_one_sentence() -> None:
    """It has the reason of the first. After a checkpoint another one begins."""
    failed: list[Entry] = [(at, "a", events.Unsaved(step, 1, f"no room for {step}")) for at, step in ((6, 9), (7, 12))]
    later: Entry = (10.0, "a", events.Unsaved(21, 1, "No space left on device"))
    told = story([*SAVED, *failed, (9.0, "a", events.Committed(18, 1)), (9.5, "a", events.Committed(20, 1)), later])
    assert [each.text for each in happened(told) if each.at >= 6] == [
        "step 9 could not be saved: no room for 9, nor any up to step 12",
        "step 18 is saved: checkpoints can be saved again",
        "step 21 could not be saved: No space left on device",
    ]


def test_the_speed_of_a_run_that_goes_on_is_that_of_the_last_while() -> None:
    """The same on the dashboard, in `status` and at the terminal; afterwards it is that of the whole run."""
    slower: list[Entry] = [(4.0 + at, "a", events.Step(1, 1 + 20 * at, 0, {})) for at in range(1, 101)]
    slower += [(104.0 + at, "a", events.Step(1, 2001 + 2 * at, 0, {})) for at in range(1, 101)]
    told = story([*THREE_STEPS, *slower])
    assert board(told, 204.5)["tiles"]["steps/s"] == "2.0"
    assert "2,201 steps, 2.0 steps/s; no checkpoint" in sums(told, 204.5)
    assert "step 2,201  2.0 steps/s  epoch 0" in now_at(told, 204.5)
    assert "no step for 10 s" in now_at(told, 214.0)
    assert "2,201 steps, 11.0 steps/s; no checkpoint" in report(told)
    again = story([*THREE_STEPS, *slower, (205.0, "a", begun(2, "ab", "failure"))])
    assert again.generations.newest.speed is None, "a pause is no slow step"


def test_a_run_that_failed_was_not_stopped() -> None:
    """One of its agents has another code."""
    entries: list[Entry] = [*SAVED, (6.0, "a", events.AgentStopped(143)), (6.0, "b", events.AgentStopped(4))]
    assert state(story(entries)).startswith("ended without a result (code 143, code 4); ")


def test_how_a_former_agent_of_a_node_ended_does_not_count() -> None:
    """The node was killed, and started again, before the run ended."""
    entries: list[Entry] = [*SAVED, (6.0, "b", started()), *((7.0, node, events.AgentStopped(4)) for node in "ab")]
    assert state(story(entries)).startswith("ended without a result (code 4); ")


def test_a_run_whose_last_save_failed_was_stopped_without_it() -> None:
    """The agent of rank 0's node has code 5. With any other node's code 5 that node was refused."""
    ends: list[Entry] = [(6.0, "a", events.AgentStopped(5)), (6.0, "b", events.AgentStopped(143))]
    words = (
        "the last checkpoint could not be saved; step 3 is saved; to go on: the same command, with --run-id calm-fox"
    )
    assert state(story([*SAVED, *ends])) == f"stopped; {words}"
    ends = [(6.0, "a", events.AgentStopped(143)), (6.0, "b", events.AgentStopped(5))]
    assert state(story([*SAVED, *ends])).startswith("ended without a result (code 143, code 5); step 3 is saved; ")


def test_the_pace_of_a_run_that_goes_on_later_is_that_of_the_time_in_which_it_ran():
    """Between two starts nobody trained, and nobody has lived."""
    one = [(0.0, "a", started()), (1.0, "a", begun(1, "a", "start")), (2.0, "a", events.FirstStep(1, 1, 0, None, None))]
    one += [(12.0, "a", events.Step(1, 101, 0, {})), (12.0, "a", events.AgentStopped(143))]
    two = [(5000.0, "a", started()), (5001.0, "a", begun(1, "a", "start", in_place=False))]
    two += [(5002.0, "a", events.FirstStep(1, 102, 101, None, None)), (5010.0, "a", events.Step(1, 201, 0, {}))]
    assert speed(story([*one, *two])) == "10.0 steps/s"


@pytest.mark.parametrize("code", [143, None])
def test_a_directory_of_one_node_claims_nothing_of_the_others(code: int | None) -> None:
    """Nodes without a shared directory each have events of their own: the others may train on, and save."""
    entries: list[Entry] = [
        (0.0, "a", started()),
        (1.0, "a", begun(1, "abc", "start")),
        (2.0, "a", events.FirstStep(1, 1, 0, None, None)),
        (4.0, "a", events.Step(1, 40, 0, {})),
    ]
    entries += [(5.0, "a", events.AgentStopped(code))] if code is not None else []
    told = story(entries)
    if code is None:
        told.note_killed("a")
    how = "killed" if code is None else f"code {code}"
    assert state(told) == f"no agent of this directory is left ({how}); it has no events of b, c"
    assert "saved" not in changes(told)
    assert "checkpoint" not in " ".join(sums(told))
