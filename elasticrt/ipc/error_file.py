"""The error file of a worker, in torchelastic's form: what `@record` writes, with a hint of ours."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

from elasticrt.ipc.file_modes import make_directory, write_text
from elasticrt.text import cut

MESSAGE_BYTES_MAX = 16 * 1024
CALLSTACK_BYTES_MAX = 48 * 1024
"""An agent reads a quarter of a MiB; what is cut in the middle of its JSON says nothing. The end is in the log."""


def write_error_file(error: BaseException, hint: int = 0) -> None:
    """Describe `error` in $TORCHELASTIC_ERROR_FILE, unless the script has done so itself.

    `hint` is the exit code that the run ends with, for errors that a restart cannot cure; 0 for all others.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    message = {
        "message": cut(f"{type(error).__name__}: {text_of(error)}", MESSAGE_BYTES_MAX),
        "extraInfo": {
            "py_callstack": cut("".join(traceback.format_exception(error)), CALLSTACK_BYTES_MAX),
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
