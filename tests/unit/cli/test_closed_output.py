"""What reads a command's output may end before the command does, or was never there, or is a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elasticrt.cli.main import main
from tests.unit.story.told import started, write


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["--version"], 0),
        (["run", "--nonsense"], 2),
        (["ledger", "check", "."], 2),
        (["run", "--no-python", "--nproc-per-node=1", "sh", "-c", "yes | head -c 100000; echo; echo >&2"], 0),
    ],
    ids=str,
)
def test_a_command_ends_as_it_does_with_a_reader(words: list[str], code: int, tmp_path: Path) -> None:
    """Nobody reads stdout and stderr: that is no bug and no failure, and the exit code is the command's own."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "elasticrt", *words]
    try:
        done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=writer, timeout=60, check=False)
    finally:
        os.close(writer)
    assert done.returncode == code


FULL = "elasticrt: error: the output cannot be written (stdout): No space left on device\n"
PRINTS = ["run", "--no-python", "--nproc-per-node=1", "echo", "hello"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["etcd", "--help"], ["--version"]], ids=str)
def test_output_that_cannot_be_written_is_a_line_and_an_exit_code(words: list[str], unbuffered: str) -> None:
    """A full disk behind stdout: one line says so, and the exit code is 2; no traceback."""
    with Path("/dev/full").open("w") as full:
        done = run(words, stdout=full, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (2, FULL)


@pytest.mark.parametrize(("words", "code"), [(["ledger", "check", "/"], 2), (PRINTS, 0)], ids=str)
def test_a_full_disk_behind_both_streams_leaves_the_exit_code(words: list[str], code: int, tmp_path: Path) -> None:
    """What would have been said is lost; what was done is not."""
    with Path("/dev/full").open("w") as full:
        assert run(words, stdout=full, stderr=full, cwd=tmp_path).returncode == code


WHERE = """#!/bin/sh
agent=$(awk '{print $4}' /proc/$PPID/stat)
for number in 0 1 2; do readlink /proc/$agent/fd/$number; done > where
"""


def test_closed_streams_lead_nowhere(tmp_path: Path) -> None:
    """No file of the agent's gets the place of a stream that was closed, and with it what workers print."""
    (tmp_path / "where.sh").write_text(WHERE)
    (tmp_path / "where.sh").chmod(0o755)
    script = 'exec "$0" -m elasticrt run --no-python ./where.sh <&- >&- 2>&-'
    assert run([], command=["sh", "-c", script, sys.executable], cwd=tmp_path).returncode == 0
    assert (tmp_path / "where").read_text().split() == ["/dev/null"] * 3


def run(words: list[str], *, command: Sequence[str] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    command = command or [sys.executable, "-m", "elasticrt", *words]
    return subprocess.run(command, text=True, timeout=60, check=False, **options)


def test_a_status_that_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`elasticrt status | head -3`: what is left is dropped, and what the run's state is, is no error."""
    write(tmp_path / "x", [(0.0, "a", started())])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["status", str(tmp_path / "x")]) == 0


@pytest.mark.parametrize("words", [["status", "--watch"], ["events", "--follow"], ["logs", "--follow"]], ids=str)
def test_who_follows_a_run_ends_with_its_reader(words: list[str], tmp_path: Path) -> None:
    """`elasticrt logs --follow | head -1` is over when `head` is, while the run goes on."""
    command = [sys.executable, "-m", "elasticrt"]
    agent = [*command, "run", "--no-python", "--nproc-per-node=1", "sh", "-c", "echo begun; sleep 600"]
    with subprocess.Popen(agent, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout is not None
            assert any("begun" in line for line in running.stdout)
            with subprocess.Popen([*command, *words], cwd=tmp_path, stdout=subprocess.PIPE) as following:
                assert following.stdout is not None
                assert following.stdout.readline()
                following.stdout.close()
                assert following.wait(60) == 0
            assert running.poll() is None
        finally:
            running.terminate()
