"""One process of the checkpoint benchmark: trains, saves in one way, and prints what that cost as a line of JSON.

    python checkpoint_job.py METHOD MODEL PACE_MS GAP_S SAVES DIRECTORY

MODEL: millions of parameters, in a few large layers; "1-deep": 1 million in 96 tensors, of 24 layers with norms.
METHOD: loop (elasticrt's disk tier), torch.save, dcp (async_save), copies (elasticrt's memory tier; under an agent) or
kills (the same; kills itself SAVES times). PACE_MS: 0: forward, backward and Adam as they come; else a step is so long
and uses no processor, as if a device did the work. GAP_S: seconds of training between two saves.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import elasticrt

WIDTH = {"1": 512, "1-deep": 208, "25": 2048, "100": 4096}
LAYERS = {"1": 4, "1-deep": 24, "25": 6, "100": 6}
ROWS = 8
WARM_STEPS = 3
BARE_S = 1.5
"""Before the first save so long is trained, to know a step's time without any."""


class Job:
    """A model of some million parameters, and a step of it."""

    def __init__(self, model: str, pace_ms: float) -> None:
        width, deep = WIDTH[model], model == "1-deep"
        layers: list[torch.nn.Module] = []
        for _ in range(LAYERS[model]):
            layers += [torch.nn.Linear(width, width, bias=deep), *([torch.nn.LayerNorm(width)] if deep else [])]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-5)
        self._input = torch.randn(ROWS, width)
        self._pace_s = pace_ms / 1000
        self.train()  # Adam has state from its first step on.

    def train(self) -> None:
        """Forward, backward and update."""
        self.optimizer.zero_grad()
        self.model(self._input).square().mean().backward()
        self.optimizer.step()

    def step(self) -> None:
        """As the pace says."""
        if self._pace_s:
            time.sleep(self._pace_s)
        else:
            self.train()

    def state(self) -> dict[str, Any]:
        """What is to be saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def bare_s(self) -> float:
        """The median time of a step without saves."""
        times: list[float] = []
        while len(times) < WARM_STEPS + 5 or sum(times) < BARE_S:
            began = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - began)
        return statistics.median(times[WARM_STEPS:])


def rival(method: str, job: Job, directory: Path) -> Callable[[int], None]:
    """How others save between two steps."""
    if method == "torch.save":

        def save(step: int) -> None:
            torch.save(job.state(), directory / f"{step % 2}.pt")

        return save
    from torch.distributed.checkpoint.state_dict_saver import async_save

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    waiting: list[Any] = []

    def save_later(step: int) -> None:
        while waiting:
            waiting.pop().result()
        waiting.append(async_save(job.state(), checkpoint_id=directory / str(step % 2)))

    return save_later


_saves: list[int] = []


def saves_begun() -> int:
    """How many saves have been begun so far: a Loop that is still writing one begins the next one later."""
    return len(_saves)


def boundaries(method: str, job: Job, directory: Path, steps: int, every: int) -> Iterator[None]:
    """Comes back between two steps `steps` times, having saved after each `every` of them."""
    if method == "loop":
        loop = elasticrt.Loop(directory, every=f"{every} steps", model=job.model, optimizer=job.optimizer)
        take_snapshot = loop._saving.take

        def noted(**wanted: bool) -> None:
            _saves.append(loop.steps_done)
            take_snapshot(**wanted)

        loop._saving.take = noted  # type: ignore[method-assign]  # Where the benchmark looks in.
        for _ in loop.epochs(1):
            yield from loop.batches(itertools.repeat(None, steps + 1))
        return
    save = rival(method, job, directory)
    yield
    for step in range(1, steps + 1):
        if step % every == 0:
            _saves.append(step)
            save(step)
        yield


def disk(method: str, job: Job, gap_s: float, saves: int, directory: Path) -> dict[str, Any]:
    """Train with saves; milliseconds of a step, of the stall at each save, and what all of it cost in percent.

    That is against the median step of the same run: from one minute to the next a machine's speed changes by more.
    """
    bare_s = job.bare_s()
    every = max(2, round(gap_s / bare_s))
    steps = every * (saves + 1) - 1
    stalls: list[float] = []
    times: list[float] = []
    frame = boundaries(method, job, directory, steps, every)
    next(frame)
    began = time.perf_counter()
    for _ in range(steps):
        began_step = time.perf_counter()
        job.step()
        times.append(time.perf_counter() - began_step)
        asked = time.perf_counter()
        before = saves_begun()
        next(frame)
        if saves_begun() > before:
            stalls.append(time.perf_counter() - asked)
    wall_s = time.perf_counter() - began
    print(json.dumps({
        "bare_ms": bare_s * 1e3, "every": every, "stalls_ms": [stall * 1e3 for stall in stalls],
        "overhead_percent": (wall_s / (steps * statistics.median(times)) - 1) * 100,
    }), flush=True)  # fmt: skip
    os._exit(0)  # What is still being written is no matter here; leaving a Loop would save once more.


def copies(job: Job, directory: Path) -> None:
    """Train until two copies have been taken (or one, if the next is far); its cost, and how often it is taken."""
    elasticrt.init(backend="gloo")
    bare_s = job.bare_s()
    loop = elasticrt.Loop(directory, every="1 h", model=job.model, optimizer=job.optimizer)
    tier = loop._saving.memory_tier
    stalls: list[float] = []
    extra_s, counted = 0.0, 0
    for _ in loop.epochs(1):
        asked = time.perf_counter()
        for _batch in loop.batches(itertools.repeat(None)):
            now = time.perf_counter()
            writing = loop._saving.checkpointer.snapshots.busy
            if writing and (not stalls or counted == 0):
                stalls.append(now - asked)
            began = now
            job.step()
            asked = time.perf_counter()
            if writing:
                extra_s += asked - began - bare_s
                counted += 1
            elif stalls:
                break
        break
    interval_s = tier._stride * tier._step_s
    result = {
        "bare_ms": bare_s * 1e3, "stalls_ms": [stall * 1e3 for stall in stalls], "interval_s": interval_s,
        "overhead_percent": (sum(stalls) + max(0.0, extra_s)) / interval_s * 100,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    os._exit(0)


def kills(job: Job, times: int, directory: Path) -> None:
    """Train, and kill this process as soon as some copies have been taken, `times` times; steps lost each time."""
    ctx = elasticrt.init(backend="gloo")
    loop = elasticrt.Loop(directory / "ckpt", every="1 h", model=job.model, optimizer=job.optimizer)
    notes = directory / "kills"
    for _ in loop.epochs(1):
        resumed = loop.steps_done
        with notes.open("a") as file:
            file.write(f"resumed {resumed}\n")
        end = time.monotonic() + 4.0 + 0.77 * ctx.restart_count
        for _batch in loop.batches(itertools.repeat(None)):
            job.step()
            if ctx.restart_count < times and time.monotonic() > end:
                with notes.open("a") as file:
                    file.write(f"killed {loop.steps_done}\n")
                os.kill(os.getpid(), signal.SIGKILL)
            if ctx.restart_count >= times:
                os._exit(0)


def main() -> None:
    """As the arguments say."""
    method, directory = sys.argv[1], Path(sys.argv[6])
    job = Job(sys.argv[2], float(sys.argv[3]))
    directory.mkdir(parents=True, exist_ok=True)
    if method == "copies":
        copies(job, directory)
    elif method == "kills":
        kills(job, int(sys.argv[5]), directory)
    else:
        disk(method, job, float(sys.argv[4]), int(sys.argv[5]), directory)


if __name__ == "__main__":
    main()
