"""Disks that are full, failing, read-only or over quota: a failed save is a warning, and what was there stays."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrt.agent.store_proxy import StoreProxy, StoreRequest
from elasticrt.data import durable_files as files
from elasticrt.errors import CheckpointError
from elasticrt.ipc.directory_owner import NAME
from elasticrt.ipc.messages import ERRNO, OpenDirectory
from elasticrt.rendezvous.records import Keys
from tests.crash.places import close, commit_of, release, restored, save, save_one, state
from tests.memory_store import MemoryServer, MemoryStore

ERRORS = ("EIO", "EROFS", "EDQUOT", "ESTALE", "EACCES", "EMFILE")
CHANGING = ("open", "write", "fsync", "rename", "unlink", "close", "fstat", "listdir")
READING = ("open", "fstat", "readv", "listdir", "close")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here needs a disk that is really synced; and this process holds no directory for the next test."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    yield
    release()


class Failing:
    """`os` for the code under test: of the calls named, number `at` fails with `error`, or a write is short."""

    def __init__(self, names: tuple[str, ...], at: int, error: str) -> None:
        self._names = names
        self._left = at
        self._error = error
        self.failed = ""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self._names:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left:
                return real(*arguments, **options)
            self.failed = name
            if self._error == "short":
                return real(arguments[0], arguments[1][:1]) if name == "write" else real(*arguments, **options)
            if name == "close":
                real(*arguments)  # Linux closes the descriptor whatever it answers.
            number = getattr(errno, self._error)
            raise OSError(number, os.strerror(number))

        return call


def _listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lock"}


@pytest.mark.parametrize("error", ["ENOSPC", "short", *(pytest.param(each, marks=pytest.mark.slow) for each in ERRORS)])
def test_an_error_at_every_call_of_a_save(
    tmp_path: Path, error: str, monkeypatch: Any, caplog: Any, capfd: Any
) -> None:
    """F01, F02, F05: once at each call: the old head or the new one, a warning that says why, and training goes on."""
    found = []
    template = tmp_path / "template"
    close(save(template, 1, 2, 3))
    for at in range(1, 1000):
        release()
        directory = tmp_path / str(at)
        shutil.copytree(template, directory)
        saver = save(directory)
        failing = Failing(CHANGING, at, error)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", failing)
            save_one(saver, 4)
        if not failing.failed:
            break
        release()
        found.append((failing.failed, restored(directory)))
        head = commit_of(directory, saver._head.known.step)
        assert restored(directory, head) == saver._head.known.step, "what was acknowledged is there"
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        if found[-1][1] != 4:
            assert any(os.strerror(getattr(errno, error)) in text for text in warned), (failing.failed, warned)
        saver.save(state(5), step=5)
        assert saver.wait()
        assert restored(directory) == 5
        close(saver)
        close(save(directory, 6))
        release()
        assert not list(directory.glob(".saving-*"))
        assert len(list(directory.glob("*.pt"))) == 2
        shutil.rmtree(directory)
    capfd.readouterr()
    assert {name for name, _ in found} == set(CHANGING)
    assert {step for _, step in found} == ({4} if error == "short" else {3, 4})
    assert len(found) > 30
    assert (found[0][1], found[-1][1]) == ((4, 4) if error == "short" else (3, 4))


@pytest.mark.parametrize("error", ["EIO", "ESTALE"])
def test_an_error_at_every_call_of_a_load(tmp_path: Path, error: str, monkeypatch: Any, capfd: Any) -> None:
    """F02, F07: once at each call: the head, an ancestor with a warning, or a stop in words; and nothing is changed."""
    save(tmp_path, 1, 2, 3, keep=3)
    release()
    before = _listing(tmp_path)
    found: list[int | str] = []
    for at in range(1, 1000):
        failing = Failing(READING, at, error)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", failing)
            try:
                found.append(restored(tmp_path))
            except CheckpointError:
                found.append("stopped")
        assert _listing(tmp_path) == before
        if not failing.failed:
            break
    capfd.readouterr()
    assert restored(tmp_path) == 3
    assert set(found) <= {2, 3, "stopped"}, found
    assert len(found) > 20


def test_every_short_write(tmp_path: Path, monkeypatch: Any) -> None:
    """F02: a disk that takes one byte at a time, or a thousand, gets them all, and the digest is of what was meant."""
    for most in (1, 1000):

        class Slow:
            def __getattr__(self, name: str) -> Any:
                return getattr(os, name)

            def write(self, fd: int, data: memoryview, most: int = most) -> int:
                return os.write(fd, data[:most])

        with monkeypatch.context() as patch:
            patch.setattr(files, "os", Slow())
            save(tmp_path / str(most), 7)
        assert restored(tmp_path / str(most)) == 7


# Real file systems, small ones, in a mount namespace of their own.

CLONE_NEWNS = 0x20000


def _in_own_mounts(act: Callable[[], object]) -> Any:
    """Do `act` in a fork with mounts of its own, which end with it; what it returns (plain JSON)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: dict[str, Any] = {"error": "it died"}
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.unshare(CLONE_NEWNS):
                answer = {"skip": os.strerror(ctypes.get_errno())}
            else:
                subprocess.run(["mount", "--make-rprivate", "/"], check=True)
                answer = {"value": act()}
        except BaseException:  # noqa: BLE001  Told to the parent, which fails with it.
            answer = {"error": traceback.format_exc()}
        finally:
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    if "skip" in answer:
        pytest.skip(f"no mount namespace: {answer['skip']}")
    assert "error" not in answer, answer["error"]
    return answer["value"]


def _mount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system(tmp_path: Path) -> None:
    """F01: with 0, 1, 2 ... free blocks: the old head until the new one fits; with room again, saves succeed."""

    def act() -> list[list[int]]:
        _mount(tmp_path, "size=128k")
        found = []
        for free in range(12):
            directory = tmp_path / f"free-{free}"
            saver = save(directory, 1, 2, 3)
            filler = tmp_path / "filler"
            status = os.statvfs(tmp_path)
            with filler.open("wb") as file:
                file.write(bytes((status.f_bavail - free) * status.f_frsize))
            saver.save(state(4), step=4)
            saver.wait()
            release()
            during = restored(directory)
            filler.unlink()
            saver.save(state(5), step=5)
            saver.wait()
            found.append([during, saver._head.known.step, restored(directory), len(list(directory.glob(".saving-*")))])
            release()
            shutil.rmtree(directory)
        return found

    found = _in_own_mounts(act)
    assert [each[1:] for each in found] == [[5, 5, 0]] * 12
    assert [each[0] for each in found] == sorted(each[0] for each in found)
    assert {each[0] for each in found} == {3, 4}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_an_agent_on_a_full_or_read_only_file_system(tmp_path: Path) -> None:
    """F01, F02: it says which error keeps it from taking the directory; with room again it takes it, once asked."""

    def act() -> list[list[Any]]:
        _mount(tmp_path, "size=64k")
        agent = StoreProxy(MemoryStore(MemoryServer(lambda: 0.0)), Keys("run"), lambda _: None, "")

        def ask() -> list[Any]:
            own = OpenDirectory(1, str(tmp_path), "0" * 16, take=True)
            reply = agent.carry_out(StoreRequest(own, 1, 0, 1, "n0", "b" * 16, 0, lambda _: None))
            return [reply.ok, reply.data.get(ERRNO), sorted(each.name for each in tmp_path.iterdir())]

        status = os.statvfs(tmp_path)
        (tmp_path / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize))
        found = [ask()]
        (tmp_path / "filler").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        found.append(ask())
        subprocess.run(["mount", "-o", "remount,rw", str(tmp_path)], check=True)
        return [*found, ask()]

    full, read_only = [False, errno.ENOSPC, ["filler"]], [False, errno.EROFS, []]
    assert _in_own_mounts(act) == [full, read_only, [True, None, [NAME]]]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_no_file_names_left(tmp_path: Path) -> None:
    """F02: out of inodes the old head stays, whatever part of the new one there was room for: it needs two names."""

    def act() -> list[int]:
        _mount(tmp_path, "size=1m,nr_inodes=20")
        saver = save(tmp_path / "ckpt", 1, 2, 3)
        found = []
        for free in (0, 1, 2, 3):
            fillers = [tmp_path / f"filler-{number}" for number in range(os.statvfs(tmp_path).f_favail - free)]
            for filler in fillers:
                filler.write_bytes(b"")
            saver.save(state(4 + free), step=4 + free)
            saver.wait()
            release()
            found.append(restored(tmp_path / "ckpt"))
            for filler in fillers:
                filler.unlink()
        return found

    assert _in_own_mounts(act) == [3, 3, 6, 7]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_file_system_that_becomes_read_only(tmp_path: Path) -> None:
    """F02, F12: as the kernel does after an error on the disk: what is there can be restored, and saved again later."""

    def act() -> list[int]:
        _mount(tmp_path, "size=1m")
        saver = save(tmp_path / "ckpt", 1, 2, 3)
        release()  # Its file is open for writing.
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        saver.save(state(4), step=4)
        saver.wait()
        release()
        found = [restored(tmp_path / "ckpt")]
        subprocess.run(["mount", "-o", "remount,rw", str(tmp_path)], check=True)
        saver.save(state(5), step=5)
        saver.wait()
        return [*found, restored(tmp_path / "ckpt")]

    assert _in_own_mounts(act) == [3, 5]
