"""Between the fork and the user's program: a worker process gets its session, signals, descriptors and directory.

An error here is the last line that the process prints, and ends it as a shell ends whose command cannot be run. None of
the user's code has run yet, so such an error is one of starting, not of the script. Standard library only.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from elasticrt.ipc.leash import die_with_parent
from elasticrt.ipc.messages import Start
from elasticrt.ipc.std_streams import point_to_null

# As a shell has them.
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127

_FD_VARIABLES = {name: f"ELASTICRT_{name.upper()}_FD" for name in ("channel", "page", "state", "listen")}
_DEFAULT_IN_PROGRAMS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores for itself. A program that is not Python expects them at their default."""


@dataclass(frozen=True)
class Job:
    """What a freshly forked worker process has to do.

    Attributes:
        start: the message that asked for the worker.
        fds: the worker's descriptors by name, as in `Start.fd_names`.
        parent_pid: the worker parent's process id.
        executes: whether to replace the process image, instead of running the script in this interpreter.
    """

    start: Start
    fds: dict[str, int]
    parent_pid: int
    executes: bool


def fail(error: OSError) -> NoReturn:
    """Print why this worker cannot run, and end. What may pass, such as a lack of memory, has another code."""
    os.write(2, f"could not be started: {error}\n".encode(errors="replace")[:2000])
    if error.errno == errno.ENOENT:
        os._exit(EXIT_NOT_FOUND)
    os._exit(EXIT_CANNOT_EXECUTE if error.errno in (errno.EACCES, errno.ENOEXEC, errno.ENOTDIR) else 1)


def settle(job: Job, signals: Mapping[int, Any]) -> dict[str, str]:
    """Make this forked process a worker in all but its program. Returns the environment that the worker is to have.

    Args:
        job: what to do.
        signals: the dispositions of signals with which the worker parent itself was started, by number.
    """
    try:
        # A session of its own, so that the processes that the worker starts are found by it (see `ipc.proc`).
        os.setsid()
        die_with_parent(job.parent_pid, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for number, handler in {signal.SIGCHLD: signal.SIG_DFL, **signals}.items():
            signal.signal(number, handler)
        # The worker parent blocked all signals for the fork. Now the handlers are the worker's own.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        _place_standard_streams(job)
        os.chdir(job.start.directory)
    except OSError as error:
        fail(error)
    env = dict(job.start.env)
    fds = dict(job.fds)
    if job.executes and "listen" in fds:
        # Only workers that run in this interpreter can host a store on a given socket. All others bind the port, so it
        # must be free by then.
        os.close(fds.pop("listen"))
    for name, variable in _FD_VARIABLES.items():
        env[variable] = str(fds.get(name, -1))
    return env


def execute(job: Job, env: dict[str, str]) -> NoReturn:
    """Replace this process by the user's command: `python -u script args`, or a program."""
    command = job.start.command
    if job.start.command_kind != "program":
        python = env.get("PYTHON_EXEC") or sys.executable
        command = [python, "-u", *(["-m"] if job.start.command_kind == "module" else []), *command]
    try:
        for name in ("channel", "page", "state"):
            if name in job.fds:
                os.set_inheritable(job.fds[name], True)
        for number in _DEFAULT_IN_PROGRAMS:
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(command[0], command, env)  # noqa: S606  Without a shell is how we want it.
    except OSError as error:
        fail(type(error)(error.errno, error.strerror, command[0]))


def _place_standard_streams(job: Job) -> None:
    if job.start.local_rank != 0:
        point_to_null(0)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if name in job.fds:
            os.dup2(job.fds[name], number)
            os.close(job.fds[name])
