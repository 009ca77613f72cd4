"""Making a program deaf to SIGTERM, although it would put a handler of its own in.

`scancel` sends SIGTERM to every process of a job at the same instant (deploy/slurm/README.md). The agents then hand
over and save, for which they need their etcd a little longer. A session of its own does not spare it: SLURM signals all
that is in the job's control group. And etcd ends on SIGTERM, and cannot be told not to. So the kernel is asked not to
let it touch (seccomp) what is done about SIGTERM, which is: nothing. SIGINT still ends it.
"""

from __future__ import annotations

import os
import signal
import struct

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2

_CALLS = {"x86_64": (0xC000003E, 13), "aarch64": (0xC00000B7, 134)}
"""By machine: the kernel's name of the architecture, and the number of rt_sigaction."""

_LOAD, _IS_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
_ALLOW, _PRETEND = 0x7FFF0000, 0x00050000
"""Let the call through; or do nothing and return 0, as if it had been done."""


def program(machine: str) -> bytes:
    """The filter, in the kernel's own code: pretend `rt_sigaction(SIGTERM, ...)`, allow all else. Pure.

    Empty for a machine that is not known here.
    """
    if machine not in _CALLS:
        return b""
    architecture, call = _CALLS[machine]
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IS_EQUAL, 0, 5, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IS_EQUAL, 0, 3, call),
        (_LOAD, 0, 0, _ARGUMENT_AT),
        (_IS_EQUAL, 0, 1, signal.SIGTERM),
        (_RETURN, 0, 0, _PRETEND),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def to_sigterm() -> None:
    """Make this process, and whatever it executes, deaf to SIGTERM. Where the kernel does not do that: nothing."""
    import ctypes  # It takes milliseconds to load, and only who starts a server needs it.

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = program(os.uname().machine)
    text = ctypes.create_string_buffer(code, len(code))
    described = ctypes.create_string_buffer(struct.pack("H6xP", len(code) // 8, ctypes.addressof(text)))
    libc = ctypes.CDLL(None)
    if code and libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0)
