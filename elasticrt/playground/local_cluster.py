"""Plays a run on one machine: one real agent process for each node, their output merged, faults on request.

Threads read the agents' pipes into one queue, and the main thread does everything else. The main thread also starts the
agents, because the leash that ends them with this process is tied to the thread that starts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any, TextIO

from elasticrt import events
from elasticrt.ipc.leash import command_of
from elasticrt.ipc.std_streams import write
from elasticrt.ipc.wording import counted
from elasticrt.playground import fault_plan, narration

# How late a fault by the clock or a status line may be.
LOOK_EVERY_S = 0.1
# From SIGTERM to SIGKILL when the simulation is stopped.
TERM_GRACE_S = 10.0
# How long pipes are read after their agent has ended: another process may hold them open.
LAST_OUTPUT_S = 1.0
LINE_BYTES_MAX = 1 << 16

# Cyan, yellow, magenta, green, blue, red: distinct on dark and on light.
COLOURS = (36, 33, 35, 32, 34, 31)
BOLD, DIM = 1, 2
# How the simulation's own lines begin, and how each kind is painted.
_OWN = {"--": BOLD, "!!": BOLD, "..": DIM}


@dataclass(frozen=True)
class Simulation:
    """What to play.

    Attributes:
        nodes: how many nodes there are at the beginning.
        words: what every agent is told: options, then the training script with its arguments.
        faults: what happens, and when.
        agent: the program that an agent is (`python -m elasticrt run`).
    """

    nodes: int
    words: tuple[str, ...]
    faults: tuple[fault_plan.Fault, ...] = ()
    agent: tuple[str, ...] = (sys.executable, "-m", "elasticrt", "run")

    def agent_command(self, node: str, events_fd: int) -> list[str]:
        """The command line of one node's agent."""
        return [*self.agent, "--node", node, "--events-fd", str(events_fd), *self.words]


class Screen:
    """Prints lines to `out`, each with the tag of its node, in colour only on a terminal.

    Attributes:
        broken: whether the reader of `out` has closed it.
    """

    def __init__(self, out: TextIO, env: Mapping[str, str]) -> None:
        self._out = out
        # NO_COLOR counts if it is set and not empty, see no-color.org.
        self._colour = out.isatty() and not env.get("NO_COLOR")
        self.broken = False

    def show(self, line: str, node: str = "") -> None:
        """Print one line, at once. `node` has printed it; "" stands for the simulation itself."""
        if self.broken:
            return
        self.broken = not write(self._out, self._format(line, node) + "\n")

    def _format(self, line: str, node: str) -> str:
        if not node:
            return self._paint(line, _OWN.get(line[:2], 0))
        colour = COLOURS[int(node.removeprefix("node-")) % len(COLOURS)]
        # A carriage return would let one node's progress bar write over another node's tag.
        return f"{self._paint(node, colour)} | " + line.rstrip("\r").replace("\r", " ")

    def _paint(self, text: str, code: int) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour and code else text


def play(simulation: Simulation, screen: Screen) -> int:
    """Play the run to its end. Returns 0 only if the run succeeded, and 130 or 143 if the simulation was stopped."""
    player = _Player(simulation, screen)
    # These signals go into the queue and do nothing else. `SimpleQueue.put` is safe in a handler.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: player.news.put(("", got)))
    return player.run()


class _Player:
    """The state of a running simulation."""

    def __init__(self, simulation: Simulation, screen: Screen) -> None:
        self._simulation = simulation
        self._screen = screen
        self._narration = narration.Narration(started_at=time.time())
        self._faults = simulation.faults
        # By node, the agents whose end has not been noted.
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        # The most steps of optimizers in one process of a script without a Loop, which tells no other steps.
        self._beats = 0
        self._stopped_by = 0
        self._kill_at: float | None = None
        # By node: a line of output, an event, or an exit code. A signal to this process has the node "".
        self.news: SimpleQueue[tuple[str, bytes | events.Record | int]] = SimpleQueue()

    def run(self) -> int:
        """Run the whole simulation. Returns the exit code."""
        for _ in range(self._simulation.nodes):
            self._add_node()
        while self._agents:
            with suppress(Empty):
                self._take(*self.news.get(timeout=LOOK_EVERY_S))
                while True:
                    self._take(*self.news.get_nowait())
            self._on_time(time.time())
        stopped_by = signal.Signals(self._stopped_by).name if self._stopped_by else ""
        for fault in () if stopped_by else self._faults:
            self._screen.show(f"!! never came: {fault.text}")
        self._show(self._narration.summary(stopped_by))
        return 128 + self._stopped_by if self._stopped_by else self._narration.verdict()[0]

    # --- What happens -------------------------------------------------------------------------------------------------

    def _take(self, node: str, news: bytes | events.Record | int) -> None:
        """Take note of one item of the queue."""
        if isinstance(news, events.Record):
            if isinstance(news.event, events.Progress):
                self._beats = max(self._beats, news.event.beats)
            self._show(self._narration.tell(news))
        elif isinstance(news, bytes):
            self._screen.show(news.decode(errors="replace").removesuffix("\n"), node)
        elif not node:
            self._stop(signal.Signals(news))
        else:
            del self._agents[node]
            self._show(self._narration.exited(node, news))

    def _on_time(self, now: float) -> None:
        self._show(self._narration.tick(now))
        if self._screen.broken and not self._stopped_by:
            self._stop(signal.SIGPIPE)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for process in self._agents.values():
                process.kill()
        if not self._stopped_by and self._agents:
            step, elapsed_s = max(self._narration.story.steps.highest, self._beats), now - self._narration.started_at
            due = [fault for fault in self._faults if fault.is_due(step, elapsed_s)]
            self._faults = tuple(fault for fault in self._faults if fault not in due)
            for fault in due:
                self._screen.show(f"!! {fault.text}  ({self._do(fault)})")

    def _stop(self, number: signal.Signals) -> None:
        """Send SIGTERM to all agents; the second time SIGKILL."""
        if self._stopped_by:
            self._kill_at = time.time()
            return
        self._stopped_by, self._kill_at = number, time.time() + TERM_GRACE_S
        self._screen.show(f"-- {number.name}: stopping {counted(len(self._agents), 'agent')}")
        for process in self._agents.values():
            process.terminate()

    def _show(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._screen.show(line)

    # --- What is done -------------------------------------------------------------------------------------------------

    def _add_node(self) -> str:
        node = f"node-{self._started}"
        self._started += 1
        events_read, events_write = os.pipe()
        try:
            process = subprocess.Popen(
                command_of(self._simulation.agent_command(node, events_write)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # Agents and workers share the machine's cores here, so each uses one thread; torchrun sets this for the
                # same reason. By default no GPU is visible, because all nodes would take the same one, which NCCL
                # refuses.
                env={"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **os.environ},
                pass_fds=(events_write,),
                start_new_session=True,
            )
        finally:
            os.close(events_write)
        self._agents[node] = process
        threading.Thread(target=self._follow, args=(node, process, os.fdopen(events_read, "rb")), daemon=True).start()
        return f"pid {process.pid} is {node}"

    def _follow(self, node: str, process: subprocess.Popen[bytes], of_events: IO[bytes]) -> None:
        """In a thread: read the agent's pipes to their ends, then report its exit code."""
        pipes = ((of_events, _event), (process.stdout, bytes))
        readers = [threading.Thread(target=self._read, args=(node, *pipe), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        code, until = process.wait(), time.monotonic() + LAST_OUTPUT_S
        for reader in readers:
            reader.join(max(0.0, until - time.monotonic()))
        self.news.put((node, code))

    def _read(self, node: str, pipe: IO[bytes], meaning: Callable[[bytes], Any]) -> None:
        """In a thread: put each line into the queue when it is complete, or too long to wait for."""
        with pipe:
            while line := pipe.readline(LINE_BYTES_MAX):
                self.news.put((node, meaning(line)))

    def _do(self, fault: fault_plan.Fault) -> str:
        """Carry out a fault. Returns a text about what was done."""
        if fault.what == "add node":
            return self._add_node()
        if fault.what == "kill worker":
            return self._kill_worker(fault.number)
        node = f"node-{fault.number}"
        process = self._agents.get(node)
        if process is None:
            return "no such node is running: nothing done"
        pid = process.pid
        if fault.what == "kill node":
            process.kill()
            return f"SIGKILL to pid {pid}"
        process.terminate()
        return f"SIGTERM to pid {pid}"

    def _kill_worker(self, rank: int) -> str:
        pid = self._narration.story.generations.worker(rank)
        if pid is None:
            return "no such worker is running: nothing done"
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return f"rank {rank} has ended already: nothing done"
        return f"SIGKILL to pid {pid}"


def _event(line: bytes) -> events.Record | bytes:
    """An agent's event, or a line about it if a killed agent has left half of one."""
    return events.decode(line) or b"?? half an event: " + line
