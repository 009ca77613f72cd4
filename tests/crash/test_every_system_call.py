"""SIGKILL before every single system call of a save and of a load: the old checkpoint or the new one, never neither."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash import stepper
from tests.crash.places import close, commit_of, release, restored, save


@pytest.fixture(autouse=True)
def no_locks_kept() -> Iterator[None]:
    """This process holds no directory from one test to the next."""
    yield
    release()


def _killed_everywhere(tmp_path: Path, template: Path, act: Callable[[Path], object]) -> Iterator[tuple[bool, Path]]:
    """Do `act` on copies of one, killed before call 1, 2, 3 ... until it gets through: whether it did, where."""
    for number in range(1, 100_000):
        directory = tmp_path / str(number)
        shutil.copytree(template, directory)
        try:
            ended = stepper.run(lambda directory=directory: act(directory), number)
        except OSError as error:
            pytest.skip(f"no ptrace here: {error}")
        assert ended.code in (0, -signal.SIGKILL)
        yield ended.code == 0, directory
        shutil.rmtree(directory)
        if ended.code == 0:
            return


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_save_killed_at_every_system_call(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """F03, G5, S7, S8, W03: whichever call it was, what is there is whole, and the next process saves and tidies up."""
    template = tmp_path / "template"
    save(template, 1, 2, 3)
    release()
    found = []
    for _, directory in _killed_everywhere(tmp_path, template, lambda directory: save(directory, 4)):
        found.append(restored(directory))
        close(save(directory, 5))
        release()
        assert restored(directory) == 5
        assert not list(directory.glob(".saving-*"))
        assert len(list(directory.glob("*.pt"))) == 2
    capfd.readouterr()
    assert (found[0], found[-1]) == (3, 4)
    assert set(found) == {3, 4}
    assert len(found) > 100


def test_a_load_killed_at_every_system_call(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """F03: a load that dies, also while it marks a commit that was not, costs nothing."""
    template = tmp_path / "template"
    save(template, 1, 2, 3)
    release()
    head = commit_of(template, 3)
    (manifest,) = template.glob("step-3-*.json")
    manifest.rename(manifest.with_suffix(".draft"))
    done, marked = [], []
    for through, directory in _killed_everywhere(tmp_path, template, lambda directory: restored(directory, head)):
        done.append(through)
        marked.append((directory / manifest.name).exists())
        assert restored(directory, head) == 3
        assert restored(directory) == 3
        assert len(list(directory.iterdir())) == len(list(template.iterdir()))
    capfd.readouterr()
    assert (marked[0], marked[-1], done.count(True)) == (False, True, 1)
    assert len(done) > 50


def test_the_stepper_counts_and_kills() -> None:
    """The tool itself: a process is killed before the call that was named, and not at all without one."""
    reader, writer = os.pipe()

    def act() -> None:
        for number in range(5):
            os.write(writer, bytes([number]))

    try:
        whole = stepper.run(act)
        assert (whole.code, os.read(reader, 100)) == (0, bytes(range(5)))
        written = []
        for number in range(1, whole.calls + 1):
            ended = stepper.run(act, number)
            assert (ended.code, ended.calls) == (-signal.SIGKILL, number)
            os.write(writer, b"\xff")
            written.append(os.read(reader, 100)[:-1])
        assert {bytes(range(length)) for length in range(6)} == set(written)
    finally:
        os.close(reader)
        os.close(writer)
