"""Keys and values in the store. Pure.

All keys of a run start with `/elasticrt/<run id>/`. Values are JSON objects with a version, checked strictly when they
are read: a value of another shape is refused by name, never guessed at, and never more than data.

    spec                  RunSpec and attempt                                   no lease
    members/<node>        a live node: its incarnation and state                the member's lease
    generation            the agreed membership, replaced by compare-and-swap   no lease
    roster/<nonce>/<k>    the seats of that generation, 16 or so a chunk        no lease
    reports/<g>/<node>    how this node's workers ended                         no lease
    checkpoint            the head: the newest committed checkpoint             no lease
    places/<place>        the newest committed checkpoint of one directory      no lease
    control/handover      that all workers stop together, and after which step  no lease
    prepare/<name>        the builder of a data set, or that it is done         while building: the builder's lease
    result/<attempt>      the one final result                                  no lease
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from elasticrt.errors import StoreError, explain
from elasticrt.ipc.env import COUNT_MAX, Commit, Copy
from elasticrt.ipc.failure import TEXT_MAX_BYTES, Failure
from elasticrt.spec import RunSpec
from elasticrt.text import cut, known

VALUE_MAX_BYTES = 64 * 1024
"""The largest are some seats of a roster, and a head in the longest of directories."""

VERSION_MAX_BYTES = 128
SEATS_PER_CHUNK = 16
"""What a node reads to find its seat, so few; but enough others to ask when etcd is away (see `outage`)."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
Hex16 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_%-]{1,253}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]


def words(bytes_max: int) -> BeforeValidator:
    """Of a text for people: it is `cut` when the record is made, so that a sender need not think of its size."""
    return BeforeValidator(lambda text: cut(text, bytes_max) if isinstance(text, str) else text)


class UnreadableRecord(StoreError):  # noqa: N818  It describes the record, not us.
    """A value under our prefix that is not one of ours: not JSON, another version, wrong types."""


class Record(BaseModel):
    """Base of everything that is stored: immutable, nothing extra, no type conversions, a version."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    v: Literal[1] = 1

    def encode(self) -> bytes:
        """The value to store. AssertionError for one that can't be read: its writer must fail, not its readers."""
        value = self.model_dump_json(exclude_none=True).encode()
        try:
            decode(type(self), "a new one", value)
        except UnreadableRecord as error:
            raise AssertionError(f"a {type(self).__name__} that can't be read: {error}") from error
        return value


R = TypeVar("R", bound=Record | Commit)


_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""What parses each kind of record, made when the first of a kind is read."""


def decode(kind: type[R], key: str, value: bytes) -> R:
    """Parse a stored value strictly. Raises UnreadableRecord naming the key and the first thing wrong."""
    if len(value) > VALUE_MAX_BYTES:
        problem = f"{len(value)} bytes; expected at most {VALUE_MAX_BYTES}"
    else:
        try:
            if kind not in _adapters:
                _adapters[kind] = TypeAdapter(kind)
            return cast("R", _adapters[kind].validate_json(value))
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc'])) or 'value'}: {first['msg']}"
    raise UnreadableRecord(
        explain(
            "a record in etcd is not readable",
            key,
            got=problem,
            expected=f"a version 1 {kind.__name__}",
            remedy="Something else writes under this run's prefix, or versions are mixed; use another run id",
        )
    )


class SpecRecord(Record):
    """The agreed options, and which attempt at this run id this is (counted from 1).

    `resized`: the numbers of nodes were changed while the run was alive, so newcomers need not know them.
    """

    spec: RunSpec
    attempt: Annotated[int, Field(ge=1)]
    resized: bool = False


class Member(Record):
    """A node in one life.

    `warm`: can start workers at once. `draining`: wants to leave. `generation`: whose workers it runs, 0 for none.
    `ready`: how many of its workers can go on in the next generation without being started for it: they take part in
    the present one, or have set up beside it, as so many `new` ones have; `has_state`: whether one has the run's state.
    `goes_on`: written by the leader, which sees all members: the generation of which workers can go on, on whichever
    node; 0 when it sees none.
    `ended`: written by the leader, which sees all reports: up to two nodes of generation `seen` whose workers have
    ended well. `seen`: the highest generation it knows of. `port`: a bound socket for the next generation's store,
    should this member be rank 0 there. `probe_port`: answers whether this life still lives. `drain_s`: the seconds for
    which it waits for a handover before it leaves without one. `node_rank`: where it would like to sit among newcomers;
    None: behind those that say.
    """

    node: Name
    incarnation: Hex16
    address: Host
    pid: Count
    workers: Annotated[int, Field(ge=1, le=4096)]
    probe_port: Port
    port: Port
    warm: bool = False
    draining: bool = False
    generation: Count = 0
    ready: Annotated[int, Field(ge=0, le=4096)] = 0
    new: Count = 0
    has_state: bool = False
    goes_on: Count = 0
    ended: tuple[Name, ...] = Field(default=(), strict=False, max_length=2)
    seen: Count = 0
    drain_s: Annotated[float, Field(ge=0)] = 0.0
    node_rank: Count | None = None


class Seat(BaseModel):
    """One member's place in a generation: its ranks are `rank_offset` ... `rank_offset + workers - 1`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    node: Name
    incarnation: Hex16
    index: Count
    rank_offset: Count
    workers: Annotated[int, Field(ge=1, le=4096)]
    address: Host
    probe_port: Port


class RosterChunk(Record):
    """Some of a generation's seats. A node finds its own seat in chunk `chunk_of(node, chunks)`."""

    seats: tuple[Seat, ...] = Field(strict=False)


class HandoverRecord(Record):
    """The leader asks all workers of a generation to stop together.

    `step` 0: hold, and report how far workers have been let in. Otherwise: all leave after that step; with `save`, rank
    0 commits a checkpoint first, because too few nodes remain to hold the state in memory.
    """

    generation: Annotated[int, Field(ge=1)]
    cause: Annotated[str, words(400)]
    step: Count = 0
    save: bool = False


class Restarts(BaseModel):
    """The failures of an attempt so far, and how far the run had come at the last one that was counted.

    `spent` counts failures since there was progress, `total` all of this attempt. `step` is the head's step at the last
    one; `beats` the most that any failure has told by then (see `Failure`), `loaded` the time of the newest snapshot
    that one had gone on from, in microseconds since the epoch; `early` the failure's, if it came before the first step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    spent: Count = 0
    total: Count = 0
    step: Count = 0
    beats: Count = 0
    loaded: Count = 0
    early: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""


class Draft(Record):
    """One agreed membership, as the leader has decided it.

    `in_place`: its workers run already: those of the generation before go on, and the others have set up beside it. All
    state comes from the living. Else every worker is started anew.

    `waits`: there are too few nodes for a step. Its workers, which go on in place, agree on the newest state, rank 0
    saves it, and all hold it until a generation with enough nodes follows.

    `last`: as for `waits`, but the run ends with this failure as soon as that is saved.

    `reached`: the step that all had agreed on and finished before it; 0 where no handover led to it.

    `resume`, `memory`: as `resume` and `copy` of `WorkerEnv`; the node with rank 0 has the copy.
    """

    number: Annotated[int, Field(ge=1)]
    attempt: Annotated[int, Field(ge=1)]
    nodes: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=1)]
    master_address: Host
    master_port: Port
    cause: Annotated[str, words(400)]
    kind: Literal["start", "failure", "lost", "join", "drain", "resize"]
    in_place: bool = False
    waits: bool = False
    last: Failure | None = None
    restarts: Restarts = Restarts()
    reached: Count = 0
    resume: Commit | None = None
    memory: Copy | None = None


class Generation(Draft):
    """A draft as it is published: with a nonce that no other has, by which its roster is found.

    The seats of a small one are in it: a read less between a change and the workers' new seats. Of a larger one each
    node reads the chunk that its own seat is in.
    """

    nonce: Hex16
    chunks: Count
    seats: tuple[Seat, ...] = Field(default=(), strict=False)


class Report(Record):
    """How a node's workers ended in a generation, or how far they are in handing over.

    "finishing": a first worker ended well, the others still run; "ok": all ended well; "failed": one did not, and the
    others of this node have been killed; "left": the node left on purpose, after `failure` if it has one.

    "holding": they hold, or will at the end of their step; `entered` is the furthest step that one of them has been
    let into, 0 if one of them has no Loop. "held": they have left after the agreed step. `memory` is the newest copy
    of their state, or the one that the generation resumed from, if this node keeps one: with "held" that of the agreed
    step, unless there was no memory for it; with "failed", where `ready` workers live and can go on, an older one; with
    "ok" what others may resume from, should one of them still fail.
    `handover` is the create revision of the record that asked for it.

    `ready`, `new`, `has_state`: as in `Member`.

    `well` is the global rank of the first worker that ended well, with "finishing" and "ok".
    """

    generation: Annotated[int, Field(ge=1)]
    node: Name
    incarnation: Hex16
    status: Literal["holding", "held", "finishing", "ok", "failed", "left"]
    failure: Failure | None = None
    handover: Count = 0
    entered: Count = 0
    memory: Copy | None = None
    ready: Annotated[int, Field(ge=0, le=4096)] = 0
    new: Count = 0
    has_state: bool = False
    well: Count | None = None


class Result(Record):
    """The end of an attempt, the same for every agent. `code` is the exit code of all of them."""

    attempt: Annotated[int, Field(ge=1)]
    status: Literal["succeeded", "failed"]
    code: Annotated[int, Field(ge=0, le=255)]
    reason: Annotated[str, words(1000)]
    generation: Count
    step: Count = 0
    text: Annotated[str, words(TEXT_MAX_BYTES)] = ""


def version_of(text: str) -> str:
    """A version of prepared data, which may be any text, as it is stored."""
    return known(text, VERSION_MAX_BYTES)


class Preparation(Record):
    """The state of one shared data preparation: "building" lives on its builder's lease, the others stay."""

    state: Literal["building", "done", "failed"]
    version: Annotated[str, Field(max_length=VERSION_MAX_BYTES)]
    generation: Count
    node: Name
    incarnation: Hex16
    error: Annotated[str, words(4000)] = ""


class Keys:
    """The names of all keys of one run; what each holds is said at the top.

    Args:
        run_id: the run's.

    Attributes:
        prefix: of everything of this run. It ends with a slash, so that run `a` never reads run `a-b`.
        spec, generation, checkpoint, handover: single keys.
        members, rosters, all_reports, preparations, results: prefixes of keys of one kind.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.prefix = prefix = f"/elasticrt/{run_id}/"
        self.spec = prefix + "spec"
        self.generation = prefix + "generation"
        self.checkpoint = prefix + "checkpoint"
        self.handover = prefix + "control/handover"
        self.members = prefix + "members/"
        self.rosters = prefix + "roster/"
        self.all_reports = prefix + "reports/"
        self.preparations = prefix + "prepare/"
        self.results = prefix + "result/"

    def member(self, node: str) -> str:
        """One member's key."""
        return self.members + node

    def roster(self, nonce: str) -> str:
        """The prefix of one generation's roster chunks."""
        return f"{self.rosters}{nonce}/"

    def chunk(self, nonce: str, index: int) -> str:
        """One roster chunk."""
        return f"{self.roster(nonce)}{index:04d}"

    def reports(self, generation: int) -> str:
        """The prefix of one generation's reports."""
        return f"{self.all_reports}{generation}/"

    def report(self, generation: int, node: str) -> str:
        """One node's report."""
        return self.reports(generation) + node

    def place(self, place: str) -> str:
        """The head of one checkpoint directory."""
        return f"{self.prefix}places/{place}"

    def preparation(self, name: str) -> str:
        """One preparation; any text may be its name, so a digest of it is the key."""
        return self.preparations + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]

    def result(self, attempt: int) -> str:
        """One attempt's result."""
        return f"{self.results}{attempt}"


def chunk_of(node: str, chunks: int) -> int:
    """The chunk that holds a node's seat: it can be found without knowing the roster."""
    return zlib.crc32(node.encode()) % chunks


def roster_chunks(seats: tuple[Seat, ...], size: int = SEATS_PER_CHUNK) -> tuple[RosterChunk, ...]:
    """Distribute seats over chunks by node name; a chunk has `size` on average. None if one would hold them all."""
    count = -(-len(seats) // size)
    if count <= 1:
        return ()
    chunks: list[list[Seat]] = [[] for _ in range(count)]
    for seat in seats:
        chunks[chunk_of(seat.node, count)].append(seat)
    return tuple(RosterChunk(seats=tuple(chunk)) for chunk in chunks)
