"""What other libraries look for to find out that they were launched elastically; the rest is tests/compat/ecosystem."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import torch.distributed as dist

from elasticrt.ipc.env import WorkerEnv
from tests.compat.ecosystem.__main__ import HERE, SCRIPTS, TABLE

LIGHTNING = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE"}
ACCELERATE = {"WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
WORKER = WorkerEnv(
    rank=3, local_rank=1, world_size=4, local_world_size=2, group_rank=1, group_world_size=2,
    master_addr="10.0.0.1", master_port=29400, restart_count=0, max_restarts=3, run_id="run", attempt=1,
    generation=1, nonce="n", node="b", run_dir="/run",
)  # fmt: skip


def test_detection(monkeypatch) -> None:
    """torchelastic is detected, and all variables are there that Lightning and accelerate read."""
    env = WORKER.to_env()
    assert {name for name in LIGHTNING | ACCELERATE if not env.get(name)} == set()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", env["TORCHELASTIC_RUN_ID"])
    assert dist.is_torchelastic_launched()
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False", "there is no store of the agent's behind it"


def test_the_table_has_every_script() -> None:
    """RESULTS.md is made of the scripts that are there, and none has failed."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [f"{name}.py" for name in SCRIPTS]
    assert all("the same result" in line for line in lines)
    assert {path.stem for path in HERE.glob("*.py")} == {*SCRIPTS, "toy", "__main__"}


def test_the_command_explains_itself() -> None:
    """`python -m tests.compat.ecosystem --help` says what it does, without installing anything."""
    command = [sys.executable, "-m", "tests.compat.ecosystem", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=HERE.parents[2])
    assert "virtual environment" in done.stdout


def test_as_srun() -> None:
    """--as-srun says of each worker what srun would say of a task; without it workers get no SLURM variable from us."""
    env = replace(WORKER, as_srun=True).to_env()
    said = {name: int(value) for name, value in env.items() if name.startswith("SLURM_")}
    assert said == {
        "SLURM_PROCID": 3, "SLURM_LOCALID": 1, "SLURM_NODEID": 1, "SLURM_NTASKS": 4, "SLURM_NPROCS": 4,
        "SLURM_NNODES": 2, "SLURM_JOB_NUM_NODES": 2, "SLURM_NTASKS_PER_NODE": 2,
    }  # fmt: skip
    assert not [name for name in WORKER.to_env() if name.startswith("SLURM_")]
