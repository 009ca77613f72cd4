"""Everything that needs a GPU, in one table: `python -m tests.gpu`.

    python -m tests.gpu                  # on a machine with a GPU; without one it says so, and ends with 0
    python -m tests.gpu --device cpu     # the same with gloo and CPU tensors: the rows that need no GPU
    python -m tests.gpu --write DIR      # also writes DIR/<device>.json and .md
    python -m tests.gpu.picture          # draws docs/img/sizes-*.svg of tests/gpu/results

It needs torch and this checkout, no etcd, no grpc and no network: the agents' part is played (`tests.gpu.station`), so
the times are without what agents agree on, some milliseconds. Each row checks what it measures: weights that are equal
on all ranks, no step missing or done otherwise, a state that is what it was. Exit code 1: a row has failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path

from tests.gpu import rows
from tests.gpu.rows import Failed, Machine, Row

SIZES_MB = (12.0, 400.0, 4000.0)
STALLS_MB = (100.0, 1000.0, 7000.0)
BUDGET_S = 520.0
"""All is to end in nine minutes."""

ROW_S = 30.0
"""What a row takes that has not been run at another size."""
MB_PER_S = 20.0
"""How much more state costs a second more, where one size alone has been run."""

MULTI_RANK = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
MULTI_RANK_SINCE = (2, 30)
"""From this version on NCCL takes several ranks on one GPU, if it is told so."""

Task = tuple[str, str, float, Callable[[], list[Row]]]


def tasks(machine: Machine, device: str, workers: int, sizes: Sequence[float]) -> Iterator[Task | Row]:
    """What is to be run, and the rows that cannot be: first what needs a GPU, small states before large ones."""
    if device == "cuda":
        yield "failure: memory", "cuda", 0, partial(rows.failure, "memory", "the GPU is out of memory")
        yield "failure: assert", "cuda", 0, partial(rows.failure, "assert", "an assertion of a kernel has failed")
        yield "node check", "nvidia-smi", 0, rows.health
        if machine.nccl is not None:
            yield "re-form", "nccl, cuda, 1 worker", 0, partial(rows.alone, "nccl", "cuda")
    else:
        for what in ("re-form with nccl", "kill, join, save, restore with nccl", "failures of a GPU", "node check"):
            yield Row(what, device, note="needs a GPU", ok=None)
    yield "re-form", f"gloo, {device}, 1 worker", 0, partial(rows.alone, "gloo", device)
    ranks, no_nccl = _ranks_of_nccl(machine) if device == "cuda" else (0, "")
    if no_nccl:
        yield Row("kill, join, save, restore", "nccl, cuda", note=no_nccl, ok=None)
    several = MULTI_RANK if len(machine.gpus) == 1 else None
    if ranks:
        yield "weights", f"nccl, cuda, {ranks} workers", 0, partial(rows.weights, "nccl", "cuda", ranks, several)
    else:
        yield "weights", f"gloo, {device}, {workers} workers", 0, partial(rows.weights, "gloo", device, workers)
    for size_mb, stall_mb in zip_longest(sizes, STALLS_MB):
        if stall_mb is not None:
            missing = _lacks(device, 2 * stall_mb, machine, rows.snapshot_needs_bytes(device, stall_mb))
            run = partial(rows.stall, device, stall_mb)
            yield (
                Row("snapshot", device, stall_mb, note=missing, ok=None)
                if missing
                else (
                    "snapshot",
                    device,
                    stall_mb,
                    run,
                )
            )
        if size_mb is not None and ranks:
            yield _sized(machine, "nccl", "cuda", ranks, size_mb, env=several)
        if size_mb is not None:
            yield _sized(machine, "gloo", device, workers, size_mb)


def _ranks_of_nccl(machine: Machine) -> tuple[int, str]:
    """How many ranks of nccl this machine takes, of 2 to 8; if none, why."""
    if machine.nccl is None:
        return 0, "this torch has no nccl"
    if len(machine.gpus) == 1 and machine.nccl[:2] < MULTI_RANK_SINCE:
        version = ".".join(map(str, machine.nccl))
        return 0, f"one GPU, and NCCL {version} takes one rank for each; 2.30 takes several"
    return max(2, min(len(machine.gpus), 8)), ""


def _sized(
    machine: Machine, backend: str, device: str, workers: int, size_mb: float, *, env: dict[str, str] | None = None
) -> Task | Row:
    what, where = "kill, join, save, restore", f"{backend}, {device}, {workers} workers"
    if missing := _lacks(device, (workers + 1) * size_mb, machine, rows.needs_bytes(device, workers, size_mb)):
        return Row(what, where, size_mb, note=missing, ok=None)
    return what, where, size_mb, partial(rows.changes, backend, device, workers, size_mb, env)


def _lacks(device: str, on_gpu_mb: float, machine: Machine, needed: int) -> str:
    """Why a size is left out that takes so much on the GPU and `needed` bytes on the host, "" if it is not."""
    free = rows.free_bytes() - rows.SPARE_BYTES
    if needed > free:
        return f"left out: needs {needed / 1e9:.0f} GB of memory, {max(free, 0) / 1e9:.0f} GB can be had"
    on_gpu = on_gpu_mb * 1e6
    if device == "cuda" and on_gpu > machine.gpu_bytes:
        return f"left out: needs {on_gpu / 1e9:.0f} GB on the GPU, {machine.gpu_bytes / 1e9:.0f} GB are free"
    return ""


def shown(row: Row) -> str:
    """One row of the table."""
    size = f"{row.size_mb:,.0f} MB" if row.size_mb else ""
    numbers = ", ".join(f"{name} {1000 * each:,.0f} ms" for name, each in row.seconds.items())
    state = {True: "ok", False: "FAILED", None: "not run"}[row.ok]
    note = row.note.replace("\n", " ").replace("|", "/")
    return f"| {row.what} | {row.where} | {size} | {numbers} | {state} | {note} |"


def expected_s(size_mb: float, known: Sequence[tuple[float, float]]) -> float:
    """How long a row will take, by the sizes and times of the same at smaller sizes, in order. Pure."""
    if not known:
        return ROW_S
    last_mb, last_s = known[-1]
    per_mb = 1 / MB_PER_S
    if len(known) > 1 and last_mb > known[-2][0]:
        per_mb = max(0.0, (last_s - known[-2][1]) / (last_mb - known[-2][0]))
    return last_s + max(0.0, size_mb - last_mb) * per_mb


HEAD = "| what | where | state of each | median or time | | |\n|---|---|---|---|---|---|"


def main() -> int:
    """Run, print, write; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="What runs on a GPU, in one table.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=2, help="workers that share the GPU, or the CPU, with gloo")
    parser.add_argument("--sizes", default=",".join(f"{each:g}" for each in SIZES_MB), help="of the state, in MB")
    parser.add_argument("--only", default="", help="rows whose first or second column has this word")
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        help="seconds: a row is begun if it will end within so long, judged by the same at another size",
    )
    parser.add_argument("--write", type=Path, help="a directory for the results")
    arguments = parser.parse_args()
    # Told to end, it takes its workers and their directories with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        machine = Machine.look()
    except Failed as failed:
        print(f"Nothing can be run here: {str(failed).splitlines()[-1]}")
        return 1
    if arguments.device == "cuda" and not machine.gpus:
        print(
            f"Nothing was run: torch {machine.torch} sees no GPU here. Missing: {'; '.join(machine.missing)}.\n"
            "`python -m tests.gpu --device cpu` runs what needs none."
        )
        return 0
    devices = ", ".join(machine.gpus) if arguments.device == "cuda" else "CPU"
    nccl = f", NCCL {'.'.join(map(str, machine.nccl))}" if machine.nccl else ""
    title = f"torch {machine.torch}{nccl}, {devices}, {machine.free_bytes / 1e9:.0f} GB of memory free"
    print(f"{title}\n\n{HEAD}", flush=True)
    began, found = time.monotonic(), []
    took: dict[tuple[str, str], list[tuple[float, float]]] = {}  # What was run at which sizes, and for how long.
    for task in tasks(
        machine, arguments.device, arguments.workers, [float(each) for each in arguments.sizes.split(",")]
    ):
        what, where = (task.what, task.where) if isinstance(task, Row) else task[:2]
        if arguments.only and arguments.only not in what and arguments.only not in where:
            continue
        at = time.monotonic()
        if isinstance(task, Row):
            done = [task]
        elif at - began + (needs_s := expected_s(task[2], took.get((what, where), []))) > arguments.budget:
            note = f"left out: would take {needs_s:.0f} s, {max(0.0, arguments.budget - at + began):.0f} s are left"
            done = [Row(what, where, task[2], note=note, ok=None)]
        else:
            done = rows.attempt(*task)
            took.setdefault((what, where), []).append((task[2], time.monotonic() - at))
        found += done
        print("\n".join(map(shown, done)), flush=True)
    print(f"\n{time.monotonic() - began:.0f} s in all; {sum(row.ok is None for row in found)} rows were not run.")
    if arguments.write is not None:
        arguments.write.mkdir(parents=True, exist_ok=True)
        name = arguments.write / arguments.device
        name.with_suffix(".json").write_text(
            json.dumps({"machine": title, "rows": [asdict(row) for row in found]}, indent=1) + "\n"
        )
        name.with_suffix(".md").write_text("\n".join([title, "", HEAD, *map(shown, found), ""]))
    return int(any(row.ok is False for row in found))


if __name__ == "__main__":
    sys.exit(main())
