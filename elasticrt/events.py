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
    """An agent joins the run. The first event of its life."""

    pid: int  # Process id of the agent.
    run_id: str  # The run.
    etcd: str  # The address of etcd.
    run_dir: str  # The directory of this node's logs and events.
    # The machine since it booted, or the container: times "at" and pids of the same one can be compared.
    machine: str = ""
    min_nodes: int = 1  # The run waits with fewer nodes.
    max_nodes: int = 1  # The most nodes that can train.


@dataclass(frozen=True)
class Health(Event):
    """The agent's health can be asked for."""

    url: str  # The address.


@dataclass(frozen=True)
class ParentWarm(Event):
    """The worker parent has imported torch: workers can now be started at once."""

    pid: int  # Process id of the parent.
    method: str  # "fork" or "exec": how it starts workers.
    reason: str  # Why it is not "fork"; "" if it is.
    import_s: float  # Seconds that the imports took.


@dataclass(frozen=True)
class Generation(Event):
    """This node has a seat in another generation, and begins it."""

    number: int  # Of the generation, from 1.
    world_size: int  # Workers of all its nodes.
    cause: str  # Why it was made, in the leader's words.
    kind: str  # "start", "failure", "lost", "join", "drain" or "resize".
    restarts: int  # Failures so far that count against --max-restarts.
    nodes: tuple[str, ...]  # Its nodes, by rank.
    resume_step: int  # The step that its workers start from, as far as it is known before they have agreed on it.
    in_place: bool = False  # Whether living workers go on in it; else all are started anew.
    # Whether it makes no step, because there are too few nodes: its workers save and keep the state.
    waits: bool = False


@dataclass(frozen=True)
class Resized(Event):
    """The run may have another number of nodes."""

    min_nodes: int  # The run waits with fewer nodes.
    max_nodes: int  # The most nodes that can train.


@dataclass(frozen=True)
class StandsBy(Generation):
    """A generation runs without this node. The fields are those of `generation`."""

    age_s: float = 0.0  # Seconds since the last step of this node's workers; 0 if they have made none.


@dataclass(frozen=True)
class WorkersStarted(Event):
    """All workers of this node's seat run."""

    generation: int  # Theirs.
    ranks: tuple[int, ...]  # Their global ranks.
    pids: tuple[int, ...]  # Their process ids, in the same order.


@dataclass(frozen=True)
class Restarted(Event):
    """The workers of a later generation run, or wait for nodes in it. `recovery` follows after their first step."""

    generation: int  # Theirs.
    phases: dict[str, float]  # Milliseconds of each phase so far; see `recovery`.


@dataclass(frozen=True)
class FirstStep(Event):
    """The first step of a `Loop` in a generation is done on this node."""

    generation: int  # The generation.
    step: int  # The step, counted over the whole run.
    resumed_from: int  # The last step before the generation.
    # Seconds between the last step before it and this one; null if the node has made none before.
    pause_s: float | None
    # Steps that had been done already, and are done again; null if this node does not know the last step before the
    # generation.
    redone: int | None


@dataclass(frozen=True)
class Recovery(Event):
    """The pause between two generations is over on this node: a step of a `Loop` or of an optimizer is done."""

    generation: int  # The new one.
    pause_s: float  # Seconds between the last step before it and the first one after it.
    # Milliseconds of each phase of the pause, by its end: "detect" (the change is known), "agree" (another generation
    # is agreed; a wait for nodes is in it), "stop" (the old workers are gone), "start" (the new ones run), "script"
    # (`elasticrt.init` is called, or a living worker has its new seat), "init" (there is a process group), "loop" (the
    # script has come to its `Loop`), "restore" (the state is restored), "first_step" (a step is done). They add up to
    # the pause.
    phases: dict[str, float]
    age_s: float = 0.0  # Seconds since it was over.


@dataclass(frozen=True)
class SetUp(Event):
    """A node that has not trained before has made its first step."""

    generation: int  # The generation.
    phases: dict[str, float]  # Milliseconds of each phase since this node knew of its seat; see `recovery`.
    age_s: float = 0.0  # Seconds since that step.


@dataclass(frozen=True)
class Step(Event):
    """A step is done, by rank 0: at most four times a second, from the agent of its node."""

    generation: int  # The generation.
    step: int  # The step, counted over the whole run.
    epoch: int  # The epoch, from 0.
    # The numbers given to `loop.report`, by name, at most a second old, of the last step its own; "nan", "inf"
    # or "-inf" as a text.
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress(Event):
    """The progress of this node's workers, and the time spent besides the steps.

    It is written about every 5 s, when there has been no step for a second, when steps go on that stood still, after a
    pause before the first step, and at the end.

    The seconds count from this node's first step in this generation, before it from the start of the workers, for the
    worker that spent most.
    """

    generation: int  # The generation.
    step: int  # The last step that all of them have finished, counted over the whole run; 0 without a `Loop`.
    data_s: float  # Seconds of waiting for the loader.
    save_s: float  # Seconds in which the training stood still for a checkpoint or a copy of the state.
    pause_s: float  # Seconds in `loop.pause`.
    samples: int = 0  # Trained on by the run so far, over all epochs; 0 without a sampler.
    # Seconds of each worker's own work in a step, without its wait for the others' gradients, lately, in the order of
    # the ranks in `workers_started`; 0 if DDP has measured nothing.
    own_s: tuple[float, ...] = ()
    beats: int = 0  # Without a `Loop`, the steps of optimizers of the worker that has made fewest; else 0.
    age_s: float = 0.0  # Seconds since `step`.
    pausing: bool = False  # Whether one of them is in `loop.pause` now.


@dataclass(frozen=True)
class Committed(Event):
    """A checkpoint is committed. A run without living workers resumes from the newest one."""

    step: int  # The step it holds, counted over the whole run.
    generation: int  # The generation that saved it.
    bytes: int = 0  # Its size.
    took_s: float = 0.0  # Seconds since it was begun: copying the state, writing, committing.


@dataclass(frozen=True)
class Unsaved(Event):
    """A checkpoint could not be saved: the disk is full, or etcd does not take it. Training goes on."""

    step: int  # The step that it would hold, counted over the whole run.
    generation: int  # The generation.
    reason: str  # What was found.


@dataclass(frozen=True)
class Copied(Event):
    """The agent keeps a copy of the state in memory."""

    generation: int  # The generation.
    step: int  # The step it holds, counted over the whole run.
    bytes: int  # Its size.


@dataclass(frozen=True)
class Ready(Event):
    """A worker has set up beside the training, and waits to be let in."""

    local_rank: int  # Its number on this node.


@dataclass(frozen=True)
class WorkerEnded(Event):
    """A worker's process has ended."""

    generation: int  # The generation of its start or its last seat; 0 for one that set up beside the training.
    rank: int  # Its global rank.
    pid: int  # Its process id.
    code: int  # Exit code, or minus the signal's number.
    failure: str = ""  # How it failed, in a line; "" if it has not, or was ended by its agent.
    collateral: bool = False  # Whether it failed only because another one had.
    step: int = 0  # The last step that it finished in its generation, counted over the whole run; 0: none.


@dataclass(frozen=True)
class MemberLost(Event):
    """The leader has taken out a lost node."""

    lost: str  # The node.
    how: str  # The evidence.


@dataclass(frozen=True)
class Stalled(Event):
    """There is no step for too long, or a worker does not end after others have. Without `final` it is a warning."""

    generation: int  # The generation.
    step: int  # The last step, counted over the whole run.
    age_s: float  # Seconds since then.
    final: bool  # Whether it is a failure.
    stacks: dict[str, tuple[str, ...]]  # The stacks of the workers: lines by rank.


@dataclass(frozen=True)
class Culprit(Event):
    """Steps stand still, and the others wait for these ranks, or a run's only rank makes none. It ends nothing.

    The node of rank 0 finds it, or another one where that does not answer; the others hear it from there, and write it
    as well.
    """

    generation: int  # The generation.
    step: int  # The last step, counted over the whole run, as rank 0's node has it.
    age_s: float  # Seconds since then.
    ranks: tuple[int, ...]  # Global ranks; none if no rank is behind the others.
    nodes: tuple[str, ...]  # Theirs, or nodes that do not answer.
    reason: str  # What they do, where in the script, and where the others wait.
    # How many of these seconds it has been known that a rank is lost, while no other group could be agreed.
    unagreed_s: float = 0.0


@dataclass(frozen=True)
class GoesOn(Event):
    """This node's workers make steps again, after a time without one of which `culprit` or `stalled` has told."""

    generation: int  # The generation.
    step: int  # The last step before that time, as in `culprit`.


@dataclass(frozen=True)
class Straggler(Event):
    """A node is slow, and the others wait for it in every step; or none is any more. Written by the node of rank 0."""

    generation: int  # The generation.
    step: int  # The last step, counted over the whole run.
    slow: str  # The node; "" when it has caught up.
    own_s: float  # Seconds of its own work in a step.
    others_s: float  # The median of the other nodes.


@dataclass(frozen=True)
class EtcdAway(Event):
    """Etcd does not answer this agent, so nothing is committed or agreed; or it does again."""

    away_s: float  # Seconds without an answer until now.
    problem: str = ""  # What a request has got in place of one; "": etcd answers again.
    # Whether that is another one, which knows nothing: the one that the agents had started has died.
    fresh: bool = False
    etcd: str = ""  # Its address, then.


@dataclass(frozen=True)
class Unwritten(Event):
    """Events could not be written to this file: the disk is full; or they can again. Written to the file alone.

    Events from before it that were kept in memory come before the one that says that it is over.
    """

    for_s: float  # Seconds for which nothing could be written until now; 0: from now on.
    reason: str  # What was found.
    missing: int = 0  # How many events of that time are not in the file; live views have got all.
    over: bool = False  # Whether events are written again.


@dataclass(frozen=True)
class Failure(Event):
    """The report of a run that has failed."""

    text: str  # Lines for people: where each worker failed, and the end of its output.


@dataclass(frozen=True)
class Result(Event):
    """The run has ended. Every node writes the same."""

    status: str  # "succeeded" or "failed".
    code: int  # The exit code of all agents.
    reason: str  # Why.


@dataclass(frozen=True)
class Leaves(Event):
    """This node leaves the run, and ends its workers."""

    reason: str  # Why.


@dataclass(frozen=True)
class AgentStopped(Event):
    """The agent ends. The last event of its life, unless it is killed."""

    code: int  # Its exit code.


@dataclass(frozen=True)
class Record:
    """An event with its node and times."""

    event: Event  # What happened.
    node: str  # The node whose agent has written it.
    at: float  # Seconds of its machine's monotonic clock.
    time: float  # Seconds since 1970, by its machine's wall clock.


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
