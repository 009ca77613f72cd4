"""How long until training goes on: `elasticrt run` beside torchrun, the same script, the same faults, one machine.

    python -m tests.bench.recovery [--reps N] [--events A,B] [--rivals A,B] [--nodes N] [--timeout S]

Events (nodes are agents with one worker each, all on this machine):

    start     all nodes are started at once, one fewer than the maximum
    worker    a worker that is not rank 0 is killed (SIGKILL); all nodes are there
    node      a node (agent and all below it) is killed; not the one with rank 0, nor the one that hosts the store
    rank0     the node with rank 0 is killed; never the one that hosts torchrun's store
    store     the node that hosts the store is killed, with the store: torchrun's first agent, our embedded etcd
    join      one more node is started beside the others
    leave     a node is told to leave, by SIGTERM to its agent

"next step" is from the kill (or the start of the process) until all ranks of the new world have finished a step of it,
read from the marks of the workers themselves (CLOCK_MONOTONIC). "pause" is from the last step before until then: for a
join the others train on while the newcomer starts. "lost" are the steps that had to be done again; everybody saves at
the same cadence. "attempts" is how often a node had to start its workers. "never" means not within the timeout.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.bench.marks import Mark, Recovery, formed, recovery, stepping
from tests.bench.report import Cell, chart, table
from tests.bench.rivals import RIVALS, Job, Node, Rival, kill_all

EVENTS = ("start", "worker", "node", "rank0", "store", "join", "leave")
RESULTS = Path(__file__).resolve().parent / "results"
STEPS_PER_SAVE = 20
PAUSE_S = 0.02
START_S_MAX = 150.0
POLL_S = 0.02
AFTERWARDS_S = 1.5
"""How long a recovered job is watched for a second world."""

DEFAULT_REPS = {"elasticrt": 3, "loop": 2, "tuned": 1, "fresh": 1, "default": 1, "plugin": 1, "torchft": 1}
"""torchrun's waits are constants of 15 and 30 s: repeating them tells little and takes long."""

DEFAULT_RIVALS = ("elasticrt", "loop", "tuned", "fresh", "default")
LEFT_OUT = {("default", "rank0"), ("default", "store"), ("default", "leave")}
LEFT_OUT |= {("loop", "start"), ("loop", "store"), ("torchft", "store")}
"""Not measured unless --events names them: the same, by torchrun's code, as with a fresh store; as without Loop; and
torchft's lighthouse is on none of the nodes."""

SLOW = ("fresh", "default")


@dataclass(frozen=True)
class Outcome:
    """One repetition: what it cost, or why there is nothing to say."""

    cost: Recovery | None
    note: str = ""


class Disturbed:
    """One job, one event."""

    def __init__(
        self,
        rival: Rival,
        event: str,
        nodes: int,
        timeout_s: float,
        *,
        keep: Path | None = None,
        torchft: Path | None = None,
    ) -> None:
        self.event, self.count, self.timeout_s = event, nodes, timeout_s
        room = nodes + 1 if event == "start" else nodes
        self.job = Job(rival, room, STEPS_PER_SAVE, PAUSE_S, keep, torchft)

    def run(self, random_step: int) -> Outcome:
        """From the first process to the outcome."""
        with self.job as job:
            before = self.count - 1 if self.event == "join" else self.count
            at = time.monotonic()
            for _ in range(before):
                job.start_node()
            if self.event == "start":
                return self._await(at, before)
            found = self._watch(at, before, START_S_MAX)
            if found is None:
                return Outcome(None, "did not start")
            world = found[0]
            # Somewhere between two saves, and not at the same place every time.
            self._until(lambda marks: max(m.step for m in marks if m.world == world) >= STEPS_PER_SAVE + random_step)
            at, size = self._disturb(world)
            return self._await(at, size)

    def _disturb(self, world: int) -> tuple[float, int]:
        """Do it; when, and how many ranks there should be afterwards."""
        job, count = self.job, self.count
        holder = {mark.rank: mark.pid for mark in job.marks.read() if mark.world == world}
        if self.event == "join":
            at = time.monotonic()
            job.start_node()
            return at, count
        victim = self._victim(holder)
        match self.event:
            case "worker":
                left = count - 1 if job.rival.shrinks else count
                return kill_all([pid for pid in holder.values() if pid in victim.processes()]), left
            case "leave":
                at = time.monotonic()
                victim.process.send_signal(signal.SIGTERM)
                return at, count - 1
            case "store":
                return kill_all([*victim.processes(), *job.store_processes()]), count - 1
        return kill_all(victim.processes()), count - 1

    def _victim(self, holder: dict[int, int]) -> Node:
        first, zero = self.job.nodes[0], self.job.node_of(holder[0])
        if self.event == "store":
            return first
        if self.event == "rank0":
            assert self.job.rival.ours or zero is not first, "rank 0 is on the node that hosts the store"
            return zero
        return next(node for node in reversed(self.job.nodes) if node is not zero and node is not first)

    def _await(self, at: float, size: int) -> Outcome:
        found = self._watch(at, size, self.timeout_s)
        if found is None:
            return Outcome(None, self._why_not(at))
        self._until(lambda _: False, AFTERWARDS_S)
        cost = recovery(self.job.marks.read(), at, *found)
        return Outcome(cost, "two worlds" if cost.two_worlds else "")

    def _watch(self, at: float, size: int, timeout_s: float) -> tuple[int, float] | None:
        self._until(lambda marks: formed(marks, at, size) is not None or self.job.ended(), timeout_s)
        return formed(self.job.marks.read(), at, size)

    def _until(self, condition: Callable[[list[Mark]], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not condition(self.job.marks.read()):
            time.sleep(POLL_S)

    def _why_not(self, at: float) -> str:
        marks: list[Mark] = self.job.marks.read()
        if self.job.ended():
            return "job lost"
        alive = stepping(marks, time.monotonic() - 1.0)
        if len(alive) > 1:
            return "two worlds"
        return "not joined" if self.event == "join" and alive else "no steps" if not alive else "stuck"


def measure(arguments: argparse.Namespace) -> list[Cell]:
    """All cells. Those of the slow rivals, which mostly wait, some at a time; all others alone."""
    draw = random.Random(arguments.seed)
    plan = []
    for name in arguments.rivals:
        reps = arguments.reps or DEFAULT_REPS[name]
        for event in arguments.events or [each for each in EVENTS if (name, each) not in LEFT_OUT]:
            plan.append((event, name, [draw.randrange(STEPS_PER_SAVE) for _ in range(reps)]))

    def one(event: str, name: str, steps: list[int]) -> Cell:
        keep = arguments.keep_logs
        outcomes = []
        for index, step in enumerate(steps):
            where = None if keep is None else keep / f"{event}-{name}-{index}"
            disturbed = Disturbed(
                RIVALS[name], event, arguments.nodes, arguments.timeout, keep=where, torchft=arguments.torchft
            )
            outcomes.append(disturbed.run(step))
        cell = Cell(event, RIVALS[name].text, tuple(o.cost for o in outcomes), tuple(o.note for o in outcomes))
        print(cell.line(), flush=True)
        return cell

    # A worker's restart takes torchrun 2 s of work; all else there is a wait of 30 s or more.
    together = [cell for cell in plan if arguments.together > 1 and cell[1] in SLOW and cell[0] != "worker"]
    cells = [one(*cell) for cell in plan if cell not in together]
    with ThreadPoolExecutor(max(1, arguments.together)) as pool:
        cells += pool.map(lambda cell: one(*cell), together)
    order = {name: index for index, name in enumerate(r.text for r in RIVALS.values())}
    return sorted(cells, key=lambda cell: (EVENTS.index(cell.event), order[cell.rival]))


def _words(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(known):
            raise argparse.ArgumentTypeError(f"some of {','.join(known)}")
        return chosen

    return parse


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--reps", type=int, help=f"repetitions of every cell (default: {DEFAULT_REPS})")
    add("--events", type=_words(EVENTS), help=",".join(EVENTS))
    add("--rivals", type=_words(tuple(RIVALS)), default=DEFAULT_RIVALS, help=",".join(RIVALS))
    add("--nodes", type=int, default=3, help="nodes of the full job, at least 3 (default: 3)")
    add("--timeout", type=float, default=80.0, help="seconds until an event counts as never recovered (default: 80)")
    add("--together", type=int, default=3, help="slow cells at the same time (default: 3)")
    add("--torchft", type=Path, help="bin directory of an environment with torchft, for the rival torchft")
    add("--seed", type=int, default=1)
    add("--keep-logs", type=Path, help="directory for the nodes' output")
    add("--output", type=Path, default=RESULTS, help="directory for recovery.txt and recovery.svg")
    arguments = parser.parse_args()
    if arguments.torchft is not None and arguments.rivals is DEFAULT_RIVALS:
        arguments.rivals = (*DEFAULT_RIVALS, "torchft")
    # Told to end, it takes its jobs with it, as after an error.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    began = time.monotonic()
    cells = measure(arguments)
    import torch

    head = (
        f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, gloo, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; {arguments.nodes} nodes with one worker; a save every "
        f"{STEPS_PER_SAVE} steps, {PAUSE_S * 1000:.0f} ms pause in a step; timeout {arguments.timeout:.0f} s; "
        f"load {os.getloadavg()[0]:.1f}; took {time.monotonic() - began:.0f} s"
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = table(cells, head)
    (arguments.output / "recovery.txt").write_text(text)
    (arguments.output / "recovery.svg").write_text(chart(cells, arguments.timeout))
    print("\n" + text)


if __name__ == "__main__":
    main()
