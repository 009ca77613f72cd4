"""Runs a command that gets a signal when its parent ends: `python leash.py PARENT_PID SIGNAL COMMAND [ARGS]`.

`prctl(PR_SET_PDEATHSIG)` survives exec, so this process becomes the command, with the same pid. It is a program of its
own because code between fork and exec of a process with threads may deadlock. It imports only the standard library, so
it starts in a few milliseconds (`python -I -S`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_PARENT_GONE, EXIT_CANNOT_START = 143, 2
LIBC = ctypes.CDLL(None, use_errno=True)


def command_of(command: list[str], number: signal.Signals = signal.SIGTERM) -> list[str]:
    """The argument list with which this process starts `command` on a leash.

    The command gets the signal `number` when the thread that started it ends, not only when the process does: Linux
    takes that thread for the parent.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def die_with_parent(parent_pid: int, number: int) -> None:
    """Let this process get the signal `number` when its parent ends. Raises OSError if `parent_pid` has ended."""
    if LIBC.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # If the parent ended before the call above, the signal would never come.
    if os.getppid() != parent_pid:
        raise ProcessLookupError(f"the parent process {parent_pid} is gone")


def main(parent: str, number: str, *command: str) -> int:
    """Exec `command`, with the signal `number` at the end of `parent`. Returns an exit code if that is impossible."""
    # An ignored signal stays ignored across exec, and a shell ignores these two for its background jobs.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    try:
        die_with_parent(int(parent), int(number))
    except ProcessLookupError:
        return EXIT_PARENT_GONE
    try:
        os.execvp(command[0], command)  # noqa: S606  Starting this command is the whole purpose.
    except OSError as error:
        sys.stderr.write(f"elasticrt: error: cannot start {command[0]}: {error.strerror}\n")
        return EXIT_CANNOT_START


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
