"""What the recovery benchmark makes of the workers' marks. Nothing is measured here."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench import chart, raw
from tests.bench.disturb import slowest_phases
from tests.bench.marks import Mark, Marks, Recovery, formed, new_ground_at, newest_whole, recovery
from tests.bench.report import aims, cells_of, seconds, table, text
from tests.bench.rows import ALL, ROWS, USUAL, tours


def steps(world: int, ranks: int, first: int, count: int, *, at: float) -> list[Mark]:
    """`count` steps of all ranks of a world, one in 0.1 s from `at` on; rank r is r ms behind."""
    return [
        Mark(at + index * 0.1 + rank / 1000, world, 0, rank, ranks, first + index, parent=100 + rank, pid=world + rank)
        for index in range(count)
        for rank in range(ranks)
    ]


def began(at: float, *parents: int) -> list[Mark]:
    """Processes that have begun."""
    return [Mark(at, 0, 0, 0, 2, -1, parent=parent, pid=1) for parent in parents]


def cost_of(marks: list[Mark], at: float, size: int) -> Recovery:
    """Of an event."""
    found = formed(marks, at, size)
    assert found is not None
    return recovery(marks, at, *found)


def test_a_failure_goes_back_to_what_was_saved() -> None:
    """Two ranks do steps 1 to 9, one dies at 1.0, both go on after step 5: next step, pause and new ground differ."""
    marks = [*steps(1, 2, 1, 9, at=0.1), *began(1.2, 100, 101), *steps(2, 2, 6, 6, at=1.5)]
    cost = cost_of(marks, 1.0, 2)
    assert cost.next_step_s == pytest.approx(0.501)
    assert cost.pause_s == pytest.approx(1.501 - 0.901)
    assert cost.new_ground_s == pytest.approx(1.9 + 0.001 - 1.0)
    assert (cost.lost, cost.repeated, cost.attempts, cost.two_worlds) == (4, 4, 1, False)


def test_nothing_is_lost_where_the_others_train_on() -> None:
    """A node joins at 1.0; the two train on to step 15 until 1.5, three go on with 16: a pause, and no step lost."""
    marks = [*steps(1, 2, 1, 15, at=0.1), *began(1.6, 100, 101, 102), *steps(2, 3, 16, 3, at=1.7)]
    cost = cost_of(marks, 1.0, 3)
    assert cost.next_step_s == pytest.approx(0.702)
    assert cost.pause_s == pytest.approx(1.702 - 1.501)
    assert (cost.lost, cost.repeated, cost.new_ground_s) == (0, 0, cost.next_step_s)


def test_attempts_and_steps_that_are_done_three_times() -> None:
    """A first attempt gets one rank through two steps and dies: its steps are repeated ones, its start an attempt."""
    half = [mark for mark in steps(2, 2, 6, 2, at=1.5) if mark.rank == 0]
    marks = [*steps(1, 2, 1, 9, at=0.1), *began(1.2, 100, 101), *half, *began(2.0, 100, 101)]
    marks += steps(3, 2, 6, 6, at=2.5)
    cost = cost_of(marks, 1.0, 2)
    assert (cost.next_step_s, cost.attempts) == (pytest.approx(1.501), 2)
    assert (cost.lost, cost.repeated) == (4, 2 + 4)


def test_two_worlds() -> None:
    """A world that goes on stepping beside the new one is seen."""
    marks = [*steps(1, 1, 1, 40, at=0.1), *steps(2, 2, 5, 10, at=1.5)]
    assert cost_of(marks, 1.0, 2).two_worlds


@pytest.mark.parametrize(
    ("ranks", "count", "is_formed"),
    [((0, 1, 2), 1, True), ((0, 1), 5, False), ((1, 2), 5, False)],
    ids=["all", "the last is missing", "rank 0 is missing"],
)
def test_a_world_has_formed_when_all_its_ranks_have_stepped(ranks, count, is_formed) -> None:
    """Less than all ranks of the expected size is not a recovery, however far they are."""
    marks = [mark for mark in steps(2, 3, 1, count, at=1.5) if mark.rank in ranks]
    assert (formed(marks, 1.0, 3) is not None) == is_formed
    assert (newest_whole(marks, 3) == 2) == is_formed
    assert formed(marks, 1.0, 2) is None
    assert formed(marks, 1.6, 3) is None


def test_new_ground_needs_every_rank() -> None:
    """One rank beyond what was finished before is not enough."""
    old, new = steps(1, 2, 1, 9, at=0.1), steps(2, 2, 9, 2, at=1.5)
    assert new_ground_at([*old, *new[:3]], 2, 1.501) is None
    assert new_ground_at([*old, *new], 2, 1.501) == pytest.approx(1.601)


def test_marks_are_read_once_and_can_be_forgotten(tmp_path: Path) -> None:
    """Whole lines only, each once; after `forget` a dead worker's file is not looked at again."""
    marks = Marks(tmp_path)
    (tmp_path / "7-8").write_bytes(b"1.0 5 0 1 2 3\n2.0 5 0 1")
    assert marks.read() == [Mark(1.0, 5, 0, 1, 2, 3, parent=7, pid=8)]
    with (tmp_path / "7-8").open("ab") as file:
        file.write(b" 2 4\n")
    assert [mark.step for mark in marks.read()] == [3, 4]
    (tmp_path / "7-9").write_bytes(b"3.0 6 0 1 2 5\n")
    marks.read()
    marks.forget(2.5)
    assert [mark.pid for mark in marks.read()] == [9]


@pytest.mark.parametrize("reps", [1, 3])
def test_tours_measure_every_row(reps: int) -> None:
    """Every row counts exactly `reps` times, whichever rows share a job, and a join never meets a full job."""
    for rows in (USUAL, ALL, ("join",), ("node", "join"), ("worker", "leave"), ("node-large", "join-large")):
        counted: Counter[str] = Counter()
        for tour in tours(rows, reps):
            missing = 0
            for name, counts in tour:
                counted[name] += counts
                missing -= ROWS[name].change
                assert missing in (0, 1)
        assert +counted == Counter(dict.fromkeys(rows, reps))


def repetition(runtime: str, next_step_s: float | None, row: str = "node", note: str = "") -> raw.Repetition:
    """One line."""
    cost = None if next_step_s is None else Recovery(next_step_s, next_step_s, next_step_s, 3, 3, 1, False)
    return raw.Repetition("r1", row, runtime, cost, note, {"detect": 10.0, "start": 20.0})


def test_raw_lines_come_back(tmp_path: Path) -> None:
    """What was appended is what is read, of all three kinds, and its table names machine, commit and command."""
    path = tmp_path / "raw.jsonl"
    lines = [
        raw.this_run("r1", {"nodes": 3, "timeout_s": 90.0}),
        repetition("elasticrt", 0.4),
        repetition("fresh", None, note="no steps"),
        raw.Skipped("r1", "power", "network namespaces need root"),
    ]
    for line in lines:
        raw.append(path, line)
    assert raw.read(path) == lines
    whole = text(lines, cells_of([each for each in lines if isinstance(each, raw.Repetition)]))
    assert lines[0].command in whole
    assert "power loss: skipped, network namespaces need root" in whole
    assert "no steps (1x)" in whole


def test_a_world_that_follows_is_not_a_second_one() -> None:
    """A worker's replacement makes a third world soon after the survivors': one at a time, all is well."""
    marks = [*steps(1, 3, 1, 9, at=0.1), *steps(2, 2, 10, 6, at=1.2), *steps(3, 3, 16, 9, at=1.8)]
    cost = cost_of(marks, 1.0, 2)
    assert (cost.two_worlds, cost.lost, cost.repeated) == (False, 0, 0)


def test_never_is_worse_than_any_number() -> None:
    """A median over repetitions of which half never recovered is never; the worst is never as soon as one did not."""
    (cell,) = cells_of([repetition("fresh", 40.0), repetition("fresh", 50.0), repetition("fresh", None)])
    assert seconds(cell.figure) == "50.0"
    (cell,) = cells_of([repetition("fresh", 40.0), repetition("fresh", None)])
    assert cell.figure == math.inf
    assert "never" in table([cell])[-1]


def test_aims_are_held_against_the_cells() -> None:
    """A median within reach is met, one beyond it is said to be missed; so are a factor and a lost step."""

    def verdicts(*repetitions: raw.Repetition) -> list[str]:
        lines = aims(cells_of(repetitions))
        return [line.split()[0] for line in lines if line.startswith(("met", "MISSED"))]

    assert verdicts(repetition("elasticrt", 0.45), repetition("fresh", 45.0)) == ["met"]
    assert verdicts(repetition("elasticrt", 0.55), repetition("fresh", 22.0)) == ["MISSED"]
    assert verdicts(*[repetition("loop", 0.09)] * 3) == ["met", "met", "MISSED"]
    joins = [repetition("loop", 0.5, "join-large"), repetition("bare", 0.4, "join-large")]
    assert verdicts(*joins) == ["met", "MISSED"]
    known = replace(joins[0], cost=replace(joins[0].cost, pause_s=1.0, step_s=0.5))
    assert verdicts(known, joins[1]) == ["MISSED", "met", "MISSED"], "the pause, what is beyond a step, lost steps"


def test_a_step_of_the_new_world() -> None:
    """What a step takes there is the median of the first after the one that ended the pause; two do not tell it."""
    joined = [*steps(1, 2, 1, 15, at=0.1), *steps(2, 3, 16, 3, at=1.7)]
    assert cost_of(joined, 1.0, 3).step_s is None
    cost = cost_of([*joined, *steps(2, 3, 19, 1, at=2.0)], 1.0, 3)
    assert cost.step_s == pytest.approx(0.1)
    assert cost.beyond_a_step_s == pytest.approx(1.702 - 1.501 - 0.1)


def test_phases_are_those_of_the_slowest_node() -> None:
    """Of two nodes' recovery events after the kill the longer one counts; older ones and unreached phases do not."""
    events = [
        {"event": "recovery", "at": 1.0, "phases": {"detect": 900.0}},
        {"event": "recovery", "at": 2.0, "phases": {"detect": 10.0, "start": 20.0}},
        {"event": "recovery", "at": 2.1, "phases": {"detect": 10.0, "start": 30.0, "restore": None}},
        {"event": "step", "at": 2.2},
    ]
    assert slowest_phases(events, 1.5, 9.0) == {"detect": 10.0, "start": 30.0}
    assert slowest_phases(events, 3.0, 9.0) == {}


def test_phases_of_a_script_without_loop() -> None:
    """What agents know of it, and as its own phase what is left of the pause."""
    events = [{"event": "restarted", "at": 2.0, "phases": {"detect": 10.0, "start": 20.0}}]
    assert slowest_phases(events, 1.0, 0.1) == {"detect": 10.0, "start": 20.0, "script": pytest.approx(70.0)}


def test_the_chart_shows_every_bar() -> None:
    """One rectangle for each bar, the longer the more seconds; never is said."""
    bars = [chart.Bar("a", "x", 0.1), chart.Bar("a", "y", 10.0), chart.Bar("b", "x", math.inf, "job lost")]
    drawn = chart.draw(bars, 90.0)
    widths = [float(part.split('"')[0]) for part in drawn.split('width="')[1:] if "fill-opacity" in part]
    assert len(widths) == 3
    assert widths == sorted(widths)
    assert "never (job lost)" in drawn
