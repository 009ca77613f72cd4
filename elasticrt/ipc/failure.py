"""The failure of a worker, as agents, reports in etcd and a run's result hold it, and which errors are causes. Pure.

When one worker dies, all others fail in their next collective. These errors are *collateral*: true, but of no use. The
agent does not blame these workers, and each prints one line instead of a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from elasticrt.ipc.env import COUNT_MAX
from elasticrt.text import cut

# The exit codes of a run that a failure can make final; 0: a restart may help.
FinalCode = Literal[0, 1, 5, 6, 7]

SUMMARY_MAX_BYTES = 400
TEXT_MAX_BYTES = 6000
"""The longest texts in a report in etcd, and in the result of a run."""

ENDED_EARLY = (
    "exited with code 0 while other ranks were in a collective; "
    "make sure that all ranks take the same number of steps, and that none calls sys.exit early"
)
# The form of `Failure.early`.
_EARLY = re.compile(r"([0-9a-f]{16})?")


@dataclass(frozen=True)
class Failure:
    """The failure of one worker, or of all workers of a node.

    Texts that are too long are cut; other wrong values raise ValueError.

    Attributes:
        rank: the worker's global rank.
        code: the exit code, or minus the signal number.
        collateral: whether the worker failed only because another one had.
        summary: where and how, in one line.
        text: the same in full, with the end of the worker's output or the stacks of its threads.
        final_code: the exit code of the run if no restart can help; otherwise 0.
        misfit: whether the worker's script differs from the run's. Then its node leaves, which costs no restart.
        stalled: whether no process ended, but no step was made for too long.
        killed: whether a signal has ended the worker after a step of its own, and that is the cause.
        early: a digest of the error and its place if it came before the first step; otherwise "". An error that comes
            twice there will come again.
        beats: steps of the run that the worker had finished; in a script without a Loop, its optimizer steps.
        loaded: when the snapshot was written from which the worker made them, in microseconds since the epoch; or 0.
    """

    rank: int
    code: int
    collateral: bool
    summary: str
    text: str = ""
    final_code: FinalCode = 0
    misfit: bool = False
    stalled: bool = False
    killed: bool = False
    early: str = ""
    beats: int = 0
    loaded: int = 0

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # noqa: RUF012  How records read it; pydantic's own word.

    def __post_init__(self) -> None:
        """Cut the texts, and check the numbers and the digest."""
        object.__setattr__(self, "summary", cut(self.summary, SUMMARY_MAX_BYTES))
        object.__setattr__(self, "text", cut(self.text, TEXT_MAX_BYTES))
        if not all(0 <= number <= COUNT_MAX for number in (self.rank, self.beats, self.loaded)):
            raise ValueError("a number is negative or too large")
        if not _EARLY.fullmatch(self.early):
            raise ValueError("early is no digest")


def first_cause(failures: Sequence[Failure], ended: Sequence[str]) -> Failure | None:
    """The first cause among `failures`, which are in the order in which they came; None without failures.

    That is the first failure that is not collateral. If all are, the others waited for a worker that had ended with
    exit code 0: the failure that says so, or the first of `ended`, which describes such workers. Otherwise it is the
    first failure.
    """
    causes = [each for each in failures if not each.collateral] or [each for each in failures if each.code == 0]
    if not causes and failures and ended:
        said = f"{ended[0]}: {ENDED_EARLY}"
        text = failures[0].text.replace(" failed first, ", " failed because of it, ", 1)
        return replace(failures[0], code=0, summary=said, text=f"{said}\n{text}")
    return next(iter([*causes, *failures]), None)


# The types of exceptions that torch's communication raises. The first ones always mean the network; the others need the
# words below.
_NETWORK_TYPES = {"DistNetworkError", "DistStoreError"}
_COLLECTIVE_TYPES = {"DistBackendError", "DistError", "RuntimeError", "ConnectionError", "ConnectionResetError"}
_COLLECTIVE_TYPES |= {"BrokenPipeError", "ConnectionRefusedError", "TimeoutError"}
# The words of gloo, NCCL and torch's store for a lost peer.
PEER_IS_GONE = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection refused|"
    r"remote process (has )?exited|timed out waiting \d+ ?ms|application timeout caused pair closure|"
    r"connectfullmesh failed|connect timeout|socket timeout|socketstartconnect|ncclremoteerror|"
    r"nccl communicator was aborted|watchdog caught collective operation timeout|nccl operation timed out|"
    r"wait timeout after",
    re.IGNORECASE,
)
NEVER_MET = re.compile(
    r"connectfullmesh failed|socketstartconnect|failed to connect to any network address", re.IGNORECASE
)
"""Errors of gloo, NCCL and torch's store when workers cannot reach each other at their announced addresses."""

NOT_LET_GO = "gloo kept waiting after the connection was closed"
LET_GO_NEVER = f"{NOT_LET_GO} (connection closed by peer in the middle of a message)"
"""The error of a survivor that gloo leaves waiting for ever, so that the worker is replaced. docs/limits.md says how
often this happens."""

_OF_GLOO = re.compile(
    r"\[[^\]\s]+\.(?:cc|cpp|h|hpp):\d+\] ?|\.? This is typically caused by a remote worker .*", re.DOTALL
)
"""In a message: the place in gloo's source, and gloo's advice to read the logs of another worker."""

# Signs of torch's communication in a traceback.
_COMMUNICATION = re.compile(r"gloo|nccl|c10d|tcpstore|torch[/.]distributed|torch[/.]nn[/.]parallel", re.IGNORECASE)


def is_collateral(exception: str, message: str, callstack: str = "") -> bool:
    """Whether an exception says that a peer is gone, and nothing about this worker.

    Args:
        exception: its type, with or without its module.
        message: its text.
        callstack: its traceback. The exceptions of a chain are judged as well. A network error of the user's code has
            the same words, so torch's communication must appear in the message or in the traceback.
    """
    chain = [(exception, message), *exceptions_in(callstack)]
    return any(
        name.rpartition(".")[2] in _NETWORK_TYPES
        or (PEER_IS_GONE.search(text) is not None and is_of_a_collective(name, text, callstack))
        for name, text in chain
    )


def in_words(message: str) -> str:
    """The message of an error, without its parts that say nothing about the error."""
    return _OF_GLOO.sub("", message)


def is_of_a_collective(exception: str, message: str, callstack: str = "") -> bool:
    """Whether an exception comes from torch's communication. Its text does not matter: a cut group has many."""
    name = exception.rpartition(".")[2]
    return name in _NETWORK_TYPES | _COLLECTIVE_TYPES and bool(
        name.startswith("Dist") or _COMMUNICATION.search(message) or _COMMUNICATION.search(callstack)
    )


_EXCEPTION_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
TRACEBACK = "Traceback (most recent call last):"


def exceptions_in(callstack: str) -> list[tuple[str, str]]:
    """Type and message of the exceptions in a printed traceback: one for each block of a chain."""
    found, inside = [], False
    for line in callstack.splitlines():
        if line.endswith(TRACEBACK):
            inside = True
        # The line of the exception is the first one after a block that is not indented.
        elif inside and line and not line.startswith(" "):
            match = _EXCEPTION_LINE.match(line)
            if match:
                found.append((match[1], match[2] or ""))
            inside = False
    return found
