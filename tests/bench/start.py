"""Start to first step of a trivial DDP script: `elasticrt run` beside `torchrun --standalone`, in turn.

    python tests/bench/start.py [--runs 10] [--workers 2]

Prints medians, worst cases and the ratio. Seconds from starting the command to the end of the first optimizer step on
all ranks, by CLOCK_MONOTONIC. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
with open(os.path.join(sys.argv[1], str(dist.get_rank())), "w") as file:
    file.write(repr(time.monotonic()))
dist.destroy_process_group()
"""


def first_step_s(command: list[str], directory: Path, workers: int) -> float:
    """Seconds from the start of `command` until the slowest rank has made its first step."""
    marks = Path(tempfile.mkdtemp(dir=directory))
    begin = time.monotonic()
    done = subprocess.run([*command, str(marks)], cwd=directory, capture_output=True, timeout=120, check=False)
    if len(list(marks.iterdir())) != workers:
        raise SystemExit(f"{command} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    if done.returncode != 0:
        # Gloo can abort while a process ends. That is no matter of starting, but it is said.
        print(f"note: exit code {done.returncode} after the first step: {' '.join(command[1:4])}")
    ends = [float((marks / str(rank)).read_text()) for rank in range(workers)]
    return max(ends) - begin


def main() -> None:
    """Measure in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="elasticrt-bench-") as name:
        directory = Path(name)
        (directory / "script.py").write_text(SCRIPT)
        number = str(arguments.workers)
        ours = [sys.executable, "-m", "elasticrt", "run", "--nproc-per-node", number, "script.py"]
        theirs = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            number,
            "script.py",
        ]
        times: dict[str, list[float]] = {"elasticrt run": [], "torchrun --standalone": []}
        for run in range(arguments.runs + 1):
            pair = [first_step_s(command, directory, arguments.workers) for command in (ours, theirs)]
            if run:  # The first pair only warms the disk cache.
                times["elasticrt run"].append(pair[0])
                times["torchrun --standalone"].append(pair[1])
    for name, values in times.items():
        print(f"{name:24} median {statistics.median(values):.2f} s   worst {max(values):.2f} s   runs {len(values)}")
    ratios = [ours / theirs for ours, theirs in zip(*times.values(), strict=True)]
    print(f"{'ratio, pair by pair':24} median {statistics.median(ratios):.2f}     worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
