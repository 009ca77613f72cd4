"""A worker parent and a group that runs small scripts with it, and what to compare and to wait with."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.messages import Warm
from elasticrt.run_options import RunOptions
from elasticrt.settings import Command
from elasticrt.workers.environment import worker_environment
from elasticrt.workers.fork_server import WorkerParent
from elasticrt.workers.group import WorkerGroup
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerStarted

WAIT_S = 60.0


@dataclass
class Ended:
    """What came of one generation: by local rank its exit code, output, error output and WorkerEnded event."""

    codes: dict[int, int] = field(default_factory=dict)
    out: dict[int, str] = field(default_factory=dict)
    err: dict[int, str] = field(default_factory=dict)
    ended: dict[int, WorkerEnded] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)


class Rig:
    """A worker parent with its group. Generations are numbered from 1."""

    def __init__(self, method: str, env: dict[str, str] | None = None, **options: Any) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        self.base_env = worker_environment({**os.environ, **(env or {})}, 2, fresh=False)
        options = {"preload": (), "kind": "script", "target": "", **options}
        self.parent = WorkerParent(method=method, env=self.base_env, directory=Path.cwd(), **options)
        shown = RunOptions(local_ranks_filter=frozenset())
        self.group = WorkerGroup(self.events.put, options=shown)
        self.group.set_parent(self.parent)
        self.generation = 0
        self.run_dir = Path("no run yet")
        try:
            self.warm = self.wait(Warm)
        except BaseException:
            self.close()
            raise

    def wait(
        self, kind: type, matches: Callable[[Any], bool] = lambda _event: True, seen: list[Any] | None = None
    ) -> Any:
        """The next event of a kind that matches; fails after WAIT_S. What passes by is added to `seen`."""
        deadline = time.monotonic() + WAIT_S
        passed = []
        while True:
            try:
                event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                said = {path.name: path.read_text(errors="replace") for path in self.run_dir.glob("logs/*/*.*")}
                pytest.fail(f"no {kind.__name__} within {WAIT_S} s; there were {passed}, and {said}")
            passed.append(event)
            if seen is not None:
                seen.append(event)
            if isinstance(event, kind) and matches(event):
                return event

    def start(
        self, command: Command, directory: Path, workers: int = 1, env: dict[str, str] | None = None, **seat: Any
    ):
        """Start a generation of workers on this one node; returns their pids by local rank."""
        self.generation += 1
        self.run_dir = directory / "run"
        listen = socket.create_server(("127.0.0.1", 0))
        fields = {
            "world_size": workers,
            "local_world_size": workers,
            "group_rank": 0,
            "group_world_size": 1,
            "master_addr": "127.0.0.1",
            "master_port": listen.getsockname()[1],
            "restart_count": 0,
            "max_restarts": 3,
            "run_id": "test",
            "attempt": 1,
            "nonce": f"nonce-{self.generation}",
            "node": "node-0",
            "run_dir": str(self.run_dir),
        } | seat
        envs = [WorkerEnv(rank=n, local_rank=n, generation=self.generation, **fields) for n in range(workers)]
        base_env = {**self.base_env, **(env or {})}
        self.group.start(self.generation, envs, command, listen, base_env, directory)

    def pids(self, workers: int = 1) -> dict[int, int]:
        """Process ids of the generation that was just started."""
        found = [self.wait(WorkerStarted, lambda e: e.generation == self.generation) for _ in range(workers)]
        return {event.local_rank: event.pid for event in found}

    def finish(self, workers: int = 1) -> Ended:
        """Wait for the end of the newest generation; workers that linger are released when all are done."""
        result = Ended()
        for _ in range(workers):
            event = self.wait(WorkerEnded, lambda e: e.generation == self.generation, result.events)
            result.codes[event.local_rank] = event.code
            result.ended[event.local_rank] = event
        self.group.release(self.generation)
        self.wait(GroupEnded, lambda e: e.generation == self.generation, result.events)
        for rank in result.codes:
            for stream, texts in (("out", result.out), ("err", result.err)):
                path = self.run_dir / "logs" / f"generation-{self.generation}" / f"rank-{rank}.node-0.{stream}"
                texts[rank] = path.read_text(errors="replace") if path.exists() else ""
        return result

    def run(
        self, body: str, directory: Path, workers: int = 1, arguments: tuple[str, ...] = (), **options: Any
    ) -> Ended:
        """Write a script, run it to its end."""
        script = directory / "script.py"
        script.write_text(textwrap.dedent(body))
        self.start(Command((str(script), *arguments)), directory, workers, **options)
        return self.finish(workers)

    def close(self) -> None:
        """End everything."""
        self.parent.close()
        self.group.close()


def plainly(body: str, directory: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """The same script with `python -u`, for comparison; in a session of its own, as launchers start programs."""
    script = directory / "script.py"
    script.write_text(textwrap.dedent(body))
    command = [sys.executable, "-u", str(script), *arguments]
    return subprocess.run(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        start_new_session=True,
    )


def alive(pid: int) -> bool:
    """Whether a process runs (one that waits to be reaped does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition()` is true; fails after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            pytest.fail(f"not within {WAIT_S} s: {what}")
        time.sleep(0.01)
