"""Records: what is stored, and what is refused when it is read back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrt.ipc.env import Commit
from elasticrt.rendezvous.records import (
    SEATS_PER_CHUNK,
    VALUE_MAX_BYTES,
    Generation,
    Keys,
    Member,
    Report,
    Result,
    RosterChunk,
    Seat,
    SpecRecord,
    UnreadableRecord,
    chunk_of,
    decode,
    roster_chunks,
)
from elasticrt.spec import RunSpec

MEMBER = Member(node="n0", incarnation="0" * 16, address="127.0.0.1", pid=1, workers=2, probe_port=5000, port=5001)
HEAD = Commit(
    step=3,
    epoch=0,
    generation=1,
    nonce="a" * 16,
    parent="",
    directory="/ckpt",
    file="step-3.pt",
    digest="b" * 64,
    size=9,
)
GENERATION = Generation(
    number=1,
    attempt=1,
    nonce="c" * 16,
    nodes=1,
    world_size=2,
    master_address="::1",
    master_port=5001,
    cause="start",
    kind="start",
    resume=HEAD,
    chunks=1,
)
SPEC = SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=2, command=("script", "a.py")), attempt=1)
REPORT = Report(generation=1, node="n0", incarnation="0" * 16, status="ok")
RESULT = Result(attempt=1, status="failed", code=1, reason="why", generation=2)


def encoded(record: Any) -> bytes:
    """As it is stored."""
    value: bytes = record.to_json().encode() if isinstance(record, Commit) else record.encode()
    return value


@pytest.mark.parametrize("record", [MEMBER, HEAD, GENERATION, SPEC, REPORT, RESULT], ids=lambda r: type(r).__name__)
def test_a_record_reads_back_as_itself(record: object) -> None:
    """What is encoded is decoded to an equal value."""
    assert decode(type(record), "key", encoded(record)) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [("node", "a/b"), ("nonce", "x"), ("digest", "b" * 63), ("step", -1), ("step", True), ("step", "3"), ("more", 1)],
)
def test_a_head_whose_field_has_another_form_is_refused(field: str, value: object) -> None:
    """What workers know as a commit is stored as it is, and held against the form of each of its fields."""
    with pytest.raises(UnreadableRecord, match=field):
        decode(Commit, "key", json.dumps({**asdict(HEAD), field: value}).encode())


def _member(**changes: object) -> bytes:
    fields = {**json.loads(MEMBER.encode()), **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"", "JSON"),
        (b"not json", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"[" * 5000 + b"]" * 5000, "recursion"),
        (b" " * (VALUE_MAX_BYTES + 1), "bytes"),
        (_member(v=99), "v:"),
        (_member(extra=1), "extra"),
        (_member(node=...), "node"),
        (_member(node="../x"), "node"),
        (_member(node="a/b"), "node"),
        (_member(node="a\n"), "node"),
        (_member(address='"; rm -rf'), "address"),
        (_member(address="a b"), "address"),
        (_member(workers=0), "workers"),
        (_member(workers="2"), "workers"),
        (_member(workers=2.0), "workers"),
        (_member(workers=True), "workers"),
        (_member(generation=-1), "generation"),
        (_member(generation=2**70), "generation"),
        (_member(port=0), "port"),
        (_member(port=70000), "port"),
        (_member(incarnation="zz"), "incarnation"),
        (_member(warm="yes"), "warm"),
        (_member().replace(b'"pid": 1', b'"pid": NaN'), "pid|JSON"),
    ],
)
def test_anything_else_is_refused_by_name(value: bytes, problem: str) -> None:
    """E17, SEC15: a value of another shape names its key and what is wrong with it."""
    with pytest.raises(UnreadableRecord, match=rf"(?s)some/key.*({problem})"):
        decode(Member, "some/key", value)


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_and_nothing_else_happens(value: bytes) -> None:
    """E17: no value whatever raises anything but the one error."""
    for kind in (Member, Generation, Commit, RosterChunk):
        with pytest.raises(UnreadableRecord):
            decode(kind, "key", value)


@pytest.mark.parametrize("file", ["", "a/b", "/etc/passwd", "..", ".hidden"])
def test_a_checkpoint_is_a_plain_file_name(file: str) -> None:
    """C9: no record can point out of its directory."""
    value = json.dumps({**asdict(HEAD), "file": file}).encode()
    with pytest.raises(UnreadableRecord, match="file"):
        decode(Commit, "key", value)


def _seats(count: int) -> tuple[Seat, ...]:
    return tuple(
        Seat(
            node=f"n{i}",
            incarnation=f"{i:016x}",
            index=i,
            rank_offset=i,
            workers=1,
            address="10.0.0.1",
            probe_port=5000,
        )
        for i in range(count)
    )


@pytest.mark.parametrize("count", [1, 15, 16])
def test_a_small_generation_has_its_seats_in_it(count: int) -> None:
    """Nothing has to be read after it, and it is no larger than a chunk and a record without seats."""
    seats = _seats(count)
    assert roster_chunks(seats) == ()
    small = GENERATION.model_copy(update={"chunks": 0, "seats": seats})
    assert decode(Generation, "key", small.encode()) == small
    assert len(small.encode()) <= 6144


@pytest.mark.parametrize("count", [17, 32, 1000])
def test_a_node_finds_its_seat_in_its_own_chunk(count: int) -> None:
    """Every seat is in exactly one chunk, the one that its node name gives; a chunk stays within a value's limit."""
    seats = _seats(count)
    chunks = roster_chunks(seats)
    assert len(chunks) == math.ceil(count / SEATS_PER_CHUNK)
    for seat in seats:
        assert [seat in chunk.seats for chunk in chunks].index(True) == chunk_of(seat.node, len(chunks))
    assert sum(len(chunk.seats) for chunk in chunks) == count
    assert all(decode(RosterChunk, "key", chunk.encode()) == chunk for chunk in chunks)


def test_a_generation_of_many_nodes_stays_small() -> None:
    """The record that everybody reads does not grow with the number of nodes: at most 2 KiB."""
    large = GENERATION.model_copy(update={"nodes": 10_000, "world_size": 80_000, "cause": "x" * 400, "chunks": 625})
    assert len(large.encode()) <= 2048


def test_no_run_is_a_prefix_of_another() -> None:
    """S14: the keys of run `a` never include those of run `a-b`, and a preparation's name cannot leave its place."""
    assert not Keys("a-b").spec.startswith(Keys("a").prefix)
    assert Keys("a").preparation("../../x").startswith(Keys("a").preparations)
    assert Keys("a").preparation("../../x").count("/") == Keys("a").preparations.count("/")
