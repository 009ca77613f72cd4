"""What the first process of a container has to do besides: reap orphans, and pass signals on.

A container's first process inherits every orphan in it and has to reap it, and signals that it does not handle do not
reach it. An agent that is started as process 1 steps aside: a fork of it becomes the agent, and the first process does
nothing but these two things. When the agent ends, it ends with the agent's code, and the kernel ends whatever is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios

PASSED_ON = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"))


def step_aside() -> None:
    """In process 1: fork, and return only in the fork. Anywhere else: nothing.

    Called before this program has started a thread or installed a handler.
    """
    if os.getpid() != 1:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    agent = os.fork()
    if agent == 0:
        _take_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    # Whatever an exit hook or a buffer holds is the agent's to run and to write.
    os._exit(_serve(agent))


def _take_terminal() -> None:
    """A group of its own, in the foreground: what is typed at a terminal reaches the agent once, not twice."""
    os.setpgid(0, 0)
    if sys.stdin is None or not sys.stdin.isatty():
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    with contextlib.suppress(OSError, termios.error):  # It is not this session's terminal: then nothing is typed at it.
        os.tcsetpgrp(sys.stdin.fileno(), os.getpid())
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(agent: int) -> int:
    """Pass signals on and reap, until the agent has ended; its exit code as a shell would give it."""
    awaited = {*PASSED_ON, signal.SIGCHLD}
    while True:
        number = signal.sigwait(awaited)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):  # It has ended: the next turn says so.
                os.kill(agent, number)
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 1  # Not even the agent is left, and its end was not seen: that cannot be a success.
            if pid == 0:
                break
            if pid == agent:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
