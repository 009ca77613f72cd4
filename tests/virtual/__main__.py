"""Run any number of seeds: `python -m tests.virtual --seeds 1000 [--first N] [--jobs 2] [--show]`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.virtual.plan import draw
from tests.virtual.simulator import Failed, simulate

BLOCK = 20


@dataclass
class Tally:
    """What some seeds were like, taken together."""

    seeds: int = 0
    events: int = 0
    generations: int = 0
    steps: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    in_seeds: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Take others in."""
        for name in ("seeds", "events", "generations", "steps", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("fired", "in_seeds", "ended"):
            getattr(self, name).update(getattr(other, name))


def run(first: int, seeds: int) -> Tally:
    """Run seeds one after the other. A failure is kept as text, and the next seed is run."""
    tally = Tally()
    for seed in range(first, first + seeds):
        tally.seeds += 1
        try:
            outcome = simulate(draw(seed))
        except Failed as failed:
            tally.failures.append((seed, str(failed)))
            tally.ended["violation"] += 1
            continue
        except Exception:  # noqa: BLE001  The other seeds are still worth running.
            tally.failures.append((seed, f"exception: {traceback.format_exc()}"))
            tally.ended["exception"] += 1
            continue
        tally.events += outcome.events
        tally.generations += outcome.generations
        tally.steps += outcome.steps
        tally.fired.update(outcome.fired)
        tally.in_seeds.update(dict.fromkeys(outcome.fired, 1))
        tally.ended[outcome.status] += 1
    return tally


def run_all(first: int, seeds: int, jobs: int) -> Tally:
    """Run seeds in several processes; the sum does not depend on how many."""
    starts = range(first, first + seeds, BLOCK)
    counts = [min(BLOCK, first + seeds - start) for start in starts]
    tally = Tally()
    if jobs == 1:
        for start, count in zip(starts, counts, strict=True):
            tally.add(run(start, count))
        return tally
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(run, starts, counts):
            tally.add(part)
    return tally


def report(tally: Tally, seconds: float) -> str:
    """The counts as a table."""
    lines = [
        f"{tally.seeds} seeds, {tally.events:,} events, {tally.generations:,} generations, {tally.steps:,} steps kept, "
        f"{seconds:.1f} s",
        "ended: " + ", ".join(f"{name} {count}" for name, count in sorted(tally.ended.items())),
        "",
        f"{'fault':<18} {'times':>8}  in seeds",
    ]
    lines += [
        f"{kind:<18} {count:>8}  {100 * tally.in_seeds[kind] / max(1, tally.seeds):5.1f} %"
        for kind, count in sorted(tally.fired.items())
    ]
    return "\n".join(lines)


def main() -> int:
    """0 when all invariants held in all seeds."""
    parser = argparse.ArgumentParser(prog="python -m tests.virtual", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", action="store_true", help="print the whole story of each seed")
    options = parser.parse_args()
    if options.show:
        for seed in range(options.first, options.first + options.seeds):
            print(simulate(draw(seed)).log)
        return 0
    gc.freeze()  # What was imported stays: to look through it again and again takes a tenth of the time.
    began = time.perf_counter()
    tally = run_all(options.first, options.seeds, options.jobs)
    for seed, text in tally.failures[:3]:
        print(f"seed {seed}: {text}\n", file=sys.stderr)
    print(report(tally, time.perf_counter() - began))
    if tally.failures:
        print("violations: " + ", ".join(f"{seed} ({text.partition(':')[0]})" for seed, text in tally.failures))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
