"""Why a worker failed: from what is left of it to one value, one verdict (cause or collateral) and one text. Pure.

When one worker dies, all others fail in their next collective. Those errors are *collateral*: true, and of no use. A
report names the first cause, and gives every other worker one line.
"""

from __future__ import annotations

import json
import signal as signals
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from elasticrt.contract.collateral import PEER_IS_GONE, TRACEBACK, exceptions_in, is_collateral
from elasticrt.errors import EXIT_CHECKPOINT, EXIT_PREPARATION

JSON_MAX_BYTES = 4096
_MESSAGE_MAX = 600
_LAST_LINES_MAX = 30
AWAY = "CheckpointAwayError"
"""Name of the exception that says so of the checkpoint to resume from."""
_KINDS = ("exit", "signal", "start", "oom", "stalled")


@dataclass(frozen=True)
class Failure:
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
        final_code: the exit code the run ends with, because no restart can cure this (5 or 6); 0 otherwise.
        step: the last global step that it is known to have finished.
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
    final_code: Literal[0, 5, 6]
    step: int | None

    def to_json(self) -> str:
        """One line of JSON of at most JSON_MAX_BYTES: earlier lines of the output go first, then text is cut."""
        failure = replace(self, message=_cut(self.message, _MESSAGE_MAX), exception=_cut(self.exception, 200))
        failure = replace(failure, log_path=_cut(failure.log_path, 1000))
        while True:
            text = json.dumps(asdict(failure), separators=(",", ":"))
            if len(text) <= JSON_MAX_BYTES:
                return text
            if failure.last_lines:
                failure = replace(failure, last_lines=failure.last_lines[1:])
            elif len(failure.message) > 40:
                failure = replace(failure, message=_cut(failure.message, len(failure.message) // 2))
            else:
                failure = replace(failure, log_path="", node=_cut(failure.node, 255), exception="")

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        """The reverse of `to_json`. ValueError says what is wrong."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or set(fields) != set(cls.__dataclass_fields__):
            raise ValueError(f"a failure needs exactly the fields {sorted(cls.__dataclass_fields__)}")
        lines = fields["last_lines"]
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"field 'last_lines' of a failure: got {lines!r}; expected a list of str")
        for name, kinds in _FIELD_TYPES.items():
            if type(fields[name]) not in kinds:
                raise ValueError(f"field {name!r} of a failure: got {fields[name]!r}; expected {kinds[0].__name__}")
        if fields["final_code"] not in (0, EXIT_CHECKPOINT, EXIT_PREPARATION):
            raise ValueError(f"field 'final_code' of a failure: got {fields['final_code']!r}; expected 0, 5 or 6")
        if fields["kind"] not in _KINDS:
            raise ValueError(f"field 'kind' of a failure: got {fields['kind']!r}; expected one of {_KINDS}")
        return cls(**{**fields, "last_lines": tuple(lines)})


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "local_rank", "generation", "code", "final_code"), (int,)),
    **dict.fromkeys(("node", "signal", "kind", "exception", "message", "log_path"), (str,)),
    "collateral": (bool,),
    "step": (int, type(None)),
}


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
) -> Failure:
    """Put together what is known of a worker that ended with `code` (not 0), or could not be started.

    `error_file` is the content of torchelastic's error file, "" when there is none; `oom` says that the kernel's count
    of processes killed for memory went up meanwhile.
    """
    name = signal_name(-code) if code < 0 else ""
    exception, message, callstack, hint = _error_file_fields(error_file)
    if not exception and not message and code > 0:
        exception, message, callstack = _exception_in(last_lines)
    kind = "signal" if code < 0 else "exit"
    if start_error:
        kind, message = "start", start_error
    elif oom and code == -signals.SIGKILL:
        kind = "oom"
    collateral = not start_error and (
        is_collateral(exception, message, callstack) if code > 0 else _aborted_by_peer(code, last_lines)
    )
    return Failure(
        rank=rank,
        local_rank=local_rank,
        node=node,
        generation=generation,
        code=code,
        signal=name,
        kind=kind,
        exception=exception,
        message=_cut(message, _MESSAGE_MAX),
        last_lines=tuple(_cut(line, 400) for line in list(last_lines)[-_LAST_LINES_MAX:]),
        log_path=log_path,
        collateral=collateral,
        final_code=_final_code(exception, hint) if code > 0 else 0,
        step=step,
    )


def lost_peer(*, rank: int, local_rank: int, node: str, generation: int, step: int, message: str) -> Failure:
    """A worker that has lost its group and lives: a sign that another is gone, and no more."""
    return Failure(
        rank=rank,
        local_rank=local_rank,
        node=node,
        generation=generation,
        code=1,
        signal="",
        kind="exit",
        exception="",
        message=_cut(message, _MESSAGE_MAX),
        last_lines=(),
        log_path="",
        collateral=True,
        final_code=0,
        step=step,
    )


def stalled(
    *, rank: int, local_rank: int, node: str, generation: int, step: int, age_s: float, stacks: Sequence[str]
) -> Failure:
    """What is known of a worker that has made no step for `age_s`, the last one being `step`; it will be killed."""
    return Failure(
        rank=rank,
        local_rank=local_rank,
        node=node,
        generation=generation,
        code=-signals.SIGKILL,
        signal="SIGKILL",
        kind="stalled",
        exception="",
        message=f"no progress for {age_s:.0f} s after step {step:,}",
        last_lines=tuple(_cut(line, 400) for line in stacks),
        log_path="",
        collateral=False,
        final_code=0,
        step=step,
    )


def _final_code(exception: str, hint: int) -> Literal[0, 5, 6]:
    if hint == EXIT_CHECKPOINT or exception.rpartition(".")[2] in ("CheckpointError", AWAY):
        return 5
    if hint == EXIT_PREPARATION or exception.rpartition(".")[2] == "PreparationError":
        return 6
    return 0


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


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The first failure that is no collateral, in the order given (etcd's revisions); else the first; else None."""
    return next((failure for failure in failures if not failure.collateral), failures[0] if failures else None)


def describe(failure: Failure) -> str:
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


def render(failures: Sequence[Failure]) -> str:
    """The report for people: the first cause in full, every other worker in one line. "" for no failures."""
    cause = first_cause(failures)
    if cause is None:
        return ""
    if cause.kind == "stalled":
        return _render_stalled([failure for failure in failures if failure.kind == "stalled"])
    step = f", after step {cause.step}" if cause.step is not None else ""
    lines = [
        f"rank {cause.rank} failed first, on {cause.node} (local rank {cause.local_rank}), "
        f"in generation {cause.generation}{step}",
        f"  {describe(cause)}",
    ]
    if cause.last_lines:
        lines += ["  the end of its error output:", *(f"  | {line}" for line in cause.last_lines)]
    if cause.log_path:
        lines.append(f"  log: {cause.log_path}")
    for failure in failures:
        if failure is not cause:
            mark = "collateral" if failure.collateral else "also"
            words = _cut(describe(failure).replace("\n", " "), 160)
            lines.append(f"  {mark}: rank {failure.rank} on {failure.node}: {words}")
    return "\n".join(lines)


def _render_stalled(failures: Sequence[Failure]) -> str:
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
    except ValueError:
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


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(0, length - 3)] + "..."
