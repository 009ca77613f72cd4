"""Play a run on one machine: one real agent process for each node, their output merged, faults on request.

Everything that is said comes from `narration`, everything that is decided about faults from `fault_plan`; this file
starts processes, reads pipes and sends signals. One thread, one `select`: agents are started from the main thread,
because the leash that ends them with us is tied to the thread that made them.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from elasticrt.ipc.leash import command_of
from elasticrt.ipc.wakeup import Wakeup
from elasticrt.ipc.wording import counted
from elasticrt.playground import fault_plan, narration, pause
from elasticrt.playground.event_stream import read_event
from elasticrt.playground.screen import Screen

LOOK_EVERY_S = 0.1  # How late a fault by the clock or a status line may be.
TERM_GRACE_S = 10.0  # From SIGTERM to SIGKILL when the simulation is stopped.
LAST_OUTPUT_S = 1.0  # How long a pipe is read after its agent has ended; whoever else holds it has no more to say.
LINE_BYTES_MAX = 1 << 16


@dataclass(frozen=True)
class Simulation:
    """What to play.

    `agent` is the program that an agent is (`python -m elasticrt run`), `options` go to every agent as they are,
    `command` is the training script with its arguments.
    """

    run_id: str
    nodes: int
    min_nodes: int
    max_nodes: int
    workers_per_node: int
    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    faults: tuple[fault_plan.Fault, ...] = ()
    run_dir: str | None = None
    agent: tuple[str, ...] = (sys.executable, "-m", "elasticrt", "run")

    def agent_command(self, node: str, events_fd: int) -> list[str]:
        """The command line of one node's agent."""
        mine = ["--node", node, "--run-id", self.run_id, "--events-fd", str(events_fd)]
        size = ["--min-nodes", str(self.min_nodes), "--max-nodes", str(self.max_nodes)]
        where = ["--run-dir", self.run_dir] if self.run_dir is not None else []
        workers = ["--nproc-per-node", str(self.workers_per_node)]
        return [*self.agent, *mine, *size, *workers, *where, *self.options, *self.command]


def play(simulation: Simulation, screen: Screen) -> int:
    """Run it to its end and return the exit code: 0 only when the run succeeded, 130 or 143 when it was stopped."""
    player = _Player(simulation, screen)
    with player.signals():
        try:
            return player.run()
        finally:
            player.close()


@dataclass
class _Agent:
    """One agent process and the read ends of its pipes."""

    node: str
    process: subprocess.Popen[bytes]
    pidfd: int
    pipes: list[_Pipe] = field(default_factory=list)


@dataclass
class _Pipe:
    """A read end and the incomplete line that has been read from it."""

    fd: int
    node: str
    events: bool
    rest: bytes = b""


class _Player:
    """The state of a running simulation."""

    def __init__(self, simulation: Simulation, screen: Screen) -> None:
        now = time.monotonic()
        self._simulation = simulation
        self._screen = screen
        self._story = narration.Narration(started_at=now, nodes=simulation.nodes, min_nodes=simulation.min_nodes)
        self._faults = simulation.faults
        self._agents: dict[str, _Agent] = {}  # Those not yet reaped: their pids are ours and can't be reused.
        self._pipes: dict[int, _Pipe] = {}
        self._pauses: list[subprocess.Popen[bytes]] = []
        self._started = 0
        self._stopped_by = 0
        self._kill_at: float | None = None
        self._last_end = now
        self._selector = selectors.DefaultSelector()
        self._bell = Wakeup()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ring a bell that the loop hears, and do nothing else."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        wakeup_before = self._bell.ring_on_signals()
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def run(self) -> int:
        """The whole simulation."""
        self._selector.register(self._bell, selectors.EVENT_READ, self._on_signal)
        for _ in range(self._simulation.nodes):
            self._add_node()
        while self._agents or (self._pipes and time.monotonic() < self._last_end + LAST_OUTPUT_S):
            for key, _ in self._selector.select(LOOK_EVERY_S):
                if key.fileobj in self._selector.get_map():  # An agent's end closes what else was ready.
                    key.data()
            self._on_time(time.monotonic())
        stopped_by = signal.Signals(self._stopped_by).name if self._stopped_by else ""
        for fault in () if stopped_by else self._faults:
            self._screen.show(narration.Line(f"!! never came: {fault.text}"))
        for line in narration.summary(self._story, time.monotonic(), stopped_by):
            self._screen.show(line)
        return 128 + self._stopped_by if self._stopped_by else narration.verdict(self._story)[0]

    def close(self) -> None:
        """End what is left (only after an error is there anything) and give back every descriptor."""
        self._end_pauses()
        for agent in self._agents.values():
            agent.process.kill()
            agent.process.wait()
            os.close(agent.pidfd)
        for fd in self._pipes:
            os.close(fd)
        self._selector.close()
        self._bell.close()

    # --- What happens -------------------------------------------------------------------------------------------------

    def _on_time(self, now: float) -> None:
        told, lines = narration.tick(self._story, now)
        self._tell(told, lines)
        self._pauses = [process for process in self._pauses if process.poll() is None]
        if self._screen.broken and not self._stopped_by:
            self._stop(signal.SIGPIPE)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for agent in self._agents.values():
                agent.process.kill()
        if not self._stopped_by and self._agents:
            now_due, self._faults = fault_plan.due(self._faults, self._story.step, now - self._story.started_at)
            for fault in now_due:
                self._feed(
                    {"event": "fault", "node": "", "at": now, "text": fault.text, "done": self._do(fault.action)}
                )

    def _on_signal(self) -> None:
        for number in self._bell.heard():
            if number in (signal.SIGINT, signal.SIGTERM):
                self._stop(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        """The first time SIGTERM to all agents, the second time SIGKILL."""
        self._end_pauses()  # A stopped process would not hear of it.
        now = time.monotonic()
        if self._stopped_by:
            self._kill_at = now
            return
        self._stopped_by, self._kill_at = number, now + TERM_GRACE_S
        self._screen.show(narration.Line(f"-- {number.name}: stopping {counted(len(self._agents), 'agent')}"))
        for agent in self._agents.values():
            agent.process.terminate()

    def _on_end(self, agent: _Agent) -> None:
        code = agent.process.wait()
        self._selector.unregister(agent.pidfd)
        os.close(agent.pidfd)
        del self._agents[agent.node]
        for pipe in agent.pipes:
            if pipe.fd in self._pipes:
                self._read(pipe)  # What it said last comes before its end.
        self._last_end = time.monotonic()
        self._feed({"event": "agent_exited", "node": agent.node, "at": self._last_end, "code": code})

    def _read(self, pipe: _Pipe) -> None:
        """Read all there is; a line is passed on when it is complete, or too long to wait for."""
        while True:
            try:
                data = os.read(pipe.fd, 1 << 16)
            except BlockingIOError:
                return
            *lines, pipe.rest = (pipe.rest + data).split(b"\n")
            if pipe.rest and (not data or len(pipe.rest) > LINE_BYTES_MAX):
                lines.append(pipe.rest)
                pipe.rest = b""
            for line in lines:
                self._line(pipe, line)
            if not data:
                self._selector.unregister(pipe.fd)
                os.close(pipe.fd)
                del self._pipes[pipe.fd]
                return

    def _line(self, pipe: _Pipe, line: bytes) -> None:
        if not pipe.events:
            self._screen.show(narration.Line(line.decode(errors="replace"), pipe.node))
            return
        try:
            event = read_event(line)
        except ValueError as error:
            self._screen.show(narration.Line(f"?? {pipe.node} sent {error}"))
            return
        if event is not None:
            self._feed(event)

    def _feed(self, event: dict[str, Any]) -> None:
        told, lines = narration.tell(self._story, event)
        self._tell(told, lines)

    def _tell(self, told: narration.Narration, lines: tuple[narration.Line, ...]) -> None:
        self._story = told
        for line in lines:
            self._screen.show(line)

    # --- What is done -------------------------------------------------------------------------------------------------

    def _add_node(self) -> str:
        node = fault_plan.node_name(self._started)
        self._started += 1
        events_read, events_write = os.pipe()
        command = command_of(self._simulation.agent_command(node, events_write))
        # Agents and workers share the machine's cores here, which is what torchrun sets this for as well.
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                pass_fds=(events_write,),
                start_new_session=True,
            )
        finally:
            os.close(events_write)
        assert process.stdout is not None and process.stderr is not None
        agent = _Agent(node, process, os.pidfd_open(process.pid))
        self._agents[node] = agent
        self._selector.register(agent.pidfd, selectors.EVENT_READ, lambda: self._on_end(agent))
        for stream, events in ((events_read, True), (process.stdout, False), (process.stderr, False)):
            # The pipe's descriptor is ours alone: a Popen that is collected must not close it a second time.
            fd = stream if isinstance(stream, int) else os.dup(stream.fileno())
            if not isinstance(stream, int):
                stream.close()
            os.set_blocking(fd, False)
            pipe = _Pipe(fd, node, events)
            agent.pipes.append(pipe)
            self._pipes[fd] = pipe
            self._selector.register(fd, selectors.EVENT_READ, lambda pipe=pipe: self._read(pipe))
        return f"pid {process.pid} is {node}"

    def _do(self, action: fault_plan.Action) -> str:
        """Carry out a fault; what was done, in words."""
        match action:
            case fault_plan.AddNode():
                return self._add_node()
            case fault_plan.KillWorker(rank):
                return self._kill_worker(rank)
        agent = self._agents.get(fault_plan.node_name(action.node))
        if agent is None:
            return "no such node is running: nothing done"
        pid = agent.process.pid
        match action:
            case fault_plan.KillNode():
                agent.process.kill()
                return f"SIGKILL to pid {pid}"
            case fault_plan.DrainNode():
                agent.process.terminate()
                return f"SIGTERM to pid {pid}"
            case fault_plan.PauseNode(_, for_s):
                _, workers = self._story.workers.get(agent.node, (0, {}))
                words = [str(word) for word in (for_s, pid, *workers.values())]
                helper = [sys.executable, "-m", "elasticrt.playground.pause", *words]
                self._pauses.append(subprocess.Popen(helper, stdin=subprocess.PIPE, start_new_session=True))
                return f"SIGSTOP to pid {pid} and its workers, SIGCONT after {for_s:g} s"

    def _kill_worker(self, rank: int) -> str:
        pid = self._story.worker(rank)
        agents = [agent.process.pid for agent in self._agents.values()]
        # A number that an event named some time ago is signalled only while it still belongs to one of our agents.
        if pid is None or not any(pause.line_of_descent(pid, agent) for agent in agents):
            return "no such worker is running: nothing done"
        with suppress(ProcessLookupError):  # It has ended by itself in this very moment.
            os.kill(pid, signal.SIGKILL)
        return f"SIGKILL to pid {pid}"

    def _end_pauses(self) -> None:
        for process in self._pauses:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        self._pauses = []
