"""An agent as the first process of a container: signals reach it, and it ends as it would elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import children
from tests.servers import EtcdServer, wait_until, wheel_binary

pytestmark = pytest.mark.root

ELASTICRT = (sys.executable, "-m", "elasticrt", "run")
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(autouse=True)
def _can() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("a process namespace of one's own needs root, unshare and nsenter")
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"this system allows no process namespaces: {tried.stderr.decode().strip()}")


@contextmanager
def first_process(
    directory: Path, script: str, *options: str, stdin: int = subprocess.DEVNULL, before: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An `elasticrt run` as process 1 of a namespace of its own: what started it, and its process id out here."""
    program = directory / "train.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with EtcdServer(wheel_binary(), directory) as etcd, (directory / "output").open("wb") as output:
        where = ["--etcd", str(etcd.address), "--log-dir", str(directory / "run")]
        process = subprocess.Popen(
            [*before, *NAMESPACE, *ELASTICRT, *where, "--no-python", *options, program],
            cwd=directory,
            stdout=output,
            stderr=output,
            stdin=stdin,
        )
        try:
            wait_until(lambda: _direct(process.pid), "process 1", 20)
            yield process, _direct(process.pid)[0]
        finally:
            process.kill()
            process.wait(20)


def _direct(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


TRAINS = "touch started; exec sleep 600"


def test_a_signal_reaches_the_agent(tmp_path: Path) -> None:
    """SIGTERM to process 1, as a container's runtime sends it, makes the agent leave, with the code that says so."""
    with first_process(tmp_path, TRAINS, "--stop-timeout", "1s") as (process, first):
        wait_until((tmp_path / "started").exists, "the worker runs", 60)
        everything = children(first)
        os.kill(first, signal.SIGTERM)
        assert process.wait(60) == 143, (tmp_path / "output").read_text()
        assert "SIGTERM received" in (tmp_path / "output").read_text()
        assert not [pid for pid in everything if Path(f"/proc/{pid}").exists()], "nothing is left"


@pytest.mark.parametrize(
    ("script", "options", "code"),
    [
        pytest.param("exit 0", [], 0, id="succeeds"),
        pytest.param("exit 3", ["--max-restarts", "0"], 1, id="fails"),
        pytest.param("exit 0", ["--nnodes", "0"], 2, id="is told nonsense"),
    ],
)
def test_the_exit_code_is_the_agents(tmp_path: Path, script: str, options: list[str], code: int) -> None:
    """Process 1 ends with the agent's exit code."""
    with first_process(tmp_path, script, *options) as (process, _):
        assert process.wait(60) == code, (tmp_path / "output").read_text()


LEAVES_SLOWLY = "trap 'sleep 0.5; touch left; exit 0' TERM INT; touch started; while :; do sleep 0.1; done"


def test_an_interrupt_from_the_terminal_arrives_once(tmp_path: Path) -> None:
    """Ctrl-C at a container's terminal lets workers end: passed on as well as typed, it would count as impatience."""
    terminal, inside = os.openpty()
    try:
        own = ("setsid", "--ctty", "--wait")
        with first_process(tmp_path, LEAVES_SLOWLY, stdin=inside, before=own) as (process, _):
            wait_until((tmp_path / "started").exists, "the worker runs", 60)
            os.write(terminal, b"\x03")
            assert process.wait(60) == 143, (tmp_path / "output").read_text()
            assert (tmp_path / "left").exists(), "the worker had the time to end"
            assert "SIGINT received" in (tmp_path / "output").read_text()
    finally:
        os.close(terminal)
        os.close(inside)
