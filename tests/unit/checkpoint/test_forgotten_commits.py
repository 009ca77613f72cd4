"""Which checkpoints of a directory were committed after the one that etcd takes for the head."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from elasticrt.checkpoint.checkpointer import Checkpointer
from elasticrt.checkpoint.manifest import History, Manifest
from elasticrt.ipc.env import Commit
from tests.fake_worker import Agent, under


def _history(*chains: str, marked: str) -> History:
    """Checkpoints named by letters; every one descends from the one before it; capitals are another run's."""
    manifests = {}
    for chain in chains:
        parent = "" if chain[0] in "ax" else chr(ord(chain[0]) - 1)
        for name in chain:
            commit = _commit(name, parent)
            manifests[commit.nonce] = Manifest(commit, "run" if name.islower() else "other", 1)
            parent = name
    return History(manifests, frozenset(map(_nonce, marked)))


def _commit(name: str, parent: str) -> Commit:
    serial = ord(name)
    root = _nonce("" if name in "ax" else "x" if name in "yz" else "a")
    return Commit(serial, 0, 1, _nonce(name), _nonce(parent), "/ckpt", f"{name}.pt", "d" * 64, 1, serial, root=root)


def _nonce(name: str) -> str:
    return name and f"{ord(name):016x}"


@pytest.mark.parametrize(
    ("chains", "marked", "head", "beyond"),
    [
        pytest.param(["abc"], "abc", "c", "", id="the head is the newest"),
        pytest.param(["abc"], "ab", "b", "", id="what was never committed does not count"),
        pytest.param(["abcde"], "abcd", "b", "dc", id="etcd has forgotten two"),
        pytest.param(["abcd"], "d", "b", "dc", id="a lost mark: the ancestors of a committed one were committed"),
        pytest.param(["ab", "xyz"], "abxyz", "b", "", id="another history in the same directory"),
        pytest.param(["bcd"], "bcd", "a", "dcb", id="the head itself has been deleted here"),
        pytest.param(["cd"], "cd", "a", "dc", id="what lies between has been deleted as well"),
        pytest.param([], "", "a", "", id="an empty directory"),
        pytest.param(["abXY"], "abXY", "b", "", id="another run went on from here"),
    ],
)
def test_beyond(chains: list[str], marked: str, head: str, beyond: str) -> None:
    """E20, S8: newest first, the committed descendants of the head; nobody else's history."""
    found = _history(*chains, marked=marked).beyond(_commit(head, ""), "run")
    assert "".join(manifest.commit.file[0] for manifest in found) == beyond


@pytest.mark.parametrize(
    ("chains", "marked", "ancestors"),
    [
        pytest.param(["abcde"], "abcde", "dcba", id="all manifests are whole"),
        pytest.param(["abc", "e"], "abcde", "cba", id="one is torn: what was committed before it"),
        pytest.param(["ab", "d"], "abcde", "dba", id="one behind it is torn"),
        pytest.param(["abc", "e", "xy"], "abcdexy", "cba", id="another history in the same directory"),
        pytest.param(["abc", "e"], "abce", "", id="one is gone: in the directory of another node, or deleted"),
        pytest.param(["aB"], "aBde", "a", id="another run went on from there"),
    ],
)
def test_ancestors(chains: list[str], marked: str, ancestors: str) -> None:
    """S8: newest first, what the run committed before its head, also behind a manifest that cannot be read."""
    found = _history(*chains, marked=marked).ancestors(_commit("e", "d"), "run")
    assert "".join(manifest.commit.file[0] for manifest in found) == ancestors


@pytest.mark.parametrize("has_saved", [True, False])
def test_neither_etcd_nor_the_directory_knows_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, has_saved: bool
) -> None:
    """S8: the run's events do: a start at step 0 warns, as the directory may be one that is not mounted."""
    events = [{"event": "committed", "step": step} for step in (100, 300)] if has_saved else []
    lines = ["{cut", *map(json.dumps, [*events, {"event": "step", "step": 310}])]
    (tmp_path / "events-a.jsonl").write_text("\n".join(lines) + "\n")
    os.mkfifo(tmp_path / "events-b.jsonl")
    with under(Agent(), monkeypatch, run_dir=str(tmp_path)), caplog.at_level(logging.WARNING):
        assert Checkpointer(tmp_path / "ckpt").restore() is None
        found = [each.getMessage() for each in caplog.records]
        assert len(found) == has_saved
        assert all("this run has saved step 300" in each and "training begins at step 0" in each for each in found)
        saver = Checkpointer(tmp_path / "ckpt")
        saver.restore()
        saver.save({"weight": 1}, step=5)
        saver.wait()
        caplog.clear()
        assert Checkpointer(tmp_path / "another").restore() is None
        assert not caplog.records, "another directory of the same script, which has saved"
