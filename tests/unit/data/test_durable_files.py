"""Files written in many small pieces and some large ones."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import IO

import pytest

from elasticrt.checkpoint.snapshot import GATHERED_BYTES_MAX, hashed
from elasticrt.data import durable_files as files
from elasticrt.data.durable_files import Directory

SIZES = [0, 1, 7, 64, GATHERED_BYTES_MAX - 1, GATHERED_BYTES_MAX, GATHERED_BYTES_MAX + 1, 3 * GATHERED_BYTES_MAX]


class Counting:
    """`os`, but counts the calls of `write`, of which one may fail."""

    def __init__(self, fails: int = 0) -> None:
        self.writes = 0
        self._fails = fails

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        """As the system does; the one that is to fail has no space."""
        self.writes += 1
        if self.writes == self._fails:
            raise OSError(28, "No space left on device")
        return os.write(fd, data)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_in_pieces_is_there_in_their_order(tmp_path: Path, seed: int) -> None:
    """Whatever their sizes; size and digest are those of the file."""
    choose = random.Random(seed)
    pieces = [choose.randbytes(choose.choice(SIZES)) for _ in range(60)]

    def fill(file: IO[bytes]) -> None:
        for piece in pieces:
            assert file.write(memoryview(piece) if choose.random() < 0.5 else piece) == len(piece)

    size, digest = Directory(tmp_path, create=True).write("name", "temporary", lambda fd: hashed(fd, fill))
    content = (tmp_path / "name").read_bytes()
    assert content == b"".join(pieces)
    assert (size, digest) == (len(content), hashlib.sha256(content).hexdigest())


def test_small_pieces_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call costs the training something: a thousand pieces of a hundred bytes are two calls."""
    counting = Counting()
    monkeypatch.setattr(files, "os", counting)
    Directory(tmp_path, create=True).write(
        "name", "temporary", lambda fd: hashed(fd, lambda file: [file.write(b"x" * 100) for _ in range(1000)])
    )
    assert (tmp_path / "name").stat().st_size == 100_000
    assert counting.writes == 2


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
    """F01: neither the first nor a later one, nor that of what is gathered at the end; the error says why."""

    def fill(file: IO[bytes]) -> None:
        for size in (9, 3 * GATHERED_BYTES_MAX, 9):
            file.write(b"x" * size)

    monkeypatch.setattr(files, "os", Counting(fails))
    with pytest.raises(OSError, match="No space left"):
        Directory(tmp_path, create=True).write("name", "temporary", lambda fd: hashed(fd, fill))
    assert not list(tmp_path.iterdir())
