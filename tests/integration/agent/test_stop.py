"""`elasticrt stop`: a whole run is ended from outside, in order. Real agents."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import TOGETHER, Cluster
from tests.integration.agent.test_narration import LOOP


def stop(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, in the directory of the run."""
    command = [sys.executable, "-m", "elasticrt", "stop", "--log-dir", "run", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize(
    "by",
    [
        "the only live run",
        pytest.param("its id", marks=pytest.mark.slow),
        pytest.param("its directory", marks=pytest.mark.slow),
    ],
)
def test_all_nodes_save_and_leave(tmp_path: Path, by: str) -> None:
    """Without an address of etcd: every agent ends with 143, and the same step is on disk for all."""
    (tmp_path / "train.py").write_text(LOOP)
    run_id = f"stop-{secrets.token_hex(4)}"
    with Cluster(tmp_path, run_id, ["--nnodes", "1:2", *TOGETHER], ["train.py"]) as run:
        run.start("n0")
        run.start("n1")
        run.wait("steps", lambda: run.last_step() > 3)
        done = stop(tmp_path, *{"its id": [run_id], "its directory": [f"run/{run_id}"]}.get(by, []))
        assert done.returncode == 0, done.stderr
        assert run.ended() == {"n0": 143, "n1": 143}
        first, last = done.stdout.splitlines()
        assert first == f"run {run_id}: 2 nodes told to save and leave"
        step = last.partition("; step ")[2].partition(" is saved")[0]
        assert last.startswith(f"run {run_id} stopped; step ")
        assert list((tmp_path / "ckpt").glob(f"step-{step.replace(',', '')}-*"))


def test_no_such_run(tmp_path: Path) -> None:
    """Exit code 2, and what to give."""
    done = stop(tmp_path, "nobody-here")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no agent of this run is on this machine (run nobody-here)" in done.stderr
    assert "--etcd ENDPOINTS" in done.stderr
