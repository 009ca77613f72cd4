"""Explains why a worker failed: makes a `Failure`, with a text for people, from what the worker has left. Pure.

When one worker dies, all others fail in their next collective. Such failures are *collateral*: they say nothing about
the cause. A report describes the first cause in full, and has one line for each other worker.
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
# A report has room for so many lines of output beside the rest. Of more lines the last ones are kept.
_LAST_LINES_MAX = 30
_LAST_LINES_MAX_BYTES = 4000

WHO_KILLED = (
    "SIGKILL comes from the kernel when memory is short (see `dmesg`), from a scheduler at one of its limits (see "
    "`sacct`, `kubectl describe pod`), or from a person"
)
# The error of a worker that ends together with rank 0, for the same reason.
_OF_RANK_0 = "RankZeroCheckpointError"
# Errors of elasticrt that no restart can cure, by name, with the exit code of the run.
_FINAL: dict[str, FinalCode] = {
    "ReadAheadError": 1,
    "CheckpointError": 5,
    _OF_RANK_0: 5,
    "PreparationError": 6,
    "DuplicateError": 7,
}
# The error of a worker whose script is not the run's. It comes again on this node, and on no other one.
_MISFIT = "MisfitError"
# Errors that no restart can cure if they come before the first step: the script or an installed package is wrong.
_CERTAIN = {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError"}
# Errors that say little even if they come twice: another machine may have been away, and come back.
_OF_OTHERS = {"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError", "BrokenPipeError"}
# Start errors of a program that is missing or cannot be executed. Other start errors may pass, such as a lack of
# processes or of open files.
_NOT_HERE = re.compile(
    rf"\[Errno ({'|'.join(str(each) for each in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR))})\]"
)

# torch's message about an error in another process or thread, such as a data loader's: the error itself comes last.
_NESTED = re.compile(r"Caught \S+ (in .+?)\.?\nOriginal Traceback")
# The last lines of output for which there is no traceback: Python's, for a script that cannot be compiled and for a
# module that is missing, and those of argparse and click for wrong arguments.
_UNCOMPILED = re.compile(r"(SyntaxError|IndentationError|TabError): (.+)")
_NO_MODULE = re.compile(r"\S+: ((?:No module named |No code object |Error while finding module specification for ).+)")
_WRONG = re.compile(r"(?:\S+: )?error: .+", re.IGNORECASE)
# What torch puts before each line of a traceback, and our own line in place of a traceback (`bootstrap.shutdown`).
_RANK = re.compile(r"^\[rank\d+\]: ?")
_IN_SHORT = re.compile(r"rank \d+: (ConfigError|CheckpointError|DuplicateError|TypeError|ValueError): (.+)")
# The exit codes of shells for a program that cannot be executed, and for a program that is missing.
EXITS_OF_SHELLS = (126, 127)
# The exit code of argparse, click and most other programs for arguments that they do not understand.
EXIT_USAGE = 2

HOW_TO_MEND = "no restart cures this: correct the script, its arguments or what is installed, then start again"
HOW_TO_MEET = (
    "another worker is out of reach at the address that it announced. Check GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
    "on all nodes, or give each node's own address with --local-addr"
)


@dataclass(frozen=True)
class Remains:
    """What is left of a worker that has ended, or that could not be started.

    Attributes:
        code: the exit code, or minus the signal number.
        error_file: the content of torchelastic's error file; "" without one.
        last_lines: the end of the worker's error output.
        log_path: the file with the whole error output; "" if it is not kept.
        step: the last global step that the worker is known to have finished.
        stepped: whether the worker has made a step; None if that is unknown.
        beats, loaded: as in `Failure`.
        start_error: why the worker could not be started; "" if it was.
        lost: why the worker parent ended, if the worker ended with it.
        oom: whether the kernel's count of processes killed for memory went up while the worker ran.
    """

    code: int
    error_file: str = ""
    last_lines: Sequence[str] = ()
    log_path: str = ""
    step: int | None = None
    stepped: bool | None = None
    beats: int = 0
    loaded: int = 0
    start_error: str = ""
    lost: str = ""
    oom: bool = False


@dataclass(frozen=True)
class Raised:
    """The exception that a worker raised, as far as its error file or its output tells; all fields empty for none.

    Attributes:
        exception: its type, possibly with a module.
        message: its text.
        callstack: its traceback.
        certain: whether a restart would certainly end in the same way.
    """

    exception: str = ""
    message: str = ""
    callstack: str = ""
    certain: bool = False

    @property
    def kind(self) -> str:
        """The exception's type without its module."""
        return self.exception.rpartition(".")[2]


def raised(left: Remains) -> Raised:
    """The exception that a worker raised, from what is `left` of it: its error file first, then its output."""
    found = _in_error_file(left.error_file)
    if found.exception or found.message or left.code <= 0:
        return found
    return _in_traceback(left.last_lines) or _without_traceback(left.code, left.last_lines)


def failure_of(worker: WorkerEnv, left: Remains) -> Failure:
    """The failure of a `worker`, from what is `left` of it. Its code is not 0."""
    found = raised(left)
    collateral = _is_collateral(found, left)
    message = left.start_error or left.lost or found.message
    how, place = _how_it_ended(left, found, message), f"rank {worker.rank} on {worker.node}"
    unmet = collateral and NEVER_MET.search(message) is not None
    advice = HOW_TO_MEET if unmet else "" if collateral else _of_gpu(found, left)
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
        early=_digest(found) if left.stepped is False and not collateral and left.code > 0 else "",
        beats=left.beats,
        loaded=left.loaded,
    )


def _report(worker: WorkerEnv, left: Remains, how: str, advice: str, final: FinalCode) -> Iterator[str]:
    """The lines of a failure's text: advice, the place, how the worker ended, and the end of its output."""
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
    """Whether a worker has failed only because another one had."""
    if left.start_error:
        return False
    if left.code > 0:
        return found.kind == _OF_RANK_0 or is_collateral(found.exception, found.message, found.callstack)
    # With NCCL the end of a peer may abort the process: NCCL's watchdog throws in a C++ thread, where no Python code
    # can catch the exception. torch's text about it is then in the output.
    text = "\n".join(left.last_lines)
    threw = "terminate called after throwing an instance of 'c10::Dist" in text
    return left.code == -signal.SIGABRT and threw and bool(PEER_IS_GONE.search(text))


def _final_code(found: Raised, left: Remains) -> FinalCode:
    """The exit code of the run if no restart can cure this failure; 0 if a restart might."""
    if left.start_error:
        return 1 if _NOT_HERE.search(left.start_error) else 0
    if left.code < 0 or found.kind == _MISFIT:
        return 0
    if not left.stepped and (found.certain or found.exception in _CERTAIN):
        return 1
    return _FINAL.get(found.kind, 0)


def _of_gpu(found: Raised, left: Remains) -> str:
    """The name and the remedy of a GPU's failure; "" if this is none."""
    # NCCL's watchdog aborts the process without an error file, so only the output names the failure. Other output is
    # not searched: see `gpu_cause`.
    aborted = left.code == -signal.SIGABRT
    cause = gpu_cause("\n".join(left.last_lines) if aborted else f"{found.exception}: {found.message}")
    return f"{cause.name}. {cause.remedy}" if cause else ""


def _digest(found: Raised) -> str:
    """A digest of an exception and its place; "" for none, and for an exception that may well not come again."""
    if not found.exception or found.kind in _OF_OTHERS:
        return ""
    places = [line.strip() for line in found.callstack.splitlines() if line.startswith('  File "')]
    text = "\n".join((found.exception, found.message, *places[-1:]))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def lost_peer(*, rank: int, node: str, message: str) -> Failure:
    """The collateral failure of a living worker, `rank` on `node`, that has lost its peers. `message` says how."""
    said = f"rank {rank} on {node}: {message}"
    return Failure(rank=rank, code=1, collateral=True, summary=said, text=said)


def stopped_failure(ranks: Sequence[int], *, node: str, where: str) -> Failure:
    """The failure of workers that a signal has stopped.

    Args:
        ranks: their global ranks; empty for a worker that sets up beside the training.
        node: their node.
        where: in which generation and after which step, in words.
    """
    who = " and ".join(f"rank {rank}" for rank in ranks) or "a newcomer"
    said = f"{who} on {node} {'are' if len(ranks) > 1 else 'is'} stopped (SIGSTOP)"
    text = f"{said} {where}, and nobody continued it within {STOPPED_S:g} s"
    return Failure(rank=min(ranks, default=0), code=-signal.SIGSTOP, collateral=False, summary=said, text=text)


def stalled_failure(*, node: str, generation: int, message: str, stacks: Mapping[int, Sequence[str]]) -> Failure:
    """The failure of workers that make no step. The agent kills them.

    Args:
        node: the node that reports the stall.
        generation: the generation of the workers.
        message: for how long there was no step, in words.
        stacks: the lines of each worker's stack, by global rank. Only a person can tell which worker is the cause.
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


def failure_of_node(failures: Sequence[Failure], ended: Sequence[str] = ()) -> Failure:
    """The failure that a node reports for all its workers: the first cause in full, and a line for each other failure.

    Args:
        failures: the failures of this node's workers, in the order of time; at least one.
        ended: descriptions of workers that have ended with code 0, as in `first_cause`.
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
        beats=max(each.beats for each in failures),
        loaded=max(each.loaded for each in failures),
    )


def _how_it_ended(left: Remains, found: Raised, message: str) -> str:
    """How a worker ended, in a few words: `exit code 1: ValueError: ...`, `killed by SIGSEGV`, ..."""
    if left.start_error:
        return f"could not be started: {cut(left.start_error, _MESSAGE_MAX_BYTES)}"
    if left.oom and left.code == -signal.SIGKILL:
        return "killed by SIGKILL: out of memory (the kernel's count of such kills went up)"
    how = f"killed by {signal_name(-left.code)}" if left.code < 0 else f"exit code {left.code}"
    # A shell around the program, or a container, ends with this code.
    if left.code == 128 + signal.SIGKILL:
        how += " (128 + SIGKILL: killed, perhaps for memory)"
    if left.code > 0 and found.kind in (*_FINAL, _MISFIT):
        # For these errors the agent ends with the error's own exit code, so the worker's would confuse.
        how = ""
    said = (cut(found.exception, _NAME_MAX_BYTES), cut(_innermost(message), _MESSAGE_MAX_BYTES))
    return ": ".join(filter(None, (how, *said)))


def _innermost(message: str) -> str:
    """The message of the error itself, if torch has put the traceback of another process before it."""
    found = _NESTED.match(message)
    inner = exceptions_in(message)[-1:] if found else []
    return f"{inner[0][1]} ({found[1]})" if found and inner else in_words(message)


def _in_error_file(content: str) -> Raised:
    """The exception in torchelastic's error file; an empty `Raised` if the content has another form."""
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
    # A message without a type.
    if not separator and " " in exception:
        exception, message = "", exception
    return Raised(exception, message, callstack)


def _in_traceback(lines: Sequence[str]) -> Raised | None:
    """The exception of the last traceback in an error output, or of our own line about one; None without one."""
    lines = [_RANK.sub("", line) for line in lines]
    starts = [index for index, line in enumerate(lines) if line.endswith(TRACEBACK)]
    newest = lines[starts[-1] :] if starts else lines
    in_short = [(found[1], found[2]) for found in map(_IN_SHORT.fullmatch, newest) if found]
    found = in_short or exceptions_in("\n".join(newest))
    return Raised(*found[-1], "\n".join(lines)) if found else None


def _without_traceback(code: int, lines: Sequence[str]) -> Raised:
    """An error that has no traceback, and that no restart can cure; an empty `Raised` for none.

    These are a script that cannot be compiled, a module or a program that is missing, and arguments that the script
    refuses.
    """
    last = next((line for line in reversed(lines) if line.strip()), "")
    if found := _UNCOMPILED.fullmatch(last):
        return Raised(found[1], found[2])
    if code == 1 and (found := _NO_MODULE.fullmatch(last)):
        return Raised("ModuleNotFoundError", found[1])
    usage = code == EXIT_USAGE and _WRONG.fullmatch(last) and any(line.lower().startswith("usage: ") for line in lines)
    return Raised(message=last, certain=True) if usage or code in EXITS_OF_SHELLS else Raised()


def _newest(lines: Sequence[str]) -> tuple[str, ...]:
    """The last lines, as many as a report has room for."""
    kept: list[str] = []
    room = _LAST_LINES_MAX_BYTES
    for line in reversed(lines[-_LAST_LINES_MAX:]):
        kept.insert(0, cut(line, _LINE_MAX_BYTES))
        room -= size(kept[0]) + 2
        if room < 0:
            return tuple(kept[1:])
    return tuple(kept)
