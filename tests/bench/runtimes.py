"""Jobs to be disturbed: the same script on several nodes of this machine, under `elasticrt run` or another runtime.

A node is an agent and everything below it; killing a node kills them all. Whatever a job has started carries its mark
in the environment, and is gone when the job is closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.marks import Marks
from tests.bench.places import Loopback, Place
from tests.servers import EtcdServer, free_port, wheel_binary

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MARK = "ELASTICRT_BENCH_JOB"
END_S = 10.0
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"


@dataclass(frozen=True)
class Runtime:
    """One way to launch the script. `rendezvous` is added to torchrun's --rdzv-conf, `env` to its environment.

    With `plug_in` torchrun's agents meet in an etcd by our rendezvous. With `survives` the others go on without a dead
    worker, which comes back later. With `torchft` every node is a torchrun of its own. With `lasts` a job is expected
    to take one disturbance after the other, nodes that go and come among them.
    """

    name: str
    text: str
    script: str = "plain_ddp.py"
    ours: bool = False
    plug_in: bool = False
    survives: bool = False
    torchft: bool = False
    lasts: bool = False
    rendezvous: str = ""
    env: tuple[tuple[str, str], ...] = ()


BARE = "bare"
"""No runtime: what the network and memory of this machine take for it."""

_FRESH_STORE = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("elasticrt", "elasticrt run", ours=True, lasts=True),
        Runtime("loop", "elasticrt run, with loop.step()", script="loop_ddp.py", ours=True, survives=True, lasts=True),
        Runtime("tuned", "torchrun, fresh store, tuned (unsafe)", rendezvous=TUNED, env=_FRESH_STORE),
        Runtime("fresh", "torchrun, fresh store", env=_FRESH_STORE),
        Runtime("default", "torchrun"),
        Runtime("plugin", "torchrun, elasticrt's rendezvous", plug_in=True),
        Runtime(
            "torchft",
            "torchft, script of its own (survivors)",
            script="torchft_ddp.py",
            survives=True,
            torchft=True,
            lasts=True,
        ),
        Runtime(BARE, "a bare broadcast of the same bytes", lasts=True),
    )
}


@dataclass
class Node:
    """One agent."""

    index: int
    process: subprocess.Popen[bytes]

    def processes(self) -> list[int]:
        """The agent and all its descendants."""
        return [self.process.pid, *descendants(self.process.pid)]

    def lives(self) -> bool:
        """Whether the agent has not ended."""
        return self.process.poll() is None


@dataclass(frozen=True)
class Pace:
    """How the script trains: a save every so many steps, a pause in each step, its own set-up before the first, and
    how large its state is. `least_steps`: how many it is to have done before it is disturbed."""

    steps_per_save: int = 20
    pause_s: float = 0.02
    setup_s: float = 0.0
    state_mb: float = 0.0
    least_steps: int = 20


@dataclass
class Job:
    """A run under one runtime. Use it as a context manager: nothing is left afterwards."""

    runtime: Runtime
    max_nodes: int
    pace: Pace = field(default_factory=Pace)
    place: Place = field(default_factory=Loopback)
    keep: Path | None = None
    torchft: Path | None = None  # The directory of its programs, in an environment that has torchft.
    nodes: list[Node] = field(default_factory=list)

    def __enter__(self) -> Job:
        # A bench that is told to end takes its jobs with it, as after an error.
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        self._stack = ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="ertb-"))  # Short: sockets in it have long names.
        for name in ("marks", "tmp", "run"):
            (self.directory / name).mkdir(mode=0o700)
        self.marks = Marks(self.directory / "marks")
        self.id = f"bench-{secrets.token_hex(4)}"
        self.port = free_port()
        self._mark = secrets.token_hex(8)
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        self.place.open(self._stack)
        self._etcd: EtcdServer | None = None
        if self.runtime.plug_in or (self.runtime.ours and not isinstance(self.place, Loopback)):
            server = EtcdServer(wheel_binary(), self.directory / "etcd")
            server.address = type(server.address)("http", self.place.host, server.port)
            self._etcd = self._stack.enter_context(server)
        if self.runtime.torchft:
            assert self.torchft is not None, "--torchft"
            quorum = ["--min_replicas", "1", "--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "20"]
            where = [f"{self.torchft}/torchft_lighthouse", "--bind", f"{self.place.host}:{self.port}"]
            self._popen([*where, *quorum, "--join_timeout_ms", "500"], "lighthouse.log")

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            for node in self.nodes:
                node.process.poll()
            time.sleep(0.02)
        self._stack.close()
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            for path in [*self.directory.glob("*.log"), *self.directory.glob("logs/events-*.jsonl")]:
                shutil.copy(path, self.keep / path.name)
        shutil.rmtree(self.directory, ignore_errors=True)
        if left:
            raise AssertionError(f"processes of {self.runtime.name} that could not be killed: {left}")

    def start_node(self) -> Node:
        """Start one more node."""
        index, pace = len(self.nodes), self.pace
        script = [str(HERE / self.runtime.script), str(self.directory)]
        script += [str(pace.steps_per_save), str(pace.pause_s), str(pace.setup_s), str(pace.state_mb)]
        command = self.place.command(index, [*self._command(index), *script])
        process = self._popen(command, f"node-{index}.log", REPLICA=str(index))
        self.nodes.append(Node(index, process))
        return self.nodes[-1]

    def _popen(self, command: list[str], log_name: str, **more: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            **dict(self.runtime.env),
            **more,
            MARK: self._mark,
            "TORCHFT_LIGHTHOUSE": f"http://{self.place.host}:{self.port}",
            "RUST_LOG": "error",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.place.interface,
            "TMPDIR": str(self.directory / "tmp"),
            "XDG_RUNTIME_DIR": str(self.directory / "run"),
        }
        with (self.directory / log_name).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self.directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _command(self, index: int) -> list[str]:
        if self.runtime.ours:
            return self._elasticrt(index)
        python = sys.executable if not self.runtime.torchft else f"{self.torchft}/python"
        command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "100"]
        if self.runtime.torchft:
            address = self.place.address(index)
            command += ["--nnodes", "1", "--rdzv-id", f"{self.id}-{index}", "--rdzv-backend", "c10d"]
            return [*command, "--rdzv-endpoint", f"{address}:0", "--rdzv-conf", "is_host=1", "--local-addr", address]
        command += ["--nnodes", f"1:{self.max_nodes}", "--rdzv-id", self.id]
        if self._etcd is not None:
            return [*command, "--rdzv-backend", "elasticrt", "--rdzv-endpoint", str(self._etcd.address)]
        # The first node hosts the store.
        conf = f"is_host={int(index == 0)}" + (f",{self.runtime.rendezvous}" if self.runtime.rendezvous else "")
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.place.address(0)}:{self.port}"]
        return [*command, "--rdzv-conf", conf, "--local-addr", self.place.address(index)]

    def _elasticrt(self, index: int) -> list[str]:
        command = [sys.executable, "-m", "elasticrt", "run", "--run-id", self.id, "--node", f"node-{index}"]
        command += ["--nnodes", f"1:{self.max_nodes}", "--nproc-per-node", "1"]
        command += ["--max-restarts", "1000", "--join", "now", "--log-dir", str(self.directory / "logs")]
        where = ["--etcd", str(self._etcd.address), "--insecure-etcd"] if self._etcd is not None else []
        return [*command, *where]

    def node_of(self, pid: int) -> Node:
        """The node that a worker belongs to."""
        return next(node for node in self.nodes if pid in descendants(node.process.pid))

    def living(self) -> list[Node]:
        """The nodes whose agents have not ended."""
        return [node for node in self.nodes if node.lives()]

    def power_off(self, node: Node) -> float:
        """Cut a node's power; when that began (CLOCK_MONOTONIC, s)."""
        return self.place.power_off(node.index)

    def events(self) -> list[dict[str, Any]]:
        """All that our agents have written about this run, in order of time; nothing under another runtime."""
        found = []
        for path in (self.directory / "logs" / self.id).glob("events-*.jsonl"):
            # The last line of a killed agent may be cut.
            found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return sorted(found, key=lambda event: event["at"])

    def store_processes(self) -> list[int]:
        """An etcd that this job's agents have started, and its keeper; torchrun's store is inside an agent."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"elasticrt.store.embedded_keeper" in words or words[0].endswith(b"/etcd"):
                    found.append(pid)
        return found

    def ended(self) -> bool:
        """Whether every agent has ended."""
        return not self.living()

    def processes(self) -> list[int]:
        """Everything that carries this job's mark and has not ended."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found


def kill_all(pids: list[int]) -> float:
    """SIGKILL them, as nearly at once as can be; when that began (CLOCK_MONOTONIC, s)."""
    at = time.monotonic()
    for pid in pids:
        _kill(pid)
    return at


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, from the kernel's own list."""
    found: list[int] = []
    todo = [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                direct = [int(word) for word in task.read_text().split()]
                todo += direct
                found += direct
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
