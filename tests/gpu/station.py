"""The agent's part for the workers of one node, played without etcd, grpc or pydantic: starts, seats, holds, kills.

So the workers' own code runs as it is on a machine that has torch and nothing else of ours. What agents agree on in
etcd, which takes some milliseconds of a recovery, is decided here at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import Commit, WorkerEnv
from elasticrt.ipc.messages import LeftGeneration, Message, OpenDirectory, Reply, Reseat, Save
from elasticrt.ipc.status_page import StatusPage

ROOT = Path(__file__).resolve().parents[2]
START_S_MAX = 240.0
"""Until a worker that has been started makes a step, or is ready: it imports torch, and may fill gigabytes."""

SEEN_S = 0.05
"""Workers that were told to hold have read that after so long, or are let into no further step."""

POLL_S = 0.02


class Failed(Exception):  # noqa: N818  It is what a row of the table says.
    """Something did not come, or was not what it has to be."""


@dataclass(frozen=True)
class Mark:
    """The end of a step, as a worker has noted it. `at`: CLOCK_MONOTONIC in seconds."""

    at: float
    generation: int
    rank: int
    world: int
    step: int
    weights: float
    sample: float


class Worker:
    """One process, and what it has said."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, page: StatusPage, heads: dict[str, Any]):
        self.process = process
        self.page = page
        self.channel = channel
        self.said: list[Message] = []
        self._heads = heads
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(ChannelClosed, OSError, ValueError):
            while True:
                received = self.channel.receive(0.5)
                if received is None:
                    continue
                message, fds = received
                for fd in fds:
                    os.close(fd)
                self.said.append(message)
                if isinstance(message, OpenDirectory):
                    self.channel.send(Reply(message.request, ok=True, data=dict(self._heads)))
                elif isinstance(message, Save):
                    self._heads["head"] = message.commit
                    self.channel.send(Reply(message.request, ok=True))

    def left(self, generation: int) -> bool:
        """Whether it has stopped in this generation, as agreed; 0: has set up beside the others."""
        return any(
            isinstance(each, LeftGeneration) and each.generation == generation and not each.error for each in self.said
        )


class Station:
    """Workers of one node. Use it as a context manager: none of its processes outlives it.

    Args:
        directory: for marks, checkpoints and output.
        backend: of the process groups.
        device: "cpu" or "cuda".
        state_mb: megabytes (10^6 bytes) of frozen state in each worker.
        env: further variables.
    """

    def __init__(
        self, directory: Path, *, backend: str, device: str, state_mb: float, env: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        self._words = [str(directory), backend, device, str(state_mb)]
        self._env = dict(env or {})
        self._heads: dict[str, Any] = {}
        self._port = 0
        self._nonce = ""
        self.generation = 0
        self.workers: dict[int, Worker] = {}
        self._frozen: list[Worker] = []
        for name in ("marks", "entered"):
            (directory / name).mkdir(parents=True)

    def __enter__(self) -> Station:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self.workers.values(), *self._frozen]:
            _end(worker)

    def begin(self, world: int) -> None:
        """Start a generation of new processes, and wait for its first steps."""
        self.generation, self._nonce = self.generation + 1, secrets.token_hex(8)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        for local_rank in range(world):
            self._start(self._place(local_rank, world))
        self.until(lambda: len(self.firsts()) == world, START_S_MAX, "a first step")

    def start_beside(self, local_rank: int) -> None:
        """Start a newcomer beside the training, and wait until it is ready."""
        world = len(self.workers) + 1
        self._start(replace(self._place(world - 1, world), local_rank=local_rank, generation=0, beside=True))
        self.until(lambda: self.workers[local_rank].left(0), START_S_MAX, "a newcomer that is ready")

    def hold(self, *, save: bool = False) -> None:
        """Stop all of the present generation after the same step; with `save` a checkpoint is committed first."""
        seated = [each for each in self.workers.values() if not each.left(0) or each.page.step]
        for each in seated:
            each.page.go = 0
            each.page.stop = 1
        time.sleep(SEEN_S)
        furthest = max(each.page.entered for each in seated)
        for each in seated:
            each.page.save = int(save)
            each.page.go = furthest
        self.until(lambda: all(each.left(self.generation) for each in seated), START_S_MAX, "all to hold")

    def seat(self) -> float:
        """Let all workers go on in the next generation, in the order of their age; when that was."""
        self.generation, self._nonce = self.generation + 1, secrets.token_hex(8)
        listening = socket.create_server(("127.0.0.1", 0))
        self._port = listening.getsockname()[1]
        at = time.monotonic()
        with listening:
            for rank, (local_rank, worker) in enumerate(self.workers.items()):
                page = worker.page
                page.stop = page.go = page.save = 0
                env = replace(self._place(rank, len(self.workers)), local_rank=local_rank)
                worker.channel.send(Reseat(env.to_env()), [listening.fileno()] if rank == 0 else [])
        return at

    def kill(self, local_rank: int) -> float:
        """Kill a worker, and see it gone; when it was killed."""
        at = time.monotonic()
        _end(self.workers.pop(local_rank))
        return at

    def freeze(self, local_rank: int) -> None:
        """Stop a worker without ending it, and count it no more: its connections stay, so that its peers wait."""
        self._frozen.append(self.workers.pop(local_rank))
        os.kill(self._frozen[-1].process.pid, signal.SIGSTOP)

    def marks(self) -> list[Mark]:
        """All steps so far, as they ended."""
        lines = [line for path in (self.directory / "marks").iterdir() for line in path.read_text().splitlines(True)]
        marks = [_mark(line.split()) for line in lines if line.endswith("\n")]
        return sorted(marks, key=lambda each: each.at)

    def entered_s(self) -> float:
        """How long the Loop of a present worker took to begin, at the most."""
        pids = [worker.process.pid for worker in self.workers.values()]
        return max(float((self.directory / "entered" / str(pid)).read_text()) for pid in pids)

    def firsts(self) -> dict[int, Mark]:
        """By rank, the first step in the present generation."""
        found: dict[int, Mark] = {}
        for mark in self.marks():
            if mark.generation == self.generation:
                found.setdefault(mark.rank, mark)
        return found

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait. Raises Failed when it takes too long, or a worker ends meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            dead = [rank for rank, each in self.workers.items() if each.process.poll() is not None]
            if dead:
                raise Failed(f"worker {dead[0]} has ended before {what}: {self.last_words(dead[0])}")
            if time.monotonic() > deadline:
                raise Failed(f"{what} did not come in {timeout_s:g} s")
            time.sleep(POLL_S)

    def last_words(self, local_rank: int) -> str:
        """The end of what a worker has printed."""
        lines = (self.directory / f"output-{local_rank}").read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])

    def _place(self, rank: int, world: int) -> WorkerEnv:
        head = self._heads.get("head")
        return WorkerEnv(
            rank=rank,
            local_rank=rank,
            world_size=world,
            local_world_size=world,
            group_rank=0,
            group_world_size=1,
            master_addr="127.0.0.1",
            master_port=self._port,
            restart_count=0,
            max_restarts=3,
            run_id="gpu-table",
            attempt=1,
            generation=self.generation,
            nonce=self._nonce,
            node="here",
            run_dir="",
            resume=None if head is None else Commit.from_fields(head),
        )

    def _start(self, place: WorkerEnv) -> None:
        channel, theirs = Channel.pair()
        page_fd, theirs_fd = StatusPage.create(), theirs.detach()
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            **self._env,
            **replace(place, channel_fd=theirs_fd, page_fd=page_fd).to_env(),
        }
        with (self.directory / f"output-{place.local_rank}").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.train", *self._words],
                cwd=ROOT,
                env=env,
                pass_fds=[theirs_fd, page_fd],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        page = StatusPage(page_fd)
        os.close(page_fd)
        os.close(theirs_fd)
        self.workers[place.local_rank] = Worker(process, channel, page, self._heads)


def _end(worker: Worker) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait(30)
    worker.channel.close()


def _mark(words: list[str]) -> Mark:
    at, generation, rank, world, step, weights, sample = words
    return Mark(float(at), int(generation), int(rank), int(world), int(step), float(weights), float(sample))
