"""The small examples as a stranger runs them: alone, and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _run(directory: Path, launcher: list[str], *script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    name, *arguments = script
    return subprocess.run(
        [*launcher, str(EXAMPLES / name), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(("launcher", "world_size"), [(ALONE, 1), (TORCHRUN, 2)])
def test_hello(tmp_path, launcher, world_size):
    """Everybody says who it is, and the sum is right."""
    done = _run(tmp_path, launcher, "hello.py")
    assert done.returncode == 0, done.stderr
    for rank in range(world_size):
        assert f"rank {rank} of {world_size}," in done.stdout
    assert "as they should: True" in done.stdout


def test_prepare_data_under_torchrun(tmp_path):
    """One of two builds, both see all of it."""
    done = _run(tmp_path, TORCHRUN, "prepare_data.py", "--parts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("builds part 1 of 1") == 1
    assert done.stdout.count("sees 1 files") == 2


def test_prepare_data_fails_everywhere(tmp_path):
    """A builder that raises fails both processes with its words (D05)."""
    done = _run(tmp_path, TORCHRUN, "prepare_data.py", "--parts", "1", "--fail")
    assert done.returncode != 0
    assert "RuntimeError: as you wished" in done.stderr
    assert not (tmp_path / "data" / "squares").exists()


@pytest.mark.slow
def test_mnist_stops_and_goes_on(tmp_path):
    """A short training with two processes is continued by one, in the line that says so."""
    first = _run(tmp_path, TORCHRUN, "mnist_ddp.py", "--epochs", "1", "--global-batch-size", "1500")
    assert first.returncode == 0, first.stderr
    assert "world size 2" in first.stdout
    second = _run(tmp_path, ALONE, "mnist_ddp.py", "--epochs", "1", "--global-batch-size", "1500")
    assert second.returncode == 0, second.stderr
    assert "resuming ckpt/ from step 5" in second.stderr
    assert "epoch" not in second.stdout
