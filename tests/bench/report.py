"""The recovery benchmark's table and bar chart, from what was measured. Nothing is measured here.

    python -m tests.bench.report [--raw FILE]

writes recovery.txt and recovery.svg beside the file of raw lines (default: results/recovery.jsonl).
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import chart
from tests.bench.marks import Recovery
from tests.bench.raw import Repetition, Run, Skipped, read
from tests.bench.rows import ROWS, Row
from tests.bench.runtimes import BARE, RUNTIMES, Runtime

RAW = Path(__file__).resolve().parent / "results" / "recovery.jsonl"
OURS = "elasticrt"


@dataclass(frozen=True)
class Cell:
    """All repetitions of one row under one runtime."""

    row: Row
    runtime: Runtime
    repetitions: tuple[Repetition, ...]

    @property
    def costs(self) -> list[Recovery]:
        """Of the repetitions after which training went on."""
        return [each.cost for each in self.repetitions if each.cost is not None]

    def values(self, of: Callable[[Recovery], float | None]) -> list[float]:
        """One number of each repetition, in order; infinity where training did not go on."""
        known = [value for cost in self.costs if (value := of(cost)) is not None]
        return [*sorted(known), *[math.inf] * (len(self.repetitions) - len(self.costs))]

    def median(self, of: Callable[[Recovery], float | None]) -> float | None:
        """Of all repetitions; infinity when half of them did not go on, None when there is no such number."""
        values = self.values(of)
        if not values:
            return None
        return statistics.median_high(values) if math.inf in values else statistics.median(values)

    @property
    def figure(self) -> float | None:
        """What the event costs: the pause where the others train on meanwhile, else the next step. Median, seconds."""
        return self.median(_pause if self.row.counts_pause else _next_step)

    def notes(self) -> str:
        """What happened besides, with how often."""
        all_notes = [each.note for each in self.repetitions]
        return ", ".join(f"{note} ({all_notes.count(note)}x)" for note in sorted(set(all_notes)) if note)

    def phases(self) -> dict[str, float]:
        """The median of each phase that our agents wrote of, in ms."""
        known = [each.phases_ms for each in self.repetitions if each.phases_ms]
        names = dict.fromkeys(name for each in known for name in each)
        return {name: statistics.median(each.get(name, 0.0) for each in known) for name in names}


def _next_step(cost: Recovery) -> float | None:
    return cost.next_step_s


def _pause(cost: Recovery) -> float | None:
    return cost.pause_s


def _step(cost: Recovery) -> float | None:
    return cost.step_s


def cells_of(repetitions: Sequence[Repetition]) -> list[Cell]:
    """In the order of the rows, and in each of the runtimes."""
    found = []
    for row in ROWS.values():
        for runtime in RUNTIMES.values():
            mine = tuple(each for each in repetitions if (each.row, each.runtime) == (row.name, runtime.name))
            if mine:
                found.append(Cell(row, runtime, mine))
    return found


def table(cells: list[Cell]) -> list[str]:
    """One line for each cell, with a blank one between rows."""
    shape = "{:24} {:>7} {:>6}  {:38} {:>7} {:>7} {:>6}  {:>7} {:>7} {:>5}  {:>7}  {:>10} {:>5}  {:>5} {:>4}  {}"
    head = shape.format(
        "event",
        "set-up",
        "state",
        "",
        "next",
        "worst",
        "times",
        "pause",
        "worst",
        "step",
        "ground",
        "steps lost",
        "again",
        "tries",
        "reps",
        "",
    ).rstrip()
    lines = [head, "-" * len(head)]
    ours = {cell.row.name: cell.figure for cell in cells if cell.runtime.name == OURS}
    for index, cell in enumerate(cells):
        if index and cells[index - 1].row != cell.row:
            lines.append("")
        start = cell.row.name == "start"
        lines.append(
            shape.format(
                cell.row.title,
                f"{cell.row.setup_s:g} s" if cell.row.setup_s else "-",
                f"{cell.row.state_mb:g} MB" if cell.row.state_mb else "-",
                cell.runtime.text,
                seconds(cell.median(_next_step)),
                seconds(max(cell.values(_next_step))),
                _times(cell.figure, ours.get(cell.row.name)) if cell.runtime.name != OURS else "",
                "-" if start else seconds(cell.median(_pause)),
                "-" if start else seconds(max(cell.values(_pause), default=None)),
                "-" if start else seconds(cell.median(_step)),
                "-" if start else seconds(cell.median(lambda cost: cost.new_ground_s)),
                "-" if start else _number(statistics.median, cell.costs, "lost"),
                "-" if start else _number(statistics.median, cell.costs, "repeated"),
                _number(max, cell.costs, "attempts"),
                len(cell.repetitions),
                cell.notes(),
            ).rstrip()
        )
    return lines


def phase_lines(cells: list[Cell]) -> list[str]:
    """Where the time of our recoveries goes; nothing when no agent wrote of it."""
    known = [(cell, phases) for cell in cells if (phases := cell.phases())]
    if not known:
        return []
    lines = ["", "Phases of elasticrt's recoveries, medians in ms (each of the slowest node):", ""]
    for cell, phases in known:
        words = "  ".join(f"{name} {value:.0f}" for name, value in phases.items())
        lines.append(f"{cell.row.label:36} {cell.runtime.text:38} {words}  = {sum(phases.values()):.0f}")
    return lines


AIMS = {
    "worker": (0.1, 0.15),
    "node": (0.1, 0.15),
    "rank0": (0.1, 0.15),
    "power": (1.2, 2.0),
    "leave": (0.06, None),
    "setup": (0.15, None),
    "node-setup": (0.15, None),
    "rank0-setup": (0.15, None),
    "power-setup": (1.2, 2.0),
    "join-setup": (0.05, None),
    "leave-setup": (0.06, None),
}
"""Median and worst, in seconds, of a script with `loop.step()`."""

BARE_TIMES = 1.5
"""What a join may cost, of a bare broadcast of the same state."""


def aims(cells: list[Cell]) -> list[str]:
    """Each aim that these cells can be held against, and whether it is met."""
    found = {(cell.row.name, cell.runtime.name): cell for cell in cells}
    lines = []

    def line(text: str, met: bool) -> None:
        lines.append(f"{'met' if met else 'MISSED':8}{text}")

    for cell in (each for each in cells if each.runtime.name == "loop" and each.figure is not None):
        assert cell.figure is not None
        what = cell.row.label
        median_max, worst_max = AIMS.get(cell.row.name, (None, None))
        worst = max(cell.values(_pause if cell.row.counts_pause else _next_step))
        if median_max is not None:
            line(f"{what}: median {seconds(cell.figure)} <= {median_max:g} s", cell.figure <= median_max)
        if worst_max is not None:
            line(f"{what}: worst {seconds(worst)} <= {worst_max:g} s", worst <= worst_max)
        bare = found.get((cell.row.name, BARE))
        if bare is not None and bare.figure:
            # By arithmetic no pause is shorter than the step at its end, which may take longer than the broadcast.
            beyond = cell.median(lambda cost: cost.beyond_a_step_s)
            for figure, without in ((cell.figure, ""), (beyond, ", without the step at the pause's end")):
                if figure is not None:
                    times = figure / bare.figure
                    text = f"{what}: {times:.2f} x a bare broadcast of the state <= {BARE_TIMES:g}{without}"
                    line(text, times <= BARE_TIMES)
        lost = max((max(cost.lost, cost.repeated) for cost in cell.costs), default=0)
        line(f"{what}: at most {lost} finished steps lost = 0", lost == 0)
    for name, factor in (("worker", 10), ("node", 80), ("rank0", 80)):
        best, mine = found.get((name, "fresh")), found.get((name, OURS))
        if best and mine and best.figure is not None and mine.figure:
            times = best.figure / mine.figure
            line(
                f"{mine.row.title}: {times:.0f} x faster than torchrun with a fresh store, >= {factor}", times >= factor
            )
    return ["", "What was to be reached:", "", *lines] if lines else []


def seconds(value: float | None) -> str:
    """As the table has it."""
    if value is None:
        return "-"
    return "never" if math.isinf(value) else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _times(theirs: float | None, ours: float | None) -> str:
    if theirs is None or not ours or math.isinf(theirs) or math.isinf(ours):
        return ""
    return f"{theirs / ours:.0f}x" if theirs / ours >= 10 else f"{theirs / ours:.1f}x"


def _number(of: Callable[[list[int]], float], costs: list[Recovery], name: str) -> str:
    return f"{of([getattr(cost, name) for cost in costs]):g}" if costs else "-"


LEGEND = """
next: from the kill (or the start of the processes) until all ranks have finished a step in the new world; median and
worst, seconds. times: that against elasticrt run (of the pause, where the others train on meanwhile). pause: from the
last step before until then. step: what one takes in the new world. ground: until all ranks have finished a step that
nobody had finished before. steps lost: those that had been finished and were gone. again: steps finished once more.
set-up: what the script takes for its own before its first step. state: parameters and optimizer; "-" is 0.1 MB. tries:
the most times that a node had to start its workers. never: not within the timeout. torchrun's rank-0 node is never its
store's host. torchft's survivors train on without the one that is lost, as elasticrt's do in a script with loop.step();
its worker comes back later.
""".strip().splitlines()


def text(lines: Sequence[Run | Repetition | Skipped], cells: list[Cell]) -> str:
    """The whole of recovery.txt."""
    counted = {each.run for each in lines if not isinstance(each, Run)}
    runs = [each for each in lines if isinstance(each, Run) and each.run in counted]
    skipped = {f"{ROWS[each.row].title}: skipped, {each.reason}" for each in lines if isinstance(each, Skipped)}
    together = max((each.together for each in lines if isinstance(each, Repetition)), default=1)
    out = ["Seconds until training goes on, after the same faults to the same script.", ""]
    for each in dict.fromkeys((run.machine, run.versions, tuple(run.settings.items())) for run in runs):
        settings = ", ".join(f"{name} {value:g}" for name, value in each[2])
        out += [f"{each[0]}; {each[1]}", f"one worker per node; {settings}", ""]
    out += [f"{run.date}  commit {run.commit}, load {run.load:g}:  {run.command}" for run in runs]
    out += ["", *table(cells), *sorted(skipped), "", *LEGEND]
    if together > 1:
        out.append(f"Events in which torchrun waits for 15 s or more were measured up to {together} jobs at a time.")
    return "\n".join([*out, *phase_lines(cells), *aims(cells), ""])


def write(path: Path) -> str:
    """Write table and chart of all raw lines of a file beside it; the table."""
    lines = read(path)
    cells = cells_of([each for each in lines if isinstance(each, Repetition)])
    timeout_s = max((run.settings["timeout_s"] for run in lines if isinstance(run, Run)), default=90.0)
    whole = text(lines, cells)
    path.with_suffix(".txt").write_text(whole)
    bars = [
        chart.Bar(cell.row.label, cell.runtime.text, cell.figure, cell.notes() if cell.figure == math.inf else "")
        for cell in cells
        if cell.figure is not None
    ]
    path.with_suffix(".svg").write_text(chart.draw(bars, timeout_s))
    return whole


def main() -> None:
    """Write both files, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, default=RAW)
    print(write(parser.parse_args().raw))


if __name__ == "__main__":
    main()
