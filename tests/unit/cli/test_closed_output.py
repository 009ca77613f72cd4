"""What reads a command's output may end before the command does, as `head` does."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.cli import control
from elasticrt.rendezvous.records import Keys, SpecRecord
from elasticrt.spec import RunSpec
from elasticrt.store.memory import MemoryServer, MemoryStore
from elasticrt.store.protocol import Put, Txn


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


def test_a_status_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`elasticrt status | head -3`: what is left is dropped, and what the run's state is, is no error."""
    store, keys = MemoryStore(MemoryServer(lambda: 0.0)), Keys("x")
    spec = SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script", "train.py")), attempt=1)
    store.commit(Txn((), (Put(keys.spec, spec.model_dump_json().encode()),), "a run"))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert control.show(store, keys, argparse.Namespace(), {}) == 0
