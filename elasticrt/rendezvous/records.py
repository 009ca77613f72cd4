"""Keys and values in the store. Pure.

All keys of a run start with `/elasticrt/<run id>/`. Values are JSON objects with a version. They are checked strictly
when they are read: a value of another shape is refused by name, never guessed at, and never treated as more than data.

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
from elasticrt.ipc.env import COUNT_MAX, NODE, Commit, Copy
from elasticrt.ipc.failure import TEXT_MAX_BYTES, Failure
from elasticrt.spec import RunSpec
from elasticrt.text import cut, known

VALUE_MAX_BYTES = 64 * 1024
"""The largest values are a chunk of a roster, and a head in a directory with the longest of paths."""

VERSION_MAX_BYTES = 128
SEATS_PER_CHUNK = 16
"""Few seats, because a node reads a whole chunk to find its own. But enough of them that the node knows other agents to
ask while etcd does not answer (see `outage`)."""

Name = Annotated[str, Field(pattern=f"^{NODE}$")]
Hex16 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_%-]{1,253}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]


def words(bytes_max: int) -> BeforeValidator:
    """A validator for a text for people: it is `cut` to `bytes_max` when the record is made.

    So a sender need not think of the text's size.
    """
    return BeforeValidator(lambda text: cut(text, bytes_max) if isinstance(text, str) else text)


class UnreadableRecord(StoreError):  # noqa: N818  It describes the record, not us.
    """A value under our prefix that is not one of ours: not JSON, another version, wrong types."""


class Record(BaseModel):
    """Base of everything that is stored: immutable, with a version, without extra fields or type conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    v: Literal[1] = 1

    def encode(self) -> bytes:
        """The value to store.

        Raises AssertionError for a record that cannot be read back: its writer must fail, not its readers.
        """
        value = self.model_dump_json(exclude_none=True).encode()
        try:
            decode(type(self), "a new one", value)
        except UnreadableRecord as error:
            raise AssertionError(f"a {type(self).__name__} that can't be read: {error}") from error
        return value


R = TypeVar("R", bound=Record | Commit)


_adapters: dict[type[Any], TypeAdapter[Any]] = {}
"""The parser of each kind of record, made when the first record of the kind is read."""


def decode(kind: type[R], key: str, value: bytes) -> R:
    """Parse a stored value strictly. Raises UnreadableRecord that names the key and the first thing wrong."""
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


LEAVING_MAX = 64
"""How many agents that were told to leave the spec names. Older ones have left, or will not come back."""


class SpecRecord(Record):
    """The agreed options of a run.

    Attributes:
        spec: the options.
        attempt: which attempt at this run id this is, counted from 1.
        resized: the numbers of nodes were changed while the run was alive, so a newcomer need not have the same
            numbers.
        stopped: the run was told to stop, so every node leaves, also one that hears of it late. Who submits the run
            again, when no node of it lives, takes this back.
        leaving: the agents that were told to leave (`Member.agent`), the newest last. An agent whose key ends before it
            hears of that, because its machine stands still, leaves when it is back.
    """

    spec: RunSpec
    attempt: Annotated[int, Field(ge=1)]
    resized: bool = False
    stopped: bool = False
    leaving: tuple[str, ...] = Field(default=(), strict=False, max_length=LEAVING_MAX)

    def telling(self, agent: str) -> SpecRecord:
        """This record, with `agent` among those that were told to leave."""
        known = agent in self.leaving
        return self if known else self.model_copy(update={"leaving": (*self.leaving, agent)[-LEAVING_MAX:]})


class Member(Record):
    """A node in one life.

    Attributes:
        node: the node's name.
        incarnation: identifies this life of the node.
        address: where the other nodes reach this one.
        pid: the agent's process id.
        workers: how many workers the node starts.
        probe_port: the port that answers whether this life still lives.
        port: a bound socket for the store of the next generation, should this member have rank 0 there.
        warm: whether the node can start workers at once.
        draining: whether the node wants to leave.
        generation: the generation whose workers the node runs, 0 for none.
        ready: how many of its workers can go on in the next generation without being started for it. They take part in
            the present one, or have set up beside it.
        new: how many of the `ready` workers have set up beside the present generation.
        has_state: whether one of these workers has the run's state.
        ended: written by the leader, which sees all reports: up to two nodes of generation `seen` whose workers have
            ended well.
        seen: the highest generation that the node knows of, in any store.
        drain_s: for how many seconds the node waits for a handover before it leaves without one.
        node_rank: the place that the node asks for among newcomers; None: behind those that ask for one.
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
    ended: tuple[Name, ...] = Field(default=(), strict=False, max_length=2)
    seen: Count = 0
    drain_s: Annotated[float, Field(ge=0)] = 0.0
    node_rank: Count | None = None

    @property
    def agent(self) -> str:
        """Names the agent's process, in all lives of the node in it. In a container each agent has the same pid."""
        return f"{self.node} {self.pid} {self.probe_port}"


class Seat(BaseModel):
    """One member's place in a generation: its ranks are `rank_offset` ... `rank_offset + workers - 1`.

    `index` is the node's group rank, counted from 0 in rank order. The other fields are those of the `Member`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    node: Name
    incarnation: Hex16
    index: Count
    rank_offset: Count
    workers: Annotated[int, Field(ge=1, le=4096)]
    address: Host
    probe_port: Port


class RosterChunk(Record):
    """Some of a generation's seats. The seat of a node is in chunk `chunk_of(node, chunks)`."""

    seats: tuple[Seat, ...] = Field(strict=False)


class HandoverRecord(Record):
    """The leader's request that all workers of a generation stop together.

    Attributes:
        generation: the generation that is handed over.
        cause: why, in words for people.
        step: 0 in the first round: hold, and report how far workers have been let in. Otherwise all leave after this
            step.
        save: rank 0 commits a checkpoint before it leaves, because too few nodes remain to hold the state in memory.
    """

    generation: Annotated[int, Field(ge=1)]
    cause: Annotated[str, words(400)]
    step: Count = 0
    save: bool = False


class Restarts(BaseModel):
    """The failures of an attempt so far, and how far the run had come at the last one that was counted.

    Attributes:
        spent: failures since there was progress.
        total: all failures of this attempt.
        step: the head's step at the last failure.
        beats: the most steps that any failure has told of by then (see `Failure`).
        loaded: when the newest snapshot was written that a failed worker had gone on from, in microseconds since the
            epoch.
        early: `Failure.early` of the last failure, "" if it came after the first step.
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

    Attributes:
        number: the generation's number, counted from 1.
        attempt: the attempt at the run that the generation belongs to.
        nodes: how many nodes take part.
        world_size: how many workers take part.
        master_address: where rank 0's node serves the generation's store.
        master_port: the port of that store.
        cause: why the generation was made, in words for people.
        kind: the same as one word.
        in_place: whether the workers run already: those of the generation before go on, and the others have set up
            beside it. All state then comes from living workers. Otherwise every worker is started anew.
        waits: whether there are too few nodes for a step. The workers, which go on in place, agree on the newest state.
            Rank 0 saves the state, and all hold it until a generation with enough nodes follows.
        last: like `waits`, but the run ends with this failure as soon as the state is saved.
        restarts: the failures so far.
        reached: the step that all workers had agreed on and finished before this generation; 0 if no handover led to
            it.
        resume: the head to resume from, as in `WorkerEnv`.
        memory: the copy to resume from instead, as `copy` in `WorkerEnv`. The node with rank 0 holds the copy.
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
    """A draft as it is published.

    A small generation has its seats in the record itself: this saves a read between a change and the workers' new
    seats. Of a larger one each node reads only the roster chunk with its own seat.

    Attributes:
        nonce: unique to this generation; the keys of its roster contain it.
        chunks: how many chunks the roster has, 0 if `seats` has all seats.
        seats: all seats of a small generation.
    """

    nonce: Hex16
    chunks: Count
    seats: tuple[Seat, ...] = Field(default=(), strict=False)


class Report(Record):
    """How a node's workers ended in a generation, or how far they are in handing over.

    Attributes:
        generation: the generation that the report is about.
        node: the node that reports.
        incarnation: the life of the node.
        status: "holding": the workers hold, or will at the end of their step. "held": they have left after the agreed
            step. "finishing": a first worker ended well, the others still run. "ok": all ended well. "failed": one did
            not end well; the others of this node have been killed, or are `ready` to go on. "left": the node left on
            purpose, after `failure` if there is one.
        failure: the node's failure.
        handover: the create revision of the record that asked the workers to hold.
        entered: with "holding": the furthest step that one of the workers has been let into, 0 if one of them has no
            Loop.
        memory: the newest copy of the workers' state, or the one that the generation resumed from, if this node keeps
            one. With "held" it is the copy of the agreed step, unless there was no memory for it. With "failed", where
            `ready` workers live and can go on, it is an older one. With "ok" it is what other workers may resume from,
            should one of them still fail.
        ready: as in `Member`.
        new: as in `Member`.
        has_state: as in `Member`.
        well: with "finishing" and "ok": the global rank of the first worker that ended well.
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
    """The end of an attempt, the same for every agent.

    Attributes:
        attempt: the attempt that has ended.
        status: how it ended.
        code: the exit code of every agent.
        reason: why it ended, in words for people.
        generation: the last generation.
        step: the step of the newest committed checkpoint, 0 without one.
        text: the failure in full, "" without one.
    """

    attempt: Annotated[int, Field(ge=1)]
    status: Literal["succeeded", "failed"]
    code: Annotated[int, Field(ge=0, le=255)]
    reason: Annotated[str, words(1000)]
    generation: Count
    step: Count = 0
    text: Annotated[str, words(TEXT_MAX_BYTES)] = ""


def version_of(text: str) -> str:
    """A version of prepared data, which may be any text, in the form in which it is stored."""
    return known(text, VERSION_MAX_BYTES)


class Preparation(Record):
    """The state of one shared data preparation. A "building" record is bound to its builder's lease, the others stay.

    Attributes:
        state: what has become of the preparation.
        version: the version of the data, as `version_of` gives it.
        generation: the generation of the builder.
        node: the builder's node.
        incarnation: the builder's life.
        error: with "failed": why.
    """

    state: Literal["building", "done", "failed"]
    version: Annotated[str, Field(max_length=VERSION_MAX_BYTES)]
    generation: Count
    node: Name
    incarnation: Hex16
    error: Annotated[str, words(4000)] = ""


class Keys:
    """The names of all keys of one run. The module's docstring says what each key holds.

    Args:
        run_id: the run.

    Attributes:
        prefix: the prefix of all keys of this run. It ends with a slash, so that run `a` never reads run `a-b`.
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
        """The key of the head of one checkpoint directory; `place` identifies the directory in the run."""
        return f"{self.prefix}places/{place}"

    def preparation(self, name: str) -> str:
        """The key of one preparation. Its name may be any text, so the key has a digest of the name."""
        return self.preparations + hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32]

    def result(self, attempt: int) -> str:
        """One attempt's result."""
        return f"{self.results}{attempt}"


def chunk_of(node: str, chunks: int) -> int:
    """The chunk that holds a node's seat. It follows from the name, so a node finds it without the roster."""
    # Every node must get the same number. Python's own `hash` of a text differs from process to process.
    return zlib.crc32(node.encode()) % chunks


def roster_chunks(seats: tuple[Seat, ...], size: int = SEATS_PER_CHUNK) -> tuple[RosterChunk, ...]:
    """Distribute seats over chunks by node name, `size` seats a chunk on average; () if one would hold them all."""
    count = -(-len(seats) // size)
    if count <= 1:
        return ()
    chunks: list[list[Seat]] = [[] for _ in range(count)]
    for seat in seats:
        chunks[chunk_of(seat.node, count)].append(seat)
    return tuple(RosterChunk(seats=tuple(chunk)) for chunk in chunks)
