"""Modes of directories and files that we make, under every usual umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elasticrt import Checkpointer, prepare
from elasticrt.data.ledger_writer import Ledger
from elasticrt.data.position import Position
from elasticrt.data.sampler import ElasticBatchSampler
from elasticrt.event_log import EventLog
from elasticrt.events import Ready
from elasticrt.ipc.error_file import write_error_file
from elasticrt.ipc.file_modes import make_directory
from elasticrt.liveness.stacks import Stacks, keep
from elasticrt.option_values import ERR
from elasticrt.run_options import RunOptions
from elasticrt.workers.logs import Output, WorkerConsole
from tests.unit.workers.states import worker


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=lambda mask: f"{mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The umask of this process, for one test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def checkpoints(path: Path) -> None:
    """A checkpoint directory, and what is in it; it must open again."""
    for step in (1, 2):
        saver = Checkpointer(path / "deep" / "ckpt")
        saver.restore()
        saver.save({"w": torch.zeros(3)}, step=step)
        assert saver.wait()


def logs(path: Path) -> None:
    """Logs, events, error files and stacks of a run."""
    output = Output(worker("a", 0, 1, path / "run"), RunOptions(), WorkerConsole())
    output.write(ERR, b"text\n")
    output.close()
    events = EventLog("a", path / "run")
    events.write(Ready(0))
    events.close()
    keep(Stacks("stalled", 1, 3, 1.0, False), {0: ("line",)}, "a", path / "run")


def error_file(path: Path) -> None:
    """What a worker leaves of its error."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path / "run" / "logs" / "error.json")
    try:
        write_error_file(ValueError("x"))
    finally:
        del os.environ["TORCHELASTIC_ERROR_FILE"]


def prepared(path: Path) -> None:
    """Prepared data, its directory and its record; what the user's function writes has the user's modes."""
    prepare(path / "deep" / "data", lambda where: os.close(os.open(where / "x", os.O_CREAT, 0o600)))


def ledger(path: Path) -> None:
    """The ledger."""
    book = Ledger(path / "deep" / "ledger", ElasticBatchSampler([1, 2], 1))
    book.open("0" * 16, Position())
    book.close()


@pytest.mark.parametrize("make", [checkpoints, logs, error_file, prepared, ledger])
def test_nothing_is_writable_by_everybody(tmp_path: Path, umask: int, make: object) -> None:
    """F12: with any umask: directories that we made are ours to use, nobody else's to write; a strict umask is kept."""
    make(tmp_path)  # type: ignore[operator]
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in tmp_path.rglob("*")}
    assert found
    for path, mode in found.items():
        assert not mode & stat.S_IWOTH, f"{path}: {mode:o}"
        assert not mode & umask, f"{path}: {mode:o}"
        assert not path.is_dir() or mode & stat.S_IRWXU == stat.S_IRWXU, f"{path}: {mode:o}"


def test_a_file_in_the_way(tmp_path: Path) -> None:
    """What is no directory is not taken for one; what is there is left as it is."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        make_directory(tmp_path / "file")
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
