"""A builder that dies, or finds no room: at every point, the data is there and complete, or it is not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrt import prepare
from elasticrt.data.prepare import RECORD, fits

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.lockf", "os.scandir")
"""What the interpreter announces before it asks the kernel."""

PARTS = 3


def build_of(version: str) -> Callable[[Path], None]:
    """Three files that say which version they are."""

    def build(directory: Path) -> None:
        (directory / "sub").mkdir()
        for part in range(PARTS):
            (directory / "sub" / str(part)).write_text(version * 100)

    return build


def _noting(built: list[Path]) -> Callable[[Path], None]:
    """Version 2, with a trace."""

    def build(directory: Path) -> None:
        built.append(directory)
        build_of("2")(directory)

    return build


def _complete(path: Path, version: str) -> bool:
    found = sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())
    texts = {(path / "sub" / str(part)).read_text() for part in range(PARTS)}
    return texts == {version * 100} and found == sorted([RECORD, *(f"sub/{part}" for part in range(PARTS))])


def _child_that_dies(target: Path, at: int) -> int:
    """Prepare version 2 in a fork that gets SIGKILL before its file system call number `at`; the exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        count = iter(range(100_000))

        def dying(event: str, _: Any) -> None:
            if event in CALLS and next(count) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(dying)
        prepare(target, build_of("2"), version="2")
        code = 0
    finally:
        os._exit(code)


@pytest.mark.parametrize("before", ["nothing", "another version"])
def test_killed_at_every_call(tmp_path: Path, before: str) -> None:
    """D01, D03, S9: from the first call to the last; nobody ever finds a part, and the next one builds or uses it."""
    states = []
    for at in range(1000):
        target = tmp_path / str(at) / "data"
        if before == "another version":
            prepare(target, build_of("1"), version="1")
        code = _child_that_dies(target, at)
        assert code in (0, -signal.SIGKILL)
        published = fits(target, "2")
        if not published and target.exists():
            assert before == "another version"
            assert _complete(target, "1")
        states.append(published)
        built: list[Path] = []
        prepare(target, _noting(built), version="2")
        assert _complete(target, "2")
        assert len(built) == (0 if published else 1)
        if built:
            assert sorted(path.name for path in target.parent.iterdir()) == [".data.lock", "data"]
        if code == 0:
            break
    assert len(states) > 15
    assert states == sorted(states), "once it is published it stays"
    assert (states[0], states[-1]) == (False, True)


FULL = """
import json, os, sys
from pathlib import Path
from elasticrt import PreparationError, prepare

place = Path(sys.argv[1])

def build(size):
    def fill(directory):
        for part in range(4):
            (directory / f"{part}").write_bytes(bytes(size // 4))
    return fill

def free():
    status = os.statvfs(place)
    return status.f_bavail * status.f_bsize

told, before = [], free()
for size in (1 << 20, 250_000, 100_000):
    try:
        prepare(place / "data", build(size), version=str(size))
        told.append("built")
    except PreparationError as error:
        told.append(str(error))
    left = sorted(path.name for path in place.iterdir())
print(json.dumps({"told": told, "left": left, "lost": before - free()}))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """D04: no room for the data, or just none for its record: an error in words, nothing half done, nothing kept.

    On a file system of 256 KiB, in a mount namespace of its own.
    """
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs a mount namespace, which this machine does not give")
    (tmp_path / "disk").mkdir()
    script = tmp_path / "full.py"
    script.write_text(FULL)
    inside = 'mount -t tmpfs -o size=256k tmpfs "$1" && exec "$2" "$3" "$1"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", inside, "sh", str(tmp_path / "disk"), sys.executable, str(script)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all("No space left on device" in error for error in found["told"][:2])
    assert found["told"][2] == "built"
    assert found["left"] == [".data.lock", "data"]
    assert found["lost"] < 200_000
