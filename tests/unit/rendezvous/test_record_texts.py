"""Texts in records: any characters, at and around their limits; paths and arguments in any bytes."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrt.agent.store_driver import StoreDriver
from elasticrt.errors import ConfigError, StoreError, path_of
from elasticrt.ipc.env import Commit
from elasticrt.ipc.failure import Failure
from elasticrt.rendezvous.records import (
    TEXT_MAX_BYTES,
    VALUE_MAX_BYTES,
    Generation,
    HandoverRecord,
    Keys,
    Member,
    Preparation,
    Report,
    Result,
    Seat,
    SpecRecord,
    decode,
    roster_chunks,
    version_of,
)
from elasticrt.rendezvous.replica import Replica
from elasticrt.spec import COMMAND_MAX_BYTES, RunSpec, difference
from elasticrt.store.protocol import Put, Txn
from elasticrt.text import cut, known, plain, shell, size
from tests.memory_store import MemoryServer, MemoryStore

LIFE = {"node": "n0", "incarnation": "0" * 16}
HEAD = {"step": 1, "epoch": 0, "generation": 1, "nonce": "a" * 16, "parent": "", "file": "x", "digest": "b" * 64}
PIECES = {
    "plain": "x",
    "NUL": "\0",
    "CJK": "漢",
    "emoji": "🦊",
    "family": "\N{WOMAN}\u200d\N{GIRL}",
    "surrogate": "\udce9",
    "high surrogate": "\ud83e",
    "escape": "\x1b",
    "quote": '"',
    "backslash": "\\",
    "newline": "\n",
    "delete": "\x7f",
}


def _failure(summary: str, text: str) -> Report:
    failure = Failure(rank=0, code=1, collateral=False, summary=summary, text=text)
    return Report(generation=1, status="failed", failure=failure, **LIFE)


def _words(text: str) -> list[str]:
    return [text[at : at + 9] for at in range(0, len(text), 9)]


RECORDS = {
    "a report's text": (TEXT_MAX_BYTES, lambda text: _failure(text, text)),
    "a result's text": (
        TEXT_MAX_BYTES,
        lambda text: Result(attempt=1, status="failed", code=1, reason=text, generation=1, text=text),
    ),
    "a reason": (1000, lambda text: Result(attempt=1, status="failed", code=1, reason=text, generation=1)),
    "a summary": (400, lambda text: _failure(text, "")),
    "a handover's cause": (400, lambda text: HandoverRecord(generation=1, cause=text)),
    "a build's error": (
        4000,
        lambda text: Preparation(state="failed", version=version_of(text), generation=1, error=text, **LIFE),
    ),
    "a version": (128, lambda text: Preparation(state="done", version=version_of(text), generation=1, **LIFE)),
    "a role": (
        128,
        lambda text: SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script",), role=text), attempt=1),
    ),
    "an argument": (
        4096,
        lambda text: SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script", text)), attempt=1),
    ),
    "a command": (
        COMMAND_MAX_BYTES,
        lambda text: SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script", *_words(text))), attempt=1),
    ),
}


@pytest.mark.parametrize("piece", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", RECORDS)
def test_a_text_at_its_limit_reads_back_as_itself(name, piece):
    """Of one byte less than the limit, of the limit, and beyond: what one agent writes, another reads."""
    limit, make = RECORDS[name]
    each = size(plain(piece))
    for pieces in (limit // each - 1, limit // each, limit // each + 1, limit, 3 * limit):
        for rest in ("", "x", "xx"):
            record = make(piece * pieces + rest)
            assert decode(type(record), "key", record.encode()) == record
            assert len(record.encode()) <= VALUE_MAX_BYTES


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=80) | st.builds(
    lambda piece, times: piece * times, st.sampled_from(list(PIECES.values())), st.integers(0, 60)
)


@given(ANY_TEXT, st.integers(4, 100))
@settings(max_examples=300, deadline=None)
def test_a_text_is_cut_by_encoded_bytes(text, limit):
    """No longer than its limit, at a character's end, as much as fits, and cutting it again changes nothing."""
    found = cut(text, limit)
    whole = plain(text)
    assert size(found) <= limit
    assert cut(found, limit) == found
    if size(whole) <= limit:
        assert found == whole
    else:
        kept = found.removesuffix("...")
        assert whole.startswith(kept)
        assert size(whole[: len(kept) + 1]) + len("...") > limit


@given(ANY_TEXT, ANY_TEXT)
@settings(max_examples=300, deadline=None)
def test_texts_that_are_compared_stay_apart(one, other):
    """Two versions, roles or arguments are equal after their way exactly where they were equal before."""
    assert (known(one, 128) == known(other, 128)) == (one == other)
    assert known(known(one, 128), 128) == known(one, 128)


def test_arguments_beyond_a_record_are_still_compared():
    """Thousands of arguments are known by a digest: the same command joins, one that differs at its end does not."""
    words = ("script", "train.py", *(f"shard-{number}.tar" for number in range(20_000)))
    mine = RunSpec(min_nodes=1, max_nodes=1, command=words)
    assert len(SpecRecord(spec=mine, attempt=1).encode()) <= VALUE_MAX_BYTES
    assert not difference(mine, RunSpec(min_nodes=1, max_nodes=1, command=words))
    assert "command" in difference(mine, RunSpec(min_nodes=1, max_nodes=1, command=(*words[:-1], "shard-x.tar")))


def test_a_directory_that_is_not_utf8_is_refused(tmp_path, monkeypatch):
    """In words, wherever the bytes are: in what is given, or in the current directory."""
    with pytest.raises(ConfigError, match=r"not UTF-8 \(Loop\): got 'caf\\udce9'.*Rename the directory"):
        path_of("caf\udce9", "Loop")
    current = tmp_path / "caf\udce9"
    current.mkdir()
    monkeypatch.chdir(current)
    with pytest.raises(ConfigError, match="not UTF-8"):
        path_of("ckpt", "Loop")
    assert path_of("/ckpt", "Loop") == "/ckpt"


def test_a_head_in_the_longest_of_directories():
    """A path of the largest size that there is travels within a generation, in any characters; a longer one not."""
    for character in ("\x01", "x", '"'):
        head = Commit(size=1, directory="/" + character * 4095, **HEAD)
        generation = Generation(
            number=1, attempt=1, nonce="c" * 16, nodes=1, world_size=1, master_address="::1", master_port=1,
            cause="\0" * 400, kind="start", resume=head, chunks=1,
        )  # fmt: skip
        assert decode(Generation, "key", generation.encode()).resume == head
    for refused in ("/" + "x" * 4096, "x", "", "/a\0b", "/\ud83e", "/\udce9", 5):
        with pytest.raises(ValueError, match="directory"):
            Commit(size=1, directory=refused, **HEAD)


@pytest.mark.parametrize("word", [b"caf\xe9", b"a\nb'c\\d", b"\x1b[2J", "漢 字".encode(), b"", b"$x", b"two words\x01"])
def test_a_command_can_be_pasted(word):
    """What is shown of a command, plainly and in one line, a shell takes for the same bytes."""
    shown = plain(shell(["printf", "%s", os.fsdecode(word)]))
    assert len(shown.splitlines()) == 1
    assert subprocess.run(["bash", "-c", shown], capture_output=True, check=True).stdout == word


def test_a_preparation_of_any_name_has_a_key():
    """The name of a preparation is a path of the user's, and that may be in any bytes."""
    assert Keys("r").preparation("caf\udce9") != Keys("r").preparation("caf\udcea")


def test_a_record_that_nobody_could_read_ends_its_writer():
    """Should a record be made past its checks all the same, its writer crashes, and nobody waits for it."""
    report = Report(generation=1, status="ok", **LIFE).model_copy(update={"node": "no/node"})
    with pytest.raises(AssertionError, match=r"Report that can't be read.*node"):
        report.encode()


OWN = ["spec", "generation", "checkpoint", "control/handover", "members/n0", "reports/1/n0", "reports/1/n1", "result/1"]
FOREIGN = ["members/x", "reports/1/x", "reports/9/n0", "result/9", "roster/zz/0000", "something/else"]


@pytest.mark.parametrize("key", OWN + FOREIGN)
def test_a_record_that_the_run_waits_for_ends_it_when_it_is_not_readable(key):
    """E17: what is not ours is ignored; in the place of one of our own, the run says so and ends, and does not wait."""
    store = MemoryStore(MemoryServer(lambda: 0.0))
    keys = Keys("r")
    seats = [
        Seat(node=f"n{n}", incarnation="0" * 16, index=n, rank_offset=n, workers=1, address="::1", probe_port=1)
        for n in (0, 1)
    ]
    chunks = roster_chunks(tuple(seats), size=1)
    generation = Generation(
        number=1, attempt=1, nonce="c" * 16, nodes=2, world_size=2, master_address="::1", master_port=1, cause="start",
        kind="start", chunks=len(chunks),
    )  # fmt: skip
    members = [
        Member(node=f"n{n}", incarnation="0" * 16, address="::1", pid=1, workers=1, probe_port=1, port=1)
        for n in (0, 1)
    ]
    spec = RunSpec(min_nodes=1, max_nodes=2, command=("script", "x"))
    values = {keys.spec: SpecRecord(spec=spec, attempt=1), keys.generation: generation}
    values |= {keys.chunk("c" * 16, k): chunk for k, chunk in enumerate(chunks)}
    values |= {keys.member(each.node): each for each in members}
    for name, record in values.items():
        store.commit(Txn((), (Put(name, record.encode()),)))
    driver = StoreDriver(store, lambda _: None, time, grant=lambda: store.grant(5.0))
    known = Replica("n0", keys, lambda _: None)
    driver.run(known.refresh())
    assert known.view.is_leader
    store.commit(Txn((), (Put(keys.prefix + key, b"\xff no record"),)))
    fresh = Replica("n0", keys, lambda _: None)
    fresh.view = replace(known.view, read_revisions={})
    if key in OWN:
        with pytest.raises(StoreError, match=rf"has been overwritten \({keys.prefix + key}\)"):
            driver.run(fresh.refresh())
    else:
        driver.run(fresh.refresh())
        assert len(fresh.view.members) == 2
