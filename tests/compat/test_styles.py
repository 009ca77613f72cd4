"""Every launch style with a killed worker: `python -m tests.compat.styles` makes the table of the same rows."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.cluster import REPOSITORY
from tests.compat.styles import STYLES, TABLE, Style, both, row

FAST = "torchrun, several nodes"


def _style(name: str) -> Style:
    return next(style for style in STYLES if style.name == name)


@pytest.mark.timeout(240)
def test_a_slice(tmp_path: Path) -> None:
    """W01: what starts under torchrun survives a killed worker with the weights of the undisturbed run."""
    outcome, problem = both(_style(FAST), tmp_path)
    assert problem == "", outcome.output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_every_style(style: Style, tmp_path: Path) -> None:
    """W01: a style survives a killed training process with the result of the undisturbed run."""
    if style.needs and importlib.util.find_spec(style.needs) is None:
        pytest.skip(f"{style.needs} is not installed")
    built_in = {"nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    if style.refused and built_in[style.arguments[0]]:
        pytest.skip(f"this torch has {style.arguments[0]}")
    outcome, problem = both(style, tmp_path)
    assert problem == "", outcome.output
    if style.needs == "hydra":
        written = {line.split(" writes to ")[1] for line in outcome.output.splitlines() if " writes to " in line}
        own = "hydra.run.dir" not in style.line
        where = " ".join(written)
        assert own or re.fullmatch(r"run/style-[0-9a-f]{8}/hydra", where), "the same for all ranks and restarts"


def test_the_table_has_every_style() -> None:
    """STYLES.md is made of the rows that are tested, and none of them has failed."""
    lines = TABLE.read_text().splitlines()
    for style in STYLES:
        found = [line for line in lines if line.startswith(row(style, None, "").rpartition("****")[0])]
        assert len(found) == 1, f"{style.name}: run `python -m tests.compat.styles`"
        assert "**" not in found[0]


def test_plain_python_in_a_srun_shell() -> None:
    """`init()` under plain python ignores what SLURM says of the allocation."""
    slurm = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_NNODES": "4"}
    command = [sys.executable, str(REPOSITORY / "examples" / "hello.py")]
    env = {**os.environ, **slurm, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True)
    assert "rank 0 of 1" in done.stdout
