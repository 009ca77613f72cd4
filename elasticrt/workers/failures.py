"""Why a worker failed: makes a `Failure` of what a worker has left, with a text for people. Pure.

When one worker dies, all others fail in their next collective. Such failures are *collateral*: they say nothing about
the cause. A report names the first cause in full, and has one line for each other worker.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.failure import (
    NEVER_MET,
    NOT_LET_GO,
    PEER_IS_GONE,
    TRACEBACK,
    Failure,
    FinalCode,
    announced_address,
    exceptions_in,
    first_cause,
    in_words,
    is_collateral,
)
from elasticrt.ipc.time_bounds import STOPPED_S
from elasticrt.ipc.wording import signal_name
from elasticrt.text import cut, size
from elasticrt.workers.gpu_failures import gpu_cause

_NAME_MAX_BYTES = 200
_MESSAGE_MAX_BYTES = 600
_LINE_MAX_BYTES = 400
# The text of a report has room for these lines beside the rest. Of too many lines the last are kept.
_LAST_LINES_MAX = 30
_LAST_LINES_MAX_BYTES = 4000

WHO_KILLED = (
    "SIGKILL comes from the kernel when memory is short (see `dmesg`), from a scheduler at one of its limits (see "
    "`sacct`, `kubectl describe pod`), or from a person"
)
# Errors that no restart can cure, by name, with the exit code of the run.
_FINAL: dict[str, FinalCode] = {
    "ReadAheadError": 1,
    "CheckpointError": 5,
    "PreparationError": 6,
    "DuplicateError": 7,
}
# It ends in the same way again, but only on this node.
_MISFIT = "MisfitError"
# Before the first step these mean that the script, or what is installed, has to be changed.
_CERTAIN = {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
# Raised twice, they may still not come a third time, because another machine may have been away.
_OF_OTHERS = {"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError", "BrokenPipeError"}
# Errors of starting a program that is missing, or is none. Others may come of too few processes or files.
_NOT_HERE = re.compile(
    rf"\[Errno ({'|'.join(str(each) for each in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR))})\]"
)

# torch's message of an error that another process or thread has raised, such as a loader's: the error comes last.
_NESTED = re.compile(r"Caught \S+ (in .+?)\.?\nOriginal Traceback")
_UNCOMPILED = re.compile(r"(SyntaxError|IndentationError|TabError): (.+)")
_NO_MODULE = re.compile(r"\S+: ((?:No module named |No code object |Error while finding module specification for ).+)")
_WRONG = re.compile(r"(?:\S+: )?error: .+", re.IGNORECASE)
# A shell's exit codes for a program that cannot be executed, and for one that is missing.
EXITS_OF_SHELLS = (126, 127)
# The exit code of argparse, click and most programs for arguments that they do not understand.
EXIT_USAGE = 2

HOW_TO_MEND = "no restart cures this: correct the script, its arguments or what is installed, then start again"
# Workers that do not reach each other in so many generations in a row, while their agents do, never will.
UNMET_MAX = 2


@dataclass(frozen=True)
class Remains:
    """What a worker has left that has ended, or that could not be started."""

    code: int  # Exit code, or minus the signal number.
    error_file: str = ""  # The content of torchelastic's error file, "" without one.
    # `last_lines`: the end of its error output; `log_path`: the file with all of it, "" when it is not kept.
    last_lines: Sequence[str] = ()
    log_path: str = ""
    step: int | None = None  # The last global step that it is known to have finished.
    stepped: bool | None = None  # Whether it had made a step; None when that cannot be seen.
    # `beats`, `loaded`: as in `Failure`.
    beats: int = 0
    loaded: int = 0
    start_error: str = ""  # Why it could not be started, "" if it was.
    lost: str = ""  # Why its parent ended, if that ended the worker as well.
    oom: bool = False  # The kernel's count of processes killed for memory went up meanwhile.


@dataclass(frozen=True)
class Raised:
    """What a worker raised, as far as its error file or its output says; all empty for nothing.

    `certain`: a restart would end in the same way.
    """

    exception: str = ""
    message: str = ""
    callstack: str = ""
    certain: bool = False

    @property
    def kind(self) -> str:
        """The exception's name without its module."""
        return self.exception.rpartition(".")[2]


def raised(left: Remains) -> Raised:
    """What a worker raised, from what it has `left`."""
    found = _in_error_file(left.error_file)
    if found.exception or found.message or left.code <= 0:
        return found
    return _in_traceback(left.last_lines) or _without_traceback(left.code, left.last_lines)


def failure_of(worker: WorkerEnv, left: Remains) -> Failure:
    """The failure of a `worker` from what it has `left`; its code is not 0."""
    found = raised(left)
    collateral = _is_collateral(found, left)
    message = left.start_error or left.lost or found.message
    how, place = _how_it_ended(left, found, message), f"rank {worker.rank} on {worker.node}"
    unmet = collateral and NEVER_MET.search(message) is not None
    advice = _how_to_meet(message) if unmet else "" if collateral else _of_gpu(found, left)
    final = _final_code(found, left)
    return Failure(
        rank=worker.rank,
        code=left.code,
        collateral=collateral,
        summary=(
            f"{place} was replaced: {NOT_LET_GO}"
            if NOT_LET_GO in message
            else ": ".join(filter(None, (place, advice, how))).replace("\n", " ")
        ),
        text="\n".join(_report(worker, left, how, advice, final)),
        final_code=final,
        misfit=found.kind == _MISFIT,
        killed=left.code < 0 and bool(left.stepped) and not collateral,
        unmet=unmet,
        early=_digest(found) if left.stepped is False and not collateral and left.code > 0 else "",
        beats=left.beats,
        loaded=left.loaded,
    )


def _report(worker: WorkerEnv, left: Remains, how: str, advice: str, final: FinalCode) -> Iterator[str]:
    """The lines of a failure's text."""
    if advice:
        yield advice
    place = f"on {worker.node} (local rank {worker.local_rank}), in generation {worker.generation}"
    yield f"rank {worker.rank} failed first, {place}{f', after step {left.step}' if left.step is not None else ''}"
    yield f"  {how}"
    if left.code == -signal.SIGKILL and not left.oom and not left.lost:
        yield f"  {WHO_KILLED}"
    if left.last_lines:
        yield "  the end of its error output:"
        yield from (f"  | {line}" for line in _newest(left.last_lines))
    if left.log_path:
        yield f"  log: {left.log_path}"
    if final == 1:
        yield HOW_TO_MEND


def _is_collateral(found: Raised, left: Remains) -> bool:
    if left.start_error:
        return False
    if left.code > 0:
        return is_collateral(found.exception, found.message, found.callstack)
    # A peer's end makes a process abort: NCCL's watchdog throws in a thread of C++, where none can catch.
    text = "\n".join(left.last_lines)
    threw = "terminate called after throwing an instance of 'c10::Dist" in text
    return left.code == -signal.SIGABRT and threw and bool(PEER_IS_GONE.search(text))


def _final_code(found: Raised, left: Remains) -> FinalCode:
    """The exit code of the run if no restart can cure this; 0 if one might."""
    if left.start_error:
        return 1 if _NOT_HERE.search(left.start_error) else 0
    if left.code < 0 or found.kind == _MISFIT:
        return 0
    if not left.stepped and (found.certain or found.exception in _CERTAIN):
        return 1
    return _FINAL.get(found.kind, 0)


def _of_gpu(found: Raised, left: Remains) -> str:
    """Which failure of a GPU this is, and its remedy; "" for none."""
    # NCCL's watchdog cannot write an error file: what it says of the GPU is only in the output.
    aborted = left.code == -signal.SIGABRT
    cause = gpu_cause("\n".join(left.last_lines) if aborted else f"{found.exception}: {found.message}")
    return f"{cause.name}. {cause.remedy}" if cause else ""


def _digest(found: Raised) -> str:
    """A digest of what was raised, and where; "" for nothing, and for what may well not come again."""
    if not found.exception or found.kind in _OF_OTHERS:
        return ""
    places = [line.strip() for line in found.callstack.splitlines() if line.startswith('  File "')]
    text = "\n".join((found.exception, found.message, *places[-1:]))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def lost_peer(*, rank: int, node: str, message: str) -> Failure:
    """The collateral failure of a living worker, `rank` on `node`, that has lost its peers; `message`: how."""
    said = f"rank {rank} on {node}: {message}"
    return Failure(rank=rank, code=1, collateral=True, summary=said, text=said)


def stopped(ranks: Sequence[int], *, node: str, where: str) -> Failure:
    """The failure of workers that a signal has stopped on `node`: global `ranks`, or newcomers without one."""
    who = " and ".join(f"rank {rank}" for rank in ranks) or "a newcomer"
    said = f"{who} on {node} {'are' if len(ranks) > 1 else 'is'} stopped (SIGSTOP)"
    text = f"{said} {where}, and nobody continued it within {STOPPED_S:g} s"
    return Failure(rank=min(ranks, default=0), code=-signal.SIGSTOP, collateral=False, summary=said, text=text)


def stalled(*, node: str, generation: int, message: str, stacks: Mapping[int, Sequence[str]]) -> Failure:
    """The failure of workers that make no step, in `generation` on `node`; the agent kills them.

    `message` says for how long, `stacks` what each does, by rank. Which of them is the cause only a person can tell.
    """
    lines = [f"{message} in generation {generation}, as seen on {node}"]
    for rank, stack in sorted(stacks.items()):
        lines += [f"  rank {rank} on {node}:", *(f"  | {cut(line, _LINE_MAX_BYTES)}" for line in stack)]
    return Failure(
        rank=min(stacks),
        code=-signal.SIGKILL,
        collateral=False,
        summary=message,
        text="\n".join(lines),
        stalled=True,
    )


def of_node(failures: Sequence[Failure], ended: Sequence[str] = (), *, unmet: int = 0) -> Failure:
    """The report of a node about its failures, in the order of time: the first cause, and a line for each other.

    `ended`: see `first_cause`. `unmet`: in how many generations in a row workers here could not reach the others.
    """
    cause = first_cause(failures, ended)
    assert cause is not None, "there is a failure to report"
    lines = [cause.text]
    for each in failures:
        if each is not cause and not each.stalled:
            lines.append(f"  {'collateral' if each.collateral else 'also'}: {cut(each.summary, 200)}")
    return replace(
        cause,
        text="\n".join(lines),
        unmet=unmet >= UNMET_MAX,
        beats=max(each.beats for each in failures),
        loaded=max(each.loaded for each in failures),
    )


def _how_it_ended(left: Remains, found: Raised, message: str) -> str:
    """In a few words: `exit code 1: ValueError: ...`, `killed by SIGSEGV`, ..."""
    if left.start_error:
        return f"could not be started: {cut(left.start_error, _MESSAGE_MAX_BYTES)}"
    if left.oom and left.code == -signal.SIGKILL:
        return "killed by SIGKILL: out of memory (the kernel's count of such kills went up)"
    how = f"killed by {signal_name(-left.code)}" if left.code < 0 else f"exit code {left.code}"
    if left.code > 0 and found.kind in (*_FINAL, _MISFIT):
        how = ""  # The agent ends with the error's own exit code, and not with the worker's.
    said = (cut(found.exception, _NAME_MAX_BYTES), cut(_innermost(message), _MESSAGE_MAX_BYTES))
    return ": ".join(filter(None, (how, *said)))


def _innermost(message: str) -> str:
    """The message of the error itself, where torch puts a traceback before it; without what says nothing."""
    found = _NESTED.match(message)
    inner = exceptions_in(message)[-1:] if found else []
    return f"{inner[0][1]} ({found[1]})" if found and inner else in_words(message)


def _how_to_meet(message: str) -> str:
    """What to do when a worker could not reach another one."""
    address = announced_address(message)
    return (
        f"another worker is out of reach{f' at the address {address}, which it announced' if address else ''}. Check "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME on all nodes, or give each node's own address with --local-addr"
    )


def _in_error_file(content: str) -> Raised:
    """What was raised, by torchelastic's error file; nothing if the content has another form."""
    try:
        fields = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        return Raised()
    said = fields.get("message") if isinstance(fields, dict) else None
    if isinstance(said, str):
        said = {"message": said}
    if not isinstance(said, dict):
        return Raised()
    extra = said.get("extraInfo")
    callstack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    exception, separator, message = str(said.get("message", "")).partition(": ")
    if not separator and " " in exception:
        exception, message = "", exception  # A message without a type.
    return Raised(exception, message, callstack)


def _in_traceback(lines: Sequence[str]) -> Raised | None:
    """What was raised, by the last traceback in an error output; None without one."""
    starts = [index for index, line in enumerate(lines) if line.endswith(TRACEBACK)]
    found = exceptions_in("\n".join(lines[starts[-1] :])) if starts else []
    return Raised(*found[-1], "\n".join(lines)) if found else None


def _without_traceback(code: int, lines: Sequence[str]) -> Raised:
    """What a restart cannot cure and has no traceback: a script that cannot be compiled, a module or a program that is
    missing, arguments that the script refuses.
    """
    last = next((line for line in reversed(lines) if line.strip()), "")
    if found := _UNCOMPILED.fullmatch(last):
        return Raised(found[1], found[2])
    if code == 1 and (found := _NO_MODULE.fullmatch(last)):
        return Raised("ModuleNotFoundError", found[1])
    usage = code == EXIT_USAGE and _WRONG.fullmatch(last) and any(line.lower().startswith("usage: ") for line in lines)
    return Raised(message=last, certain=True) if usage or code in EXITS_OF_SHELLS else Raised()


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
