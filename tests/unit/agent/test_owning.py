"""What an agent says to a worker that wants to save to a directory: its head, and whether another live run is there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from elasticrt.agent.store_proxy import StoreProxy, StoreRequest
from elasticrt.ipc.directory_owner import NAME, Owner
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import OpenDirectory, Reply, Save
from elasticrt.ipc.proc import start_of
from elasticrt.rendezvous.records import Keys
from tests.memory_store import MemoryServer, MemoryStore


def errands_of(server: MemoryServer, run: str, meeting: str = "") -> StoreProxy:
    """The agent of a run."""
    return StoreProxy(MemoryStore(server), Keys(run), lambda _: None, meeting)


def by_another_agent(directory: Path) -> None:
    """The record there becomes that of another process that lives."""
    text = (directory / NAME).read_text()
    (directory / NAME).write_text(text.replace(f'"pid": {os.getpid()}', f'"pid": {os.getppid()}').replace(
        f'"started": {start_of(os.getpid())}', f'"started": {start_of(os.getppid())}'))  # fmt: skip


def ask(errands: StoreProxy, request: OpenDirectory | Save) -> Reply:
    """One request of a worker in generation 1, which nobody has replaced."""
    return errands.carry_out(StoreRequest(request, 1, b"", 1, "n0", "b" * 16, 0, lambda _: None))


def test_heads_of_several_directories() -> None:
    """Each is found by its place; a commit replaces the run's head, of whichever directory that is."""
    errands = errands_of(MemoryServer(lambda: 0.0), "run")
    places, replaces = ("0" * 16, "1" * 16), ""
    for step, place in ((1, 0), (2, 1), (3, 0)):
        nonce = str(step) * 16
        commit = Commit(step, 0, 1, nonce, "", "/ckpt", "step", "d" * 64, 1, place=places[place], total=10 * step)
        assert ask(errands, Save(step, asdict(commit), replaces)).ok
        replaces = nonce
    heads = [ask(errands, OpenDirectory(9, "/ckpt", place, take=False)).data["head"] for place in places]
    assert [(head["step"], head["total"]) for head in heads] == [(3, 30), (2, 20)]
    assert ask(errands, OpenDirectory(9, "/ckpt", "2" * 16, take=False)) == Reply(9, ok=True)


def test_what_a_script_saves_beside_its_loop() -> None:
    """It is the head of its directory only: neither the run's, nor does the Loop's next commit have to replace it."""
    errands = errands_of(MemoryServer(lambda: 0.0), "run")
    of_loop = Commit(5, 0, 1, "a" * 16, "", "/ckpt", "step", "d" * 64, 1, place="0" * 16)
    best = replace(of_loop, nonce="b" * 16, directory="/best", place="1" * 16, step=90)
    better = replace(best, nonce="c" * 16, parent="b" * 16, step=91)
    assert ask(errands, Save(1, asdict(of_loop), "")).ok
    assert ask(errands, Save(2, asdict(best), "", beside=True)).ok
    reply = ask(errands, Save(3, asdict(better), "", beside=True))
    assert (reply.ok, reply.reason) == (False, "another checkpoint, of step 90, is the newest now")
    assert ask(errands, Save(4, asdict(better), "b" * 16, beside=True)).ok
    assert ask(errands, Save(5, asdict(replace(of_loop, step=6, nonce="e" * 16)), "a" * 16)).ok
    heads = [ask(errands, OpenDirectory(9, "/ckpt", place, take=False)).data["head"] for place in ("0" * 16, "1" * 16)]
    assert [head["step"] for head in heads] == [6, 91]


def test_why_a_commit_is_refused() -> None:
    """E05: a head that etcd has lost is told from one that another has written."""
    commit = Commit(1, 0, 1, "1" * 16, "", "/ckpt", "step", "d" * 64, 1, place="0" * 16, total=10)
    errands = errands_of(MemoryServer(lambda: 0.0), "run")
    reply = ask(errands, Save(1, asdict(commit), "2" * 16))
    assert (reply.ok, reply.reason) == (False, "etcd has lost the record of the checkpoint before it")
    assert ask(errands, Save(1, asdict(commit), "")).ok
    reply = ask(errands, Save(2, asdict(replace(commit, step=2, nonce="2" * 16)), "3" * 16))
    assert (reply.ok, reply.reason) == (False, "another checkpoint, of step 1, is the newest now")


def test_a_run_whose_agent_lives(tmp_path: Path) -> None:
    """F13: another run is refused while the agent that saves there lives, and welcome when it has let go."""
    server = MemoryServer(lambda: 0.0)
    first, second = errands_of(server, "first"), errands_of(server, "second")
    own = OpenDirectory(1, str(tmp_path), "0" * 16, take=True)
    assert ask(first, own).ok
    text = (tmp_path / NAME).read_text()
    by_another_agent(tmp_path)
    reply = ask(second, own)
    assert (reply.refusal, reply.reason) == ("taken", f"run first, process {os.getppid()} on n0")
    (tmp_path / NAME).write_text(text)
    first.close(0)
    assert ask(second, own).ok
    second.close(0)


def test_two_live_runs_of_one_id(tmp_path: Path) -> None:
    """F13: one machine, two etcds: the second is refused, unless its etcd has only taken the place of the first's."""
    first = errands_of(MemoryServer(lambda: 0.0, "first"), "run", "/run/elasticrt")
    fresh = errands_of(MemoryServer(lambda: 0.0, "fresh"), "run", "/run/elasticrt")
    other = errands_of(MemoryServer(lambda: 0.0, "other"), "run", "/home/me/elasticrt")
    own = OpenDirectory(1, str(tmp_path), "0" * 16, take=True)
    assert ask(first, own).ok
    by_another_agent(tmp_path)
    assert ask(other, own).refusal == "taken"
    assert ask(fresh, own).ok
    for each in (first, fresh, other):
        each.close(0)


def test_a_run_that_was_followed_by_another_commits_nothing_more(tmp_path: Path) -> None:
    """S2: whoever was taken for dead, and lives, is told so at its next commit."""
    errands = errands_of(MemoryServer(lambda: 0.0), "run")
    assert ask(errands, OpenDirectory(1, str(tmp_path), "0" * 16, take=True)).ok
    other = Owner("other", "another store", "b", "elsewhere", 3, 4, "t")
    (tmp_path / NAME).write_text(json.dumps(asdict(other)))
    commit = Commit(1, 0, 1, "a" * 16, "", str(tmp_path), "step", "d" * 64, 1)
    reply = ask(errands, Save(2, asdict(commit), ""))
    assert reply == Reply(2, ok=False, reason="run other, process 3 on b", refusal="taken")
    errands.close(0)
    assert (tmp_path / NAME).exists()
