"""Checkpoints on disk: whole or not at all, verified before parsed, resumed from where the run says."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elasticrt import Checkpointer, CheckpointError, ConfigError, Loop
from elasticrt.checkpoint import checkpointer, commits, restoring
from elasticrt.checkpoint.checkpoint_dir import CheckpointDirectory
from elasticrt.checkpoint.manifest import Manifest, _check
from elasticrt.checkpoint.snapshot import Snapshot
from elasticrt.distributed import agent_client
from elasticrt.errors import DuplicateError
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import Reply, Save, Unsaved
from tests.fake_worker import Agent, forget, under
from tests.full_disk import full_disk
from tests.servers import wait_until


def state(step: int) -> dict:
    """What a step leaves."""
    return {"model": {"w": torch.full((50,), float(step))}, "step": step}


def save(directory: Path, *steps: int, keep: int = 10) -> Checkpointer:
    """One process that restores, then saves at each of `steps`."""
    saver = Checkpointer(directory, keep=keep)
    saver.restore()
    for step in steps:
        saver.save(state(step), step=step, epoch=step // 10)
        assert saver.wait()
    return saver


def restored(directory: Path) -> int | None:
    """The step that a new process goes on from, and that its content is of that step."""
    found = Checkpointer(directory).restore()
    if found is not None:
        assert found["model"]["w"].tolist() == [float(found.step)] * 50
    return None if found is None else found.step


def payload(directory: Path, step: int) -> Path:
    """The one payload of a step."""
    (path,) = directory.glob(f"step-{step}-*.pt")
    return path


def steps_on_disk(directory: Path) -> list[int]:
    """Of all payloads."""
    return sorted(int(path.name.split("-")[1]) for path in directory.glob("*.pt"))


def commit_of(directory: Path, step: int) -> Commit:
    """As the manifest has it."""
    manifest = json.loads(payload(directory, step).with_suffix(".json").read_text())
    return Commit.from_fields(manifest["commit"])


def unmark(path: Path) -> None:
    """As if the commit of a payload had not been accepted."""
    path.with_suffix(".json").rename(path.with_suffix(".draft"))


def signed(fields: dict) -> str:
    """A manifest with the digest of what it holds now: a lie, not damage."""
    told = {name: value for name, value in fields.items() if name != "check"}
    return json.dumps({**told, "check": _check(told)})


def test_saves_and_restores(tmp_path):
    """What was saved comes back, with its step, epoch, run and world size; nothing there is nothing to go on from."""
    assert Checkpointer(tmp_path / "ckpt").restore() is None
    assert not (tmp_path / "ckpt").exists()
    save(tmp_path / "ckpt", 12)
    found = Checkpointer(tmp_path / "ckpt").restore()
    assert (found.step, found.epoch, found.world_size, found["step"], "model" in found) == (12, 1, 1, 12, True)


def test_plain_torch_opens_it(tmp_path):
    """The payload needs nothing of ours: torch.load(weights_only=True) reads it."""
    save(tmp_path, 3)
    assert torch.load(payload(tmp_path, 3), weights_only=True)["model"]["w"][0] == 3.0


def test_says_where_it_resumes(tmp_path, capsys, monkeypatch):
    """One line names directory, step and run."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_RUN_ID", "calm-fox-41")
        forget()
        save(tmp_path / "ckpt", 1240)
    forget()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    Checkpointer("ckpt/").restore()
    assert "resuming ckpt/ from step 1,240 (run calm-fox-41); ELASTICRT_FRESH=1 starts over" in capsys.readouterr().err


def test_the_copy_is_taken_at_save(tmp_path):
    """Training goes on in the same tensors while the writer works."""
    saver = Checkpointer(tmp_path)
    live = state(1)
    saver.save(live, step=1)
    live["model"]["w"].fill_(99)
    assert saver.wait()
    assert restored(tmp_path) == 1


DAMAGE = {
    "torn": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0]]) + b"X" + path.read_bytes()[2:]),
    "zeroed": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "missing": lambda path: path.unlink(),
    "symlink": lambda path: (path.rename(path.with_suffix(".x")), path.symlink_to(path.with_suffix(".x"))),
    "hardlink": lambda path: os.link(path, path.with_suffix(".x")),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "another's": lambda path: shutil.copy(payload(path.parent, 2), path),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_payload_falls_back_to_its_parent(tmp_path, kind, caplog, monkeypatch):
    """Torn, changed, swapped or planted files are named, skipped and never parsed (F06, F07, F15, S7, C9)."""
    save(tmp_path, 1, 2, 3)
    path = payload(tmp_path, 3)
    DAMAGE[kind](path)
    parsed = []
    real = restoring.parse
    monkeypatch.setattr(restoring, "parse", lambda payload: parsed.append(payload.size) or real(payload))
    assert restored(tmp_path) == 2
    assert len(parsed) == 1
    assert path.name in caplog.text


@pytest.mark.parametrize("kind", DAMAGE)
def test_all_damaged_is_an_error_and_never_a_start_from_zero(tmp_path, kind):
    """Without a single good checkpoint the user decides (F07)."""
    save(tmp_path, 1, 2)
    for step in (2, 1):
        if kind == "another's":
            payload(tmp_path, step).write_bytes(b"other")
        else:
            DAMAGE[kind](payload(tmp_path, step))
    with pytest.raises(CheckpointError, match="no checkpoint can be used"):
        restored(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "no json", "[]", "{}", '{"format": 99}', "[" * 100_000, '{"format": 2, "commit": {}}', "\xff\xfe", "null"],
    ids=["empty", "text", "list", "object", "future", "deep", "fields", "bytes", "null"],
)
def test_damaged_manifest_is_skipped(tmp_path, text, caplog):
    """A manifest that is none costs that checkpoint, not the others (F06, SEC15)."""
    save(tmp_path, 1, 2)
    payload(tmp_path, 2).with_suffix(".json").write_bytes(text.encode("latin-1"))
    assert restored(tmp_path) == 1
    assert payload(tmp_path, 2).with_suffix(".json").name in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"file": "../../etc/passwd"}, {"file": "/etc/passwd"}, {"file": "other.pt"}, {"step": 5}, {"digest": "0" * 63},
     {"size": -1}, {"size": "5"}, {"parent": "../x"}, {"step": 2.0}, {"extra": 1}],
    ids=str,
)  # fmt: skip
def test_lying_manifest_is_skipped(tmp_path, change, caplog):
    """Names that lead elsewhere and fields of the wrong kind are not followed (C9, SEC09)."""
    save(tmp_path, 1, 2)
    path = payload(tmp_path, 2).with_suffix(".json")
    fields = json.loads(path.read_text())
    fields["commit"] |= change
    path.write_text(signed(fields))
    assert restored(tmp_path) == 1
    assert path.name in caplog.text


def test_valid_digest_over_code_is_refused(tmp_path):
    """A payload that would run code is refused even when its digest is right (SEC07)."""
    import pickle

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    save(tmp_path, 1, 2)
    path = payload(tmp_path, 2)
    bomb = bytearray(pickle.dumps({"model": Bomb()}, protocol=2))
    path.write_bytes(bomb)
    manifest = path.with_suffix(".json")
    fields = json.loads(manifest.read_text())
    fields["commit"] |= {"digest": hashlib.sha256(bomb).hexdigest(), "size": len(bomb)}
    manifest.write_text(signed(fields))
    assert restored(tmp_path) == 1
    assert not (tmp_path / "ran").exists()


def test_uncommitted_is_not_resumed(tmp_path):
    """Payload and draft: an interrupted save, unless a committed one descends from it."""
    save(tmp_path, 1, 2, 3)
    for step in (1, 3):
        unmark(payload(tmp_path, step))
    assert restored(tmp_path) == 2
    payload(tmp_path, 2).unlink()
    assert restored(tmp_path) == 1


def test_interrupted_first_save_is_a_fresh_start(tmp_path):
    """Nothing was ever committed: there is nothing to lose."""
    save(tmp_path, 1)
    unmark(payload(tmp_path, 1))
    assert restored(tmp_path) is None


def test_foreign_files_are_left_alone(tmp_path):
    """Names that do not follow the pattern are neither read nor deleted."""
    for name in ("notes.txt", "step-9.pt", "step-9-g0-zz.json", "model.pt"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-9-g0-0123456789abcdef.d").mkdir()
    save(tmp_path, 1, 2, 3, keep=1)
    assert restored(tmp_path) == 3
    assert {"notes.txt", "step-9.pt", "step-9-g0-zz.json", "model.pt"} <= {path.name for path in tmp_path.iterdir()}


def test_keeps_the_newest(tmp_path):
    """`keep` checkpoints remain, whole; temporaries of a killed process go (S11)."""
    (tmp_path / ".saving-step-1-g0-0123456789abcdef").write_text("half")
    save(tmp_path, 1, 2, 3, 4, 5, keep=2)
    assert steps_on_disk(tmp_path) == [4, 5]
    assert len(list(tmp_path.glob("step-*"))) == 4
    assert not list(tmp_path.glob(".saving-*"))


def test_starting_over_beside_an_old_history(tmp_path, monkeypatch):
    """ELASTICRT_FRESH=1 begins a new history, with which the next start goes on; of the old one stays what there is
    room for in `keep`."""
    save(tmp_path, 100, 200)
    monkeypatch.setenv("ELASTICRT_FRESH", "1")
    save(tmp_path, 5, 6, keep=3)
    assert steps_on_disk(tmp_path) == [5, 6, 200]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restored(tmp_path) == 6, "a restart goes on with what this run has saved"
    monkeypatch.delenv("ELASTICRT_FRESH")
    assert restored(tmp_path) == 6


def test_histories_of_before_go_once_there_are_enough_newer_checkpoints(tmp_path, monkeypatch):
    """D01: started over again and again, a directory keeps the newest `keep`, whichever history they are of."""
    save(tmp_path, 17, 20, keep=2)
    monkeypatch.setenv("ELASTICRT_FRESH", "1")
    for steps in ([1, 5], [2, 6]):
        saver = Checkpointer(tmp_path, keep=2)
        assert saver.begin() is None
        newest = steps_on_disk(tmp_path)[-1]
        saver.save(state(steps[0]), step=steps[0])
        assert saver.wait()
        assert steps_on_disk(tmp_path) == [steps[0], newest]
        saver.save(state(steps[1]), step=steps[1])
        assert saver.wait()
        assert steps_on_disk(tmp_path) == steps


def test_one_step_saved_twice_counts_twice(tmp_path):
    """The state behind an epoch's end has the steps of the one before it: `keep` checkpoints remain, no more."""
    save(tmp_path, 10, 20, 30, 30, keep=2)
    assert steps_on_disk(tmp_path) == [30, 30]


def test_going_back_makes_a_new_branch(tmp_path):
    """After a fallback the damaged one never comes back, though it has more steps."""
    save(tmp_path, 1, 2, 3)
    DAMAGE["flipped"](payload(tmp_path, 3))
    save(tmp_path, 3)
    assert restored(tmp_path) == 3
    newest = max(tmp_path.glob("step-3-*.json"), key=lambda path: json.loads(path.read_text())["commit"]["serial"])
    assert json.loads(newest.read_text())["commit"]["parent"] == commit_of(tmp_path, 2).nonce


def test_a_lack_of_memory_is_no_damage(tmp_path):
    """Where a checkpoint does not fit into memory the rank fails: it does not go back to an older one (S6)."""
    save(tmp_path, 1, 2)
    with full_disk(700), pytest.raises(MemoryError, match="does not fit into memory"):
        restored(tmp_path)
    assert restored(tmp_path) == 2


@pytest.mark.parametrize("size", [0, 1, 700, 4000])
def test_a_full_disk_costs_this_save_only(tmp_path, size, caplog):
    """At whatever byte the writing ends: a warning, no leftovers, the old head intact, training goes on (F01, F02)."""
    saver = save(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"}
    with full_disk(size):
        saver.save({"w": torch.zeros(3000)}, step=2)
        assert saver.wait()
    assert f"[Errno {errno.EFBIG}]" in caplog.text
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"} == before
    saver.save(state(3), step=3)
    assert saver.wait()
    assert restored(tmp_path) == 3
    assert commit_of(tmp_path, 3).parent == commit_of(tmp_path, 1).nonce


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_fsync_that_fails_fails_the_save(tmp_path, call, monkeypatch, caplog):
    """An fsync is not tried again: the save counts as failed, or only its tidying up does (F05)."""
    saver = save(tmp_path, 1)
    real, calls = os.fsync, []

    def failing(fd):
        calls.append(fd)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", failing)
    saver.save(state(2), step=2)
    assert saver.wait()
    monkeypatch.setattr(os, "fsync", real)
    assert "Input/output error" in caplog.text
    assert not list(tmp_path.glob(".saving-*"))
    assert restored(tmp_path) in (1, 2)


def test_directory_replaced_while_running(tmp_path, caplog):
    """Nothing is written into another directory that took the path's place (F12)."""
    directory = tmp_path / "ckpt"
    saver = save(directory, 1)
    directory.rename(tmp_path / "moved")
    directory.mkdir()
    saver.save(state(2), step=2)
    assert saver.wait()
    assert "is not the directory of the start" in caplog.text
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "everybody's"])
def test_unfit_directories(tmp_path, kind):
    """A file in its place, or a directory in which strangers can plant files, is refused (C9)."""
    path = tmp_path / "ckpt"
    if kind == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod(0o777)
    with pytest.raises(CheckpointError, match="can't be used"):
        Checkpointer(path).restore()
    with pytest.raises(CheckpointError, match="can't be used"):
        Checkpointer(path).save({}, step=0)


def test_another_live_process_saves_there(tmp_path):
    """A second process is refused while the first lives, and welcome after its end (F13)."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            Checkpointer(tmp_path).begin()
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            code = 0
        finally:
            os._exit(code)
    try:
        os.read(ready[0], 1)
        with pytest.raises(DuplicateError, match=f"process {child}"):
            Checkpointer(tmp_path).begin()
        assert Checkpointer(tmp_path).restore() is None, "reading is allowed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for fd in (*ready, *done):
            os.close(fd)
    assert Checkpointer(tmp_path).begin() is None


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda path: Checkpointer(3), TypeError),
        (lambda path: Checkpointer(path, keep=0), ValueError),
        (lambda path: Checkpointer(path, keep="3"), TypeError),
        (lambda path: Checkpointer(path).save([], step=1), TypeError),
        (lambda path: Checkpointer(path).save({}, step=-1), ValueError),
        (lambda path: Checkpointer(path).save({}, step=1.5), TypeError),
        (lambda path: Checkpointer(path).save({"f": print}, step=1), ConfigError),
        (lambda path: save(path, 5, 4), ValueError),
    ],
)
def test_wrong_use(tmp_path, monkeypatch, act, error):
    """Wrong types, sizes and contents are refused in words."""
    monkeypatch.setattr(commits, "_runs", {})  # Else a Loop of another test is beside them.
    with pytest.raises(error):
        act(tmp_path)


def test_commits_go_through_the_agent(tmp_path, monkeypatch):
    """Each save asks for a fenced commit that replaces the head it knows, and is marked after the answer (S2)."""
    agent = Agent()
    with under(agent, monkeypatch):
        save(tmp_path, 1, 2)
        first, second = agent.of(Save)
        assert (first.replaces, second.replaces) == ("", first.commit["nonce"])
        assert second.commit == {**commit_of(tmp_path, 2).__dict__}
        assert second.commit["parent"] == first.commit["nonce"]
        assert (second.commit["generation"], second.commit["directory"]) == (1, str(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_refused_commit_is_no_commit(tmp_path, monkeypatch):
    """Its files are deleted, the agent is told, and training goes on (F08)."""
    save(tmp_path, 1)
    head = commit_of(tmp_path, 1)
    agent = Agent(head="0123456789abcdef")
    with under(agent, monkeypatch, resume=head, generation=3):
        saver = save(tmp_path, 2)
        wait_until(lambda: agent.of(Unsaved), "the agent is told")
        assert [each.reason for each in agent.of(Unsaved)] == [f"the head is 0123456789abcdef ({tmp_path})"]
        assert saver._head.known.step == 1
    assert [path.suffix for path in sorted(tmp_path.glob("step-*"))] == [".json", ".pt"]
    assert restored(tmp_path) == 1


def test_a_save_in_flight_is_of_the_generation_that_it_began_in(tmp_path, monkeypatch):
    """S2: the process moves on while a save is being committed: that one says the old generation, the next the new."""
    asked, go_on = threading.Event(), threading.Event()

    def slowly(message):
        if isinstance(message, Save):
            asked.set()
            assert go_on.wait(20)
        return agent.fenced(message)

    agent = Agent(answer=slowly)
    with under(agent, monkeypatch) as worker:
        saver = save(tmp_path)
        saver.save(state(1), step=1)
        assert asked.wait(20)
        saver.move(replace(worker, generation=2))
        go_on.set()
        saver.save(state(2), step=2)
        assert saver.wait()
        assert [each.commit["generation"] for each in agent.of(Save)] == [1, 2]
    assert restored(tmp_path) == 2


def test_a_refused_save_of_another_place_is_nobodys_last(tmp_path, monkeypatch):
    """F08: who was rank 0 when its save was refused has another place since, where another one saves: it ends well."""
    with under(Agent(head="0123456789abcdef"), monkeypatch) as worker:
        saver = Checkpointer(tmp_path)
        saver.save(state(1), step=1)
        assert saver.wait()
        assert saver.missed
        saver.move(replace(worker, generation=2, rank=1))
        saver.finish()


def test_a_refused_save_of_an_earlier_generation_does_not_fail_the_script_at_its_end(tmp_path, monkeypatch):
    """F08: its process lived on, and another rank has saved since; one of the present generation fails the script."""
    for generation, code in ((2, 0), (1, 1)):
        with under(Agent(head="0123456789abcdef"), monkeypatch) as worker:
            saver = Checkpointer(tmp_path)
            saver.save(state(1), step=1)
            assert saver.wait()
            assert saver.missed
            child = os.fork()
            if child == 0:
                checkpointer._unsaved[tmp_path] = (worker.generation, RuntimeError("refused"))  # A fork has forgotten.
                agent_client.take_seat(replace(worker, generation=generation))
                checkpointer._finish_saves()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_a_save_of_the_scripts_that_a_change_has_overtaken_is_told_of(tmp_path, monkeypatch, caplog):
    """Nobody repeats it, so its script hears of it, and still ends well."""
    agent = Agent()

    def refuse(message):
        is_save = isinstance(message, Save)
        return Reply(message.request, ok=False, reason="", refusal="over") if is_save else agent.fenced(message)

    agent._answer = refuse
    with under(agent, monkeypatch):
        saver = Checkpointer(tmp_path)
        saver.save(state(1), step=1)
        assert saver.wait()
        assert not saver.missed
    assert "the checkpoint of step 1 is not saved" in caplog.text


def test_a_save_without_restore_beside_another_history(tmp_path, monkeypatch):
    """Whoever has not restored, and may not replace what is there, hears what is missing."""
    agent = Agent(head="0123456789abcdef")
    with under(agent, monkeypatch):
        saver = Checkpointer(tmp_path)
        saver.save(state(1), step=1)
        assert saver.wait()
        wait_until(lambda: agent.of(Unsaved), "the agent is told")
        assert "has not called restore() here" in agent.of(Unsaved)[0].reason


@pytest.mark.parametrize("agent", [False, True])
def test_checkpoints_that_were_not_read_are_not_replaced(tmp_path, monkeypatch, agent):
    """Whoever saves without `restore` would delete, by and by, what another training has saved."""
    save(tmp_path, 1, 2)
    there = sorted(tmp_path.iterdir())
    monkeypatch.setattr(commits, "_runs", {})  # As in another process.
    with under(Agent(), monkeypatch) if agent else contextlib.nullcontext():
        saver = Checkpointer(tmp_path, keep=1)
        with pytest.raises(CheckpointError, match=r"this script has not restored .*expected restore\(\) before"):
            saver.save(state(3), step=3)
        assert [path for path in sorted(tmp_path.iterdir()) if path.suffix in (".pt", ".json")] == [
            path for path in there if path.suffix in (".pt", ".json")
        ]


def test_a_payload_without_its_manifest_is_told(tmp_path, caplog):
    """Somebody has copied the large files alone, or a process died between the two: nobody wonders where they are."""
    save(tmp_path, 1, 2)
    (manifest,) = tmp_path.glob("step-2-*.json")
    manifest.unlink()
    assert restored(tmp_path) == 1
    assert f"{payload(tmp_path, 2).name}: there is no {manifest.name} with it" in caplog.text


def test_payloads_without_any_manifest_stay(tmp_path):
    """A copy of the large files alone can be made whole again, whatever is saved beside it."""
    save(tmp_path / "a", 1, 2)
    (tmp_path / "b").mkdir(mode=0o700)
    copied = [path.rename(tmp_path / "b" / path.name) for path in (tmp_path / "a").glob("*.pt")]
    save(tmp_path / "b", 1, 3, keep=1)
    assert len(copied) == 2
    assert all(path.exists() for path in copied)
    assert restored(tmp_path / "b") == 3


def test_a_later_step_is_not_replaced_by_another_checkpointer(tmp_path):
    """Two of one directory in one process: steps do not go back."""
    save(tmp_path, 10)
    with pytest.raises(ValueError, match=r"the step number goes back .*got 3; expected >= 10, saved before"):
        Checkpointer(tmp_path).save(state(3), step=3)


def test_who_has_never_saved_can_after_a_move(tmp_path, monkeypatch):
    """A newcomer that becomes rank 0 opens the directory at its first save, and goes on from the run's head."""
    save(tmp_path, 1)
    head = commit_of(tmp_path, 1)
    agent = Agent(head=head.nonce)
    with under(agent, monkeypatch) as worker:
        saver = Checkpointer(tmp_path)
        saver.move(replace(worker, generation=4, resume=head))
        saver.save(state(2), step=2)
        assert saver.wait()
        (asked,) = agent.of(Save)
        assert (asked.replaces, asked.commit["parent"]) == (head.nonce, head.nonce)
        assert asked.commit["generation"] == 4


def test_beside_a_loop_steps_are_labels(tmp_path, monkeypatch):
    """Where a run goes back, its script saves earlier steps again; the newest save is what is restored."""
    agent = Agent()
    with under(agent, monkeypatch):
        Loop(tmp_path / "ckpt")
        save(tmp_path / "best", 30, keep=1)
        save(tmp_path / "best", 20, keep=1)
        assert restored(tmp_path / "best") == 20
    assert [each.beside for each in agent.of(Save)] == [True, True]
    assert len(list((tmp_path / "best").glob("*.pt"))) == 1


def test_who_becomes_rank_0_saves_beside_its_loop(tmp_path, monkeypatch):
    """It goes on from what the run has saved there, also if its script has restored nothing: rank 0 has not either."""
    agent = Agent()
    with under(agent, monkeypatch):
        Loop(tmp_path / "ckpt")
        Checkpointer(tmp_path / "best").save(state(1), step=1)
        wait_until(lambda: agent.heads, "it is committed")
        for known in commits._runs.values():  # As in a process that was another rank.
            known.heads.clear()
        other = Checkpointer(tmp_path / "best")
        other.save(state(2), step=2)
        assert other.wait()
    first, second = agent.of(Save)
    assert second.replaces == second.commit["parent"] == first.commit["nonce"]
    assert not agent.of(Unsaved)


def test_what_a_new_rank_0_saves_is_newer_than_what_another_node_has(tmp_path, monkeypatch):
    """S6: with own disks: a later run that knows nothing of this one tells by serial numbers which is the newest."""
    save(tmp_path / "a", 1, 2, 3)
    head = commit_of(tmp_path / "a", 3)
    with under(Agent(head=head.nonce), monkeypatch) as worker:
        saver = Checkpointer(tmp_path / "b")
        saver.move(replace(worker, generation=2, resume=head))
        saver.save(state(4), step=4)
        assert saver.wait()
    assert commit_of(tmp_path / "b", 4).serial > head.serial


def test_an_agent_that_never_answers(tmp_path, monkeypatch):
    """E11: whether a commit has happened must be known before the next one: the worker fails, its next life asks."""
    monkeypatch.setattr("elasticrt.checkpoint.commits.COMMIT_TIMEOUT_S", 0.1)
    agent = Agent()
    agent._answer = lambda message: None if isinstance(message, Save) else agent.fenced(message)
    with under(agent, monkeypatch):
        saver = Checkpointer(tmp_path)
        saver.save(state(1), step=1)
        with pytest.raises(RuntimeError, match="whether it has committed step 1"):
            saver.wait()


def test_adopts_what_the_directory_has(tmp_path, monkeypatch):
    """Without a head in etcd the newest committed checkpoint becomes it."""
    save(tmp_path, 1, 2)
    agent = Agent()
    with under(agent, monkeypatch):
        assert restored(tmp_path) == 2
        (adopted,) = agent.of(Save)
        assert (adopted.replaces, adopted.commit["nonce"]) == ("", commit_of(tmp_path, 2).nonce)


def test_resumes_exactly_what_the_run_says(tmp_path, monkeypatch, capsys):
    """Not the newest in the directory, but the commit of the generation record; quietly, for the agent says it (S6)."""
    save(tmp_path, 1, 2, 3)
    head = commit_of(tmp_path, 2)
    unmark(payload(tmp_path, 2))
    capsys.readouterr()
    agent = Agent(head=head.nonce)
    with under(agent, monkeypatch, resume=head):
        assert restored(tmp_path) == 2
        assert agent.of(Save) == []
        assert capsys.readouterr().err == ""
    assert payload(tmp_path, 2).with_suffix(".json").exists()


def test_a_resume_point_without_its_manifest(tmp_path, monkeypatch, caplog):
    """The record of etcd has all that is needed: it is used, and nothing is told of it."""
    save(tmp_path, 1, 2)
    head = commit_of(tmp_path, 2)
    payload(tmp_path, 2).with_suffix(".json").unlink()
    with under(Agent(head=head.nonce), monkeypatch, resume=head):
        assert restored(tmp_path) == 2
    assert "skipped" not in caplog.text


def test_the_record_of_etcd_is_what_counts(tmp_path, monkeypatch):
    """A file and manifest that agree with each other, but not with the commit, are not the commit (C8, SEC06)."""
    save(tmp_path, 1, 2)
    head = commit_of(tmp_path, 2)
    forged = Commit(**{**head.__dict__, "digest": "0" * 64})
    agent = Agent(head=head.nonce)
    with under(agent, monkeypatch, resume=forged):
        assert restored(tmp_path) == 1


def test_a_damaged_head_goes_back_to_its_ancestor(tmp_path, monkeypatch, caplog):
    """The nearest whole ancestor is loaded and made the head again, before anything is trained (F07, S6)."""
    save(tmp_path, 1, 2, 3)
    head = commit_of(tmp_path, 3)
    DAMAGE["torn"](payload(tmp_path, 3))
    DAMAGE["flipped"](payload(tmp_path, 2))
    agent = Agent(head=head.nonce)
    with under(agent, monkeypatch, resume=head, generation=2):
        save(tmp_path, 2)
        back, new = agent.of(Save)
        assert (back.replaces, back.commit) == (
            head.nonce,
            {**commit_of(tmp_path, 1).__dict__, "place": back.commit["place"], "generation": 2},
        )
        assert (new.replaces, new.commit["parent"]) == (back.commit["nonce"], back.commit["nonce"])
    assert "going back from step 3 to step 1" in caplog.text


def test_going_back_while_etcd_is_away(tmp_path, monkeypatch):
    """Nobody trains on from an ancestor while the damaged head is still the head: the worker fails."""
    save(tmp_path, 1, 2)
    head = commit_of(tmp_path, 2)
    DAMAGE["torn"](payload(tmp_path, 2))
    agent = Agent(head=head.nonce)
    agent.head = "of another writer"
    with under(agent, monkeypatch, resume=head, generation=2):
        with pytest.raises(RuntimeError, match="step 1 could not be recorded as the run's head"):
            restored(tmp_path)
        agent.head = head.nonce
        assert restored(tmp_path) == 1


def test_no_ancestor_left_is_final(tmp_path, monkeypatch):
    """The run's head and all its ancestors gone: CheckpointError, though another history has good files (F07, F16)."""
    save(tmp_path, 1)
    lost = Commit(**{**commit_of(tmp_path, 1).__dict__, "nonce": "f" * 16, "file": "step-9-g1-" + "f" * 16 + ".pt"})
    agent = Agent(head=lost.nonce)
    with under(agent, monkeypatch, resume=lost), pytest.raises(CheckpointError, match="no checkpoint can be used"):
        restored(tmp_path)


def test_a_stale_process_tidies_nothing_up(tmp_path, monkeypatch):
    """Whoever sees a checkpoint that somebody newer has written deletes nothing (F09, S11)."""
    save(tmp_path, 1, 2, 3)
    head = commit_of(tmp_path, 3)
    agent = Agent(head=head.nonce)
    with under(agent, monkeypatch, resume=head, generation=6):
        saver = Checkpointer(tmp_path, keep=1)
        saver.begin()
        newer = CheckpointDirectory(tmp_path, 10)
        newer.open(create=False)
        for step, nonce, parent in ((4, "f" * 16, head.nonce), (5, "e" * 16, "f" * 16)):
            stem = f"step-{step}-g6-{nonce}"
            commit = replace(head, step=step, generation=6, nonce=nonce, parent=parent, file=f"{stem}.pt", serial=step)
            newer.write(Manifest(commit, "", 1), Snapshot(state(step)).write_to)
        saver.save(state(4), step=4)
        assert saver.wait()
    assert steps_on_disk(tmp_path) == [1, 2, 3, 4, 4, 5]


@pytest.mark.parametrize("planted", ["step-1-g999999999-0123456789abcdef", "step-999-g999999999-0123456789abcdef"])
@pytest.mark.parametrize("suffix", [".pt", ".draft", ".json"])
def test_a_planted_name_does_not_end_the_tidying(tmp_path, monkeypatch, planted, suffix):
    """Only a whole manifest tells that somebody newer has been here (S11)."""
    save(tmp_path, 1, 2)
    (tmp_path / (planted + suffix)).write_text("")
    head = commit_of(tmp_path, 2)
    with under(Agent(head=head.nonce), monkeypatch, resume=head, generation=3):
        save(tmp_path, 3, 4, keep=2)
    assert {3, 4} <= set(steps_on_disk(tmp_path)) <= {3, 4, 999}


def test_generations_of_another_store_do_not_matter(tmp_path, monkeypatch):
    """A run that has reached generation 7, then another one in the same directory: `keep` holds, orphans go (S11)."""
    with under(Agent(), monkeypatch, generation=7):
        save(tmp_path, 1, 2, keep=2)
    (tmp_path / "step-2-g7-0123456789abcdef.pt").write_text("")
    (tmp_path / ".saving-step-2-g8-1123456789abcdef").write_text("")
    with under(Agent(), monkeypatch, generation=1, run_id="another"):
        save(tmp_path, *range(3, 9), keep=2)
    assert steps_on_disk(tmp_path) == [7, 8]
    assert not list(tmp_path.glob(".saving-*"))


def test_orphans_of_earlier_generations_are_tidied_up(tmp_path, monkeypatch):
    """What a refused save left is deleted later, by a generation after it (F08)."""
    save(tmp_path, 1)
    (tmp_path / "step-0-g2-0123456789abcdef.pt").write_text("")
    (tmp_path / "step-8-g2-1123456789abcdef.pt").write_text("")
    head = commit_of(tmp_path, 1)
    agent = Agent(head=head.nonce)
    with under(agent, monkeypatch, resume=head, generation=3):
        save(tmp_path, 4)
    assert steps_on_disk(tmp_path) == [1, 4]


def test_several_directories_of_a_run(tmp_path, monkeypatch):
    """Each has a head of its own, and all commits are the run's: in turns, and after a restart."""
    agent = Agent()
    with under(agent, monkeypatch):
        first, second = save(tmp_path / "one", 1), save(tmp_path / "two", 1)
        first.save(state(7), step=7)
        assert first.wait()
        second.save(state(2), step=2)
        assert second.wait()
        assert [saver._head.known.step for saver in (first, second)] == [7, 2]
        assert restored(tmp_path / "one") == 7, "this process has moved on"
    for path in (tmp_path / "one").glob("*.committed"):
        path.unlink()
    head = commit_of(tmp_path / "two", 2)
    again = Agent(head=head.nonce)
    again.heads = agent.heads
    with under(again, monkeypatch, resume=head, generation=2):
        assert restored(tmp_path / "one") == 7, "etcd knows the head, whatever the marks say"
        save(tmp_path / "two", 3)
        save(tmp_path / "three", 1)
        assert restored(tmp_path / "two") == 3
    assert commit_of(tmp_path / "two", 3).parent == head.nonce
    assert commit_of(tmp_path / "three", 1).parent == ""


def test_the_head_of_another_directory_is_lost(tmp_path, monkeypatch):
    """It is never begun anew in silence."""
    agent = Agent()
    with under(agent, monkeypatch):
        save(tmp_path / "one", 1)
        save(tmp_path / "two", 1)
    head = commit_of(tmp_path / "two", 1)
    shutil.rmtree(tmp_path / "one")
    again = Agent(head=head.nonce)
    again.heads = agent.heads
    with under(again, monkeypatch, resume=head), pytest.raises(CheckpointError, match="no checkpoint can be used"):
        restored(tmp_path / "one")


def test_a_live_run_saves_there(tmp_path, monkeypatch):
    """F13: whoever the agent names; later, when another run has taken the directory, the next save ends this one."""
    agent = Agent()
    with under(agent, monkeypatch):
        agent.taken = "run other, process 3 on b"
        with pytest.raises(DuplicateError, match="run other, process 3 on b"):
            Checkpointer(tmp_path).begin()
    agent = Agent()
    with under(agent, monkeypatch):
        saver = Checkpointer(tmp_path)
        saver.begin()
        agent._answer = lambda message: Reply(message.request, ok=False, reason="run other", refusal="taken")
        saver.save(state(1), step=1)
        with pytest.raises(DuplicateError, match="run other"):
            saver.wait()


def test_an_agent_that_dies_refuses(tmp_path, monkeypatch, caplog):
    """No agent, no commit; the worker learns it at once."""
    caplog.set_level(logging.WARNING)
    agent = Agent()
    with under(agent, monkeypatch):
        saver = save(tmp_path)
        saver.begin()
        agent.close()
        saver.save(state(1), step=1)
        assert saver.wait()
    assert "the agent is gone" in caplog.text
    assert not list(tmp_path.glob("*.json"))
