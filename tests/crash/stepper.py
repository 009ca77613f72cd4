"""SIGKILL at an exact system call: a process is run from one system call to the next, and killed before the one wanted.

Linux's ptrace through ctypes. The traced process is a fork, all its threads are followed, and every entry into the
kernel is counted, from the moment that the fork says it is ready. The process dies before the kernel does what it was
asked to do, as if it had been killed from outside at just that moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

_SYSCALL, _SEIZE, _INTERRUPT, _GET_SYSCALL_INFO = 24, 0x4206, 0x4207, 0x420E
_TRACE_SYSCALLS, _TRACE_CLONE, _KILL_ON_EXIT = 0x1, 0x8, 0x100000
_ENTRY, _EXIT = 1, 2
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Info(ctypes.Structure):
    """What PTRACE_GET_SYSCALL_INFO says of an entry; at an exit the result is where the number is here."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


@dataclass(frozen=True)
class Ended:
    """How a traced process has ended.

    Attributes:
        code: its exit code, negative for a signal.
        calls: system calls that it began, the one it was killed before included.
        last: the number (in the kernel's table) of the last of them.
    """

    code: int
    calls: int
    last: int


def run(act: Callable[[], object], kill_at: int = 0) -> Ended:
    """Run `act` in a fork, killed before its system call `kill_at` (from 1; 0: never). OSError without ptrace."""
    reader, writer = os.pipe()
    tracer = os.fork()
    if tracer == 0:  # A process of its own, because it waits for whichever thread stops next.
        answer: list[int | str] = ["the tracer failed"]
        try:
            ended = _trace(act, kill_at)
            answer = [ended.code, ended.calls, ended.last]
        except OSError as error:
            answer = [str(error)]
        finally:
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(tracer, 0)
    if len(answer) == 1:
        raise OSError(answer[0])
    return Ended(*answer)


def _trace(act: Callable[[], object], kill_at: int) -> Ended:
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            act()
            code = 0
        finally:
            os._exit(code)
    try:
        os.read(ready[0], 1)
        _ptrace(_SEIZE, child, 0, _TRACE_SYSCALLS | _TRACE_CLONE | _KILL_ON_EXIT)
        _ptrace(_INTERRUPT, child, 0, 0)
        os.waitpid(child, _WALL)
        _ptrace(_SYSCALL, child, 0, 0)
        os.write(go[1], b"x")
        return _follow(child, kill_at)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise


def _follow(child: int, kill_at: int) -> Ended:
    calls, last, began = 0, -1, False
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if thread == child:
                return Ended(os.waitstatus_to_exitcode(status), calls, last)
            continue
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP | 0x80:
            info = _Info()
            _ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
            if began and info.op == _ENTRY:
                calls, last = calls + 1, int(info.number)
                if calls == kill_at:
                    os.kill(child, signal.SIGKILL)
            # The word to go has been read, which may have taken several tries: counting begins behind it.
            began = began or (info.op == _EXIT and info.number == 1)
        # Only a signal for the process itself is passed on, not what ptrace reports in a signal's form.
        passed = 0 if number & 0x7F == signal.SIGTRAP or status >> 16 else number
        with contextlib.suppress(ProcessLookupError):  # Killed at this moment: the next wait says so.
            _ptrace(_SYSCALL, thread, 0, passed)


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")
