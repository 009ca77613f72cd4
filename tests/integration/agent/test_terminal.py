"""A run at a real terminal: its last line, its sentences, Ctrl-C. And without one: nothing but plain lines."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cluster import gone, kill
from tests.servers import wait_until

TRAIN = """
import os, time, torch, elasticrt
from torch.utils.data import DataLoader, TensorDataset
ctx = elasticrt.init()
data = TensorDataset(torch.randn(400_000, 2), torch.randn(400_000, 1))
sampler = elasticrt.ElasticBatchSampler(data, 8)
model = torch.nn.Linear(2, 1)
loop = elasticrt.Loop("ckpt", sampler=sampler, model=model)
for epoch in loop.epochs(1):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        with loop.step():
            ctx.sum(torch.ones(1))
            loop.report(loss=0.25)
        if loop.steps_done % 10 == 0:
            print("pid", os.getpid(), flush=True)
        time.sleep(0.02)
"""


class Typed:
    """A command at a terminal of its own, whose keys are typed here."""

    def __init__(self, directory: Path, *options: str) -> None:
        (directory / "train.py").write_text(TRAIN)
        self.run_id = f"typed-{secrets.token_hex(4)}"
        self.typing, inside = os.openpty()
        self.data = b""
        command = ["setsid", "--ctty", "--wait", sys.executable, "-m", "elasticrt", "run", "--run-id", self.run_id]
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"}
        self.process = subprocess.Popen(
            [*command, *options, "train.py"], cwd=directory, stdin=inside, stdout=inside, stderr=inside, env=env
        )
        os.close(inside)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while found := os.read(self.typing, 1 << 16):
                self.data += found
        except OSError:  # The other side is closed.
            return

    def text(self) -> str:
        """All that has been written there."""
        return self.data.decode(errors="replace")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until this has been written."""
        wait_until(lambda: re.search(pattern, self.text()) is not None, pattern, 90)
        found = re.search(pattern, self.text())
        assert found is not None
        return found

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self._reader.join(10)
        os.close(self.typing)


@pytest.fixture
def typed(tmp_path: Path):
    """Starts one."""
    started = []

    def start(*options: str) -> Typed:
        started.append(Typed(tmp_path, *options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_a_run_at_a_terminal(typed) -> None:
    """The last line moves, a kill is one sentence with cause and cost, and the first Ctrl-C leaves in order."""
    shown = typed("--nproc-per-node", "2")
    shown.wait_for(r"generation 1: 1 node, world size 2, first step 1 after \d")
    shown.wait_for(r"generation 1  1 node  step [\d,]+  [\d.]+ steps/s  epoch 0  loss 0\.25")
    victim = int(shown.wait_for(r"\[rank 1\] pid (\d+)")[1])
    kill(victim)
    shown.wait_for(
        r"generation 2: rank 1 on \S+: killed by SIGKILL, .*paused \d+\.\d\d s after step [\d,]+, no step lost"
    )
    os.write(shown.typing, b"\x03")
    shown.wait_for("SIGINT received: handing over; a second signal ends this node at once")
    assert shown.process.wait(60) == 143
    shown.wait_for(r"step [\d,]+ is saved; to go on: the same command")
    assert shown.text().rstrip().splitlines()[-1].endswith(f"--run-id {shown.run_id}"), "the last line is gone"


def test_an_interrupt_that_comes_twice_is_one(typed) -> None:
    """A04: `timeout` signals its child and then the child's group: the step is saved all the same."""
    shown = typed("--nproc-per-node", "2")
    victim = int(shown.wait_for(r"\[rank 1\] pid (\d+)")[1])
    os.write(shown.typing, b"\x03")
    shown.wait_for("SIGINT received")
    os.write(shown.typing, b"\x03")
    assert shown.process.wait(60) == 143, shown.text()
    shown.wait_for(r"step [\d,]+ is saved; to go on: the same command")
    assert gone([victim], 10.0) == []


def plainly(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A short run whose output is no terminal."""
    command = [sys.executable, "-m", "elasticrt", "run", "--run-id", f"plain-{secrets.token_hex(4)}", *options]
    (directory / "train.py").write_text("print('trained')\n")
    env = {**os.environ, "TERM": "xterm-256color"}
    return subprocess.run(
        [*command, "train.py"], cwd=directory, capture_output=True, text=True, timeout=90, env=env, check=False
    )


def test_no_control_characters_without_a_terminal(tmp_path: Path) -> None:
    """Plain lines, whatever the terminal's name."""
    done = plainly(tmp_path)
    assert done.returncode == 0
    assert done.stdout == "trained\n"
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stderr)
    assert "generation 1: 1 node, world size 1" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("elasticrt: run plain-")


def test_quiet_says_nothing_of_what_goes_well(tmp_path: Path) -> None:
    """The script's own words are all that is left."""
    done = plainly(tmp_path, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


def test_lines_for_programs(tmp_path: Path) -> None:
    """Each of the agent's lines, and of its log, is one object; a generation and the result have their fields."""
    done = plainly(tmp_path, "--log-format", "json", "-v")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert all({"time", "level", "kind", "text"} <= set(line) for line in lines)
    (begun,) = [line for line in lines if line["kind"] == "generation" and "number" in line][:1]
    assert (begun["number"], begun["world_size"], begun["level"]) == (1, 1, "info")
    assert lines[-1]["kind"] == "result" or any(line["kind"] == "result" and line["code"] == 0 for line in lines)
    assert any(line["kind"] == "log" and line["text"].startswith("Publish: generation 1") for line in lines)


def test_an_error_for_programs(tmp_path: Path) -> None:
    """A wrong option's line is an object as well."""
    done = plainly(tmp_path, "--log-format", "json", "--local-addr", "no.such.host.invalid")
    (line,) = [json.loads(each) for each in done.stderr.splitlines()]
    assert (done.returncode, line["level"], line["kind"]) == (2, "error", "error")
