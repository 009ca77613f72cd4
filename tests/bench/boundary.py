"""What `Loop` costs a step when nothing is asked of it: the look at the status page, and all of the boundary.

    python -m tests.bench.boundary [--steps N]

Runs `boundary_loop.py` under `elasticrt run`. To be reached: the check in 1 us, all of the boundary in 5 us, 25 us with
`with loop.step():`, 50 us where random number generators are seeded, and 50 us where buffers are noted (medians).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().with_name("boundary_loop.py")
AIMS_US = {
    "check_us": ("check of the page", 1.0),
    "boundary_us": ("all of the boundary", 5.0),
    "--seed": ("the same with a seed", 50.0),
    "--block": ("with loop.step()", 25.0),
    "--block --seed": ("the same with a seed", 50.0),
    "--block --buffers": ("with loop.step(), 12 buffers", 50.0),
    "--block --buffers --seed": ("the same with a seed", 75.0),
}


def measure(steps: int) -> dict[str, list[float]]:
    """Microseconds per step of each, one value per 1000 steps."""
    found = _run(steps)
    for options in (each for each in AIMS_US if each.startswith("--")):
        found[options] = _run(steps, *options.split())["boundary_us"]
    return found


def _run(steps: int, *options: str) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="ertb-") as name:
        result = Path(name) / "result.json"
        command = [sys.executable, "-m", "elasticrt", "run", "--standalone", "--log-dir", f"{name}/logs"]
        command += ["--nproc-per-node", "1", str(SCRIPT), str(result), str(steps), *options]
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode or not result.exists():
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found: dict[str, list[float]] = json.loads(result.read_text())
        return found


def main() -> None:
    """Print each and whether it is within reach."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    for name, values in measure(parser.parse_args().steps).items():
        text, most = AIMS_US[name]
        median, least = statistics.median(values), min(values)
        worst = statistics.quantiles(values, n=20)[-1]
        verdict = "met" if median <= most else "MISSED"
        print(f"{text:30} median {median:.2f} us  least {least:.2f}  95 % {worst:.2f}   <= {most:g} us: {verdict}")


if __name__ == "__main__":
    main()
