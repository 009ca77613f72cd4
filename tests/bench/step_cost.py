"""What `with loop.step():` adds to a step: steps with it and without it take turns in the same processes.

    python -m tests.bench.step_cost [--blocks 150] [--pause S]

Two workers of one agent train two copies of one network in turn, by blocks of 50 steps: one copy in a Loop, the other
as in any script. So both have the same machine, load and caches, which two jobs never have. Steps take 1.1 ms, and
--pause longer. Prints the medians over the blocks of rank 0, and what the Loop adds: the median of the differences of
neighbours, with the quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().with_name("step_cost_ddp.py")


def main() -> None:
    """Measure, and print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=150)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds more for each step (default: 0)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ertb-") as name:
        command = [sys.executable, "-m", "elasticrt", "run", "--standalone", "--nproc-per-node", "2"]
        command += ["--log-dir", f"{name}/logs", str(SCRIPT), name, str(arguments.blocks), str(arguments.pause)]
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        pairs: list[tuple[float, float]] = json.loads(Path(name, "pairs.json").read_text())
    ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([mine - other for mine, other in pairs], n=4)
    ratio = statistics.median(mine / other for mine, other in pairs)
    print(f"with loop.step() {ours:.0f} us, without {theirs:.0f} us, medians of {len(pairs)} blocks")
    print(f"it adds {middle:.0f} us (quartiles {low:.0f} and {high:.0f}): a factor of {ratio:.3f}")


if __name__ == "__main__":
    main()
