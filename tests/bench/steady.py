"""Undisturbed training: the step time of the same script under `elasticrt run` and under torchrun, in turn.

    python -m tests.bench.steady [--pairs 5] [--seconds 8] [--nodes 2] [--pause S]

A B A B ...: two nodes with one worker each train `plain_ddp.py` without saves; what agents, etcd and torchrun's store
do besides is in it. `step_cost` measures what `loop.step()` adds. Steps take 1.4 ms, and --pause longer. Prints each
job's median and mean step time, and the ratios of their medians. A ratio says something when it differs from 1 by more
than the jobs of one runtime differ among themselves.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from tests.bench.marks import formed, worlds
from tests.bench.runtimes import RUNTIMES, Job, Pace, Runtime

START_S_MAX = 120.0
SETTLE_S = 1.0
"""The first steps are not counted."""


@dataclass(frozen=True)
class Steps:
    """Of one job, in microseconds."""

    median_us: float
    mean_us: float
    count: int


def step_times(runtime: Runtime, nodes: int, seconds: float, pause_s: float) -> Steps:
    """Train for some seconds; rank 0's step times."""
    with Job(runtime, nodes, Pace(steps_per_save=10**9, pause_s=pause_s)) as job:
        for _ in range(nodes):
            job.start_node()
        deadline = time.monotonic() + START_S_MAX
        while formed(job.marks.read(), 0.0, nodes) is None:
            if time.monotonic() > deadline or job.ended():
                raise SystemExit(f"{runtime.text} has not started within {START_S_MAX:g} s")
            time.sleep(0.1)
        began = time.monotonic() + SETTLE_S
        time.sleep(SETTLE_S + seconds)  # Not a look at the marks: reading them would take time from the training.
        marks = job.marks.read()
    (steps,) = worlds(mark for mark in marks if mark.at > began).values()
    at = sorted(mark.at for mark in steps if mark.rank == 0)
    gaps = [(later - earlier) * 1e6 for earlier, later in pairwise(at)]
    return Steps(statistics.median(gaps), statistics.fmean(gaps), len(gaps))


def main() -> None:
    """Measure in turn, print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds more for each step (default: 0)")
    arguments = parser.parse_args()
    ours, theirs = RUNTIMES["elasticrt"], RUNTIMES["fresh"]
    found: dict[str, list[Steps]] = {ours.name: [], theirs.name: []}
    for _ in range(arguments.pairs):
        for runtime in (ours, theirs):
            steps = step_times(runtime, arguments.nodes, arguments.seconds, arguments.pause)
            found[runtime.name].append(steps)
            print(
                f"{runtime.text:32} median {steps.median_us:7.0f} us  mean {steps.mean_us:7.0f} us  {steps.count} steps"
            )
    for name in ("median", "mean"):
        mine, other = ([getattr(each, f"{name}_us") for each in found[runtime.name]] for runtime in (ours, theirs))
        ratio = statistics.median(mine) / statistics.median(other)
        pairs = ", ".join(f"{a / b:.2f}" for a, b in zip(mine, other, strict=True))
        spread = max(max(each) / min(each) for each in (mine, other))
        print(
            f"ratio of the {name}s: {ratio:.3f}   (pair by pair: {pairs}; one runtime's jobs differ by {spread:.2f} x)"
        )


if __name__ == "__main__":
    main()
