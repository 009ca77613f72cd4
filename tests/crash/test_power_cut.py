"""Power cuts: whatever POSIX lets a disk forget, an acknowledged checkpoint is there, and no torn one is loaded.

The production code saves to a disk that notes each change (`disk.Recorder`); every state that the disk may have after
a power cut at any point is laid out as files, and the production code restores from these. Twice: as the next start of
a script, for which the directory is all there is, and as the next generation under an agent, whose etcd remembers the
head. Then rules of the writing are broken, one at a time, and each of these must be caught.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticrt import Checkpointer
from elasticrt.checkpoint import checkpoint_dir, commits, restoring
from elasticrt.data import durable_files as files
from elasticrt.distributed.shared_payload import Payload
from elasticrt.errors import ElasticError
from elasticrt.ipc.env import Commit
from tests.crash.disk import Change, Content, Recorder, remains
from tests.crash.places import close, release, restored, save_one, state

STATES_MIN = 2000
SAVED_AGAIN = 99
EVERY = 40
"""Of the states, so many apart, those in which it is also tried to save again."""


@dataclass(frozen=True)
class Saved:
    """What a process did to a disk: `whole` are the payloads as they were meant."""

    directory: Path
    changes: tuple[Change, ...]
    whole: frozenset[Content]
    keep: int


@dataclass(frozen=True)
class Promise:
    """What must be true after a power cut: `marked`, or a later step, is found in the directory, 0: maybe nothing; and
    each of `heads`, one of which etcd has for the head, can be restored exactly.
    """

    marked: int
    heads: tuple[Commit | None, ...]

    @classmethod
    def after(cls, changes: Sequence[Change]) -> Promise:
        """What has been promised by these changes."""
        marked = max((each.note.step for each in changes if each.kind == "marked"), default=0)
        accepted = next((each.note for each in reversed(changes) if each.kind == "accepted"), None)
        asked = next((each.note for each in reversed(changes) if each.kind == "asked"), None)
        return cls(marked, tuple(dict.fromkeys((accepted, asked))))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thousands of restores say thousands of lines; and this process holds no directory for the next test."""
    monkeypatch.setattr(restoring, "say", lambda _: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # What is durable is decided here, not by the disk below.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    release()


def record(directory: Path, monkeypatch: pytest.MonkeyPatch, *, saves: int, keep: int) -> Saved:
    """Save steps 1 to `saves` into `directory`, which is made; note what happens to the disk and what is promised."""
    recorder = Recorder()

    def noted(kind: str, before: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def act(self: Any, subject: Commit, **options: bool) -> Any:
            if before:
                recorder.note(before, subject)
            result = call(self, subject, **options)
            recorder.note(kind, subject)
            return result

        return act

    with monkeypatch.context() as patch:
        patch.setattr(files, "os", recorder)
        patch.setattr(commits.DirectoryHead, "commit", noted("accepted", "asked", commits.DirectoryHead.commit))
        patch.setattr(
            checkpoint_dir.CheckpointDirectory, "mark", noted("marked", "", checkpoint_dir.CheckpointDirectory.mark)
        )
        saver = Checkpointer(directory, keep=keep)
        assert saver.restore() is None
        whole = set()
        for step in range(1, saves + 1):
            save_one(saver, step)
            (payload,) = directory.glob(f"step-{step}-*.pt")
            whole.add(payload.read_bytes())
    return Saved(directory, tuple(recorder.changes), frozenset(whole), keep)


def lay_out(disk: dict[str, Content], saved: Saved, root: Path) -> Path:
    """The files of `disk` below `root`; the directory that was saved to."""
    base = saved.directory.parents[1]
    made = {
        each.name for each in saved.changes if each.kind == "link" and each.name in map(str, saved.directory.parents)
    }
    for path, content in sorted(disk.items()):
        target = root / Path(path).relative_to(base)
        if path == str(saved.directory) or path in made:
            target.mkdir()
        else:
            target.write_bytes(content)
    return root / saved.directory.relative_to(base)


class Checker:
    """Restores from laid out states, and says what is wrong."""

    def __init__(self, saved: Saved, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._saved = saved
        self._root = root
        self._numbers = itertools.count()
        self._torn = False
        self.states = 0
        real = restoring.parse

        def parse(payload: Payload) -> dict[str, Any]:
            self._torn |= payload.path.read_bytes() not in saved.whole
            return real(payload)

        monkeypatch.setattr(restoring, "parse", parse)

    def check(self, disk: dict[str, Content], promise: Promise) -> str:
        """What is wrong, "" when nothing is."""
        self.states += 1
        root = self._root / str(next(self._numbers))
        root.mkdir()
        try:
            directory = lay_out(disk, self._saved, root)
            self._torn = False
            problems = [self._tried(lambda: self._directory_alone(directory, promise))]
            for head in filter(None, promise.heads):
                problems.append(self._tried(lambda head=head: self._with_head(directory, head)))
            problems.append("a torn payload was parsed" if self._torn else "")
            if self.states % EVERY == 0 and not any(problems):
                problems.append(self._tried(lambda: self._saves_again(directory)))
        finally:
            shutil.rmtree(root)
        return "; ".join(filter(None, problems))

    @staticmethod
    def _tried(act: Callable[[], str]) -> str:
        try:
            return act()
        except (ElasticError, AssertionError) as error:
            return str(error)

    @staticmethod
    def _directory_alone(directory: Path, promise: Promise) -> str:
        step = restored(directory)
        return "" if step >= promise.marked else f"step {promise.marked} was promised, {step} is there"

    @staticmethod
    def _with_head(directory: Path, head: Commit) -> str:
        step = restored(directory, head)
        return "" if step == head.step else f"the head is step {head.step}, restored was {step}"

    def _saves_again(self, directory: Path) -> str:
        """What a power cut leaves does not hinder the next saves, and is tidied up after them."""
        saver = Checkpointer(directory, keep=self._saved.keep)
        saver.restore()
        for step in (SAVED_AGAIN, SAVED_AGAIN + 1):
            saver.save(state(step), step=step)
            saver.wait()
        close(saver)
        found = sorted(int(path.name.split("-")[1]) for path in directory.glob("*.pt"))
        release()
        right = (
            found[-1:] == [SAVED_AGAIN + 1] and len(found) <= self._saved.keep and not list(directory.glob(".saving*"))
        )
        return "" if right else f"after saving again there are {found}"


def violations(
    saved: Saved, changes: Sequence[Change], root: Path, monkeypatch: Any, *, enough: int
) -> tuple[int, list[str]]:
    """How many states there are, and what is wrong with them; after `enough` wrong ones no more are tried."""
    with monkeypatch.context() as patch:
        checker = Checker(saved, root, patch)
        wrong: list[str] = []
        for number, promise, disk in remains(changes, Promise.after):
            problem = checker.check(disk, promise)
            if problem:
                wrong.append(f"cut before change {number} of {len(changes)}: {problem}; there was {sorted(disk)}")
                if len(wrong) >= enough:
                    break
        return checker.states, wrong


def _all_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int, keep: int) -> int:
    saved = record(tmp_path / "disk" / "runs" / "ckpt", monkeypatch, saves=saves, keep=keep)
    root = tmp_path / "states"
    root.mkdir()
    states, wrong = violations(saved, saved.changes, root, monkeypatch, enough=5)
    assert not wrong, "\n".join(wrong)
    return states


@pytest.mark.timeout(600)  # It computes all the time, and takes long on a busy machine.
def test_every_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F04, S7, S8: at least 2,000 states: the acknowledged checkpoint or a newer one, whole; no torn one is parsed."""
    (tmp_path / "disk").mkdir()
    assert _all_states(tmp_path, monkeypatch, saves=4, keep=1) >= STATES_MIN


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_every_power_cut_in_longer_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    """F04, S7, S8, S11: the same with more saves, so that old ones are deleted again and again."""
    (tmp_path / "disk").mkdir()
    assert _all_states(tmp_path, monkeypatch, saves=7, keep=keep) >= 2 * STATES_MIN


# The rules, broken.


@dataclass(frozen=True)
class Parts:
    """One save, taken apart. The mark ends with the note that it is there; `tidy` is the deletion of old files."""

    payload: list[Change]
    manifest: list[Change]
    committed: list[Change]
    mark: list[Change]
    tidy: list[Change]


def take_apart(changes: Sequence[Change]) -> tuple[list[Change], list[Parts]]:
    """What came before the first save, and the saves."""
    groups: list[list[Change]] = [[]]
    for change in changes:
        begins = change.kind == "asked" or (change.kind == "link" and "/.saving-" in change.name)
        if begins or (groups[-1] and groups[-1][-1].kind in ("accepted", "marked")):
            groups.append([])
        groups[-1].append(change)
    saves, rest = [], groups[1:]
    while rest:
        length = 5 if len(rest) > 4 and rest[4][0].kind == "unlink" else 4
        saves.append(Parts(*rest[:4], tidy=rest[4] if length == 5 else []))
        rest = rest[length:]
    return groups[0], saves


def without(kind: str, part: list[Change]) -> list[Change]:
    """Something is forgotten."""
    return [each for each in part if each.kind != kind]


def moved(kind: str, part: list[Change], before: str) -> list[Change]:
    """Something is done too early: before the first change of kind `before`."""
    early = [each for each in part if each.kind == kind]
    rest = without(kind, part)
    at = next(index for index, each in enumerate(rest) if each.kind == before)
    return [*rest[:at], *early, *rest[at:]]


Rule = Callable[[Parts], list[Change]]

BROKEN: dict[str, Rule] = {
    "the payload is not synced": lambda s: [*without("fsync", s.payload), *s.manifest, *s.committed, *s.mark, *s.tidy],
    "the manifest is not synced": lambda s: [*s.payload, *without("fsync", s.manifest), *s.committed, *s.mark, *s.tidy],
    "the payload is synced before it is written": lambda s: [
        *moved("fsync", s.payload, "write"), *s.manifest, *s.committed, *s.mark, *s.tidy],
    "the payload's name is not synced, nor any after it": lambda s: [
        *without("fsync directory", [*s.payload, *s.manifest, *s.committed, *s.mark]), *s.tidy],
    "names are synced before they are given": lambda s: [
        *moved("fsync directory", s.payload, "fsync"), *moved("fsync directory", s.manifest, "fsync"), *s.committed,
        *moved("fsync directory", s.mark, "link"), *s.tidy],
    "the mark's name is not synced": lambda s: [
        *s.payload, *s.manifest, *s.committed, *without("fsync directory", s.mark), *s.tidy],
    "commit first": lambda s: [*s.committed, *s.payload, *s.manifest, *s.mark, *s.tidy],
    "commit before the payload": lambda s: [*s.manifest, *s.committed, *s.payload, *s.mark, *s.tidy],
    "commit before the payload is renamed": lambda s: [
        *s.payload[: _renamed(s.payload)], *s.committed, *s.payload[_renamed(s.payload) :], *s.manifest, *s.mark,
        *s.tidy],
    "mark before the payload": lambda s: [*s.mark, *s.payload, *s.manifest, *s.committed, *s.tidy],
    "mark before the manifest": lambda s: [*s.payload, *s.mark, *s.manifest, *s.committed, *s.tidy],
    "old ones are deleted first": lambda s: [*s.tidy, *s.payload, *s.manifest, *s.committed, *s.mark],
    "old ones are deleted before the commit": lambda s: [*s.payload, *s.manifest, *s.tidy, *s.committed, *s.mark],
    "the new one is deleted with the old ones": lambda s: [
        *s.payload, *s.manifest, *s.committed, *s.mark, *s.tidy, Change("unlink", _final(s.payload))],
}  # fmt: skip


def _renamed(part: list[Change]) -> int:
    """Where the rename begins."""
    return max(index for index, each in enumerate(part) if each.kind == "link")


def _final(part: list[Change]) -> str:
    return part[_renamed(part)].name


def test_taking_apart_keeps_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the broken rules are made from is what was recorded, complete and in order."""
    (tmp_path / "disk").mkdir()
    saved = record(tmp_path / "disk" / "runs" / "ckpt", monkeypatch, saves=3, keep=1)
    first, saves = take_apart(saved.changes)
    assert [each.kind for each in first] == ["link", "fsync directory"] * 2
    parts = [[*s.payload, *s.manifest, *s.committed, *s.mark, *s.tidy] for s in saves]
    assert (*first, *itertools.chain(*parts)) == saved.changes
    assert [[each.kind for each in s.tidy] for s in saves] == [
        [],
        *[["unlink", "unlink"]] * 2,
    ]
    assert all(_final(part).endswith(end) for s in saves for part, end in zip(
        (s.payload, s.manifest, s.mark), (".pt", ".draft", ".json"), strict=True))  # fmt: skip


@pytest.mark.parametrize(
    "rule",
    [*BROKEN, "a new directory is not synced"],
)
def test_a_broken_rule_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """F04: the enumeration has teeth: each rule of the writing, broken, loses or tears a checkpoint in some state."""
    (tmp_path / "disk").mkdir()
    saved = record(tmp_path / "disk" / "runs" / "ckpt", monkeypatch, saves=2, keep=1)
    first, saves = take_apart(saved.changes)
    if rule in BROKEN:
        changes = [*first, *itertools.chain.from_iterable(BROKEN[rule](save) for save in saves)]
    else:
        changes = [*without("fsync directory", first), *saved.changes[len(first) :]]
    assert changes != list(saved.changes)
    root = tmp_path / "states"
    root.mkdir()
    _, wrong = violations(saved, changes, root, monkeypatch, enough=1)
    assert wrong
