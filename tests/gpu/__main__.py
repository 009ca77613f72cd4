"""Everything that needs a GPU, from a plain checkout: `python -m tests.gpu`, which takes less than 9 minutes.

Runs the tests of this folder, then prints one table: what a snapshot makes the training wait for, by the size of the
state, beside a blocking copy; and seconds from a kill to the next step, with gloo. Nothing is fetched: what is missing
on this machine is said. `ELASTICRT_CPU_AS_GPU=1` runs what can be run on the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from elasticrt.checkpoint.snapshot import Snapshots
from tests.cluster import REPOSITORY, kill
from tests.gpu.runs import Run, agents_lack, missing

STATES_GB = (0.1, 1.0, 7.0)
STATES_MB = (12.0, 400.0, 4000.0)
TESTS_S = 300.0
TENSOR_BYTES = 1 << 26


def stalls(device: str) -> Iterator[str]:
    """What a snapshot makes the training wait for, and how long until it is on the host."""
    for size_gb in STATES_GB:
        count = max(1, round(size_gb * 1e9 / TENSOR_BYTES))
        state = {str(n): torch.ones(TENSOR_BYTES // 4, device=device) for n in range(count)}
        taken, waits, wholes = Snapshots(), [], []
        for _ in range(4):
            synchronize(device)
            began = time.monotonic()
            taken.take(state, [lambda snapshot: snapshot._fetch()])
            state["0"].add_(1)
            synchronize(device)
            waits.append(time.monotonic() - began)
            taken.wait(120)
            wholes.append(time.monotonic() - began)
        began = time.monotonic()
        plain = [each.to("cpu", copy=True) for each in state.values()]
        blocking = time.monotonic() - began
        del plain, taken
        # The first copy takes memory that the others use again.
        yield (
            f"| snapshot of {size_gb:g} GB | stall {min(waits[1:]):.4f} s (first {waits[0]:.3f}), on the host after "
            f"{min(wholes[1:]):.2f} s; a blocking copy {blocking:.2f} s |"
        )


def synchronize(device: str) -> None:
    """Wait for all that the GPU has been given."""
    if device == "cuda":
        torch.cuda.synchronize()


def recoveries() -> Iterator[str]:
    """Seconds from a worker's kill to the next step of its survivor, by the size of the state."""
    for state_mb in STATES_MB if torch.cuda.is_available() else STATES_MB[:1]:
        with tempfile.TemporaryDirectory(prefix="ertg-") as name, Run(Path(name), "gloo", state_mb) as run:
            began = time.monotonic()
            run.start("a")
            run.start("b")
            run.first_step(2, began)
            (victim,) = run.agents["b"].worker_pids().values()
            killed = time.monotonic()
            kill(victim)
            alone = run.first_step(1, killed, more=1)
            back = run.first_step(2, alone, more=1)
            yield (
                f"| kill, gloo, {state_mb:g} MB | next step after {alone - killed:.2f} s, replacement in after "
                f"{back - killed:.1f} s |"
            )


def main() -> int:
    """Run the tests and measure; the exit code."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else "-"
    print(f"torch {torch.__version__}, {where}, NCCL {nccl}; agents: {agents_lack() or 'can run'}", flush=True)
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-rs", "-p", "no:cacheprovider", "tests/gpu"]
    code = subprocess.run(command, cwd=REPOSITORY, timeout=TESTS_S, check=False).returncode
    if missing(real=False):
        print(missing(real=False))
        return code
    print("| what | figure |\n|---|---|")
    for rows in (stalls(device), recoveries() if not agents_lack() else iter(())):
        for row in rows:
            print(row, flush=True)
    return code


if __name__ == "__main__":
    os.chdir(REPOSITORY)
    sys.exit(main())
