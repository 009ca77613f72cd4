"""Becomes `python -u script args`, in a process that was forked from one that has imported torch already.

A script sees of its interpreter what a fresh one would show: `__main__`, argv, path, environment, multiprocessing,
random numbers, exit codes, tracebacks. At the end `shutdown.leave` joins threads, runs exit hooks and flushes streams
as Python does, but does not take torch apart.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from typing import NoReturn

from elasticrt.bootstrap import env_store, optimizer_heartbeat, shutdown
from elasticrt.distributed import agent_client, regroup
from elasticrt.errors import Handover
from elasticrt.ipc.error_file import str_of, write_error_file
from elasticrt.ipc.messages import HANDED_OVER_CODE


def become(command: Sequence[str], *, module: bool, env: Mapping[str, str], torch_threads: int) -> NoReturn:
    """Run a script, and end this process with its exit code.

    Args:
        command: the path of the script, or with `module` the name of a module, and its arguments.
        module: whether to run it as `python -m` does.
        env: the worker's whole environment.
        torch_threads: torch's number of threads, unless OMP_NUM_THREADS says another.
    """
    _take_environment(env)
    _take_identity()
    _prepare_torch(env, torch_threads)
    directory = os.getcwd() if module else os.path.dirname(os.path.realpath(command[0]))  # noqa: PTH109, PTH120  As Python does it.
    _take_path(directory)
    regroup.keep_groups()
    worker = agent_client.worker_env()
    if worker.has_agent:
        env_store.serve_env_rendezvous(worker)
        optimizer_heartbeat.begin()
    # The newest module so far: those imported later are the script's, and are destroyed at the end.
    last, me = next(reversed(sys.modules)), os.getpid()
    code = _run(list(command), module=module)
    # A process that the script has forked returns from `_run` as well, and must not act for the worker.
    is_fork = os.getpid() != me
    loaded = list(sys.modules)
    names = ["__main__", *(loaded[loaded.index(last) + 1 :] if last in loaded else ())]
    # The agent link is made here, because an interpreter that is ending starts no threads. The worker may be in a later
    # generation by now.
    worker = agent_client.worker_env()
    hosts_store = worker.rank == 0 and worker.world_size > 1
    host = agent_client.agent_link() if code == 0 and not is_fork and hosts_store else None
    failed = code not in (0, HANDED_OVER_CODE) and worker.has_agent and not is_fork
    shutdown.leave(code, names, host, limited=failed)


def _take_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    # TZ may be another one here.
    time.tzset()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  It is a descriptor, and stays open.


def _take_identity() -> None:
    """Get what every process has for itself: a secret for multiprocessing, and a temporary directory."""
    multiprocessing.current_process().authkey = os.urandom(32)
    # TMPDIR may be another one here.
    tempfile.tempdir = None


def _prepare_torch(env: Mapping[str, str], torch_threads: int) -> None:
    import torch

    # All workers are copies of one process and would draw the same numbers. Python's own `random` reseeds itself in a
    # fork.
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    # The first number of a list such as "4,2". The others are for nested parallelism.
    wanted = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) > 0 else torch_threads)


def _take_path(directory: str) -> None:
    if getattr(sys.flags, "safe_path", False):
        return
    sys.path.insert(0, directory)
    # The parent's cached listing of the directory may be older than the script's files.
    sys.path_importer_cache.pop(directory, None)


def _run(command: list[str], *, module: bool) -> int:
    """Execute the user's code. Returns its exit code, or minus the number of the signal to end by."""
    me = os.getpid()
    main = types.ModuleType("__main__")
    vars(main).update({"__builtins__": builtins, "__annotations__": {}})
    sys.modules["__main__"] = main
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if module else []), *command]
    sys.argv = ["-m" if module else command[0], *command[1:]]
    try:
        if module:
            # What `python -m` calls: it fills `__main__` and argv[0], and reports a missing module. The public
            # `runpy.run_module` would put another `__main__` in its place when the script ends.
            runpy._run_module_as_main(command[0])  # type: ignore[attr-defined]
        else:
            _execute_script(command[0], main)
    except SystemExit as request:
        return _exit_code(request.code)
    except Handover:
        # The agent knows of the handover, and has the state.
        return HANDED_OVER_CODE
    except BaseException as error:  # noqa: BLE001  This is the top of the user's program.
        failure = error
    else:
        return 0
    # Outside of the `except`, because the user's hook expects that no exception is being handled.
    return _uncaught(failure, is_fork=os.getpid() != me)


def _exit_code(code: object) -> int:
    """The exit code that Python makes of the argument of `sys.exit`. An argument that is no number is printed."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(str_of(code), file=sys.stderr)  # noqa: T201  As Python does.
    return 1


def _execute_script(path: str, main: types.ModuleType) -> None:
    full = path if path.startswith("/") else os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118  Python keeps "./" and "..".
    loader = importlib.machinery.SourceFileLoader("__main__", full)
    vars(main).update({"__file__": full, "__cached__": None, "__loader__": loader})
    with io.open_code(full) as file:
        source = file.read()
    exec(compile(source, full, "exec", dont_inherit=True), vars(main))  # noqa: S102  Running the script is the purpose.


def _uncaught(error: BaseException, *, is_fork: bool) -> int:
    """Print the traceback as Python does, keep it for the report unless it is a fork's, and return the exit code."""
    trace = error.__traceback__ = _theirs(error)
    if not is_fork:
        write_error_file(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    short = "" if is_fork else shutdown.in_short(error)
    if short:
        print(short, file=sys.stderr)  # noqa: T201  In place of the traceback.
        return 1
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException as broken:  # noqa: BLE001  The user's hook may do anything, and the error must still be seen.
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201  As Python does.
        broken.__traceback__ = _theirs(broken)
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201  As Python does.
        sys.__excepthook__(type(error), error, trace)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _theirs(error: BaseException) -> types.TracebackType | None:
    """The traceback without this file's frames, as a script in an interpreter of its own has it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
