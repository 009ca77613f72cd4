"""Real agents as real processes on this machine, and their events, for tests that kill them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elasticrt.event_log import files, records
from elasticrt.events import AgentStarted
from elasticrt.story.buckets import totals
from elasticrt.story.run_dir import read
from tests.servers import end_embedded_store

REPOSITORY = Path(__file__).resolve().parents[1]
RECORDER = REPOSITORY / "tests" / "chaos" / "recorder.py"
TOGETHER = ("--rdzv-conf", "last_call_timeout=60")
"""The first generation begins when max-nodes are ready, however far apart a busy machine starts them."""


@dataclass
class AgentProcess:
    """One `elasticrt run`, with the events it has written so far."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    events: list[dict] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """Of the agent."""
        return self.process.pid

    def worker_pids(self) -> dict[int, int]:
        """Process ids of its newest generation's workers, by rank."""
        started = [event for event in self.events if event["event"] == "workers_started"]
        return dict(zip(started[-1]["ranks"], started[-1]["pids"], strict=True)) if started else {}

    def text(self) -> str:
        """What it and its workers have printed."""
        return self.output.read_text(errors="replace")


class Cluster:
    """Agents of one run. Use it as a context manager: whatever happens, nothing is left."""

    def __init__(self, directory: Path, run_id: str, options: list[str], script: list[str]) -> None:
        self.directory = directory
        self.run_id = run_id
        self.options = options
        self.script = script
        self.agents: dict[str, AgentProcess] = {}
        self._changed = threading.Condition()
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end()
        if kind is None and self.run_dir.is_dir():
            assert_buckets_add_up(self.run_dir)

    def _end(self) -> None:
        for agent in self.agents.values():
            if agent.process.poll() is None:
                agent.process.terminate()
        for agent in self.agents.values():
            try:
                agent.process.wait(15)
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait(15)
        for reader in self._readers:
            reader.join(15)
        end_embedded_store(self.run_id)

    @property
    def run_dir(self) -> Path:
        """Where logs and events are."""
        return self.directory / "run" / self.run_id

    def start(self, name: str, *extra: str) -> AgentProcess:
        """Start an agent as one more node, with `extra` options of its own."""
        reader, writer = os.pipe()
        output = self.directory / f"{name}-{len(self.agents)}.out"
        command = [sys.executable, "-m", "elasticrt", "run", "--run-id", self.run_id, "--node", name]
        command += ["--log-dir", str(self.directory / "run"), "--events-fd", str(writer), *self.options]
        command = self.wrap(name, [*command, *extra, *self.script])
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                pass_fds=[writer],
                cwd=self.directory,
                env=env,
            )
        os.close(writer)
        agent = AgentProcess(name, process, output)
        self.agents[name if name not in self.agents else f"{name}#{len(self.agents)}"] = agent
        thread = threading.Thread(target=self._read, args=(agent, reader), daemon=True)
        thread.start()
        self._readers.append(thread)
        return agent

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """The command that starts a node's agent. A subclass may run it elsewhere, as the same process."""
        return command

    def _read(self, agent: AgentProcess, reader: int) -> None:
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                with self._changed:
                    agent.events.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def events(self, name: str) -> list[dict]:
        """All events of one kind, of all agents, in order of time."""
        found = [event for agent in self.agents.values() for event in agent.events if event["event"] == name]
        return sorted(found, key=lambda event: event["at"])

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Wait until the events make `condition` true."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.story()}")
                self._changed.wait(min(left, 1.0))

    def wait_for_commits(self, number: int, generation: int = 1) -> None:
        """Wait until so many checkpoints of a generation, or of later ones, have been committed."""
        self.wait(
            f"{number} commits in generation {generation}",
            lambda: sum(event.get("generation", 0) >= generation for event in self.events("committed")) >= number,
        )

    def wait_for_step_after(self, step: int) -> None:
        """Wait until training has finished a step greater than `step`."""
        self.wait(f"a step after {step}", lambda: self.last_step() > step)

    def last_step(self) -> int:
        """The newest step that rank 0's node has reported."""
        return max((event["step"] for event in self.events("step")), default=0)

    def number(self) -> int:
        """The newest generation that has started anywhere."""
        return max((event["number"] for event in self.events("generation")), default=0)

    def holder_of_rank(self, rank: int) -> AgentProcess:
        """The agent whose newest generation has this rank."""
        number = self.number()
        for agent in self.agents.values():
            started = [e for e in agent.events if e["event"] == "workers_started" and e["generation"] == number]
            if started and rank in started[-1]["ranks"]:
                return agent
        raise AssertionError(f"nobody has rank {rank} in generation {number}\n{self.story()}")

    def ended(self, timeout_s: float = 90.0) -> dict[str, int]:
        """Wait for all agents; their exit codes."""
        deadline = time.monotonic() + timeout_s
        codes = {}
        for key, agent in self.agents.items():
            try:
                codes[key] = agent.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{key} has not ended within {timeout_s:g} s\n{self.story()}") from None
        for reader in self._readers:
            reader.join(10)
        return codes

    def story(self) -> str:
        """Everything known, for a failing test."""
        parts = []
        for key, agent in self.agents.items():
            parts.append(f"--- {key} (pid {agent.pid}, code {agent.process.poll()})")
            parts += [json.dumps(event) for event in agent.events if event["event"] != "step"][-40:]
            parts.append(agent.text()[-3000:])
        return "\n".join(parts)


def assert_buckets_add_up(run_dir: Path) -> None:
    """Of each agent's life every moment is in one bucket, from its start to its end, or to the last it has said.

    A killed agent's goes on to the moment in which the others had noticed.
    """
    story = read(run_dir)
    lives = [life for path in files(run_dir) for life in _lives_in(path)]
    assert len(lives) == len(story.lives.all), "every agent that has started is a life of the story"
    for life in story.lives.all:
        spans = story.lives.spans_of(life)
        spent_s = totals(spans)
        lived_s = max(until - since for node, since, until in lives if (node, since) == (life.node, life.started_at))
        if life.gone_at is not None:
            lived_s = max(lived_s, life.gone_at - life.begin)
        assert sum(spent_s.values()) == pytest.approx(lived_s, rel=0.005, abs=0.001), (life.node, spent_s)
        assert all(span.end > span.begin for span in spans), spans


def _lives_in(path: Path) -> list[tuple[str, float, float]]:
    """Node, start and last moment of each life that a file tells of, by the machine's clock."""
    found: list[tuple[str, float, float]] = []
    for record in records(path):
        if isinstance(record.event, AgentStarted):
            found.append((record.node, record.at, record.at))
        elif found:
            found[-1] = (*found[-1][:2], record.at)
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal one process by its id."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def gone(pids: list[int], timeout_s: float) -> list[int]:
    """Those of `pids` that still exist (and are no zombies) after at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _lives(pid)]
        time.sleep(0.01)
    return left


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
