"""What the table runs, as tests: on a GPU, and with gloo and CPU tensors what needs none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import picture, rows
from tests.gpu.__main__ import MB_PER_S, MULTI_RANK, MULTI_RANK_SINCE, ROW_S, SIZES_MB, STALLS_MB, expected_s
from tests.gpu.rows import Machine
from tests.gpu.station import ROOT

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def machine() -> Machine:
    """A machine with a GPU; skipped without one."""
    found = Machine.look()
    if not found.gpus:
        pytest.skip(f"torch {found.torch} sees no GPU here")
    return found


@pytest.mark.slow
def test_the_table_without_a_gpu() -> None:
    """Workers are killed, replaced, frozen, saved and restored by gloo on the CPU; each check of the table holds."""
    found = rows.changes("gloo", "cpu", 2, 12.0)
    assert [row.what for row in found] == ["kill", "join", "save and hold", "abort", "restore"]
    assert all(row.ok and all(0 < each < 60 for each in row.seconds.values()) for row in found)


@pytest.mark.parametrize(
    ("size_mb", "known", "seconds"),
    [
        (12.0, [], ROW_S),
        (412.0, [(12.0, 20.0)], 20.0 + 400.0 / MB_PER_S),
        (4000.0, [(12.0, 20.0), (400.0, 58.8)], 418.8),
        (4000.0, [(12.0, 20.0), (400.0, 18.0)], 18.0),
        (0.0, [(0.0, 3.0)], 3.0),
    ],
)
def test_how_long_a_row_will_take(size_mb: float, known: list[tuple[float, float]], seconds: float) -> None:
    """It is judged by the same at smaller sizes, as starting its workers takes most of it at first."""
    assert expected_s(size_mb, known) == pytest.approx(seconds)


def test_without_a_gpu_the_table_says_so() -> None:
    """What is missing, in one line, and the exit code of a success."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Nothing was run: .* Missing: .*CUDA", done.stdout)
    assert len(done.stdout.splitlines()) == 2


def test_the_largest_state_fits_on_a_machine_of_24_gb() -> None:
    """22 GB of it can be had, and some are left to others: two workers with 4 GB each, and a snapshot of 7 GB."""
    largest = rows.needs_bytes("cpu", 2, SIZES_MB[-1]), rows.snapshot_needs_bytes("cpu", STALLS_MB[-1])
    assert max(largest) < 22e9 - rows.SPARE_BYTES


def test_the_pictures_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the documentation shows is drawn from the results that are there: `python -m tests.gpu.picture`."""
    shown = picture.PICTURES
    monkeypatch.setattr(picture, "PICTURES", tmp_path)
    picture.main()
    drawn = sorted(each.name for each in tmp_path.iterdir())
    assert drawn == sorted(each.name for each in shown.glob("sizes*.svg")) == ["sizes-cpu.svg", "sizes-cuda.svg"]
    for name in drawn:
        assert (tmp_path / name).read_text() == (shown / name).read_text()
        assert (shown / name).read_text().count("<polyline") > 5


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_share_a_gpu(machine: Machine, workers: int) -> None:
    """With gloo and CUDA tensors all of the table's changes keep every step and the state."""
    assert all(row.ok for row in rows.changes("gloo", "cuda", workers, 100.0))


@pytest.mark.gpu
def test_a_world_of_one_with_nccl(machine: Machine) -> None:
    """Its communicator is aborted and made anew, five times, and training goes on."""
    assert machine.nccl is not None
    assert all(row.ok for row in rows.alone("nccl", "cuda"))


@pytest.mark.gpu
def test_several_ranks_with_nccl(machine: Machine) -> None:
    """As many ranks as GPUs; on one GPU two, where NCCL takes them."""
    assert machine.nccl is not None
    if len(machine.gpus) == 1 and machine.nccl[:2] < MULTI_RANK_SINCE:
        pytest.skip(f"one GPU, and NCCL {machine.nccl} takes one rank for each")
    workers = 2 if len(machine.gpus) == 1 else min(8, len(machine.gpus))
    env = MULTI_RANK if len(machine.gpus) == 1 else {}
    assert all(row.ok for row in rows.changes("nccl", "cuda", workers, 100.0, env))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "expected"), [("memory", "the GPU is out of memory"), ("assert", "an assertion of a kernel has failed")]
)
def test_failures_have_names(machine: Machine, kind: str, expected: str) -> None:
    """What torch says here, in its version, of a GPU that is full and of a kernel's assertion is understood."""
    assert rows.failure(kind, expected)


@pytest.mark.gpu
def test_this_machine_is_healthy(machine: Machine) -> None:
    """What `nvidia-smi` answers here is understood, and nothing is wrong."""
    assert rows.health()[0].ok


@pytest.mark.gpu
def test_a_snapshot_is_of_its_moment(machine: Machine) -> None:
    """A gigabyte that changes at once is in the file as it was."""
    assert rows.stall("cuda", 1000.0)[0].ok
