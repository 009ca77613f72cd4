"""Why a worker failed: from what is left of it to one value, one verdict (cause or collateral) and one text. Pure.

When one worker dies, all others fail in their next collective. Those errors are *collateral*: true, and of no use. A
report names the first cause, and gives every other worker one line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import signal as signals
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from elasticrt.ipc.collateral_errors import (
    NEVER_MET,
    PEER_IS_GONE,
    TRACEBACK,
    announced_address,
    exceptions_in,
    is_collateral,
)
from elasticrt.text import cut, size

_NAME_MAX_BYTES = 200
_MESSAGE_MAX_BYTES = 600
_LINE_MAX_BYTES = 400
_LAST_LINES_MAX = 30
_LAST_LINES_MAX_BYTES = 4000
"""The text of a report holds all of them, with what else it says: of too many lines the last are what matters."""
WHO_KILLED = (
    "SIGKILL comes from the kernel when memory is short (see `dmesg`), from a scheduler at one of its limits (see "
    "`sacct`, `kubectl describe pod`), or from a person"
)
_FINAL: dict[str, Literal[5, 6, 7]] = {
    "CheckpointError": 5,
    "PreparationError": 6,
    "DuplicateError": 7,
}
"""Errors that no restart can cure, by name, with the exit code of the run."""


@dataclass(frozen=True)
class WorkerFailure:
    """How one worker failed.

    Attributes:
        rank: global rank; `local_rank` and `node` say where.
        generation: the generation it belonged to.
        code: exit code, or minus the signal number.
        signal: name of the signal that ended it, "" for an exit.
        kind: "exit", "signal", "start" (it could not be started), "oom" (the kernel killed it for its memory) or
            "stalled" (it runs, but has made no step for too long).
        exception: type of the exception, "" when there was none or it is unknown.
        message: what the exception or the system said.
        last_lines: the end of its error output; of one that stalled, what its threads were doing.
        log_path: where the whole of it is, "" when it is not kept.
        collateral: it failed only because another worker had.
        final_code: the exit code the run ends with, because no restart can cure this (1, 5, 6 or 7); 0 otherwise.
        step: the last global step that it is known to have finished.
        beats: optimizer steps that it made, in a script without a Loop.
        loaded: when the newest snapshot was written from which its node's workers have made such steps, see `Page`.
        early: what it raised before its first step, and where, as a digest: the same twice is certain to come again.
    """

    rank: int
    local_rank: int
    node: str
    generation: int
    code: int
    signal: str
    kind: str
    exception: str
    message: str
    last_lines: tuple[str, ...]
    log_path: str
    collateral: bool
    final_code: Literal[0, 1, 5, 6, 7]
    step: int | None
    beats: int = 0
    loaded: int = 0
    early: str = ""


def failure_of(
    *,
    rank: int,
    local_rank: int,
    node: str,
    generation: int,
    code: int,
    error_file: str = "",
    last_lines: Sequence[str] = (),
    log_path: str = "",
    step: int | None = None,
    start_error: str = "",
    oom: bool = False,
    stepped: bool | None = None,
    beats: int = 0,
    loaded: int = 0,
) -> WorkerFailure:
    """Put together what is known of a worker that ended with `code` (not 0), or could not be started.

    `error_file` is the content of torchelastic's error file, "" when there is none; `oom` says that the kernel's count
    of processes killed for memory went up meanwhile; `stepped` whether it had made a step, None where that is not seen.
    """
    name = signal_name(-code) if code < 0 else ""
    exception, message, callstack, hint = _error_file_fields(error_file)
    final: Literal[0, 1, 5, 6, 7] = 0
    if not exception and not message and code > 0:
        exception, message, callstack = _exception_in(last_lines)
        if not exception:
            exception, message = _without_traceback(code, last_lines)
            final = 1 if message and not stepped else 0
    kind = "signal" if code < 0 else "exit"
    if start_error:
        kind, message = "start", start_error
        final = 1 if _NOT_HERE.search(start_error) else 0
    elif oom and code == -signals.SIGKILL:
        kind = "oom"
    collateral = not start_error and (
        is_collateral(exception, message, callstack) if code > 0 else _aborted_by_peer(code, last_lines)
    )
    return WorkerFailure(
        rank=rank,
        local_rank=local_rank,
        node=node,
        generation=generation,
        code=code,
        signal=name,
        kind=kind,
        exception=cut(exception, _NAME_MAX_BYTES),
        message=cut(message, _MESSAGE_MAX_BYTES),
        last_lines=_newest(last_lines),
        log_path=log_path,
        collateral=collateral,
        final_code=final or (_final_code(exception, hint, stepped=stepped) if code > 0 else 0),
        step=step,
        beats=beats,
        loaded=loaded,
        early="" if stepped is not False or collateral or code <= 0 else _digest(exception, message, callstack),
    )


def lost_peer(*, rank: int, local_rank: int, node: str, generation: int, step: int, message: str) -> WorkerFailure:
    """A worker that has lost its group and lives: a sign that another is gone, and no more."""
    return WorkerFailure(
        rank=rank,
        local_rank=local_rank,
        node=node,
        generation=generation,
        code=1,
        signal="",
        kind="exit",
        exception="",
        message=cut(message, _MESSAGE_MAX_BYTES),
        last_lines=(),
        log_path="",
        collateral=True,
        final_code=0,
        step=step,
    )


def stalled(
    *, rank: int, local_rank: int, node: str, generation: int, step: int, age_s: float, stacks: Sequence[str]
) -> WorkerFailure:
    """What is known of a worker that has made no step for `age_s`, the last one being `step`; it will be killed."""
    return WorkerFailure(
        rank=rank,
        local_rank=local_rank,
        node=node,
        generation=generation,
        code=-signals.SIGKILL,
        signal="SIGKILL",
        kind="stalled",
        exception="",
        message=f"no progress for {age_s:.0f} s after step {step:,}",
        last_lines=tuple(cut(line, _LINE_MAX_BYTES) for line in stacks),
        log_path="",
        collateral=False,
        final_code=0,
        step=step,
    )


_CERTAIN = {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
"""Raised before the first step, they say that the script itself, or what is installed, has to be changed."""

_NOT_HERE = re.compile(
    rf"\[Errno ({'|'.join(str(each) for each in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR))})\]"
)
"""What starting a program says where it is none, or not there: other errors may come of too few processes or files."""

_UNCOMPILED = re.compile(r"(SyntaxError|IndentationError|TabError): (.+)")
_NO_MODULE = re.compile(r"\S+: ((?:No module named |No code object |Error while finding module specification for ).+)")
_WRONG = re.compile(r"(?:\S+: )?error: .+", re.IGNORECASE)
EXIT_USAGE = 2
"""What argparse, click and most programs end with when they do not understand their arguments."""

HOW_TO_MEND = "no restart cures this: correct the script, its arguments or what is installed, then start again"

_OF_OTHERS = {"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError", "BrokenPipeError"}
"""Raised twice, they may still not come a third time: another machine may have been away."""


def _digest(exception: str, message: str, callstack: str) -> str:
    """What was raised, and where; "" for nothing, and for what may well not come again."""
    if not exception or exception.rpartition(".")[2] in _OF_OTHERS:
        return ""
    places = [line.strip() for line in callstack.splitlines() if line.startswith('  File "')]
    return hashlib.sha256("\n".join((exception, message, *places[-1:])).encode(errors="replace")).hexdigest()[:16]


def _final_code(exception: str, hint: int, *, stepped: bool | None = None) -> Literal[0, 1, 5, 6, 7]:
    if exception in _CERTAIN and not stepped:
        return 1
    hinted: Literal[0, 5, 6, 7] = next((code for code in _FINAL.values() if code == hint), 0)
    return _FINAL.get(exception.rpartition(".")[2], hinted)


def signal_name(number: int) -> str:
    """SIGSEGV and so on; "signal 42" for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _aborted_by_peer(code: int, last_lines: Sequence[str]) -> bool:
    # NCCL's watchdog throws in a thread of C++, which nobody can catch: the process aborts because a peer is gone.
    if code != -signals.SIGABRT:
        return False
    text = "\n".join(last_lines)
    return "terminate called after throwing an instance of 'c10::Dist" in text and bool(PEER_IS_GONE.search(text))


def first_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure | None:
    """The first failure that is no collateral, in the order given (etcd's revisions); else the first; else None."""
    return next((failure for failure in failures if not failure.collateral), failures[0] if failures else None)


def never_met(failure: WorkerFailure) -> bool:
    """Whether this worker could not reach another one, and nothing else went wrong with it."""
    return failure.collateral and NEVER_MET.search(failure.message) is not None


def how_to_meet(failure: WorkerFailure) -> str:
    """What to do about a worker that has `never_met` the others."""
    address = announced_address(failure.message)
    return (
        f"another worker is out of reach{f' at the address {address}, which it announced' if address else ''}. Check "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on all nodes, or give each node's own address with --local-addr"
    )


def describe(failure: WorkerFailure) -> str:
    """How it ended, in a few words: `exit code 1: ValueError: ...`, `killed by SIGSEGV`, ..."""
    if failure.kind == "start":
        return f"could not be started: {failure.message}"
    if failure.kind == "stalled":
        return failure.message
    if failure.kind == "oom":
        return "killed by SIGKILL: out of memory (the kernel's count of such kills went up)"
    said = ": ".join(part for part in (failure.exception, failure.message) if part)
    how = f"killed by {failure.signal}" if failure.signal else f"exit code {failure.code}"
    return f"{how}: {said}" if said else how


def render(failures: Sequence[WorkerFailure], early: str = "") -> str:
    """The report for people: the first cause in full, every other worker in one line. "" for no failures.

    `early`: the cause in words, where it is a worker that has not failed.
    """
    cause = first_cause(failures)
    if cause is None:
        return ""
    if early:
        return "\n".join([early, *map(_in_a_line, failures)])
    if cause.kind == "stalled":
        return _render_stalled([failure for failure in failures if failure.kind == "stalled"])
    step = f", after step {cause.step}" if cause.step is not None else ""
    lines = [
        f"rank {cause.rank} failed first, on {cause.node} (local rank {cause.local_rank}), "
        f"in generation {cause.generation}{step}",
        f"  {describe(cause)}",
    ]
    if cause.kind == "signal" and cause.signal == "SIGKILL":
        lines.append(f"  {WHO_KILLED}")
    if cause.last_lines:
        lines += ["  the end of its error output:", *(f"  | {line}" for line in cause.last_lines)]
    if cause.log_path:
        lines.append(f"  log: {cause.log_path}")
    return "\n".join([*lines, *(_in_a_line(failure) for failure in failures if failure is not cause)])


def _in_a_line(failure: WorkerFailure) -> str:
    mark = "collateral" if failure.collateral else "also"
    words = cut(describe(failure).replace("\n", " "), 160)
    return f"  {mark}: rank {failure.rank} on {failure.node}: {words}"


def _render_stalled(failures: Sequence[WorkerFailure]) -> str:
    """What all workers of a node were doing: which of them is the cause, nobody but a person can tell."""
    first = failures[0]
    lines = [f"{describe(first)} in generation {first.generation}, as seen on {first.node}"]
    for failure in failures:
        lines += [f"  rank {failure.rank} on {failure.node}:", *(f"  | {line}" for line in failure.last_lines)]
    return "\n".join(lines)


def _error_file_fields(content: str) -> tuple[str, str, str, int]:
    """Exception, message, call stack and exit code hint; empty where the content is none of torchelastic's."""
    try:
        fields = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return "", "", "", 0
    said = fields.get("message") if isinstance(fields, dict) else None
    hint = fields.get("exit_code_hint") if isinstance(fields, dict) else 0
    if isinstance(said, str):
        said = {"message": said}
    if not isinstance(said, dict):
        return "", "", "", 0
    extra = said.get("extraInfo")
    callstack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    exception, separator, message = str(said.get("message", "")).partition(": ")
    if not separator and " " in exception:
        exception, message = "", exception  # A message without a type.
    return exception, message, callstack, hint if isinstance(hint, int) else 0


def _exception_in(lines: Sequence[str]) -> tuple[str, str, str]:
    """Type, message and text of the last traceback in an error output; empty strings when there is none."""
    starts = [index for index, line in enumerate(lines) if line.endswith(TRACEBACK)]
    if not starts:
        return "", "", ""
    block = "\n".join(lines[starts[-1] :])
    found = exceptions_in(block)
    return (*found[-1], "\n".join(lines)) if found else ("", "", "")


def _without_traceback(code: int, lines: Sequence[str]) -> tuple[str, str]:
    """Type and message of what certainly comes again and has no traceback: a script that cannot be compiled, a module
    that is not there, arguments that the script refuses. Empty strings for anything else."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    if found := _UNCOMPILED.fullmatch(last):
        return found[1], found[2]
    if code == 1 and (found := _NO_MODULE.fullmatch(last)):
        return "ModuleNotFoundError", found[1]
    usage = code == EXIT_USAGE and _WRONG.fullmatch(last) and any(line.lower().startswith("usage: ") for line in lines)
    return ("", last) if usage else ("", "")


def _newest(lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines that a report has room for."""
    kept: list[str] = []
    room = _LAST_LINES_MAX_BYTES
    for line in reversed(lines[-_LAST_LINES_MAX:]):
        kept.insert(0, cut(line, _LINE_MAX_BYTES))
        room -= size(kept[0]) + 2
        if room < 0:
            return tuple(kept[1:])
    return tuple(kept)
