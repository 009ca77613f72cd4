"""Bits that flip and files that are cut: everything that is read is proven first, and what is damaged is named."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrt.checkpoint import checkpoint_dir, restoring
from elasticrt.data.durable_files import Unfit
from elasticrt.distributed.shared_payload import Payload
from elasticrt.errors import CheckpointError
from elasticrt.ipc.env import Commit
from tests.crash.places import commit_of, release, restored, save

PAYLOAD_STRIDE = 41
"""Of a payload's bytes so many apart are tried in the fast layer, all of them in the full one."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No line for each of thousands of restores; and this process holds no directory for the next test."""
    monkeypatch.setattr(restoring, "say", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    yield
    release()


class Rot:
    """A directory with the checkpoints 1, 2 and 3, and damage done to one file of it at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        save(directory, 1, 2, 3, keep=3)
        release()
        self.head = commit_of(directory, 3)
        self.problems: list[str] = []
        self.tried = 0

    def files(self, *suffixes: str) -> list[Path]:
        """Of all checkpoints."""
        return sorted(path for path in self.directory.glob("step-*") if path.suffix in suffixes)

    def damage(self, path: Path, content: bytes, what: str, caplog: Any) -> None:
        """Put `content` in place of a file's, restore in both ways, and put it back."""
        whole = path.read_bytes()
        if content.rstrip(b"\n") == whole.rstrip(b"\n"):
            return  # A last line without its end says the same.
        path.write_bytes(content)
        self.tried += 1
        caplog.clear()
        step = int(path.name.split("-")[1])
        allowed = {3} if step < 3 else {2}
        for head in (None, self.head):
            # The head is known by etcd's record, not by its manifest.
            expected = {3} if head is not None and path.suffix == ".json" else allowed
            try:
                found: object = restored(self.directory, head)
            except (AssertionError, CheckpointError) as error:
                found = error
            if found not in expected:
                self.problems.append(f"{path.name}, {what}: {found!r} instead of {expected} (head: {bool(head)})")
        read = path.suffix == ".json" or (path.suffix == ".pt" and step == 3)
        if read and path.name not in caplog.text:
            self.problems.append(f"{path.name}, {what}: not named")
        path.write_bytes(whole)


def _offsets(size: int, stride: int) -> list[int]:
    return sorted({*range(0, size, stride), size - 1})


@pytest.mark.parametrize(
    "stride", [PAYLOAD_STRIDE, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)  # fmt: skip
def test_every_flipped_bit(tmp_path: Path, stride: int, caplog: Any) -> None:
    """F06, F07, S7: a bit flips in any file, at any place: nothing torn is loaded, and no other step than it should."""
    caplog.set_level(logging.WARNING)
    rot = Rot(tmp_path)
    for path in rot.files(".pt", ".json"):
        whole = path.read_bytes()
        for offset in _offsets(len(whole), stride if path.suffix == ".pt" else max(1, stride // 8)):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << offset % 8
            rot.damage(path, bytes(flipped), f"bit {offset % 8} of byte {offset}", caplog)
    assert not rot.problems, "\n".join(rot.problems[:20])
    assert rot.tried > 500


@pytest.mark.parametrize(
    "stride", [PAYLOAD_STRIDE, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)  # fmt: skip
def test_every_cut(tmp_path: Path, stride: int, caplog: Any) -> None:
    """F06, F07, S7: a file ends at any byte, or goes on as zeros, as after a power cut on some file systems."""
    rot = Rot(tmp_path)
    for path in rot.files(".pt", ".json"):
        whole = path.read_bytes()
        for offset in _offsets(len(whole), stride):
            rot.damage(path, whole[:offset], f"cut at {offset}", caplog)
            rot.damage(path, whole[:offset] + bytes(len(whole) - offset), f"zeros from {offset}", caplog)
    assert not rot.problems, "\n".join(rot.problems[:20])
    assert rot.tried > 500


def test_all_damaged_stops(tmp_path: Path) -> None:
    """F07: when every payload is damaged the run stops, both ways: it never starts from 0 by itself."""
    rot = Rot(tmp_path)
    for path in rot.files(".pt"):
        path.write_bytes(path.read_bytes()[:-1])
    for head in (None, rot.head):
        with pytest.raises(CheckpointError, match="no checkpoint can be used"):
            restored(tmp_path, head)


def _unchecked(self: checkpoint_dir.CheckpointDirectory, commit: Commit) -> Payload:
    payload = Payload()
    payload.write(self._opened().read(commit.file, size_max=1 << 20))
    return payload


def _size_only(self: checkpoint_dir.CheckpointDirectory, commit: Commit) -> Payload:
    payload = Payload()
    self._opened().read_into(commit.file, payload.write, commit.size)
    return payload


def _own_word(self: checkpoint_dir.CheckpointDirectory, commit: Commit) -> Payload:
    """Checks a payload against its manifest, not against what was committed."""
    known = self.history().manifests.get(commit.nonce)
    payload = _unchecked(self, commit)
    if known is None or payload.flaw(known.commit.size, known.commit.digest):
        raise Unfit("not as the manifest says")
    return payload


@pytest.mark.parametrize("broken", [_unchecked, _size_only, _own_word])
def test_a_broken_rule_of_reading_is_caught(tmp_path: Path, broken: Any, monkeypatch: Any, caplog: Any) -> None:
    """S7, C8: the tests above have teeth: without the size, the digest, or etcd's digest, something wrong is loaded."""
    rot = Rot(tmp_path)
    monkeypatch.setattr(checkpoint_dir.CheckpointDirectory, "payload", broken)
    (newest,) = tmp_path.glob("step-3-*.pt")
    if broken is _own_word:
        (manifest,) = tmp_path.glob("step-3-*.json")
        rot.damage(manifest, b"", "empty", caplog)
    else:
        whole = newest.read_bytes()
        for offset in range(0, len(whole), 16):
            flipped = bytearray(whole)
            flipped[offset] ^= 64
            rot.damage(newest, bytes(flipped), f"byte {offset}", caplog)
    assert rot.problems
