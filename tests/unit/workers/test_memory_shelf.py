"""What a node keeps in memory for the generation to come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrt.ipc.env import Copy
from elasticrt.workers.snapshot_cache import SnapshotCache


def _copy(step: int, digest: str = "a") -> Copy:
    return Copy(step, 0, 8, digest * 64, 2)


def _file(content: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def memory() -> Iterator[SnapshotCache]:
    """A node's memory in its first generation; nothing of it stays open."""
    before = _open_files()
    kept = SnapshotCache()
    kept.renew(None)
    yield kept
    kept.close()
    assert _open_files() == before


def test_the_newest_copy_is_what_is_reported(memory: SnapshotCache) -> None:
    """Copies replace each other; before the first one the copy that was resumed from counts."""
    assert memory.newest is None
    for step in (5, 6, 7):
        memory.put(_copy(step), _file(b"%d" % step))
        assert memory.newest == _copy(step)
    memory.renew(_copy(7))
    assert memory.newest == _copy(7)


@pytest.mark.parametrize("chosen", [6, 7])
def test_the_last_two_copies_can_be_resumed_from(memory: SnapshotCache, chosen: int) -> None:
    """S6: a copy that arrives while the leader decides does not push out the one that it chooses."""
    for step in (5, 6, 7):
        memory.put(_copy(step), _file(b"%d" % step))
    memory.renew(_copy(chosen))
    fd = memory.descriptor(_copy(chosen))
    assert os.pread(fd, 8, 0) == b"%d" % chosen


def test_of_two_copies_of_a_step_the_chosen_one_is_given(memory: SnapshotCache) -> None:
    """A node may have another node's step in two forms: workers get the one whose digest they will check."""
    memory.put(_copy(5, "b"), _file(b"other"))
    memory.put(_copy(5, "a"), _file(b"chosen"))
    memory.renew(_copy(5, "a"))
    assert os.pread(memory.descriptor(_copy(5, "a")), 8, 0) == b"chosen"


def test_an_older_copy_is_gone(memory: SnapshotCache) -> None:
    """No more than two are kept, and what cannot be given is not offered."""
    for step in (5, 6, 7):
        memory.put(_copy(step), _file(b"%d" % step))
    memory.renew(_copy(5))
    assert memory.descriptor(_copy(5)) < 0


def test_a_copy_of_the_same_step_is_kept_but_not_taken_for_another_node_s(memory: SnapshotCache) -> None:
    """It is there should its holder die; only the very copy that was chosen is handed to workers."""
    memory.put(_copy(5, "b"), _file(b"mine"))
    memory.renew(_copy(5, "a"))
    assert memory.newest == _copy(5, "b")
    assert memory.descriptor(_copy(5, "a")) < 0
    memory.renew(_copy(5, "b"))
    assert os.pread(memory.descriptor(_copy(5, "b")), 8, 0) == b"mine"


def test_what_was_left_at_a_handover_comes_before_older_copies(memory: SnapshotCache) -> None:
    """A handover's state is resumed from although one that was being written when it was taken arrives after it."""
    memory.put(_copy(3), _file(b"old"))
    memory.put(_copy(8), _file(b"left"))
    memory.put(_copy(5), _file(b"late"))
    assert memory.newest == _copy(8)
    memory.renew(_copy(8))
    assert os.pread(memory.descriptor(_copy(8)), 8, 0) == b"left"


def test_going_back_to_disk_forgets_all_copies(memory: SnapshotCache) -> None:
    """A generation that resumes from a checkpoint has another future: copies of the old one must not come back."""
    memory.put(_copy(9), _file(b"old"))
    memory.renew(None)
    assert memory.newest is None


def test_a_damaged_copy_is_offered_to_nobody_again(memory: SnapshotCache) -> None:
    """F06: what a worker has found damaged is let go: the next generation must not be sent to it again."""
    memory.put(_copy(5), _file(b"five"))
    memory.renew(_copy(5))
    memory.forget()
    assert memory.newest is None
    assert memory.descriptor(_copy(5)) < 0
    memory.renew(_copy(5))
    assert memory.descriptor(_copy(5)) < 0


def test_what_is_taken_after_a_damaged_copy_counts(memory: SnapshotCache) -> None:
    """Only that one copy is given up."""
    memory.put(_copy(5), _file(b"five"))
    memory.renew(_copy(5))
    memory.forget()
    memory.put(_copy(6), _file(b"six"))
    assert memory.newest == _copy(6)
