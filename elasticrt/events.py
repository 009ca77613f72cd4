"""What happened, as values: one dataclass for each kind of event, which is the schema of `events-NODE.jsonl`. Pure.

An event is one line: a JSON object with the schema's version ("v"), the kind ("event"), the node that writes it
("node"), two times and the fields of its kind. "at" is CLOCK_MONOTONIC in seconds: exact, and comparable between
processes of one machine until it boots. "time" is the wall clock in UTC: for people, and between machines. Each agent
writes the events of its own node; `elasticrt.story` puts them together.

Readers leave out unknown kinds and fields. Any other change needs another version.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from elasticrt.ipc.typed import typed
from elasticrt.text import json_text

VERSION = 1

SECONDS_MAX = 1e10
"""Later times are nonsense: a line that has one is no event."""

KINDS: dict[str, type[Any]] = {}
"""The kinds of events by their names on a line."""

_NAMES: dict[type[Any], str] = {}


class Event:
    """What happened. Each kind is a dataclass of its own."""

    def __init_subclass__(cls) -> None:
        """The name of the kind on a line is `first_step` for FirstStep."""
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[name], _NAMES[cls] = cls, name


@dataclass(frozen=True)
class AgentStarted(Event):
    """An agent joins the run. The first event of its life.

    Attributes:
        pid: process id of the agent.
        run_id: the run.
        etcd: the address of etcd.
        run_dir: the directory of this node's logs and events.
        machine: the machine since it booted, or the container: times "at" and pids of the same one can be compared.
        min_nodes: the run waits with fewer nodes.
        max_nodes: the most nodes that can train.
    """

    pid: int
    run_id: str
    etcd: str
    run_dir: str
    machine: str = ""
    min_nodes: int = 1
    max_nodes: int = 1


@dataclass(frozen=True)
class Health(Event):
    """The agent's health can be asked for.

    Attributes:
        url: the address.
    """

    url: str


@dataclass(frozen=True)
class ParentWarm(Event):
    """The worker parent has imported torch: workers can now be started at once.

    Attributes:
        pid: process id of the parent.
        method: "fork" or "exec": how it starts workers.
        reason: why it is not "fork"; "" if it is.
        import_s: seconds that the imports took.
    """

    pid: int
    method: str
    reason: str
    import_s: float


@dataclass(frozen=True)
class Generation(Event):
    """This node has a seat in another generation, and begins it.

    Attributes:
        number: of the generation, from 1.
        world_size: workers of all its nodes.
        cause: why it was made, in the leader's words.
        kind: "start", "failure", "lost", "join", "drain" or "resize".
        restarts: failures so far that count against --max-restarts.
        in_place: whether living workers go on in it; else all are started anew.
        waits: whether it makes no step, because there are too few nodes: its workers save and keep the state.
        nodes: its nodes, by rank.
        resume_step: the step that its workers start from, as far as it is known before they have agreed on it.
    """

    number: int
    world_size: int
    cause: str
    kind: str
    restarts: int
    nodes: tuple[str, ...]
    resume_step: int
    in_place: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Resized(Event):
    """The run may have another number of nodes.

    Attributes:
        min_nodes: the run waits with fewer nodes.
        max_nodes: the most nodes that can train.
    """

    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class StandsBy(Generation):
    """A generation runs without this node. The fields are those of `generation`.

    Attributes:
        age_s: seconds since the last step of this node's workers; 0 if they have made none.
    """

    age_s: float = 0.0


@dataclass(frozen=True)
class WorkersStarted(Event):
    """All workers of this node's seat run.

    Attributes:
        generation: theirs.
        ranks: their global ranks.
        pids: their process ids, in the same order.
    """

    generation: int
    ranks: tuple[int, ...]
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Restarted(Event):
    """The workers of a later generation run, or wait for nodes in it. `recovery` follows after their first step.

    Attributes:
        generation: theirs.
        phases: ms of each phase so far; see `recovery`.
    """

    generation: int
    phases: dict[str, float]


@dataclass(frozen=True)
class FirstStep(Event):
    """The first step of a `Loop` in a generation is done on this node.

    Attributes:
        generation: the generation.
        step: the step, counted over the whole run.
        resumed_from: the last step before the generation.
        pause_s: seconds between the last step before it and this one; null if the node has made none before.
        redone: steps that had been done already, and are done again; null if this node does not know the last step
            before the generation.
    """

    generation: int
    step: int
    resumed_from: int
    pause_s: float | None
    redone: int | None


@dataclass(frozen=True)
class Recovery(Event):
    """The pause between two generations is over on this node: a step of a `Loop` or of an optimizer is done.

    Attributes:
        generation: the new one.
        pause_s: seconds between the last step before it and the first one after it.
        phases: ms of each phase of the pause, by its end: "detect" (the change is known), "agree" (another generation
            is agreed; a wait for nodes is in it), "stop" (the old workers are gone), "start" (the new ones run),
            "script" (`elasticrt.init` is called, or a living worker has its new seat), "init" (there is a process
            group), "loop" (the script has come to its `Loop`), "restore" (the state is restored), "first_step" (a step
            is done). They add up to the pause.
        age_s: seconds since it was over.
    """

    generation: int
    pause_s: float
    phases: dict[str, float]
    age_s: float = 0.0


@dataclass(frozen=True)
class SetUp(Event):
    """A node that has not trained before has made its first step.

    Attributes:
        generation: the generation.
        phases: ms of each phase since this node knew of its seat; see `recovery`.
        age_s: seconds since that step.
    """

    generation: int
    phases: dict[str, float]
    age_s: float = 0.0


@dataclass(frozen=True)
class Step(Event):
    """A step is done, by rank 0: at most four times a second, from the agent of its node.

    Attributes:
        generation: the generation.
        step: the step, counted over the whole run.
        epoch: the epoch, from 0.
        scalars: the numbers given to `loop.report`, by name, at most a second old; "nan", "inf" or "-inf" as a text.
    """

    generation: int
    step: int
    epoch: int
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress(Event):
    """The progress of this node's workers, and the time spent besides the steps.

    It is written about every 5 s, when there has been no step for a second, when steps go on that stood still, after a
    pause before the first step, and at the end.

    The seconds count from this node's first step in this generation, before it from the start of the workers, for the
    worker that spent most.

    Attributes:
        generation: the generation.
        step: the last step that all of them have finished, counted over the whole run; 0 without a `Loop`.
        data_s: seconds of waiting for the loader.
        save_s: seconds in which the training stood still for a checkpoint or a copy of the state.
        pause_s: seconds in `loop.pause`.
        samples: trained on by the run so far, over all epochs; 0 without a sampler.
        own_s: seconds of each worker's own work in a step, without its wait for the others' gradients, lately, in the
            order of the ranks in `workers_started`; 0 if DDP has measured nothing.
        beats: without a `Loop`, the steps of optimizers of the worker that has made fewest; else 0.
        age_s: seconds since `step`.
        pausing: whether one of them is in `loop.pause` now.
    """

    generation: int
    step: int
    data_s: float
    save_s: float
    pause_s: float
    samples: int = 0
    own_s: tuple[float, ...] = ()
    beats: int = 0
    age_s: float = 0.0
    pausing: bool = False


@dataclass(frozen=True)
class Committed(Event):
    """A checkpoint is committed. A run without living workers resumes from the newest one.

    Attributes:
        step: the step it holds, counted over the whole run.
        generation: the generation that saved it.
        bytes: its size.
        took_s: seconds since it was begun: copying the state, writing, committing.
    """

    step: int
    generation: int
    bytes: int = 0
    took_s: float = 0.0


@dataclass(frozen=True)
class Unsaved(Event):
    """A checkpoint could not be saved: the disk is full, or etcd does not take it. Training goes on.

    Attributes:
        step: the step that it would hold, counted over the whole run.
        generation: the generation.
        reason: what was found.
    """

    step: int
    generation: int
    reason: str


@dataclass(frozen=True)
class Copied(Event):
    """The agent keeps a copy of the state in memory.

    Attributes:
        generation: the generation.
        step: the step it holds, counted over the whole run.
        bytes: its size.
    """

    generation: int
    step: int
    bytes: int


@dataclass(frozen=True)
class Ready(Event):
    """A worker has set up beside the training, and waits to be let in.

    Attributes:
        local_rank: its number on this node.
    """

    local_rank: int


@dataclass(frozen=True)
class WorkerEnded(Event):
    """A worker's process has ended.

    Attributes:
        generation: the generation of its start or its last seat; 0 for one that set up beside the training.
        rank: its global rank.
        pid: its process id.
        code: exit code, or minus the signal's number.
        failure: how it failed, in a line; "" if it has not, or was ended by its agent.
        collateral: whether it failed only because another one had.
        step: the last step that it finished in its generation, counted over the whole run; 0: none.
    """

    generation: int
    rank: int
    pid: int
    code: int
    failure: str = ""
    collateral: bool = False
    step: int = 0


@dataclass(frozen=True)
class MemberLost(Event):
    """The leader has taken out a lost node.

    Attributes:
        lost: the node.
        how: the evidence.
    """

    lost: str
    how: str


@dataclass(frozen=True)
class Stalled(Event):
    """There is no step for too long, or a worker does not end after others have. Without `final` it is a warning.

    Attributes:
        generation: the generation.
        step: the last step, counted over the whole run.
        age_s: seconds since then.
        final: whether it is a failure.
        stacks: the stacks of the workers: lines by rank.
    """

    generation: int
    step: int
    age_s: float
    final: bool
    stacks: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Culprit(Event):
    """Steps stand still, and the others wait for these ranks, or a run's only rank makes none. It ends nothing.

    The node of rank 0 finds it; the others hear it from there, and write it as well.

    Attributes:
        generation: the generation.
        step: the last step, counted over the whole run, as rank 0's node has it.
        age_s: seconds since then.
        ranks: global ranks; none if no rank is behind the others.
        nodes: theirs, or nodes that do not answer.
        reason: what they do, where in the script, and where the others wait.
    """

    generation: int
    step: int
    age_s: float
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class GoesOn(Event):
    """This node's workers make steps again, after a time without one of which `culprit` or `stalled` has told.

    Attributes:
        generation: the generation.
        step: the last step before that time, as in `culprit`.
    """

    generation: int
    step: int


@dataclass(frozen=True)
class Straggler(Event):
    """A node is slow, and the others wait for it in every step; or none is any more. Written by the node of rank 0.

    Attributes:
        generation: the generation.
        step: the last step, counted over the whole run.
        slow: the node; "" when it has caught up.
        own_s: seconds of its own work in a step.
        others_s: the median of the other nodes.
    """

    generation: int
    step: int
    slow: str
    own_s: float
    others_s: float


@dataclass(frozen=True)
class EtcdAway(Event):
    """Etcd does not answer this agent, so nothing is committed or agreed; or it does again.

    Attributes:
        away_s: seconds without an answer until now.
        problem: what a request has got in place of one; "": etcd answers again.
        fresh: whether that is another one, which knows nothing: the one that the agents had started has died.
    """

    away_s: float
    problem: str = ""
    fresh: bool = False


@dataclass(frozen=True)
class Failure(Event):
    """The report of a run that has failed.

    Attributes:
        text: lines for people: where each worker failed, and the end of its output.
    """

    text: str


@dataclass(frozen=True)
class Result(Event):
    """The run has ended. Every node writes the same.

    Attributes:
        status: "succeeded" or "failed".
        code: the exit code of all agents.
        reason: why.
    """

    status: str
    code: int
    reason: str


@dataclass(frozen=True)
class Leaves(Event):
    """This node leaves the run, and ends its workers.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(frozen=True)
class AgentStopped(Event):
    """The agent ends. The last event of its life, unless it is killed.

    Attributes:
        code: its exit code.
    """

    code: int


@dataclass(frozen=True)
class Record:
    """An event with its node and times.

    Attributes:
        event: what happened.
        node: the node whose agent has written it.
        at: seconds of its machine's monotonic clock.
        time: seconds since 1970, by its machine's wall clock.
    """

    event: Event
    node: str
    at: float
    time: float


def kind_of(event: Event) -> str:
    """The name of its kind on a line."""
    return _NAMES[type(event)]


def encode(event: Event, node: str, at: float, time: datetime) -> bytes:
    """The line, without its end."""
    head = {"v": VERSION, "event": kind_of(event), "node": node, "at": round(at, 6), "time": time.isoformat()}
    return json_text({**head, **vars(event)}).encode()


def decode(line: bytes | str) -> Record | None:
    """The record in a line; None for half a line, another version, or an unknown kind."""
    try:
        found = json.loads(line)
        if found["v"] != VERSION:
            return None
        kind = KINDS[found["event"]]
        if kind is Step and "scalars" in found:  # Some of them may be "nan".
            found["scalars"] = {name: float(value) for name, value in found["scalars"].items()}
        event = typed(kind, {name: found[name] for name in kind.__dataclass_fields__ if name in found})
        time = datetime.fromisoformat(found["time"]).timestamp()
        record = Record(event, str(found["node"]), float(found["at"]), time)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return record if abs(record.at) < SECONDS_MAX and 0 <= record.time < SECONDS_MAX else None
