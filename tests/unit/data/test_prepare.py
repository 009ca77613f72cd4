"""Data preparation: built once, complete, verified; failures told to all; builders replaced."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from elasticrt import ConfigError, PreparationError, prepare
from elasticrt.data.prepare import RECORD, ClaimRight, LockRight
from elasticrt.ipc.messages import BuildDone, ClaimBuild, Reply
from elasticrt.ipc.status_page import StatusPage
from tests.fake_worker import Agent, under


class Builder:
    """Writes two files and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, directory: Path) -> None:
        """A different result each time."""
        self.calls += 1
        assert list(directory.iterdir()) == []
        (directory / "a.txt").write_text("one")
        (directory / "sub").mkdir()
        (directory / "sub" / "b.txt").write_text(f"build {self.calls}")


def names(directory: Path) -> list[str]:
    """All that lies in it, of whatever name."""
    return sorted(path.name for path in directory.iterdir())


def longer_at_the_same_time(path: Path) -> None:
    """As a copy that was cut short or written on, with its times set."""
    times = path.stat()
    path.write_text("longer")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_builds_once(tmp_path):
    """The first call builds, the second finds it; nothing is left beside it but the lock."""
    build = Builder()
    path = prepare(tmp_path / "deep" / "data", build)
    assert prepare(tmp_path / "deep" / "data", build) == path
    assert build.calls == 1
    assert (path / "sub" / "b.txt").read_text() == "build 1"
    assert names(path.parent) == [".data.lock", "data"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "a.txt").unlink(),
        lambda path: (path / "a.txt").write_text("longer"),
        lambda path: (path / "a.txt").write_text("eno"),
        lambda path: (path / RECORD).write_text("{}"),
        lambda path: (path / RECORD).write_text("no json"),
        lambda path: (path / RECORD).write_text(json.dumps({"format": 1, "version": "1", "files": [{"path": 3}]})),
        lambda path: shutil.rmtree(path / "sub"),
        lambda path: longer_at_the_same_time(path / "a.txt"),
    ],
)
def test_damaged_is_built_again(tmp_path, damage, capsys):
    """A file missing, changed, or a record that does not fit: redone, not reused, and said (D03)."""
    build = Builder()
    path = prepare(tmp_path / "data", build)
    damage(path)
    prepare(path, build)
    assert build.calls == 2
    assert (path / "a.txt").read_text() == "one"
    assert names(tmp_path) == [".data.lock", "data"]
    assert "files in it have changed; prepared again" in "".join(capsys.readouterr())


def test_a_copy_with_other_times_is_reused(tmp_path):
    """Other modification times are looked into by digest, and found harmless."""
    build = Builder()
    path = prepare(tmp_path / "data", build)
    os.utime(path / "a.txt", (1, 1))
    prepare(path, build)
    assert build.calls == 1


def test_another_version_is_built_again(tmp_path):
    """The version is part of what a result is."""
    build = Builder()
    prepare(tmp_path / "data", build)
    prepare(tmp_path / "data", build, version="2")
    assert build.calls == 2


def test_the_result_is_put_in_place_under_the_lock(tmp_path, monkeypatch):
    """S9: while names change no other process can have the lock, so that nobody builds or replaces in between."""
    rename, renamed = Path.rename, []

    def take() -> None:
        fcntl.lockf(os.open(tmp_path / ".data.lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def watched(path: Path, target: Path) -> Path:
        # A process of its own: the lock is never in the way of its holder, who would lose it by closing the file.
        renamed.append((path.name == "data", target.name == "data", ends(fork(take))))
        return rename(path, target)

    prepare(tmp_path / "data", Builder())
    monkeypatch.setattr(Path, "rename", watched)
    prepare(tmp_path / "data", Builder(), version="2")
    assert renamed == [(True, False, [1]), (False, True, [1])], "the old one goes, the new one comes"


def test_what_is_in_place_is_durable(tmp_path, monkeypatch):
    """F04, D03: before it gets its name every file and directory of it is synced as it is, and the name after that."""
    rename, fsync, synced, named = Path.rename, os.fsync, {}, []

    def state(status: os.stat_result) -> tuple[int, int]:
        return status.st_size, status.st_mtime_ns

    def watched(path: Path, target: Path) -> Path:
        tree = [path, *path.rglob("*")]
        assert len(tree) == 5  # Itself, two files, a directory, the record.
        assert {each: synced.get(each.stat().st_ino) for each in tree} == {each: state(each.stat()) for each in tree}
        synced.pop(target.parent.stat().st_ino, None)
        named.append(target)
        return rename(path, target)

    def noted(fd: int) -> None:
        synced[os.fstat(fd).st_ino] = state(os.fstat(fd))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", watched)
    path = prepare(tmp_path / "data", Builder())
    assert named == [path]
    assert tmp_path.stat().st_ino in synced


def test_somebody_elses_directory_is_moved_not_deleted(tmp_path, capsys):
    """A directory without our record may be somebody's only copy (D03)."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("mine")
    prepare(tmp_path / "data", Builder())
    (moved,) = tmp_path.glob("data.replaced-*")
    assert (moved / "precious").read_text() == "mine"
    assert moved.name in capsys.readouterr().err


def raising(directory: Path) -> None:
    """Half a build."""
    (directory / "half").write_text("x")
    raise ValueError("no such corpus")


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (raising, "ValueError: no such corpus"),
        (lambda directory: None, "created no files"),
        (lambda directory: sys.exit(3), "SystemExit: 3"),
    ],
)
def test_a_builder_that_fails(tmp_path, build, word):
    """Raising, leaving nothing, exiting: PreparationError with the reason, and nothing half done (D05)."""
    with pytest.raises(PreparationError, match=word):
        prepare(tmp_path / "data", build)
    assert names(tmp_path) == [".data.lock"]


def fork(function) -> int:
    """Run in a process of its own: exit code 0, 6 for the expected error, 1 for another."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except PreparationError as error:
            code = 6 if "no such corpus" in str(error) else 1
        finally:
            os._exit(code)
    return child


def ends(*pids: int) -> list[int]:
    """Exit codes."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def wait_for(condition) -> None:
    """Until it holds, for 20 s at most."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_after_a_failed_build_the_next_process_builds(tmp_path):
    """One that waited tries by itself: a launcher ends all with the first failure, and alone it may succeed (D05)."""
    begun, go = tmp_path / "begun", tmp_path / "go"

    def build(directory):
        begun.touch()
        wait_for(go.exists)
        raising(directory)

    first = fork(lambda: prepare(tmp_path / "data", build))
    wait_for(begun.exists)
    second = fork(lambda: prepare(tmp_path / "data", Builder()))
    time.sleep(0.2)
    assert not (tmp_path / "data").exists()
    go.touch()
    assert ends(first, second) == [6, 0]


def test_of_two_threads_one_has_the_lock(tmp_path):
    """Record locks know only processes: between the threads of one there is another."""
    first, second = LockRight(tmp_path / "data"), LockRight(tmp_path / "data")
    assert first.ask()
    assert not second.ask()
    first.release()
    assert second.ask()
    second.release()


def test_a_lock_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    """Where nothing may be written no process waits for another."""
    real = os.open

    def refusing(path, *arguments, **options):
        if str(path).endswith(".lock"):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(PreparationError, match="Permission denied"):
        prepare(tmp_path / "data", Builder(), timeout_s=5)


@pytest.mark.parametrize("at", ["begin", "middle", "end"])
def test_a_killed_builder_is_replaced(tmp_path, at):
    """SIGKILL at any point of the build: one of those who wait takes over, and nobody sees a part (D01, S9)."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def build(directory):
        first = not (marks / "begin").exists()
        (directory / "size").write_text("0123456789" * (1 if first else 2))
        for point in ("begin", "middle", "end"):
            (marks / point).touch()
            if first and point == at:
                signal.pause()
            (directory / point).write_text(point)

    first = fork(lambda: prepare(tmp_path / "data", build))
    wait_for((marks / at).exists)
    others = [fork(lambda: prepare(tmp_path / "data", build)) for _ in range(2)]
    assert not (tmp_path / "data").exists()
    os.kill(first, signal.SIGKILL)
    assert ends(first, *others) == [-signal.SIGKILL, 0, 0]
    assert (tmp_path / "data" / "size").read_text() == "0123456789" * 2
    assert names(tmp_path) == [".data.lock", "data", "marks"]


def test_waiting_has_a_deadline_and_is_not_silent(tmp_path, monkeypatch, capsys):
    """Who waits says so, and gives up after timeout_s, naming the builder."""
    monkeypatch.setattr("elasticrt.data.prepare.PROGRESS_S", 0.1)
    mark = tmp_path / "begun"

    def build(directory):
        mark.touch()
        signal.pause()

    child = fork(lambda: prepare(tmp_path / "data", build))
    try:
        wait_for(mark.exists)
        with pytest.raises(PreparationError, match=f"process {child}"):
            prepare(tmp_path / "data", Builder(), timeout_s=0.5)
        assert f"process {child}" in capsys.readouterr().err
    finally:
        os.kill(child, signal.SIGKILL)
        ends(child)


def answers(*replies):
    """An agent that answers claims one after the other, and everything else with ok."""
    queue = list(replies)

    def answer(message):
        if isinstance(message, ClaimBuild) and queue:
            refusal, reason = queue.pop(0)
            return Reply(message.request, ok=not refusal, reason=reason, refusal=refusal)
        refusal = "wait" if isinstance(message, ClaimBuild) else ""
        return Reply(message.request, ok=not refusal, reason="nobody", refusal=refusal)

    return answer


def test_shared_build_is_claimed_and_published(tmp_path, monkeypatch):
    """Under agents: claim, build, claim again before the rename, say that it is there (S9)."""
    monkeypatch.setattr(ClaimRight, "poll_s", 0.01)
    agent = Agent(answer=answers(("wait", "node b"), ("", ""), ("", "")))
    build = Builder()
    with under(agent, monkeypatch):
        path = prepare(tmp_path / "data", build, scope="shared")
        (published,) = agent.of(BuildDone)
        assert len(agent.of(ClaimBuild)) == 3
        assert published.name.startswith("data-")
    assert build.calls == 1
    assert path.is_dir()


def test_workshops_of_earlier_generations_are_swept(tmp_path, monkeypatch):
    """D02: what dead builders left goes with the next result; one of the same generation may be paused, and live."""
    for generation in (2, 3):
        (tmp_path / f".data.shared-{generation}-0123").mkdir()
    agent = Agent(answer=answers(("", ""), ("", "")))
    with under(agent, monkeypatch, generation=3):
        prepare(tmp_path / "data", Builder(), scope="shared")
    assert names(tmp_path) == [".data.shared-3-0123", "data"]


def test_what_was_replaced_is_swept(tmp_path, monkeypatch):
    """A builder that ends before it has removed the directory of another version leaves that to the next generation."""

    def ends(*_, **__):
        raise OSError("it ends here")

    with under(Agent(answer=answers(*[("", "")] * 4)), monkeypatch, generation=2):
        prepare(tmp_path / "data", Builder(), scope="shared", version="1")
        with monkeypatch.context() as patch, pytest.raises(PreparationError):
            patch.setattr("shutil.rmtree", ends)
            prepare(tmp_path / "data", Builder(), scope="shared", version="2")
        assert len(names(tmp_path)) == 2
    with under(Agent(answer=answers(*[("", "")] * 2)), monkeypatch, generation=3):
        prepare(tmp_path / "data", Builder(), scope="shared", version="3")
    assert names(tmp_path) == ["data"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_agent_knows_who_builds(tmp_path, monkeypatch, fails):
    """A membership change waits for a build under way, and for nothing after it."""
    fd, seen = StatusPage.create(), []
    page = StatusPage(fd)

    def build(directory: Path) -> None:
        seen.append(page.building)
        (raising if fails else Builder())(directory)

    with under(Agent(), monkeypatch, page_fd=fd), contextlib.suppress(PreparationError):
        prepare(tmp_path / "data", build)
    assert (seen, page.building) == ([1], 0)
    os.close(fd)


def test_a_claim_of_unknown_outcome_is_asked_again(tmp_path, monkeypatch):
    """While etcd does not answer nothing is built twice or thrown away, before the build and after it (E11)."""
    monkeypatch.setattr(ClaimRight, "poll_s", 0.01)
    unsure = ("unsure", "etcd does not answer")
    agent = Agent(answer=answers(unsure, ("", ""), unsure, unsure, ("", "")))
    build = Builder()
    with under(agent, monkeypatch):
        prepare(tmp_path / "data", build, scope="shared")
        assert len(agent.of(ClaimBuild)) == 5
    assert build.calls == 1


def test_a_claim_that_nobody_can_record_ends_with_the_reason(tmp_path, monkeypatch, capsys):
    """E07: an etcd without space is waited for, as one that is away, and the line says so; then a remedy is named."""
    monkeypatch.setattr(ClaimRight, "poll_s", 0.01)
    monkeypatch.setattr("elasticrt.data.prepare.UNSURE_S", 0.1)
    agent = Agent(answer=lambda message: Reply(message.request, ok=False, reason="etcd is full", refusal="unsure"))
    build = Builder()
    with under(agent, monkeypatch), pytest.raises(PreparationError, match=r"the agent refuses .*got etcd is full"):
        prepare(tmp_path / "data", build, scope="shared")
    assert capsys.readouterr().err == f"elasticrt: {tmp_path / 'data'} waits for etcd: etcd is full\n"
    assert build.calls == 0


def test_shared_build_by_another_node(tmp_path, monkeypatch):
    """While told to wait, and when told it is done, nothing is built here."""
    monkeypatch.setattr(ClaimRight, "poll_s", 0.01)
    build = Builder()
    agent = Agent()

    def answer(message):
        if len(agent.of(ClaimBuild)) == 3:
            prepare(tmp_path / "data", build)
            return Reply(message.request, ok=False, refusal="done")
        return Reply(message.request, ok=False, reason="node b", refusal="wait")

    agent._answer = answer
    with under(agent, monkeypatch):
        prepare(tmp_path / "data", lambda directory: pytest.fail("not here"), scope="shared")
    assert build.calls == 1


def test_shared_build_failed_elsewhere(tmp_path, monkeypatch):
    """The builder's error, wherever it was, is everybody's (D05)."""
    agent = Agent(answer=answers(("failed", "ValueError: no such corpus")))
    with under(agent, monkeypatch), pytest.raises(PreparationError, match="no such corpus"):
        prepare(tmp_path / "data", Builder(), scope="shared")


def test_shared_build_that_fails_here_is_told(tmp_path, monkeypatch):
    """The agent learns the error, so that all nodes can fail with it."""
    agent = Agent(answer=answers(("", "")))
    with under(agent, monkeypatch):
        with pytest.raises(PreparationError, match="no such corpus"):
            prepare(tmp_path / "data", raising, scope="shared")
        (failed,) = agent.of(BuildDone)
        assert "no such corpus" in failed.error
    assert names(tmp_path) == []


def test_a_builder_that_lost_its_claim_publishes_nothing(tmp_path, monkeypatch):
    """Paused for long and overtaken: its result is dropped, the other's counts (D02, S9)."""
    monkeypatch.setattr(ClaimRight, "poll_s", 0.01)
    mine, theirs = Builder(), Builder()

    def slow(directory):
        mine(directory)
        (directory / "whose").write_text("mine")
        prepare(tmp_path / "data", theirs)

    agent = Agent(answer=answers(("", ""), ("done", ""), ("done", "")))
    with under(agent, monkeypatch):
        path = prepare(tmp_path / "data", slow, scope="shared")
        assert agent.of(BuildDone) == []
    assert not (path / "whose").exists()
    assert names(tmp_path) == [".data.lock", "data"], "its workshop is gone as well"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"path": 3}, TypeError),
        ({"build": "make"}, TypeError),
        ({"version": 2}, TypeError),
        ({"scope": "world"}, ValueError),
        ({"timeout_s": 0}, ValueError),
        ({"timeout_s": "9"}, TypeError),
        ({"path": "/"}, ConfigError),
        ({"path": "."}, ConfigError),
        ({"path": ".."}, ConfigError),
        ({"path": Path.home()}, ConfigError),
        ({"path": __file__}, ConfigError),
        ({"path": "/proc/nowhere"}, PreparationError),
    ],
)
def test_wrong_use(tmp_path, arguments, error):
    """Wrong types, and places that can only have been meant otherwise, are refused before anything happens."""
    with pytest.raises(error):
        prepare(**({"path": tmp_path / "data", "build": Builder()} | arguments))
