"""What happened, as values: one dataclass for each kind of event, the schema of `events-NODE.jsonl`. Pure.

An event is one line: a JSON object with the schema's version ("v"), the kind ("event"), the node that writes it
("node"), two times, and the fields of the kind. "at" is CLOCK_MONOTONIC in seconds: exact, and comparable between
processes of one machine until it reboots. "time" is the wall clock in UTC: for people, and between machines. Each agent
writes the events of its own node; `elasticrt.story` folds them into the story of the run.

Readers ignore unknown kinds and fields. Any other change of the schema needs a new version. The tables of
docs/events.md are made from the docstrings and comments here: `python -m tests.events_page`.
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
"""Later times are nonsense: a line with such a time is not an event."""

KINDS: dict[str, type[Any]] = {}
"""The kinds of events by their names in a line."""

# The reverse of `KINDS`.
_NAMES: dict[type[Any], str] = {}


class Event:
    """The base of all kinds of events."""

    def __init_subclass__(cls) -> None:
        """Register the kind. Its name in a line is `first_step` for FirstStep."""
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[name], _NAMES[cls] = cls, name


@dataclass(frozen=True)
class AgentStarted(Event):
    """An agent joins the run. The first event of an agent's life."""

    pid: int  # The agent's process id.
    run_id: str  # The run's id.
    etcd: str  # The address of etcd.
    run_dir: str  # The directory of this node's logs and events.
    # Names the machine until it reboots, or the container. Times "at" and pids with the same name can be compared.
    machine: str = ""
    min_nodes: int = 1  # The run waits while it has fewer nodes.
    max_nodes: int = 1  # At most so many nodes train.
    store: str = ""  # The identity of etcd's data, as etcd tells it: the id of its cluster.


@dataclass(frozen=True)
class Health(Event):
    """The agent answers questions about its health."""

    url: str  # The address where it does.


@dataclass(frozen=True)
class ParentWarm(Event):
    """The worker parent has imported torch: workers can now be started at once."""

    method: str  # "fork" or "exec": how it starts workers.
    reason: str  # Why it is not "fork"; "" if it is.
    import_s: float  # How many seconds the imports took.


@dataclass(frozen=True)
class Generation(Event):
    """This node has a seat in a new generation, and begins it."""

    number: int  # The generation's number, from 1.
    world_size: int  # Workers of all its nodes.
    cause: str  # Why it was made, in the leader's words.
    kind: str  # "start", "failure", "lost", "join", "drain" or "resize".
    restarts: int  # Failures so far that count against --max-restarts.
    nodes: tuple[str, ...]  # Its nodes, by rank.
    resume_step: int  # The step that its workers resume after, as far as is known before the workers have agreed.
    in_place: bool = False  # Whether living workers go on in it; otherwise all workers are started anew.
    # Whether it makes no step because there are too few nodes. Its workers save the state and keep it.
    waits: bool = False


@dataclass(frozen=True)
class Resized(Event):
    """The run's limits on its number of nodes have changed."""

    min_nodes: int  # The run waits while it has fewer nodes.
    max_nodes: int  # At most so many nodes train.


@dataclass(frozen=True)
class StandsBy(Generation):
    """A generation runs without this node, which stands by. The fields of `generation` describe it."""

    age_s: float = 0.0  # Seconds since the last step of this node's workers; 0 if they have made none.


@dataclass(frozen=True)
class WorkersStarted(Event):
    """All workers of this node's seat run."""

    generation: int  # The generation that they were started for.
    ranks: tuple[int, ...]  # Their global ranks.
    pids: tuple[int, ...]  # Their process ids, in the same order.


@dataclass(frozen=True)
class Restarted(Event):
    """The workers of a later generation run, or wait for nodes in it. `recovery` follows after their first step."""

    generation: int  # The later generation.
    phases: dict[str, float]  # Milliseconds of each phase so far; see `recovery`.


@dataclass(frozen=True)
class FirstStep(Event):
    """This node has made its first step of a `Loop` in a generation."""

    generation: int  # The generation.
    step: int  # The step, counted over the whole run.
    resumed_from: int  # The step that the generation resumed after.
    # Seconds from the node's last step before the generation to this one; null if the node has made none before.
    pause_s: float | None
    # How many steps that had been done already are done again; null if this node does not know the last step before the
    # generation.
    redone: int | None


@dataclass(frozen=True)
class Recovery(Event):
    """The pause between two generations is over on this node: it has made a step of a `Loop` or of an optimizer."""

    generation: int  # The new generation.
    pause_s: float  # Seconds from the last step before it to the first one in it.
    # Milliseconds of each phase of the pause. A phase is named after what ends it: "detect" (the change is known),
    # "agree" (a new generation is agreed; a wait for nodes is part of this phase), "stop" (the old workers are gone),
    # "start" (the new ones run), "script" (`elasticrt.init` is called, or a living worker has its new seat), "init"
    # (there is a process group), "loop" (the script has come to its `Loop`), "restore" (the state is restored),
    # "first_step" (a step is done). The phases add up to the pause.
    phases: dict[str, float]
    age_s: float = 0.0  # Seconds since the pause was over.


@dataclass(frozen=True)
class SetUp(Event):
    """A node that has not trained before has made its first step."""

    generation: int  # The generation.
    phases: dict[str, float]  # Milliseconds of each phase since this node knew of its seat; see `recovery`.
    age_s: float = 0.0  # Seconds since that step.


@dataclass(frozen=True)
class Step(Event):
    """Rank 0 has made a step. Written by the agent of its node, at most four times a second."""

    generation: int  # The generation.
    step: int  # The step, counted over the whole run.
    epoch: int  # The epoch, from 0.
    # The numbers given to `loop.report`, by name. They may be of a step up to a second earlier, but the last step has
    # its own. "nan", "inf" and "-inf" are texts.
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress(Event):
    """How far this node's workers are, and the time that they spent besides their steps.

    Written about every 5 s, and when there has been no step for a second, when steps go on after a standstill, and at
    the end.

    The seconds are sums, for the worker that spent most. They count from this node's first step in the generation, and
    before it from the start of the workers.
    """

    generation: int  # The generation.
    step: int  # The last step that all of them have finished, counted over the whole run; 0 without a `Loop`.
    data_s: float  # Seconds of waiting for the loader.
    save_s: float  # Seconds in which the training stood still for a checkpoint or a copy of the state.
    pause_s: float  # Seconds in `loop.pause`.
    samples: int = 0  # Samples trained on by the run so far, over all epochs; 0 without a sampler.
    # Seconds of each worker's own recent work in a step, without its wait for the other ranks' gradients, in the order
    # of the ranks in `workers_started`; 0 if DDP has measured nothing.
    own_s: tuple[float, ...] = ()
    beats: int = 0  # Without a `Loop`, the optimizer steps of the worker that has made fewest; otherwise 0.
    age_s: float = 0.0  # Seconds since `step`.
    pausing: bool = False  # Whether one of the workers is in `loop.pause` now.
    saving: bool = False  # Whether one of the workers stands still for a checkpoint or a copy of the state now.


@dataclass(frozen=True)
class Committed(Event):
    """A checkpoint is committed. A run without living workers resumes from the newest one."""

    step: int  # The step that it holds, counted over the whole run.
    generation: int  # The generation that saved it.
    bytes: int = 0  # Its size in bytes.
    took_s: float = 0.0  # Seconds since it was begun: copying the state, writing, committing.


@dataclass(frozen=True)
class Unsaved(Event):
    """A checkpoint could not be saved: the disk is full, or etcd does not accept writes. Training goes on."""

    step: int  # The step that it would have held, counted over the whole run.
    generation: int  # The generation.
    reason: str  # Why not.


@dataclass(frozen=True)
class Copied(Event):
    """The agent keeps a copy of the training state in memory."""

    generation: int  # The generation.
    step: int  # The step that it holds, counted over the whole run.
    bytes: int  # Its size in bytes.


@dataclass(frozen=True)
class Ready(Event):
    """A worker has set up beside the training, and waits to be let in."""

    local_rank: int  # The worker's number on this node.


@dataclass(frozen=True)
class WorkerEnded(Event):
    """A worker's process has ended."""

    generation: int  # That of its start or its last seat; 0 for a worker that set up beside the training.
    rank: int  # Its global rank.
    pid: int  # Its process id.
    code: int  # Exit code, or minus the signal's number.
    failure: str = ""  # How it failed, in a line; "" if it did not, or was ended by its agent.
    collateral: bool = False  # Whether it failed only because another worker had.
    step: int = 0  # The last step that it finished in its generation, counted over the whole run; 0: none.


@dataclass(frozen=True)
class MemberLost(Event):
    """The leader has taken out a node that is lost."""

    lost: str  # The node.
    how: str  # The evidence.


@dataclass(frozen=True)
class Stalled(Event):
    """No step was made for too long, or a worker does not end after others have."""

    generation: int  # The generation.
    step: int  # The last step, counted over the whole run.
    age_s: float  # Seconds since that step.
    final: bool  # Whether it is a failure; otherwise it is a warning.
    stacks: dict[str, tuple[str, ...]]  # The stacks of the workers: their lines, by rank.


@dataclass(frozen=True)
class Culprit(Event):
    """Steps stand still, and it is known whom the others wait for. It ends nothing.

    The node of rank 0 finds it. The other nodes hear it from there, and write it as well. A run's only rank is named,
    too, when it makes no step.
    """

    generation: int  # The generation.
    step: int  # The last step, counted over the whole run, as the node of rank 0 has it.
    age_s: float  # Seconds since that step.
    ranks: tuple[int, ...]  # The global ranks that are waited for; none if no rank is behind the others.
    nodes: tuple[str, ...]  # Their nodes, or nodes that do not answer.
    reason: str  # What those ranks do, where in the script, and where the others wait.


@dataclass(frozen=True)
class GoesOn(Event):
    """This node's workers make steps again, after a standstill that `culprit` or `stalled` has reported."""

    generation: int  # The generation.
    step: int  # The last step before the standstill, as in `culprit`.


@dataclass(frozen=True)
class Straggler(Event):
    """A node is slow, so the others wait for it in every step; or none is any more. Written by the node of rank 0."""

    generation: int  # The generation.
    step: int  # The last step, counted over the whole run.
    slow: str  # The slow node; "" when it has caught up.
    own_s: float  # Seconds of its own work in a step.
    others_s: float  # The median of the same seconds over the other nodes.


@dataclass(frozen=True)
class EtcdAway(Event):
    """Etcd does not answer this agent, so nothing is committed or agreed; or etcd answers again."""

    away_s: float  # Seconds without an answer until now.
    problem: str = ""  # What a request got instead of an answer; "": etcd answers again.
    # Whether the etcd that answers is a new and empty one, because the one that the agents had started has died.
    fresh: bool = False
    etcd: str = ""  # The address of the new etcd; "" otherwise.


@dataclass(frozen=True)
class Failure(Event):
    """The report of a run that has failed."""

    text: str  # Lines for people: where each worker failed, and the end of its output.


@dataclass(frozen=True)
class Result(Event):
    """The run has ended. Every node writes the same event."""

    status: str  # "succeeded" or "failed".
    code: int  # The exit code of all agents.
    reason: str  # Why.


@dataclass(frozen=True)
class Leaves(Event):
    """This node leaves the run and ends its workers."""

    reason: str  # Why.


@dataclass(frozen=True)
class AgentStopped(Event):
    """The agent ends. The last event of an agent's life, unless it is killed."""

    code: int  # Its exit code.


@dataclass(frozen=True)
class Record:
    """An event with the node that wrote it and its times."""

    event: Event  # What happened.
    node: str  # The node whose agent has written it.
    at: float  # Seconds of the machine's monotonic clock.
    time: float  # Seconds since 1970, by the machine's wall clock.


def kind_of(event: Event) -> str:
    """The name of the event's kind in a line."""
    return _NAMES[type(event)]


def encode(event: Event, node: str, at: float, time: datetime) -> bytes:
    """The event as a line, without the line's end."""
    head = {"v": VERSION, "event": kind_of(event), "node": node, "at": round(at, 6), "time": time.isoformat()}
    return json_text({**head, **vars(event)}).encode()


def decode(line: bytes | str) -> Record | None:
    """The record in a line; None for half a line, another version, or an unknown kind."""
    try:
        found = json.loads(line)
        if found["v"] != VERSION:
            return None
        kind = KINDS[found["event"]]
        # JSON has no "nan", so such a scalar is a text.
        if kind is Step and "scalars" in found:
            found["scalars"] = {name: float(value) for name, value in found["scalars"].items()}
        event = typed(kind, {name: found[name] for name in kind.__dataclass_fields__ if name in found})
        time = datetime.fromisoformat(found["time"]).timestamp()
        record = Record(event, str(found["node"]), float(found["at"]), time)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    return record if abs(record.at) < SECONDS_MAX and 0 <= record.time < SECONDS_MAX else None
