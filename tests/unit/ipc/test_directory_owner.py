"""Who saves to a checkpoint directory, and whether its owner lives."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrt.ipc import directory_owner as owners
from elasticrt.ipc.directory_owner import NAME, Holding, Owner, judge
from tests.unit.checkpoint.test_last_save import full_disk

ME = Owner("mine", "store-1", "a", "machine-1", 10, 100, "t1", "/run/elasticrt")
OTHER = Owner("other", "store-2", "b", "machine-2", 20, 200, "t2")

CASES = [
    # found, runs, age_s, verdict
    (None, False, 0.0, "free"),
    (ME, True, 0.0, "ours"),
    (replace(ME, pid=11, machine="machine-2"), True, 0.0, "ours"),  # Another node of this run.
    (replace(ME, pid=11, store="store-9"), True, 0.0, "ours"),  # Its embedded etcd has been replaced.
    (replace(ME, pid=11, store="store-9", meeting="/run/other"), True, 0.0, "taken"),  # Two live runs of one id.
    (replace(ME, pid=11, store="store-9", meeting="/run/other"), False, 0.0, "free"),
    (replace(ME, pid=11, meeting="http://here:2379"), True, 0.0, "ours"),  # That etcd by another of its names.
    (replace(ME, pid=11, store="store-9", machine="machine-2"), False, 0.0, "unsure"),  # Of the same id only.
    (replace(OTHER, machine="machine-1"), True, 99.0, "taken"),
    (replace(OTHER, machine="machine-1"), False, 0.0, "free"),
    (OTHER, False, 1.0, "unsure"),
    (OTHER, True, 10.1, "free"),  # The number of a process on another machine says nothing.
    (replace(OTHER, run="", store=""), False, 1.0, "unsure"),
]


@pytest.mark.parametrize(("found", "runs", "age_s", "verdict"), CASES)
def test_judged(found: Owner | None, runs: bool, age_s: float, verdict: str) -> None:
    """F13: by the process where it would be on this machine, else by the record's age."""
    assert judge(found, ME, runs=runs, age_s=age_s) == verdict


def elsewhere(**changes: object) -> Owner:
    """An owner on another machine."""
    return replace(Owner.here("other", "store-2", "b"), machine="elsewhere", pid=1, **changes)  # type: ignore[arg-type]


def test_an_owner_that_is_alive_is_seen_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F13: nobody can ask it; but its record is touched while one looks."""
    monkeypatch.setattr(owners, "BEAT_S", 0.05)
    monkeypatch.setattr(owners, "LOOK_AGAIN_S", 0.01)
    first = Holding(tmp_path, elsewhere())
    assert first.take() is None
    try:
        assert Holding(tmp_path, Owner.here("mine", "store-1", "a")).take() == elsewhere(token=first._owner.token)
    finally:
        first.release()
    assert not list(tmp_path.iterdir())
    second = Holding(tmp_path, Owner.here("mine", "store-1", "a"))
    assert second.take() is None
    second.release()


def test_an_owner_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record gets old; how old is read from the directory's clock, and then the directory is free."""
    monkeypatch.setattr(owners, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(owners, "STALE_S", 0.2)
    gone = Holding(tmp_path, elsewhere())
    monkeypatch.setattr(gone, "_thread", threading.current_thread())
    assert gone.take() is None
    mine = Holding(tmp_path, Owner.here("mine", "store-1", "a"))
    assert mine.take() is None
    assert gone.lost() == mine._owner
    assert mine.lost() is None
    mine.release()


def test_a_process_of_this_machine(tmp_path: Path) -> None:
    """F13: one that lives is refused at once, one that was killed holds nothing."""
    script = (
        "import sys, pathlib; from elasticrt.ipc.directory_owner import *\n"
        "holding = Holding(pathlib.Path(sys.argv[1]), Owner.here('', '', 'x'))\n"
        "print(holding.take(), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"
        mine = Holding(tmp_path, Owner.here("mine", "store-1", "a"))
        found = mine.take()
        assert found is not None
        assert str(found) == f"process {process.pid} on x"
        process.kill()
    assert mine.take() is None
    mine.release()


def test_a_full_disk(tmp_path: Path) -> None:
    """F01: a part of a record is not left there."""
    mine = Holding(tmp_path, Owner.here("mine", "store-1", "a"))
    with full_disk(100):
        with pytest.raises(OSError, match="No space left"):
            mine.take()
        assert not list(tmp_path.iterdir())
    assert mine.take() is None
    mine.release()


def test_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    """F13: nothing is left there by one who cannot tell whether it is the owner, however often it asks."""
    (tmp_path / NAME).mkdir()
    for token in ("t1", "t2"):
        with pytest.raises(OSError, match=r"directory|Invalid"):
            Holding(tmp_path, replace(ME, token=token)).take()
    assert [each.name for each in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("text", ["", "{}", "[" * 4000, '{"run": 3}', "null", "\xff"])
def test_what_is_no_record_is_nobody_s(tmp_path: Path, text: str) -> None:
    """Damaged or planted, it does not keep anybody out, and a deleted one is written again."""
    (tmp_path / NAME).write_bytes(text.encode("latin-1"))
    mine = Holding(tmp_path, Owner.here("mine", "store-1", "a"))
    assert mine.take() is None
    (tmp_path / NAME).unlink()
    assert mine.lost() is None
    assert (tmp_path / NAME).exists()
    mine.release()
