"""An agent under small limits: it raises what it may, and says the rest before anything has been started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.agent.resource_limits import files_needed, threads_needed
from tests.servers import wheel_binary


def _run(tmp_path: Path, limit: str, workers: int, binary: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elasticrt", "run", "--standalone", "--nproc-per-node"]
    command += [str(workers), "--log-dir", str(tmp_path / "run"), "--no-python", "true"]
    limited = ["bash", "-c", f'{limit}; ELASTICRT_ETCD_BIN={binary} exec "$@"', "bash", *command]
    return subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)


def test_the_soft_limit_is_raised(tmp_path: Path) -> None:
    """W17: more workers than the soft limit of open files has room for: it is raised, and all of them run."""
    done = _run(tmp_path, "ulimit -Sn 64", 8, wheel_binary())
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_150_workers_under_1024_files(tmp_path: Path) -> None:
    """W17: a node with many workers and the usual soft limit."""
    done = _run(tmp_path, "ulimit -Sn 1024", 150, wheel_binary())
    assert done.returncode == 0, done.stderr


def test_the_hard_limit_is_too_low(tmp_path: Path) -> None:
    """G17: where the hard limit is not enough the agent says how much is, starts nothing, and ends with 2."""
    done = _run(tmp_path, "ulimit -n 256", 150, wheel_binary())
    assert done.returncode == 2, done.stderr
    assert f"expected {files_needed(150, 1):,} for 150 workers" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_etcd_under_small_limits(tmp_path: Path) -> None:
    """G17: an embedded etcd that may open too few files: a line with the remedy, no stack, exit code 4."""
    binary = tmp_path / "etcd"
    binary.write_text(f'#!/bin/bash\nulimit -n 6\nexec {wheel_binary()} "$@"\n')
    binary.chmod(0o755)
    done = _run(tmp_path, "true", 1, binary)
    assert done.returncode == 4, done.stderr
    assert "Raise the limit that it ran into (ulimit -n" in done.stderr
    assert "goroutine" not in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_the_limit_of_processes_is_too_low() -> None:
    """G17: a user who may start too few processes is told how many are missing, before any is started."""
    code = "import os\nfrom elasticrt.agent.resource_limits import check_processes\n"
    code += "from elasticrt.errors import ConfigError\nos.setresuid(65000, 65000, 65000)\n"
    code += "for workers in (1, 4):\n    try:\n"
    code += "        check_processes(workers, serves=True)\n    except ConfigError as error:\n        print(error)"
    enough = threads_needed(1, serves=True) + 1
    done = subprocess.run(
        ["bash", "-c", f'ulimit -u {enough}; exec "$@"', "bash", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    said = f"got {enough}, of which this user has 1 in use (each thread counts); expected"
    said += f" {threads_needed(4, serves=True)} more for 4 workers"
    assert said in done.stdout, done.stdout
    assert len(done.stdout.splitlines()) == 1
