"""Jobs to be disturbed: the same script on several nodes of this machine, under `elasticrt run` or under torchrun.

A node is an agent and everything below it; killing a node kills them all. Whatever a job has started carries its mark
in the environment, and is gone when the job is closed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.marks import Marks
from tests.servers import EtcdServer, free_port, wheel_binary

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MARK = "ELASTICRT_BENCH_JOB"
END_S = 10.0
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"


@dataclass(frozen=True)
class Rival:
    """One way to launch the script. `rendezvous` is added to torchrun's --rdzv-conf, `env` to its environment.

    With `plug_in` torchrun's agents meet in an etcd by our rendezvous. With `shrinks` (torchft) the others go on
    without a dead worker, which comes back later; every node is a torchrun of its own.
    """

    name: str
    text: str
    script: str = "plain_ddp.py"
    ours: bool = False
    plug_in: bool = False
    shrinks: bool = False
    rendezvous: str = ""
    env: tuple[tuple[str, str], ...] = ()


_FRESH_STORE = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),)
RIVALS = {
    rival.name: rival
    for rival in (
        Rival("elasticrt", "elasticrt run", ours=True),
        Rival("loop", "elasticrt run, script with Loop", script="loop_ddp.py", ours=True),
        Rival("tuned", "torchrun, fresh store, tuned (unsafe)", rendezvous=TUNED, env=_FRESH_STORE),
        Rival("fresh", "torchrun, fresh store", env=_FRESH_STORE),
        Rival("default", "torchrun"),
        Rival("plugin", "torchrun, elasticrt's rendezvous", plug_in=True),
        Rival("torchft", "torchft, script of its own (survivors)", script="torchft_ddp.py", shrinks=True),
    )
}


@dataclass
class Node:
    """One agent."""

    name: str
    process: subprocess.Popen[bytes]

    def processes(self) -> list[int]:
        """The agent and all its descendants."""
        return [self.process.pid, *descendants(self.process.pid)]


@dataclass
class Job:
    """A run of one rival. Use it as a context manager: nothing is left afterwards."""

    rival: Rival
    max_nodes: int
    steps_per_save: int
    pause_s: float
    keep: Path | None = None
    torchft: Path | None = None  # The directory of its programs, in an environment that has torchft.
    nodes: list[Node] = field(default_factory=list)

    def __enter__(self) -> Job:
        self.directory = Path(tempfile.mkdtemp(prefix="ertb-"))  # Short: sockets in it have long names.
        for name in ("marks", "tmp", "run"):
            (self.directory / name).mkdir(mode=0o700)
        self.marks = Marks(self.directory / "marks")
        self.id = f"bench-{secrets.token_hex(4)}"
        self.port = free_port()
        self._mark = secrets.token_hex(8)
        self._etcd = EtcdServer(wheel_binary(), self.directory / "etcd") if self.rival.plug_in else None
        if self._etcd is not None:
            self._etcd.start()
        if self.rival.shrinks:
            assert self.torchft is not None, "--torchft"
            quorum = ["--min_replicas", "1", "--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "20"]
            where = [f"{self.torchft}/torchft_lighthouse", "--bind", f"127.0.0.1:{self.port}"]
            self._popen([*where, *quorum, "--join_timeout_ms", "500"], "lighthouse.log")
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            for node in self.nodes:
                node.process.poll()
            time.sleep(0.02)
        if self._etcd is not None:
            self._etcd.kill()
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            for path in self.directory.glob("*.log"):
                shutil.copy(path, self.keep / path.name)
        shutil.rmtree(self.directory, ignore_errors=True)
        if left:
            raise AssertionError(f"processes of {self.rival.name} that could not be killed: {left}")

    def start_node(self) -> Node:
        """Start one more node."""
        index = len(self.nodes)
        command = self._command(index)
        script = [str(HERE / self.rival.script), str(self.directory), str(self.steps_per_save), str(self.pause_s)]
        process = self._popen([*command, *script], f"node-{index}.log", REPLICA=str(index))
        self.nodes.append(Node(f"node-{index}", process))
        return self.nodes[-1]

    def _popen(self, command: list[str], log_name: str, **more: str) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            **dict(self.rival.env),
            **more,
            MARK: self._mark,
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}",
            "RUST_LOG": "error",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
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
        if self.rival.shrinks:
            torchrun = [f"{self.torchft}/python", "-m", "torch.distributed.run", "--standalone"]
            return [*torchrun, "--nproc-per-node", "1", "--max-restarts", "100"]
        return self._elasticrt(index) if self.rival.ours else self._torchrun(index)

    def _elasticrt(self, index: int) -> list[str]:
        command = [sys.executable, "-m", "elasticrt", "run", "--run-id", self.id, "--node", f"node-{index}"]
        command += ["--min-nodes", "1", "--max-nodes", str(self.max_nodes), "--workers-per-node", "1"]
        command += ["--max-restarts", "100", "--join", "now", "--run-dir", str(self.directory / "logs")]
        return [*command, "--etcd-linger", "2s"]

    def _torchrun(self, index: int) -> list[str]:
        # The first node hosts the store. Its address sorts last, so that rank 0 is another one.
        conf = f"is_host={int(index == 0)}" + (f",{self.rival.rendezvous}" if self.rival.rendezvous else "")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.max_nodes}"]
        command += ["--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-id", self.id]
        if self._etcd is not None:
            return [*command, "--rdzv-backend", "elasticrt", "--rdzv-endpoint", str(self._etcd.address)]
        command += ["--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", conf]
        return [*command, "--local-addr", "127.0.0.2" if index == 0 else "127.0.0.1"]

    def node_of(self, pid: int) -> Node:
        """The node that a worker belongs to."""
        return next(node for node in self.nodes if pid in descendants(node.process.pid))

    def store_processes(self) -> list[int]:
        """An etcd that this job's agents have started, and its keeper; torchrun's store is inside an agent."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"elasticrt.store.keeper" in words or words[0].endswith(b"/etcd"):
                    found.append(pid)
        return found

    def ended(self) -> bool:
        """Whether every agent has ended."""
        return all(node.process.poll() is not None for node in self.nodes)

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
