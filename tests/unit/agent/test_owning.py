"""What an agent says to a worker that wants to save to a directory: its head, and whether another live run is there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from elasticrt.agent.store_proxy import StoreRequest, StoreRequests
from elasticrt.ipc.directory_owner import NAME, Owner
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import Own, Reply, Save
from elasticrt.rendezvous.records import Keys
from elasticrt.store.protocol import Put, Txn
from elasticrt.testing.memory_store import MemoryServer, MemoryStore


def errands_of(server: MemoryServer, run: str) -> StoreRequests:
    """The agent of a run."""
    return StoreRequests(MemoryStore(server), Keys(run), lambda _: None, lambda: True)


def ask(errands: StoreRequests, request: Own | Save) -> Reply:
    """One request of a worker in generation 1, which nobody has replaced."""
    return errands.carry_out(StoreRequest(request, 1, 0, 1, "n0", "b" * 16, 0, lambda _: None))


def test_heads_of_several_directories() -> None:
    """Each is found by its place; a commit replaces the run's head, of whichever directory that is."""
    errands = errands_of(MemoryServer(lambda: 0.0), "run")
    places, replaces = ("0" * 16, "1" * 16), ""
    for step, place in ((1, 0), (2, 1), (3, 0)):
        nonce = str(step) * 16
        commit = Commit(step, 0, 1, nonce, "", "/ckpt", "step", "d" * 64, 1, place=places[place], total=10 * step)
        assert ask(errands, Save(step, asdict(commit), replaces)).ok
        replaces = nonce
    heads = [ask(errands, Own(9, "/ckpt", place, take=False)).data["head"] for place in places]
    assert [(head["step"], head["total"]) for head in heads] == [(3, 30), (2, 20)]
    assert ask(errands, Own(9, "/ckpt", "2" * 16, take=False)) == Reply(9, ok=True)


@pytest.mark.parametrize("alive", [True, False])
def test_two_runs_in_one_store(tmp_path: Path, alive: bool) -> None:
    """F13: the members of the other run tell whether it lives, wherever it is; its record may be old or new."""
    server = MemoryServer(lambda: 0.0)
    first, second = errands_of(server, "first"), errands_of(server, "second")
    own = Own(1, str(tmp_path), "0" * 16, take=True)
    assert ask(first, own).ok
    elsewhere = Owner.from_json((tmp_path / NAME).read_bytes())
    assert elsewhere is not None
    text = (tmp_path / NAME).read_text().replace(elsewhere.machine, "elsewhere").replace(f"{elsewhere.pid}", "1")
    (tmp_path / NAME).write_text(text)
    if alive:
        MemoryStore(server).commit(Txn((), (Put(Keys("first").member("n0"), b"{}"),), why="first lives"))
    told = ask(second, own)
    assert (told.ok, told.reason) == ((False, "taken: run first, process 1 on n0") if alive else (True, ""))
    first.release()
    second.release()


def test_a_run_that_was_followed_by_another_commits_nothing_more(tmp_path: Path) -> None:
    """S2: whoever was taken for dead, and lives, is told so at its next commit."""
    errands = errands_of(MemoryServer(lambda: 0.0), "run")
    assert ask(errands, Own(1, str(tmp_path), "0" * 16, take=True)).ok
    other = Owner("other", "another store", "b", "elsewhere", 3, 4, "t")
    (tmp_path / NAME).write_text(json.dumps(asdict(other)))
    commit = Commit(1, 0, 1, "a" * 16, "", str(tmp_path), "step", "d" * 64, 1)
    assert ask(errands, Save(2, asdict(commit), "")) == Reply(2, ok=False, reason="taken: run other, process 3 on b")
    errands.release()
    assert (tmp_path / NAME).exists()
