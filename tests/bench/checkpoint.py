"""What saving costs: the stall at each save and the time in all, beside torch.save and DCP's async_save.

    python -m tests.bench.checkpoint [--models 1 1-deep 25 100] [--paces 50 0] [--only disk|memory] [--output FILE]

Each row is a process of its own on an otherwise idle machine: a model of so many million parameters with Adam, trained
alone, at steps of 50 ms that use no processor (as if a device did the work), and at the model's own pace here. Models
have few large layers, which is the least work for whoever collects them; "1-deep" has 96 tensors, as real ones have.
All ways save after the same number of steps. About 16 minutes in all.

The memory tier is measured under an agent at its default budget: how often it copies, what that costs, and how many
steps are lost when the worker is killed again and again. Prints the table and writes it to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticrt.checkpoint.memory_tier import BUDGET
from tests.bench.raw import this_run

JOB = Path(__file__).with_name("checkpoint_job.py")
OUTPUT = Path(__file__).with_name("results") / "checkpoint.txt"
METHODS = {"torch.save": "torch.save", "dcp": "DCP async_save", "loop": "elasticrt"}
TITLES = {"1": "1 million", "1-deep": "1 million (96 tensors)", "25": "25 million", "100": "100 million"}
GAP_S = {"1": 1.0, "1-deep": 1.0, "25": 4.0, "100": 10.0}
SAVES = {"1": 12, "1-deep": 12, "25": 4, "100": 3}
KILLS = 8
TIMEOUT_S = 200.0


def job(method: str, model: str, pace_ms: int, directory: Path) -> dict[str, Any]:
    """Run one process; what it printed. RuntimeError with its output when it printed nothing."""
    saves = KILLS if method == "kills" else SAVES[model]
    arguments = [
        str(JOB),
        method,
        model,
        str(pace_ms),
        str(GAP_S[model]),
        str(saves),
        str(directory / "data"),
    ]
    command = [sys.executable, *arguments]
    if method in ("copies", "kills"):
        run = ["run", "--standalone", "--log-dir", str(directory / "run"), "--max-restarts", "100"]
        command = [sys.executable, "-m", "elasticrt", *run, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={**os.environ, "PYTHONPATH": "."}
    )
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or (not lines and method != "kills"):
        raise RuntimeError(f"{method}, {TITLES[model]}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return dict(json.loads(lines[-1])) if lines else {}


def lost_steps(notes: str) -> list[int]:
    """Steps lost at each kill, from what the killed process wrote about itself. Pure."""
    lost, killed = [], None
    for line in notes.splitlines():
        word, number = line.split()
        if word == "killed":
            killed = int(number)
        elif killed is not None:
            lost.append(killed - int(number))
    return lost


def disk_row(name: str, found: dict[str, Any], reference_ms: float) -> str:
    """One line of the table. Pure."""
    stall_ms = statistics.median(found["stalls_ms"])
    ratio = f"{stall_ms / reference_ms:7.2f}" if reference_ms else "       "
    worst = max(found["stalls_ms"])
    return f"    {name:<16}{stall_ms:12.1f}{worst:12.1f}{ratio}{found['overhead_percent']:12.1f}"


def disk(models: Sequence[str], paces: Sequence[int]) -> list[str]:
    """The table of the disk tier."""
    lines = []
    for model in models:
        for pace in paces:
            reference_ms = 0.0
            for method, name in METHODS.items():
                with Place() as place:
                    found = job(method, model, pace, place)
                if method == "torch.save":
                    reference_ms = statistics.median(found["stalls_ms"])
                    title = f"{TITLES[model]} parameters, steps of {found['bare_ms']:.0f} ms"
                    lines.append(f"  {title}, saved every {found['every']} steps")
                    lines.append("                      stall ms    worst ms  of it   overhead %")
                lines.append(disk_row(name, found, reference_ms))
                print(lines[-1], flush=True)
    return lines


def memory(models: Sequence[str], paces: Sequence[int]) -> list[str]:
    """The table of the memory tier."""
    lines = [f"  memory tier at its default budget of {BUDGET:.1%}  stall ms    every s   overhead %"]
    for model in models:
        for pace in paces:
            with Place() as place:
                found = job("copies", model, pace, place)
            title = f"{TITLES[model]}, steps of {found['bare_ms']:.0f} ms"
            stall_ms = sum(found["stalls_ms"])
            lines.append(f"    {title:<38}{stall_ms:12.1f}{found['interval_s']:11.1f}{found['overhead_percent']:13.2f}")
            print(lines[-1], flush=True)
    with Place() as place:
        job("kills", "1", 50, place)
        lost = lost_steps((place / "data" / "kills").read_text())
    text = f"{statistics.mean(lost):.1f} on average, {max(lost)} at most" if lost else "none was killed"
    lines.append(f"  steps of 50 ms lost by {len(lost)} kills of the worker, 1 million parameters: {text}")
    print(lines[-1], flush=True)
    return lines


class Place:
    """A directory for one process, gone afterwards. Beside the results, so that it is a disk like the user's."""

    def __enter__(self) -> Path:
        self._path = Path(tempfile.mkdtemp(prefix="checkpoint-bench-"))
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TITLES, default=[*TITLES])
    parser.add_argument("--paces", type=int, nargs="+", default=[50, 0], help="milliseconds; 0: the model's own")
    parser.add_argument("--only", choices=("disk", "memory"))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    about = this_run("checkpoint", {})
    lines = [f"{about.command}   ({about.date}, commit {about.commit})", f"{about.machine}; {about.versions}", ""]
    lines += disk(given.models, given.paces) if given.only != "memory" else []
    lines += memory(given.models, given.paces) if given.only != "disk" else []
    given.output.parent.mkdir(exist_ok=True)
    given.output.write_text("\n".join(lines) + "\n")
    print(f"written to {given.output}")


if __name__ == "__main__":
    main()
