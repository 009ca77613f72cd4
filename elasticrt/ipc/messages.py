"""The messages between an agent, its worker parent and its workers. Pure values and their encoding.

A message is one frozen dataclass, sent as one frame (`ipc.channel`): JSON, the class name under "kind". Unknown
kinds, missing or extra fields are refused: both ends come from the same installation. The unions at the end of the
kinds say which way they go.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from elasticrt.ipc.typed import typed

HANDED_OVER_CODE = 79
"""Exit code of a forked worker that has left its loop to hand over, after its message `Left`."""

FRAME_MAX_BYTES = 40 * 1024 * 1024
"""A frame holds at most an environment and a command line. The kernel limits both together to 6 MiB, and JSON makes six
bytes of a control character."""

ERRNO = "errno"
"""The number of the error with which the directory can't be taken, in the data of an agent's refusal."""


@dataclass(frozen=True)
class Start:
    """Start one worker.

    The descriptors named in `fd_names` travel with it, in this order: "stdout", "stderr" (write ends), "channel",
    "page", "state" (global rank 0, if the generation resumes from a copy in memory), "listen" (global rank 0). The
    parent writes their numbers into the worker's environment (ELASTICRT_CHANNEL_FD and so on). `env` is otherwise
    complete. `generation` is that of the start; the worker may go on in later ones. Local rank 0 keeps stdin.
    `command_kind` is as in `Command`.
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

    SIGKILL goes to all processes of their sessions, any other signal only to the main ones.
    """

    generation: int
    number: int
    local_ranks: list[int]


@dataclass(frozen=True)
class Warm:
    """The parent is ready to start workers. `method` is "fork" or "exec"; `reason`: why it is not "fork"."""

    pid: int
    method: str
    reason: str
    import_s: float


@dataclass(frozen=True)
class Started:
    """The worker runs under `pid`; `at_ns` is CLOCK_MONOTONIC."""

    generation: int
    local_rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True)
class Exited:
    """The worker and all processes of its session have ended.

    `code` is the exit code, or minus the signal number. `error` is set if the worker could not be started.
    """

    generation: int
    local_rank: int
    pid: int
    code: int
    error: str = ""


@dataclass(frozen=True)
class Step:
    """A worker with a Loop has finished global step `step`. The first of a generation is sent at once, then <= 4/s.

    `at_ns` is CLOCK_MONOTONIC at the end of the step; `resumed_from` is the step the generation started from.
    `scalars` are the user's, as of this step.
    """

    step: int
    epoch: int
    at_ns: int
    resumed_from: int
    first: bool
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """Rank 0 asks for a fenced commit of a file that is already durable. Answered by Reply.

    `replaces` is the nonce of the head that this worker knows ("" for none). If another head is recorded, the commit is
    refused. `commit.parent` differs from it only when the run went back to an ancestor of a damaged head. `beside`: the
    head is that of the commit's directory only, because a Loop saves the run.
    """

    request: int
    commit: dict[str, Any]
    replaces: str
    beside: bool = False


@dataclass(frozen=True)
class Own:
    """Ask for the newest commit of a checkpoint directory, and with `take` for the right to save there.

    Answered by Reply: `data["head"]` has the commit, if there is one. A refusal is "taken" if a live run saves there;
    after another one the request may be repeated. `place` is the directory's, as in Commit.
    """

    request: int
    directory: str
    place: str
    take: bool


@dataclass(frozen=True)
class Claim:
    """Ask to build `name` for all nodes that share the directory. Answered by Reply.

    Reply.ok means: build. Else the refusal is "done", "failed" with the builder's error, "wait" with the builder's
    node, or "unsure". After the last two, another Claim follows.
    """

    request: int
    name: str
    version: str


@dataclass(frozen=True)
class Built:
    """The claimed preparation is in place (renamed, synced). Answered by Reply.

    With `error`, the user's build function has raised it, and all workers that wait for `name` fail with it.
    """

    request: int
    name: str
    version: str
    error: str = ""


@dataclass(frozen=True)
class Done:
    """The script has ended with `code` and this process lingers (it holds the group's store) until Release."""

    code: int


@dataclass(frozen=True)
class Left:
    """The worker has left `generation`. It waits for another seat, or leaves its loop.

    Without `error` it has stopped after `step` of the run, as agreed; if it leaves its loop, local rank 0 has sent
    Copied first. With `error` it has lost its group, in the step after `step`. `generation` 0: it has set up beside the
    training.
    """

    generation: int
    step: int = 0
    error: str = ""


@dataclass(frozen=True)
class Copied:
    """A worker has a copy of its state as of `step` of the run. The memory file that holds it travels with this.

    The file has `size` bytes with SHA-256 `digest`. `place` is the loop's directory, as in Commit. `request` is not 0
    where this process ends, which waits until the agent has the copy.
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
class Damaged:
    """The copy in this node's memory is damaged: this worker fails, and no other may use the copy."""


@dataclass(frozen=True)
class Reply:
    """The answer to the request of the same number.

    `refusal` is for the worker, `reason` for people. "unsure": etcd did not answer, so the request may have taken
    effect, or the node's lease has ended; it may be repeated. "blocked": etcd takes no writes now, a save not
    either. "taken": the `reason` is another live run, which saves to the directory. "over": the generation of a save is
    over, and whoever has that state in the next one saves it again.
    "" where nothing else follows from it.
    """

    request: int
    ok: bool
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True)
class Reseat:
    """The worker goes on in another generation: it leaves its group at once, and joins the new one.

    `env`: the variables of its new seat (`WorkerEnv.to_env`); its descriptors stay. For global rank 0, the listening
    socket of the new generation's store travels with this.
    """

    env: dict[str, str]


@dataclass(frozen=True)
class Release:
    """The worker may end: it gets no other seat, or the group whose store it holds has ended."""


@dataclass(frozen=True)
class Look:
    """Steps stand still: the worker writes its stack, `begun` and `flights` on its status page."""


# From a worker, each answered by a Reply, as a Copied with a number is.
Request = Save | Own | Claim | Built
FromWorker = Step | Copied | Unsaved | Damaged | Left | Done | Request
FromParent = Warm | Started | Exited
# The others come from the agent: to the worker parent Start and Signal (a closed channel means "end"), to a worker the
# rest.
Message = Start | Signal | FromParent | FromWorker | Reply | Reseat | Release | Look

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """The message as JSON. Raises ValueError when it is larger than a frame may be."""
    fields = {"kind": type(message).__name__, **asdict(message)}
    # Paths and arguments may have bytes that are not UTF-8, as surrogates. They arrive unchanged.
    data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    if len(data) > FRAME_MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(data)} bytes; expected <= {FRAME_MAX_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """The message in `data`: the reverse of `encode`. Raises ValueError on anything else."""
    try:
        fields = json.loads(data)
        message: Message = typed(_KINDS[fields.pop("kind")], fields)
    # A recursion error is how JSON that is nested too deeply ends.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message of this version: {data[:80]!r} ({error})") from error
    return message
