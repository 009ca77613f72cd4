"""torchrun with `--rdzv-backend elasticrt`: torchrun's agents and workers, our agreement about who takes part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster import gone, kill
from tests.conftest import children
from tests.servers import EtcdServer, etcd_server, wait_until

SCRIPT = Path(__file__).with_name("node_steps.py")
START_S = 60.0


@dataclass(frozen=True)
class Step:
    """One line of one worker."""

    rank: int
    size: int
    restart: int
    step: int
    port: int
    pid: int


@dataclass
class Torchrun:
    """torchrun's agents of one run. Use it as a context manager."""

    directory: Path
    etcd: str
    nodes: str
    options: tuple[str, ...] = ()
    script_arguments: tuple[str, ...] = ()
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                pids = children(agent.pid)
                agent.kill()
                for pid in pids:  # torchrun leaves its workers behind.
                    kill(pid)
            agent.wait(10)

    def start(self) -> subprocess.Popen[bytes]:
        """One more node with one worker."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "elasticrt", "--rdzv-endpoint", self.etcd]
        # A node that torchrun ended without a word is a member until its lease ends: other options are refused so long.
        command += ["--rdzv-id", f"plug-in-{self.nodes.replace(':', '-')}"]
        command += [*self.options, str(SCRIPT), str(self.directory), *self.script_arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "LOGLEVEL": "INFO"}
        with (self.directory / f"agent-{len(self.agents)}.log").open("wb") as log:
            self.agents.append(subprocess.Popen(command, cwd=self.directory, stdout=log, stderr=log, env=env))
        return self.agents[-1]

    def steps(self) -> list[Step]:
        """All steps so far. The last line of a killed process may be cut."""
        found = []
        for path in self.directory.glob("steps-*"):
            for line in path.read_text().split("\n")[:-1]:
                found.append(Step(*map(int, line.split()), pid=int(path.name.split("-")[1])))
        return found

    def pids(self, size: int, *, without: frozenset[int] = frozenset()) -> dict[int, int]:
        """Processes by rank that have made steps in a world of `size`, apart from those given."""
        return {step.rank: step.pid for step in self.steps() if step.size == size and step.pid not in without}

    def wait_for(self, size: int, *, without: frozenset[int] = frozenset()) -> dict[int, int]:
        """Wait until all ranks of a world of `size` have made steps, in processes apart from those given."""
        try:
            wait_until(
                lambda: set(self.pids(size, without=without)) == set(range(size)), f"{size} ranks have stepped", START_S
            )
        except AssertionError:
            print(self.story())
            raise
        return self.pids(size, without=without)

    def end(self) -> list[int]:
        """Let the training end; the agents' exit codes."""
        (self.directory / "end").touch()
        try:
            return [agent.wait(30) for agent in self.agents]
        except subprocess.TimeoutExpired:
            print(self.story())
            raise

    def story(self) -> str:
        """What the agents have written, for a failing test."""
        logs = sorted(self.directory.glob("agent-*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One server for all tests of this file.

    Those with the same options have the same run id, again, which torchrun's own back ends refuse.
    """
    with etcd_server() as server:
        yield server


@contextmanager
def _running(
    directory: Path, etcd: EtcdServer, nodes: str, started: int, *, options: tuple[str, ...] = (), script: str = ""
) -> Iterator[Torchrun]:
    with Torchrun(directory, str(etcd.address), nodes, options, (script,) if script else ()) as torchrun:
        for _ in range(started):
            torchrun.start()
        yield torchrun


@pytest.mark.slow
def test_a_worker_crashes(tmp_path: Path, etcd: EtcdServer) -> None:
    """W01: a crash restarts the workers of both nodes, in a store of its own; the run then succeeds with code 0."""
    with _running(tmp_path, etcd, "2", 2, options=("--max-restarts", "2"), script="1") as torchrun:
        wait_until((tmp_path / "crashed").exists, "a worker has crashed", START_S)
        crashed = frozenset(step.pid for step in torchrun.steps())
        torchrun.wait_for(2, without=crashed)
        assert torchrun.end() == [0, 0], torchrun.story()
        ports = {(step.pid in crashed, step.port) for step in torchrun.steps()}
        assert len(ports) == len({port for _, port in ports}) == 2, "the restart met the store of the crash"


@pytest.mark.parametrize("victim", [pytest.param(0, id="rank-0"), pytest.param(1, id="rank-1", marks=pytest.mark.slow)])
def test_a_node_is_killed(victim: int, tmp_path: Path, etcd: EtcdServer) -> None:
    """A01, W03: agent and worker of one node are killed; the other goes on alone, whichever it was."""
    with _running(tmp_path, etcd, "1:3", 2, options=("--max-restarts", "2")) as torchrun:
        pids = torchrun.wait_for(2)
        (agent,) = [agent for agent in torchrun.agents if pids[victim] in children(agent.pid)]
        for pid in (agent.pid, pids[victim]):
            kill(pid)
        torchrun.wait_for(1, without=frozenset(pids.values()))
        codes = torchrun.end()
        assert sorted(codes) == [-signal.SIGKILL, 0], torchrun.story()


@pytest.mark.slow
def test_nodes_come_and_go(tmp_path: Path, etcd: EtcdServer) -> None:
    """L4, A02: a newcomer is let in without costing a restart; one that leaves by SIGTERM is not waited for."""
    with _running(tmp_path, etcd, "1:2", 1, options=("--max-restarts", "1")) as torchrun:
        alone = torchrun.wait_for(1)
        newcomer = torchrun.start()
        both = torchrun.wait_for(2, without=frozenset(alone.values()))
        assert {step.restart for step in torchrun.steps()} == {0}
        newcomer.terminate()
        torchrun.wait_for(1, without=frozenset([*alone.values(), *both.values()]))
        assert torchrun.agents[0].poll() is None
        assert newcomer.wait(20) == 1, "torchrun's own exit code after a signal"
        (tmp_path / "end").touch()
        assert torchrun.agents[0].wait(30) == 0, torchrun.story()
        assert gone([*alone.values(), *both.values()], 5.0) == []


@pytest.mark.parametrize(
    ("option", "text"),
    [("last_call_timeout=1", "last_call_timeout"), ("join=never", "now, failure")],
)
def test_options_are_checked(option: str, text: str, tmp_path: Path, etcd: EtcdServer) -> None:
    """C02: an option that means nothing here is refused by name."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from elasticrt.errors import ConfigError
    from elasticrt.torchrun.backend import create

    key, _, value = option.partition("=")
    with pytest.raises(ConfigError, match=text):
        create()(RendezvousParameters("elasticrt", str(etcd.address), "checked", 1, 2, **{key: value, "timeout": 900}))
