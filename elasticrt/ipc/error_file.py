"""The error file of a worker, in torchelastic's form, which `@record` writes as well."""

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
"""An agent reads at most 256 KiB of an error file, and cannot parse JSON that is cut in the middle. The log has the
whole."""

_CUT = "\n[... a long text is cut here ...]\n"


class Described(NamedTuple):
    """Excerpts of an exception of the script. They are short because the other ranks wait while they are made.

    Attributes:
        name: the exception's type.
        message: the beginning of its text.
        callstack: the beginning and the end of the traceback.
        whole: whether `callstack` is all of it.
    """

    name: str
    message: str
    callstack: str
    whole: bool


def described(error: BaseException) -> Described:
    """Excerpts of `error`, even if the exception's own methods raise."""
    callstack, part = "".join(traceback.format_exception(error)), CALLSTACK_BYTES_MAX // 2
    whole = len(callstack) <= CALLSTACK_BYTES_MAX
    shown = callstack if whole else f"{callstack[: part - len(_CUT)]}{_CUT}{callstack[-part:]}"
    return Described(type(error).__name__, str_of(error)[:MESSAGE_BYTES_MAX], shown, whole)


def write_error_file(error: BaseException) -> None:
    """Write `error` to $TORCHELASTIC_ERROR_FILE, unless the script has written there itself, as `@record` does."""
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
    try:
        if not os.path.exists(path) or not os.path.getsize(path):  # noqa: PTH110, PTH202  One call each.
            make_directory(Path(path).parent)
            write_text(Path(path), json.dumps({"message": message}))
    except OSError as problem:
        print(f"elasticrt: cannot write {path}: {problem}", file=sys.stderr)  # noqa: T201  There is no other way.


def str_of(value: object) -> str:
    """`str(value)` of a value of the script, whose own method may raise."""
    try:
        return str(value)
    except BaseException as error:  # noqa: BLE001  As an interpreter does in a traceback.
        return f"<{type(value).__name__}: its __str__ raises {type(error).__name__}>"
