"""The rows of the table: each does something to workers, checks what became of it, and says how long it took."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.station import ROOT, START_S_MAX, Failed, Mark, Station

STEPS_BETWEEN = 5
"""Steps that are made before something else is done."""

GO_ON_S_MAX = 60.0
"""A recovery that takes longer has failed."""

SPARE_BYTES = 3 << 30
"""Memory that a measurement leaves to others."""

PROCESS_BYTES = 1 << 29
"""Of a process with torch in it, at the most."""

KILLS = 3
"""In the row that compares weights."""

WEIGHTS_SPREAD = 1e-9
"""Of sums in another order, in double precision."""

FROZEN_SUM = 2 * 0.5
"""What a worker's sample of a frozen piece is: the first and the last number of it."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was done.
        where: backend, device and number of workers.
        size_mb: of each worker's state, 0 where that does not matter.
        seconds: by name, in the order to be shown.
        note: what else is to be known; for a row that was not run, why.
        ok: None: not run.
    """

    what: str
    where: str
    size_mb: float = 0
    seconds: dict[str, float] = field(default_factory=dict)
    note: str = ""
    ok: bool | None = True


@dataclass(frozen=True)
class Machine:
    """What there is to run on. `gpus`: their names; `missing`: what it lacks to have any; `nccl`: its version;
    `free_bytes`: of the host's memory."""

    torch: str
    gpus: tuple[str, ...]
    missing: tuple[str, ...]
    gpu_bytes: int
    nccl: tuple[int, ...] | None
    free_bytes: int

    @staticmethod
    def look() -> Machine:
        """Ask torch, in a process of its own. Raises Failed when there is none."""
        found = ask("facts")
        gpus, nccl = tuple(found["gpus"]), found["nccl"]
        missing = tuple(found["missing"])
        return Machine(found["torch"], gpus, missing, found["gpu_bytes"], nccl and tuple(nccl), free_bytes())


def free_bytes() -> int:
    """The host's memory that can be had."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.split()[1:]}
    return found.get("MemAvailable", found["MemFree"])


def ask(*words: str, timeout_s: float = 300.0) -> dict[str, Any]:
    """What `tests.gpu.alone` answers. Raises Failed with its last words."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.gpu.alone", *words]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(words)}: no end in {timeout_s:g} s") from None
    if done.returncode:
        raise Failed(done.stderr.strip()[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# What is checked after each row.


def check(station: Station) -> None:
    """All ranks have the same weights after the same step, no step is missing or done otherwise than before, and the
    frozen state is everywhere what it was. Raises Failed."""
    by_step: dict[int, list[Mark]] = {}
    samples = set()
    for mark in station.marks():
        by_step.setdefault(mark.step, []).append(mark)
        samples.add(mark.sample)
    missing = sorted(set(range(1, max(by_step) + 1)) - set(by_step))
    if missing:
        raise Failed(f"step {missing[0]} is missing")
    for step, marks in by_step.items():
        spread = max(each.weights for each in marks) - min(each.weights for each in marks)
        if not spread <= WEIGHTS_SPREAD or math.isnan(spread):
            raise Failed(f"after step {step} weights differ by {spread:g}")
    if len(samples) != 1 or not next(iter(samples)) % FROZEN_SUM == 0.0 or min(samples) < 0:
        raise Failed(f"the frozen state has changed: {sorted(samples)}")


def _pass(station: Station, steps: int = STEPS_BETWEEN) -> None:
    """Let the present generation make some steps."""
    until = max(mark.step for mark in station.firsts().values()) + steps
    ranks = len(station.workers)

    def there() -> bool:
        newest: dict[int, int] = {}
        for mark in station.marks():
            if mark.generation == station.generation:
                newest[mark.rank] = mark.step
        return len(newest) == ranks and min(newest.values()) >= until

    station.until(there, GO_ON_S_MAX, f"{steps} more steps")


def _gone_on(station: Station) -> float:
    """Wait until all workers have made a step in the present generation; when the last of them had."""
    station.until(lambda: len(station.firsts()) == len(station.workers), GO_ON_S_MAX, "a step in the new generation")
    return max(mark.at for mark in station.firsts().values())


def _parts(station: Station, seated_at: float) -> dict[str, float]:
    """From the seat to the meeting (until workers were free, and their step undone), and the meeting itself."""
    pages = [worker.page for worker in station.workers.values()]
    freed_at = max(page.init_at_ns for page in pages) / 1e9
    joined_at = max(page.joined_at_ns for page in pages) / 1e9
    return {"freed": freed_at - seated_at, "re-form": joined_at - freed_at}


class Peaks:
    """By how much the memory of all workers together has been more at its highest than when this was made."""

    def __init__(self, station: Station) -> None:
        self._pids = [worker.process.pid for worker in station.workers.values()]
        self._before = 0
        with contextlib.suppress(OSError):
            for pid in self._pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            self._before = sum(self._word(pid, "VmRSS") for pid in self._pids)

    def note(self) -> str:
        """In words; "" where the kernel does not tell."""
        with contextlib.suppress(OSError):
            if self._before:
                more = sum(self._word(pid, "VmHWM") for pid in self._pids) - self._before
                return f"peak of all workers: {self._before / 1e6:,.0f} + {more / 1e6:,.0f} MB"
        return ""

    @classmethod
    def highest(cls, station: Station) -> str:
        """The same of all that workers have done since they were started."""
        most = sum(cls._word(worker.process.pid, "VmHWM") for worker in station.workers.values())
        return f"peak of all workers: {most / 1e6:,.0f} MB, the checkpoint that they share counted in each"

    @staticmethod
    def _word(pid: int, name: str) -> int:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)


# Rows.


@contextlib.contextmanager
def station(backend: str, device: str, size_mb: float, env: dict[str, str] | None = None) -> Iterator[Station]:
    """A station in a directory of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="elasticrt-gpu-") as directory,
        Station(Path(directory) / "run", backend=backend, device=device, state_mb=size_mb, env=env) as made,
    ):
        yield made


def changes(backend: str, device: str, workers: int, size_mb: float, env: dict[str, str] | None = None) -> list[Row]:
    """A worker is killed, another joins, all save and all begin anew from that; one is frozen, and taken out."""
    where = f"{backend}, {device}, {workers} workers"
    rows = []
    with station(backend, device, size_mb, env) as here:
        here.begin(workers)
        _pass(here)

        killed_at = here.kill(workers - 1)
        seated_at = here.seat()
        gone_on_at = _gone_on(here)
        rows.append(Row("kill", where, size_mb, {"recovery": gone_on_at - killed_at, **_parts(here, seated_at)}))
        _pass(here)

        here.start_beside(workers - 1)
        peaks = Peaks(here)
        rows.append(_joined(here, where, size_mb, peaks))
        _pass(here)

        peaks = Peaks(here)
        began = time.monotonic()
        here.hold(save=True)
        held_s = time.monotonic() - began
        here.seat()
        _gone_on(here)
        rows.append(Row("save and hold", where, size_mb, {"save": held_s}, peaks.note()))
        _pass(here)

        here.freeze(workers - 1)
        time.sleep(0.3)  # All others are in a collective by then, and wait.
        seated_at = here.seat()
        gone_on_at = _gone_on(here)
        rows.append(Row("abort", where, size_mb, {"recovery": gone_on_at - seated_at, **_parts(here, seated_at)}))
        _pass(here)
        check(here)

        for local_rank in list(here.workers):
            here.kill(local_rank)
        newest = max(mark.step for mark in here.marks())
        here.begin(workers)
        if not all(1 < mark.step <= newest + 1 for mark in here.firsts().values()):
            raise Failed("a start of all workers did not go on from the checkpoint")
        rows.append(Row("restore", where, size_mb, {"restore": here.entered_s()}, Peaks.highest(here)))
        _pass(here)
        check(here)
    return rows


def _joined(here: Station, where: str, size_mb: float, peaks: Peaks) -> Row:
    here.hold()
    last = max(mark.at for mark in here.marks())
    seated_at = here.seat()
    gone_on_at = _gone_on(here)
    return Row("join", where, size_mb, {"pause": gone_on_at - last, **_parts(here, seated_at)}, peaks.note())


def weights(backend: str, device: str, workers: int, env: dict[str, str] | None = None) -> list[Row]:
    """Workers are killed and replaced, one after another; then the weights are those of one worker left alone."""
    with station(backend, device, 0, env) as here:
        here.begin(workers)
        for _ in range(KILLS):
            _pass(here)
            lost = list(here.workers)[-1]
            here.kill(lost)
            here.seat()
            _gone_on(here)
            _pass(here)
            here.start_beside(lost)
            here.hold()
            here.seat()
            _gone_on(here)
        _pass(here)
        check(here)
        disturbed = {mark.step: mark.weights for mark in here.marks()}
    with station("gloo", device, 0) as undisturbed:
        undisturbed.begin(1)
        needed = max(disturbed)
        undisturbed.until(lambda: any(mark.step >= needed for mark in undisturbed.marks()), START_S_MAX, "all steps")
        alone = {mark.step: mark.weights for mark in undisturbed.marks()}
    spread = max(abs(each - alone[step]) for step, each in disturbed.items())
    where = f"{backend}, {device}, {workers} workers"
    note = f"{KILLS} kills in {needed} steps: {spread:.1g} from {abs(alone[needed]):.3g} of an undisturbed run"
    return [Row("weights", where, note=note, ok=spread <= WEIGHTS_SPREAD)]


def alone(backend: str, device: str, env: dict[str, str] | None = None) -> list[Row]:
    """One worker whose group is made anew, again and again."""
    times: list[dict[str, float]] = []
    with station(backend, device, 0, env) as here:
        here.begin(1)
        for _ in range(5):
            _pass(here)
            here.hold()
            last = max(mark.at for mark in here.marks())
            seated_at = here.seat()
            times.append({"pause": _gone_on(here) - last, **_parts(here, seated_at)})
        _pass(here)
        check(here)
    middle = sorted(times, key=lambda each: each["pause"])[len(times) // 2]
    return [Row("re-form", f"{backend}, {device}, 1 worker", 0, middle)]


def stall(device: str, size_mb: float) -> list[Row]:
    """How long the training waits for a snapshot."""
    found = ask("snapshot", device, str(size_mb))
    seconds = {"stall": found["stall_s"], "first": found["first_s"], "written": found["written_s"]}
    return [Row("snapshot", device, size_mb, seconds)]


def failure(kind: str, expected: str) -> list[Row]:
    """A process fails on the GPU; what it says must be told by its cause."""
    from elasticrt.workers.gpu_failures import gpu_cause

    try:
        ask("fail", kind)
    except Failed as failed:
        cause = gpu_cause(str(failed))
        if cause is None or not cause.name.startswith(expected):
            raise Failed(f"{kind}: told as {cause}, said: {failed}") from None
        return [Row(f"failure: {kind}", "cuda", note=cause.name)]
    raise Failed(f"{kind}: it did not fail")


def health() -> list[Row]:
    """`nvidia-smi` says that this machine's GPUs are fit, in words that are understood."""
    from elasticrt.agent.node_check import NVIDIA_SMI, refusal

    began = time.monotonic()
    done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=120, check=False)
    problem = refusal(done.returncode, done.stdout + done.stderr, 1)
    return [Row("node check", "nvidia-smi", seconds={"asked": time.monotonic() - began}, note=problem, ok=not problem)]


def attempt(what: str, where: str, size_mb: float, run: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a run, or one that says how it failed."""
    try:
        return run()
    except (Failed, OSError) as error:
        return [Row(what, where, size_mb, note=f"{type(error).__name__}: {error}"[:600], ok=False)]


def needs_bytes(device: str, workers: int, size_mb: float) -> int:
    """Memory of the host that a run of `changes` takes: on the CPU the workers' states, a checkpoint and its copy, once
    for all workers, and the processes."""
    states = 2 + (workers if device == "cpu" else 0)
    return int(states * size_mb * 1e6) + workers * PROCESS_BYTES


def snapshot_needs_bytes(device: str, size_mb: float) -> int:
    """The same for a run of `stall`: the copy, on the CPU the state, and the process."""
    states = 2 if device == "cpu" else 1
    return int(states * size_mb * 1e6) + PROCESS_BYTES
