"""Playing a simulation with real processes; the agents are a small program that speaks their events."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from elasticrt.playground.local_cluster import Screen

HERE = Path(__file__).parent
DEADLINE_S = 60.0
FOR_EVER = "100000"


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Poll until it holds, for DEADLINE_S at most."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


@contextmanager
def playing(directory: Path, nodes: int, behaviour: str, steps: str, *faults: str) -> Iterator[subprocess.Popen[str]]:
    """A simulation under way."""
    env = {**os.environ, "NO_COLOR": "1"}
    env.pop("OMP_NUM_THREADS", None)
    process = subprocess.Popen(
        [sys.executable, str(HERE / "drive.py"), str(nodes), behaviour, steps, str(directory), *faults],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def played(directory: Path, nodes: int, behaviour: str, steps: int, *faults: str) -> tuple[int, list[str]]:
    """A simulation to its end: exit code and lines."""
    with playing(directory, nodes, behaviour, str(steps), *faults) as process:
        out, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, out.splitlines()


def agents(directory: Path) -> list[psutil.Process]:
    """The fake agents that run, in the order of their names."""
    found = []
    for path in sorted(directory.glob("alive-*")):
        try:
            process = psutil.Process(int(path.read_text() or 0))
            if str(directory) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    return found


def ended(process: psutil.Process) -> bool:
    """Whether it has ended; reaping an orphan is init's business, and some take their time."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def training(directory: Path) -> bool:
    """Whether steps are being made."""
    return (directory / "step").exists()


def test_a_run_without_faults(tmp_path):
    """All agents' output is merged under their names, the generations are listed, and the exit code is 0."""
    code, lines = played(tmp_path, 2, "works", 60)
    assert code == 0, lines
    assert {"node-0 | hello from node-0, OMP_NUM_THREADS=1", "node-1 | hello from node-1, OMP_NUM_THREADS=1"} <= set(
        lines
    )
    assert "node-0 | an unfinished last line" in lines
    assert f"-- run calm-fox, etcd files, logs in {tmp_path}" in lines
    assert "-- the run succeeded" in lines
    assert any(line.startswith("generation  cause") for line in lines)
    assert lines[-1].endswith("the run succeeded")


def test_faults_by_step_and_by_time(tmp_path):
    """A node is killed, one is added, one drained, and each is told with its cost and listed; the run succeeds."""
    faults = ["step 60: kill node 1", "step 150: add node", "step 300: drain node 0", "86400s: add node"]
    code, lines = played(tmp_path, 2, "works", 400, *faults)
    text = "\n".join(lines)
    assert code == 0, text
    assert re.search(r"^!! step 60: kill node 1  \(SIGKILL to pid \d+\)$", text, re.M)
    assert re.search(r"^-- generation \d: node-1 is gone, 1 node, world size 1, paused", text, re.M)
    assert re.search(r"^-- generation \d: node-2 joined, 2 nodes, world size 2, paused", text, re.M)
    assert re.search(r"^-- generation \d: node-0 is gone, 1 node, world size 1, paused", text, re.M)
    assert "!! never came: 86400s: add node" in lines
    assert re.search(r"^\d +node-2 joined +2 +2 +\d+ +0.25 s +0$", text, re.M)


def test_a_worker_is_killed_by_its_rank(tmp_path):
    """`kill worker 1` ends exactly that process; a rank that nobody has is told, and nothing happens."""
    _, lines = played(tmp_path, 2, "works", 120, "step 40: kill worker 1", "step 50: kill worker 7")
    assert any(re.fullmatch(r"!! step 40: kill worker 1  \(SIGKILL to pid \d+\)", line) for line in lines), lines
    assert "!! step 50: kill worker 7  (no such worker is running: nothing done)" in lines


def test_a_fault_for_a_node_that_is_not_there(tmp_path):
    """A fault that names no running node is told, and the run goes on."""
    code, lines = played(tmp_path, 1, "works", 40, "step 10: kill node 5")
    assert code == 0
    assert "!! step 10: kill node 5  (no such node is running: nothing done)" in lines


@pytest.mark.parametrize(("behaviour", "code", "words"), [("fails", 1, "budget spent"), ("bad-end", 7, "code 7")])
def test_a_run_that_fails(tmp_path, behaviour, code, words):
    """A failed result, or a surviving agent's failing code, is the exit code; the report is printed."""
    got, lines = played(tmp_path, 2, behaviour, 20)
    assert got == code, lines
    assert words in lines[-1]
    assert ("  ValueError: no" in lines) == (behaviour == "fails")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_it_stops_all_agents(tmp_path, number, code):
    """SIGINT and SIGTERM end every agent, orderly, and the exit code says which it was."""
    with playing(tmp_path, 2, "works", FOR_EVER) as process:
        wait_for(lambda: training(tmp_path), "steps")
        process.send_signal(number)
        out, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, out
    assert f"-- {number.name}: stopping 2 agents" in out
    assert out.endswith(f"stopped by {number.name}\n")
    assert not list(tmp_path.glob("alive-*")), "an agent that was stopped in order takes its file away"


def test_a_second_signal_kills(tmp_path):
    """Agents that do not hear SIGTERM get SIGKILL when the user insists."""
    with playing(tmp_path, 2, "stubborn", FOR_EVER) as process:
        wait_for(lambda: training(tmp_path) and len(agents(tmp_path)) == 2, "steps")
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        wait_for(lambda: "stopping 2 agents" in process.stdout.readline(), "the first signal to be told")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert not agents(tmp_path)


def test_nothing_outlives_a_killed_simulation(tmp_path):
    """When the simulation itself gets SIGKILL, its agents and their workers end too."""
    with playing(tmp_path, 2, "works", FOR_EVER) as process:
        simulation = psutil.Process(process.pid)
        wait_for(lambda: len(simulation.children(recursive=True)) == 4, "two agents with a worker each")
        family = simulation.children(recursive=True)
        process.kill()
        process.wait()
        wait_for(lambda: all(ended(member) for member in family), "all its processes to end")


def test_a_reader_that_goes_away_ends_the_simulation(tmp_path):
    """With stdout closed (`... | head`) the agents are stopped and the exit code is that of SIGPIPE."""
    with playing(tmp_path, 1, "works", FOR_EVER, *(f"step {n}: kill worker 9" for n in range(20, 200))) as process:
        wait_for(lambda: training(tmp_path), "steps")
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        assert process.wait(timeout=DEADLINE_S) == 128 + signal.SIGPIPE
    assert not agents(tmp_path)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.mark.parametrize(
    ("out", "env", "shown"),
    [
        (Terminal(), {}, "\033[33mnode-1\033[0m | 10% 20%\n"),
        (Terminal(), {"NO_COLOR": ""}, "\033[33mnode-1\033[0m | 10% 20%\n"),
        (Terminal(), {"NO_COLOR": "1"}, "node-1 | 10% 20%\n"),
        (io.StringIO(), {}, "node-1 | 10% 20%\n"),
    ],
)
def test_colour_is_for_terminals(out, env, shown):
    """Tags are coloured on a terminal only, and not with NO_COLOR; a carriage return never hides a tag."""
    Screen(out, env).show("10%\r20%\r", "node-1")
    assert out.getvalue() == shown
