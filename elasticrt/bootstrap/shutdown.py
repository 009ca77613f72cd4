"""Ends a worker: shortens its error, runs exit hooks, flushes files, and keeps the host of the group's store."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

from elasticrt.distributed.agent_client import AgentClient
from elasticrt.errors import CheckpointError, ConfigError, DuplicateError, RankZeroCheckpointError
from elasticrt.ipc.error_file import described
from elasticrt.ipc.failure import is_collateral
from elasticrt.ipc.proc import ports_of, sockets_of

_OURS = f"{Path(__file__).parent.parent}{os.sep}"
_IN_FORM = re.compile(r"[^()]+ \((?:[^()]|\([^()]*\))+\)")
"""How our own messages begin: see `errors.explain`."""

FAILED_S = 3.0
"""How long a failed process may take to end. Its peers stand still meanwhile, but a thread of the script, or a process
that it has started, could run on for as long as it likes."""

CONNECTING_S = 1.0
"""How long a peer may still be connecting to a process whose script has ended."""


def in_short(error: BaseException) -> str:
    """What to print in place of the traceback of `error`; "" to print the traceback.

    The whole traceback is in the error file. One line stands for an error that only says that another worker is lost,
    and for our own errors about a wrong call or a bad checkpoint, whose traceback is mostly ours. Of a very long
    traceback an excerpt is printed. A script that has set `sys.excepthook` keeps its own way of printing.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    hook = sys.excepthook
    # torch.distributed sets a hook that puts the rank before each line. Such a hook is not the script's own.
    if hook is not sys.__excepthook__ and not (type(hook) is FunctionType and hook.__module__.startswith("torch.")):
        return ""
    found = described(error)
    excerpt = "" if found.whole else found.callstack.rstrip("\n")
    rank = os.environ.get("RANK", "?")
    # Where the run directory cannot be written there is no error file. The agent then reads these lines.
    kept = os.path.exists(path) and os.path.getsize(path) > 0  # noqa: PTH110, PTH202  One call each.
    shown = os.path.relpath(path, os.environ.get("ELASTICRT_RUN_DIR") or ".") if kept else "not kept"
    if isinstance(error, RankZeroCheckpointError) and kept:
        return f"rank {rank} ends with the CheckpointError of rank 0; traceback: {shown}"
    frames = traceback.extract_tb(error.__traceback__)
    raised_by_us = bool(frames) and frames[-1].filename.startswith(_OURS)
    if isinstance(error, (ConfigError, CheckpointError, DuplicateError)) or (
        isinstance(error, (TypeError, ValueError)) and raised_by_us and _IN_FORM.match(found.message)
    ):
        return f"rank {rank}: {type(error).__name__}: {error}\n{_called_at(frames)}  traceback: {shown}"
    if not kept or not is_collateral(found.name, found.message, found.callstack):
        return excerpt
    # Without the place in torch's C++ sources.
    said = re.sub(r"^\[[^]]*\] ", "", found.message).split(". ")[0]
    return f"rank {rank} has lost another worker ({' '.join(said.split())[:120]}); traceback: {shown}"


def _called_at(frames: traceback.StackSummary) -> str:
    """The line of the user's code that led to an error: the last one outside of this package and of libraries."""
    paths = sysconfig.get_paths()
    known = (_OURS, *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))
    theirs = [each for each in frames if not each.filename.startswith(known)]
    if not theirs:
        return ""
    line = f": {theirs[-1].line[:120]}" if theirs[-1].line else ""
    return f"  called at {theirs[-1].filename}, line {theirs[-1].lineno}{line}\n"


def _leave_groups() -> None:
    """Close the connections to peers that wait for this process in a collective, but not those to the store."""
    store = os.environ.get("MASTER_PORT", "")
    for fd in sockets_of():
        if (ports := ports_of(fd)) and store not in map(str, ports):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
                each.shutdown(socket.SHUT_RDWR)


def arrange() -> None:
    """Prepare for `leave`, in this process and its forks.

    Call it before anything registers an exit hook: Python runs hooks in reverse order, so ours is then the last.
    """
    atexit.register(lambda: [step() for step in _last_steps])


_last_steps: list[Callable[[], object]] = []
"""What the last exit hook does: nothing until `leave` has been called."""


def leave(code: int, names: Sequence[str] = (), host: AgentClient | None = None, *, limited: bool = False) -> NoReturn:
    """End this process with `code` (negative: by that signal), as an interpreter does, but leave torch as it is.

    The interpreter joins threads and runs exit hooks. The last hook (see `arrange`) destroys the objects that the
    script and the modules it imported (`names`) hold, which flushes files and calls `__del__`. Then the hook flushes
    streams and ends the process. The destructors of preloaded libraries do not run: in a fork they would copy memory
    pages only to free them, which costs 0.2 s; they complain of what a fork cannot free; and they can wait for ever for
    a thread of torch's that needs the interpreter.

    Code of the script runs here. What it raises is shown as an interpreter shows it, and the remaining work is still
    done.

    Args:
        code: the exit code.
        names: modules to destroy.
        host: after a success, the agent link of a worker that hosts its group's store. The worker waits until the group
            has ended or its agent is gone. After CONNECTING_S it leaves its collectives, so that a peer that still
            expects it there fails.
        limited: whether the process ends after FAILED_S at the latest.
    """
    _spare_torch()
    if limited:
        threading.Thread(target=_end_late, args=[code], daemon=True).start()
    _last_steps.append(partial(_end, code, names, host))
    # The last step ends the process with `code` itself; 1 is the exit code if that step fails.
    sys.exit(1)


def _end(code: int, names: Sequence[str], host: AgentClient | None) -> NoReturn:
    # Files are flushed before objects are destroyed: of a file in a reference cycle, the lower layer to which it writes
    # may be destroyed first.
    flushed = [_flushed(file) for file in _open_files()]
    try:
        _destroy(names)
    except BaseException as error:  # noqa: BLE001  Code of the script's may raise anything.
        _show(error, _destroy)
    flushed += [_flushed(stream) for stream in (sys.stdout, sys.stderr, *_open_files())]
    if not all(flushed):
        code = code or _EXIT_CANNOT_FLUSH
    # C libraries have buffers of their own, and `os._exit` does not flush them.
    ctypes.CDLL(None).fflush(None)
    if code == 0 and host is not None:
        # Other ranks may still need the store in this process.
        host.wait_for_release(0, CONNECTING_S, _leave_groups)
    _end_now(code)


def _end_now(code: int) -> NoReturn:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _end_late(code: int) -> NoReturn:
    time.sleep(FAILED_S)
    others = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    what = f"threads that run on: {', '.join(others)}" if others else "its exit handlers run on"
    with contextlib.suppress(OSError):  # The script may have closed it.
        os.write(2, f"elasticrt: this worker failed {FAILED_S:g} s ago, and is ended now ({what})\n".encode())
    _end_now(code)


def _show(error: BaseException, about: object) -> None:
    what = {"exc_type": type(error), "exc_value": error, "exc_traceback": error.__traceback__, "err_msg": None}
    with contextlib.suppress(BaseException):  # All of this may be the script's own.
        if sys.unraisablehook is not sys.__unraisablehook__:
            sys.unraisablehook(SimpleNamespace(**what, object=about))
        else:
            print(f"Exception ignored in: {about!r}", file=sys.stderr)  # noqa: T201  As Python does.
            traceback.print_exception(type(error), error, error.__traceback__)


def _destroy(names: Sequence[str]) -> None:
    """Destroy what the modules hold: first modules that nothing else holds, then the contents of the others.

    An object of the first kind still finds its module's globals when it is destroyed.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    # Daemon threads run on meanwhile, and must not print errors about destroyed modules.
    threading.excepthook = lambda _: None
    found = [sys.modules.pop(name, None) for name in names if not name.startswith("elasticrt.")]
    modules = [weakref.ref(each) for each in found if issubclass(type(each), ModuleType)]
    found.clear()
    gc.collect()
    # A module that something still holds is not freed by leaving `sys.modules`, so its namespace is emptied.
    # `__getattribute__` of `ModuleType`, because a script may put objects with a `__dict__` of their own into
    # `sys.modules`.
    for module in reversed(modules):
        if (left := module()) is not None:
            ModuleType.__getattribute__(left, "__dict__").clear()
    gc.collect()


def _flushed(stream: Any) -> bool:
    """Flush `stream`, of any type if the script replaced `sys.stdout`. Returns whether nothing is left unflushed."""
    try:
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()
    except (OSError, ValueError):
        return False
    except BaseException as error:  # noqa: BLE001  As above.
        _show(error, stream)
        return False
    return True


def _spare_torch() -> None:
    """Remove torch's exit hooks, which only free memory of a process that is ending.

    They unload each library of operators, which takes 50 ms in a fork because it copies the pages that it writes to.
    Our own hook waits for gloo's threads, which takes 20 ms; these threads do harm only while an interpreter is
    finalized.
    """
    for finalizer, about in list(weakref.finalize._registry.items()):  # type: ignore[attr-defined]  # As above.
        if type(about.func) is FunctionType and about.func.__module__ == "torch.library":
            finalizer.atexit = False
    context = sys.modules.get("elasticrt.distributed.context")
    if context is not None and hasattr(context, "leave_group"):
        atexit.unregister(context.leave_group)


_EXIT_CANNOT_FLUSH = 120
"""Python's exit code when its output could not be written, or was closed."""


def _open_files() -> list[io.IOBase]:
    # Objects from before the fork are frozen and not listed, so there are few. The type is compared by its MRO and not
    # by `isinstance`, which asks an object for its `__class__`: some objects raise then. `base` is the C class at the
    # root of all files.
    base = io.IOBase.__mro__[1]
    return [each for each in gc.get_objects() if base in type(each).__mro__ and _is_writable(each)]


def _is_writable(file: io.IOBase) -> bool:
    try:
        return not file.closed and file.writable()
    except BaseException:  # noqa: BLE001  A file of a class of the script's. Python reports nothing here, either.
        return False
