"""The messages between an agent, its worker parent and its workers. Pure values and their encoding.

A message is one frozen dataclass, sent as one frame of `ipc.channel`: JSON, with the class name under "kind". Unknown
kinds and missing or extra fields are refused, because both ends come from the same installation. The unions below the
kinds say which kinds go in which direction.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from elasticrt.ipc.typed import typed

HANDED_OVER_CODE = 79
"""The exit code of a forked worker that has left its loop for a handover, after its message `LeftGeneration`."""

FRAME_MAX_BYTES = 40 * 1024 * 1024
"""The largest frame. The largest message holds an environment and a command line: Linux limits both together to 6 MiB,
and JSON writes a control character as six bytes."""

ERRNO = "errno"
"""In the data of an agent's refusal of `OpenDirectory`: the errno with which the directory can't be taken."""


@dataclass(frozen=True)
class Start:
    """Start one worker. From the agent to the worker parent.

    The parent writes the numbers of the descriptors into the worker's environment (ELASTICRT_CHANNEL_FD and so on),
    which `env` otherwise holds completely. Local rank 0 keeps stdin.

    Attributes:
        generation: the generation of the start. The worker may go on in later ones.
        local_rank: the worker's number on this node.
        command: the script, module or program, with its arguments.
        command_kind: "script", "module" or "program".
        env: the whole environment.
        directory: the working directory.
        fd_names: names of the descriptors that travel with the message, in this order: "stdout", "stderr" (write ends),
            "channel", "page", "state" (global rank 0, if the generation resumes from a copy in memory), "listen"
            (global rank 0).
    """

    generation: int
    local_rank: int
    command: list[str]
    command_kind: str
    env: dict[str, str]
    directory: str
    fd_names: list[str]


@dataclass(frozen=True)
class Signal:
    """Send the signal `number` to the workers `local_ranks` that were started in `generation`.

    SIGKILL goes to all processes of the workers' sessions, any other signal only to the worker processes themselves.
    """

    generation: int
    number: int
    local_ranks: list[int]


@dataclass(frozen=True)
class Warm:
    """The worker parent is ready to start workers.

    Attributes:
        method: "fork" or "exec": how it starts workers.
        reason: why `method` is not "fork"; "" if it is.
        import_s: seconds that the imports took.
    """

    method: str
    reason: str
    import_s: float


@dataclass(frozen=True)
class Started:
    """The worker runs under `pid` since `at_ns` (CLOCK_MONOTONIC)."""

    generation: int
    local_rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True)
class Exited:
    """The worker and all processes of its session have ended.

    Attributes:
        code: the exit code, or minus the signal number.
        error: why the worker could not be started; "" if it was.
    """

    generation: int
    local_rank: int
    pid: int
    code: int
    error: str = ""


@dataclass(frozen=True)
class Step:
    """A worker with a Loop has finished a step.

    The first step of a generation is sent at once, later ones at most 4 times a second.

    Attributes:
        step: the step, counted over the whole run.
        epoch: its epoch, from 0.
        at_ns: when it ended (CLOCK_MONOTONIC).
        resumed_from: the step that the generation started from.
        first: whether it is this worker's first step of the generation.
        scalars: the user's numbers (`loop.report`) as of this step.
    """

    step: int
    epoch: int
    at_ns: int
    resumed_from: int
    first: bool
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """Rank 0 asks for a fenced commit of a file that is durable already. Answered by Reply.

    Attributes:
        request: the number of the request, which the Reply repeats.
        commit: the fields of the `Commit`.
        replaces: the nonce of the head that this worker knows; "" for none. If another head is recorded, the commit is
            refused. `commit.parent` differs from `replaces` only after the run went back to an ancestor of a damaged
            head.
        beside: whether the commit is the head of its directory only, because a Loop saves the run.
    """

    request: int
    commit: dict[str, Any]
    replaces: str
    beside: bool = False


@dataclass(frozen=True)
class OpenDirectory:
    """Ask for the newest commit of a checkpoint directory, and with `take` for the right to save there.

    Answered by Reply: `data["head"]` has the commit, if there is one. The refusal "taken" means that another live run
    saves there. After any other refusal the request may be repeated. `place` identifies the directory, as in `Commit`.
    """

    request: int
    directory: str
    place: str
    take: bool


@dataclass(frozen=True)
class ClaimBuild:
    """Ask for the right to build the data set `name` for all nodes that share the directory. Answered by Reply.

    `Reply.ok` means: build. Otherwise the refusal is "done"; "failed", with the builder's error; "wait", with the
    builder's node; or "unsure". After "wait" and "unsure" the worker sends another ClaimBuild.
    """

    request: int
    name: str
    version: str


@dataclass(frozen=True)
class BuildDone:
    """The claimed data set is in place (renamed, synced). Answered by Reply.

    With an `error`, which the user's build function raised, all workers that wait for `name` fail with this error.
    """

    request: int
    name: str
    version: str
    error: str = ""


@dataclass(frozen=True)
class ScriptDone:
    """The script has ended with `code`, and this process stays until Release because it hosts the group's store."""

    code: int


@dataclass(frozen=True)
class LeftGeneration:
    """The worker has left `generation`, and waits for another seat or leaves its loop.

    Attributes:
        generation: the generation; 0 for a worker that has set up beside the training.
        step: without an `error`, the step after which it stopped as agreed. A worker that leaves its loop then sends a
            Copied first if it is local rank 0. With an `error`, the last step that it finished.
        error: why it has lost its process group; "" if it has not.
    """

    generation: int
    step: int = 0
    error: str = ""


@dataclass(frozen=True)
class Copied:
    """A worker has copied its state as of `step` of the run. The memory file with the copy travels with this message.

    Attributes:
        step: steps of the run in the state.
        epoch: the epoch that the next step belongs to.
        size: bytes of the file.
        digest: SHA-256 of the file, 64 hex digits.
        place: the loop's checkpoint directory, as in `Commit`.
        request: not 0 if this process ends, and waits for the Reply that says that the agent has the copy.
    """

    step: int
    epoch: int
    size: int
    digest: str
    place: str = ""
    request: int = 0


@dataclass(frozen=True)
class Unsaved:
    """The checkpoint of `step` could not be saved, for this `reason`."""

    step: int
    reason: str


@dataclass(frozen=True)
class CopyDamaged:
    """The copy in this node's memory is damaged. This worker fails, and no other may use the copy."""


@dataclass(frozen=True)
class Reply:
    """The answer to the request of the same number.

    Attributes:
        request: the number of the request.
        ok: whether it was granted.
        reason: why not, for people.
        data: what was asked for.
        refusal: what follows for the worker; "" if nothing special does. "unsure": etcd did not answer, so the request
            may have taken effect, or the node's lease has ended; repeat the request. "blocked": etcd accepts no writes
            now, not even a save. "taken": another live run saves to the directory; `reason` names it. "over": the
            generation of a save is over; a rank that has this state in the next generation saves it again.
    """

    request: int
    ok: bool
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True)
class Reseat:
    """The worker goes on in another generation: it leaves its process group at once, and joins the new one.

    `env` has the variables of the new seat (`WorkerEnv.to_env`); the worker's descriptors stay. For global rank 0 the
    listening socket of the new generation's store travels with this message.
    """

    env: dict[str, str]


@dataclass(frozen=True)
class Release:
    """The worker may end: it gets no other seat, or the group whose store it hosts has ended."""


@dataclass(frozen=True)
class ShowStack:
    """Steps stand still: the worker writes its stack, `begun` and `flights` on its status page."""


# From a worker. Each of these is answered by a Reply, as is a Copied with a request number.
Request = Save | OpenDirectory | ClaimBuild | BuildDone
FromWorker = Step | Copied | Unsaved | CopyDamaged | LeftGeneration | ScriptDone | Request
FromParent = Warm | Started | Exited
# The agent sends the other kinds: Start and Signal to the worker parent (to which a closed channel means "end"), all
# others to workers.
Message = Start | Signal | FromParent | FromWorker | Reply | Reseat | Release | ShowStack

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """The message as JSON. Raises ValueError when it is larger than a frame may be."""
    fields = {"kind": type(message).__name__, **asdict(message)}
    # Paths and arguments may contain bytes that are not UTF-8. Python holds these as surrogates, which plain UTF-8
    # refuses.
    data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    if len(data) > FRAME_MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(data)} bytes; expected <= {FRAME_MAX_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """The message in `data`: the reverse of `encode`. Raises ValueError on anything else."""
    try:
        fields = json.loads(data)
        message: Message = typed(_KINDS[fields.pop("kind")], fields)
    # JSON that is nested too deeply raises RecursionError.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message of this version: {data[:80]!r} ({error})") from error
    return message
