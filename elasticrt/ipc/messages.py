"""The messages between an agent, its worker parent and its workers. Pure values and their encoding.

A message is one frozen dataclass, sent as one frame (`ipc.channel`): JSON, the class name under "kind". Unknown
kinds, missing or extra fields are refused: both ends come from the same installation.

Who says what:

* agent -> parent: Start (one per worker, with its file descriptors), Signal, and closing the channel means "end".
* parent -> agent: Warm, Started, Exited.
* worker -> agent: Step, Copied, Damaged, Left, Done; requests, each answered by Reply: Save, Own, Claim, Built.
* agent -> worker: Reply, Reseat, Release, Look.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from elasticrt.ipc.typed import typed

HANDED_OVER_CODE = 79
"""Exit code of a forked worker that has left its loop to hand over. The message says it; the code only agrees."""

FRAME_MAX_BYTES = 40 * 1024 * 1024
"""A frame holds at most an environment and a command line. The kernel limits both together to 6 MiB, and JSON makes six
bytes of a control character."""


UNSURE = "unsure: "
"""How the reason of a Reply begins when etcd did not answer: what was asked for may have been done or not. It may be
asked for again."""


@dataclass(frozen=True)
class Start:
    """Start one worker.

    With it travel, in this order, the descriptors named in `fd_names`: "stdout", "stderr" (write ends), "channel",
    "page", "state" (global rank 0: the copy to resume from, if the generation resumes from one), "listen" (only for
    global rank 0). The worker finds each under the number that its environment states (ELASTICRT_CHANNEL_FD ...), which
    the parent fills in. `env` is complete: nothing of the parent's own is added. `generation` numbers starts, larger
    each time: a worker may go on in other generations later. `keep_stdin` is true for local rank 0 only.
    """

    generation: int
    local_rank: int
    command: list[str]
    module: bool
    env: dict[str, str]
    directory: str
    fd_names: list[str]
    keep_stdin: bool = False


@dataclass(frozen=True)
class Signal:
    """Send `number` to workers that were started as `generation` (0: all): their main processes, or all of `sessions`.

    `local_ranks`: only to these of them; empty: to all.
    """

    generation: int
    number: int
    sessions: bool
    local_ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Warm:
    """The parent is ready to start workers. `method` is "fork" or "exec"; `reason` says why not "fork"."""

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
    """The worker ended and its whole session is gone.

    `code` is the exit code, or minus the signal number; `error` is set when it could not be started at all.
    """

    generation: int
    local_rank: int
    pid: int
    code: int
    error: str = ""


@dataclass(frozen=True)
class Step:
    """A worker with a Loop has finished global step `step`. The first of a generation is sent at once, then <= 10/s.

    `at_ns` is CLOCK_MONOTONIC at the end of the step; `resumed_from` is the step the generation started from.
    `scalars` are the user's, as of this step (or None values where not yet read).
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

    `replaces` is the nonce of the head that this worker knows ("" for none): the commit is refused when another head is
    recorded. `commit.parent` differs from it only when a damaged head is replaced by going back to an ancestor.
    """

    request: int
    commit: dict[str, Any]
    replaces: str


@dataclass(frozen=True)
class Own:
    """Ask for the newest commit of a checkpoint directory, and with `take` for the right to save there.

    Answered by Reply: `data["head"]` holds the commit, if there is one. A refusal says "taken: <by whom>" where a live
    run saves there; any other reason may go away. `place` is the directory's, as in Commit.
    """

    request: int
    directory: str
    place: str
    take: bool


@dataclass(frozen=True)
class Claim:
    """Ask to build `name` for all nodes that share the directory. Answered by Reply.

    Reply.ok means: build. Otherwise `reason` is "done", "failed: <the builder's error>", "wait: <who builds>" or
    "unsure: <why>", and another Claim follows later.
    """

    request: int
    name: str
    version: str


@dataclass(frozen=True)
class Built:
    """The claimed preparation is in place (renamed, synced). Answered by Reply.

    With `error`: the user's build function raised that, and all who wait for `name` fail with it.
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
    """The worker takes part in `generation` no more. It lives, and waits for another seat, or leaves its loop.

    Without `error` it has stopped after `step` of the run, as agreed. Where it leaves its loop, local rank 0 has sent
    its state as of `step` first, by Copied. With `error` it has lost its group, in the step after `step`. `generation`
    0: it has set up beside the training.
    """

    generation: int
    step: int = 0
    error: str = ""


@dataclass(frozen=True)
class Copied:
    """Local rank 0 has a copy of its state as of `step` of the run. With it travels the memory file that holds it.

    `size` bytes with SHA-256 `digest`; `place` is the loop's directory, as in Commit.
    """

    step: int
    epoch: int
    size: int
    digest: str
    place: str = ""


@dataclass(frozen=True)
class Damaged:
    """The copy of `step` in this node's memory is not what was promised: this worker fails, and no other may use it.

    `problem` says what was found instead.
    """

    step: int
    problem: str


@dataclass(frozen=True)
class Reply:
    """The answer to the request of the same number."""

    request: int
    ok: bool
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reseat:
    """The worker goes on in another generation: it leaves its group at once, wherever it is, and meets in the new one.

    `env`: the variables that say who it is there (`WorkerEnv.to_env`); its descriptors stay. With it travels, for
    global rank 0, the listening socket of the generation's store.
    """

    env: dict[str, str]


@dataclass(frozen=True)
class Release:
    """The worker may end: there is no other seat for it, or the group whose store it holds has ended."""


@dataclass(frozen=True)
class Look:
    """Steps stand still: the worker is to write on its status page how many collectives it has begun."""


Request = Save | Own | Claim | Built
FromParent = Warm | Started | Exited
FromWorker = Step | Copied | Damaged | Left | Done | Request
Message = Start | Signal | FromParent | FromWorker | Reply | Reseat | Release | Look

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """The message as JSON. Raises ValueError when it is larger than a frame may be."""
    fields = {"kind": type(message).__name__, **asdict(message)}
    # Texts of the system's may hold bytes that are not UTF-8, as surrogates; they arrive as they are.
    data = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    if len(data) > FRAME_MAX_BYTES:
        raise ValueError(f"a {type(message).__name__} message of {len(data)} bytes; expected <= {FRAME_MAX_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """The message in `data`: the reverse of `encode`. Raises ValueError on anything else."""
    try:
        fields = json.loads(data)
        message: Message = typed(_KINDS[fields.pop("kind")], fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message of this version: {data[:80]!r} ({error})") from error
    return message
