"""The error file of a worker, in torchelastic's form: what `@record` writes, with a hint of ours."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from elasticrt.ipc.file_modes import make_directory, write_text
from elasticrt.text import cut

MESSAGE_BYTES_MAX = 16 * 1024
CALLSTACK_BYTES_MAX = 48 * 1024
"""An agent reads a quarter of a MiB; what is cut in the middle of its JSON says nothing. The end is in the log."""

_CUT = "\n[... a long text is cut here ...]\n"


class Described(NamedTuple):
    """An exception of the script's in words, in excerpts: peers wait while a worker looks at what it has raised.

    `message` is the beginning, `callstack` beginning and end of the whole traceback; `whole`: nothing of that is left
    out.
    """

    name: str
    message: str
    callstack: str
    whole: bool


def described(error: BaseException) -> Described:
    """What `error` says, at most some ten thousand characters, whatever its own methods do."""
    callstack, part = "".join(traceback.format_exception(error)), CALLSTACK_BYTES_MAX // 2
    whole = len(callstack) <= CALLSTACK_BYTES_MAX
    shown = callstack if whole else f"{callstack[: part - len(_CUT)]}{_CUT}{callstack[-part:]}"
    return Described(type(error).__name__, text_of(error)[:MESSAGE_BYTES_MAX], shown, whole)


def write_error_file(error: BaseException, hint: int = 0) -> None:
    """Describe `error` in $TORCHELASTIC_ERROR_FILE, unless the script has done so itself.

    `hint` is the exit code that the run ends with, for errors that a restart cannot cure; 0 for all others.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    said = described(error)
    message = {
        "message": cut(f"{said.name}: {said.message}", MESSAGE_BYTES_MAX),
        "extraInfo": {
            "py_callstack": cut(said.callstack, CALLSTACK_BYTES_MAX),
            "timestamp": str(int(time.time())),
        },
    }
    content: dict[str, object] = {"message": message}
    if hint:
        content["exit_code_hint"] = hint
    try:
        # `@record` has written it where the script uses that; only the hint is worth writing it anew.
        if hint or not os.path.exists(path) or not os.path.getsize(path):  # noqa: PTH110, PTH202  One call each.
            make_directory(Path(path).parent)
            write_text(Path(path), json.dumps(content))
    except OSError as problem:
        print(f"elasticrt: cannot write {path}: {problem}", file=sys.stderr)  # noqa: T201  There is nobody else to tell.


def text_of(value: object) -> str:
    """`str(value)`, of a value of the script's, whose own method may raise."""
    try:
        return str(value)
    except BaseException as error:  # noqa: BLE001  As an interpreter does in a traceback.
        return f"<{type(value).__name__}: its __str__ raises {type(error).__name__}>"
