"""Every example under `elasticrt run`; plain python and torchrun are in tests/integration/train."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY

ELASTICRT = [sys.executable, "-m", "elasticrt", "run", "--nproc-per-node", "2"]


def _run(example: str, *arguments: str, cwd: Path) -> str:
    command = [*ELASTICRT, str(REPOSITORY / "examples" / example), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def test_hello(tmp_path: Path) -> None:
    """hello.py says who each process is."""
    output = _run("hello.py", cwd=tmp_path)
    assert "rank 0 of 2" in output
    assert "rank 1 of 2" in output


@pytest.mark.slow
def test_mnist_ddp(tmp_path: Path) -> None:
    """One epoch of the digits example learns something, and leaves a checkpoint that plain torch.load opens."""
    output = _run("mnist_ddp.py", "--epochs", "1", "--global-batch-size", "128", cwd=tmp_path)
    accuracy = re.search(r"epoch 0 .*accuracy ([0-9.]+)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.5
    code = "import sys, torch; s = torch.load(sys.argv[1], weights_only=True); print(sorted(s))"
    *_, payload = sorted((tmp_path / "ckpt").glob("*.pt"))  # A slow machine has saved in the middle as well.
    shown = subprocess.run([sys.executable, "-c", code, str(payload)], capture_output=True, text=True, check=True)
    assert "model" in shown.stdout


def test_prepare_data(tmp_path: Path) -> None:
    """prepare_data.py builds each part once, and both processes see all of them."""
    output = _run("prepare_data.py", "--parts", "2", cwd=tmp_path)
    assert output.count("builds part 1 of 2") == 1
    assert output.count("sees 2 files") == 2


@pytest.mark.slow
def test_char_gpt(tmp_path: Path) -> None:
    """char_gpt.py trains on two processes, saves, and writes some text."""
    output = _run("char_gpt.py", "--steps", "6", cwd=tmp_path)
    assert "def " in output
    assert list((tmp_path / "ckpt-gpt").glob("*.pt"))


def test_scale_lr(tmp_path: Path) -> None:
    """scale_lr.py sets the learning rate by the world size."""
    assert "world size 0 to 2 (start): learning rate 0.04" in _run("scale_lr.py", "--steps", "5", cwd=tmp_path)


def test_curve(tmp_path: Path) -> None:
    """curve.py trains, and writes one curve, or says that it cannot."""
    output = _run("curve.py", "--steps", "5", cwd=tmp_path)
    assert "5 steps, loss" in output
    assert ("no curve is written" in output) != (tmp_path / "curve").exists()


def test_a_change_is_told_to_the_script(tmp_path: Path) -> None:
    """scale_lr.py hears of a lost node: both world sizes, the cause, and what it has cost."""
    script = [str(REPOSITORY / "examples" / "scale_lr.py"), "--steps", "4000"]
    command = [sys.executable, "-m", "elasticrt", "simulate", "--nodes", "2", "--nnodes", "1:2"]
    command += ["--fault", "step 30: kill node 1", *script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = r"world size 2 to 1 \(node-1 lost.*\), after \d+\.\d\d s and 0 steps lost: learning rate 0.02"
    assert re.search(told, done.stdout), done.stdout
