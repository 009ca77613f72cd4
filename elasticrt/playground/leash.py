"""Become a command that gets SIGTERM when its parent ends.

`python -m elasticrt.playground.leash PARENT_PID -- COMMAND [ARGS]`
`prctl(PR_SET_PDEATHSIG)` survives exec, so what it is set in becomes the command itself: same pid, no process between.
A program of its own, because code between fork and exec of a process with threads may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from elasticrt.errors import EXIT_TERMINATED, EXIT_USAGE

PR_SET_PDEATHSIG = 1


def command_of(parent: int, command: list[str]) -> list[str]:
    """The argument list that runs `command` on the leash of process `parent`, which must be the one that starts it."""
    return [sys.executable, "-m", "elasticrt.playground.leash", str(parent), "--", *command]


def main(argv: list[str]) -> int:
    """Exec the command; returns only when that is impossible or the parent has ended already."""
    if len(argv) < 3 or argv[1] != "--" or not argv[0].isdecimal():
        sys.stderr.write("usage: python -m elasticrt.playground.leash PARENT_PID -- COMMAND [ARGS]\n")
        return EXIT_USAGE
    # An ignored signal stays ignored across exec, and a leash that the command does not feel is none.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have ended before the call; then nobody would ever send the signal.
    if os.getppid() != int(argv[0]):
        return EXIT_TERMINATED
    try:
        os.execvp(argv[2], argv[2:])  # noqa: S606  Starting this command is the whole purpose.
    except OSError as error:
        sys.stderr.write(f"elasticrt: error: cannot start {argv[2]}: {error.strerror}\n")
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
