"""How long until training goes on: `elasticrt run` beside torchrun and torchft, same script, same faults, one machine.

    python -m tests.bench.recovery [--rows A,B] [--runtimes A,B] [--reps N] [--timeout S] [--torchft BIN] ...

Every repetition is appended to results/recovery.jsonl as soon as it is there: several partial runs add up. The table
and the chart are written from that file, at the end of each run and by `python -m tests.bench.report`.

Rows:

{rows}

"next step" is from the kill (or the start of the process) until all ranks of the new world have finished a step of it,
read from the marks of the workers themselves (CLOCK_MONOTONIC). "pause" is from the last step before until then: for a
join the others train on while the newcomer starts. "never" means not within the timeout. Everybody saves every {every}
steps; of a large state nobody saves anything. A job that recovers is disturbed again: every worker's death of a runtime
is one job's, and under elasticrt and torchft nodes also go and come. Where torchrun can only wait, for half a minute
and more, some jobs wait together.
"""

from __future__ import annotations

import argparse
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.bench import broadcast, raw, report
from tests.bench.disturb import START_S_MAX, Disturbed, Outcome
from tests.bench.marks import Recovery
from tests.bench.rows import ALL, ROWS, tours
from tests.bench.runtimes import BARE, RUNTIMES, Pace, Runtime
from tests.netns import missing

PACE = Pace(steps_per_save=20, pause_s=0.02)
LARGE_PACE = Pace(steps_per_save=10**9, pause_s=0.0, least_steps=3)
"""With a large state: its steps take long by themselves."""

DEFAULT_REPS = {"elasticrt": 10, "loop": 10, "tuned": 3, "fresh": 2, "default": 2, "plugin": 2, "torchft": 5}
"""torchrun's waits are constants of 15 and 30 s: repeating them tells little and takes long."""

DEFAULT_RUNTIMES = ("elasticrt", "loop", "tuned", "fresh", "default")
LEFT_OUT = {("loop", "start"), ("torchft", "store")}
"""Not measured: the same as without Loop; and torchft's lighthouse is on none of the nodes."""


def measured(runtime: str, row: str) -> bool:
    """Whether there is such a cell."""
    return (runtime, row) not in LEFT_OUT and (runtime == "loop" or not ROWS[row].ours_alone)


STARTING_S = 8.0
"""Jobs that wait together are started one after the other: starting is work for the processor."""


def waits(runtime: str, row: str) -> bool:
    """Whether nearly all of what this takes is one of torchrun's timeouts, or nothing at all until ours."""
    if runtime in ("fresh", "default"):
        return ROWS[row].event != "worker"
    return runtime == "tuned" and row in ("power", "join")


class Bench:
    """One call: does the tours, writes down what comes of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._draw = random.Random(arguments.seed)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._stop = threading.Event()
        settings = {"nodes": arguments.nodes, "timeout_s": arguments.timeout}
        settings |= {"steps_per_save": PACE.steps_per_save, "pause_s": PACE.pause_s}
        self.this = raw.this_run(secrets.token_hex(3), settings)
        self._put(self.this)

    def measure(self) -> None:
        """Everything. What mostly waits comes last, some jobs at a time; all else one by one."""
        alone, together = [], []
        rows = [row for row in self._arguments.rows if not self._skip(row)]
        for name in self._arguments.runtimes:
            wanted = [row for row in rows if measured(name, row)]
            reps = self._arguments.reps or DEFAULT_REPS[name]
            if name == "loop":
                self._broadcast([row for row in wanted if ROWS[row].state_mb and ROWS[row].event == "join"], reps)
            quick = [row for row in wanted if not waits(name, row)]
            alone += [(RUNTIMES[name], tour) for tour in self._tours(RUNTIMES[name], quick, reps)]
            slow = [row for row in wanted if waits(name, row)]
            together += [(RUNTIMES[name], [(row, True)]) for row in slow for _ in range(reps)]
        for runtime, tour in alone:
            self._travel(runtime, tour, 1)
        count = max(1, min(self._arguments.together, len(together)))
        with ThreadPoolExecutor(count) as pool:
            tasks = [pool.submit(self._travel, *each, count) for each in together]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _tours(self, runtime: Runtime, rows: list[str], reps: int) -> list[list[tuple[str, bool]]]:
        if runtime.lasts:
            return tours(rows, reps)
        # One node after the other would find a job that the first loss has crippled.
        return [[(row, True)] * reps for row in rows]

    def _skip(self, row: str) -> bool:
        reason = missing() if ROWS[row].network else ""
        if reason:
            self._put(raw.Skipped(self.this.run, row, reason))
            print(f"{ROWS[row].title}: skipped, {reason}", flush=True)
        return bool(reason)

    def _travel(self, runtime: Runtime, tour: list[tuple[str, bool]], together: int) -> None:
        """One row after the other, with one job as long as that comes through."""
        with ExitStack() as stack:
            job: Disturbed | None = None
            for name, counts in tour:
                row = ROWS[name]
                same = job is not None and (runtime.lasts or row.change == 0) and name != "start"
                if job is None or not (same and job.suits(row) and job.ready(self._steps(job))):
                    if not counts:
                        continue  # It would only have made room for what comes next.
                    stack.close()
                    job = stack.enter_context(self._disturbed(runtime, name))
                    began = self._begin(job, name, together)
                    if name == "start":
                        self._record(runtime, name, began, together)
                        continue
                    if began.cost is None or not job.ready(self._steps(job)):
                        self._record(runtime, name, Outcome(None, f"did not start: {began.note}"), together)
                        continue
                outcome = job.disturb(row)
                if counts:
                    self._record(runtime, name, outcome, together)

    def _disturbed(self, runtime: Runtime, name: str) -> Disturbed:
        arguments, keep = self._arguments, self._arguments.keep_logs
        if keep is not None:
            keep = keep / f"{name}-{runtime.name}-{secrets.token_hex(2)}"
        row = ROWS[name]
        pace = replace(LARGE_PACE if row.state_mb else PACE, setup_s=row.setup_s, state_mb=row.state_mb)
        return Disturbed(
            runtime,
            ROWS[name],
            arguments.nodes,
            pace,
            arguments.timeout,
            stop=self._stop,
            keep=keep,
            torchft=arguments.torchft,
        )

    def _begin(self, job: Disturbed, name: str, together: int) -> Outcome:
        """Start a job, with all its nodes; one fewer where another is to join."""
        nodes = self._arguments.nodes - int(ROWS[name].event == "join")
        timeout_s = self._arguments.timeout if name == "start" else START_S_MAX
        if together == 1:
            return job.begin(nodes, timeout_s)
        with ThreadPoolExecutor(1) as pool:
            with self._starting:
                began = pool.submit(job.begin, nodes, timeout_s)
                deadline = time.monotonic() + STARTING_S
                while not began.done() and time.monotonic() < deadline:
                    time.sleep(0.1)
            return began.result()

    def _steps(self, job: Disturbed) -> int:
        """Somewhere between two saves, and not at the same place every time."""
        with self._lock:
            return 1 + self._draw.randrange(job.job.pace.least_steps)

    def _broadcast(self, rows: list[str], reps: int) -> None:
        """What the bytes of these rows' states take by themselves, as a cell beside theirs."""
        for row in rows:
            for took in broadcast.measure(self._arguments.nodes, ROWS[row].state_mb, reps):
                cost = Recovery(took, took, None, lost=0, repeated=0, attempts=0, two_worlds=False)
                self._record(RUNTIMES[BARE], row, Outcome(cost), 1)

    def _record(self, runtime: Runtime, row: str, outcome: Outcome, together: int) -> None:
        cost = outcome.cost
        self._put(
            raw.Repetition(self.this.run, row, runtime.name, cost, outcome.note, outcome.phases_ms, together),
        )
        took = "never" if cost is None else f"{cost.next_step_s:.2f} s, {cost.lost} lost, {cost.attempts} tries"
        print(f"{row:14} {runtime.text:40} {took}  {outcome.note}".rstrip(), flush=True)

    def _put(self, line: raw.Line) -> None:
        with self._lock:
            raw.append(self._arguments.raw, line)


def _words(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"some of {','.join(known)}")
        return chosen

    return parse


def main() -> None:
    """Measure, and write the table of everything measured so far."""
    rows = "\n".join(f"    {row.name:14}{row.what}" for row in ROWS.values())
    about = (__doc__ or "").format(rows=rows, every=PACE.steps_per_save)
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=_words(tuple(ROWS)), default=ALL, help=f"default: {','.join(ALL)}")
    launched = tuple(name for name in RUNTIMES if name != BARE)
    add("--runtimes", type=_words(launched), default=DEFAULT_RUNTIMES, help=",".join(launched))
    add("--reps", type=int, help=f"repetitions of every cell (default: {DEFAULT_REPS})")
    add("--nodes", type=int, default=3, help="nodes of the full job, at least 3 (default: 3)")
    add("--timeout", type=float, default=90.0, help="seconds until an event counts as never recovered (default: 90)")
    add("--together", type=int, default=4, help="jobs at the same time, of those that mostly wait (default: 4)")
    add("--torchft", type=Path, help="bin directory of an environment with torchft: adds the runtime torchft")
    add("--seed", type=int, default=1)
    add("--keep-logs", type=Path, help="directory for the nodes' output")
    add("--raw", type=Path, default=report.RAW, help="append to this file; table and chart go beside it")
    arguments = parser.parse_args()
    if arguments.torchft is not None and arguments.runtimes is DEFAULT_RUNTIMES:
        arguments.runtimes = (*DEFAULT_RUNTIMES, "torchft")
    if "torchft" in arguments.runtimes and arguments.torchft is None:
        parser.error("the runtime torchft needs --torchft BIN")
    Bench(arguments).measure()
    print("\n" + report.write(arguments.raw))


if __name__ == "__main__":
    main()
