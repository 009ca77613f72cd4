"""Tells collateral errors from causes. Pure.

When one worker dies, all others fail in their next collective. These errors are *collateral*: true, but of no use. The
agent does not blame them, and a worker prints one line for them instead of a traceback.
"""

from __future__ import annotations

import re

_NETWORK_TYPES = {"DistNetworkError", "DistStoreError"}
_COLLECTIVE_TYPES = {"DistBackendError", "DistError", "RuntimeError", "ConnectionError", "ConnectionResetError"}
_COLLECTIVE_TYPES |= {"BrokenPipeError", "ConnectionRefusedError", "TimeoutError"}
PEER_IS_GONE = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection refused|"
    r"remote process (has )?exited|timed out waiting \d+ ?ms|application timeout caused pair closure|"
    r"connectfullmesh failed|connect timeout|socket timeout|socketstartconnect|ncclremoteerror|"
    r"nccl communicator was aborted|watchdog caught collective operation timeout|nccl operation timed out|"
    r"wait timeout after",
    re.IGNORECASE,
)
NEVER_MET = re.compile(
    r"connectfullmesh failed|socketstartconnect|failed to connect to any network address", re.IGNORECASE
)
"""Errors of gloo, NCCL and torch's store when workers cannot reach each other at their announced addresses."""

NOT_LET_GO = "gloo did not let it go"
LET_GO_NEVER = f"{NOT_LET_GO} (connection closed by peer in the middle of a message)"
"""The error of a survivor that gloo leaves waiting for ever, so that it is replaced. docs/limits.md says how often."""

_OF_GLOO = re.compile(
    r"\[[^\]\s]+\.(?:cc|cpp|h|hpp):\d+\] ?|\.? This is typically caused by a remote worker .*", re.DOTALL
)
"""The place in gloo's source, and its advice to read the logs of another worker."""

_ANNOUNCED = re.compile(r"remote=\[([^\]]+)\]|connect to ([0-9a-f.:]+)<|address of \(([^,)]+),", re.IGNORECASE)
_COMMUNICATION = re.compile(r"gloo|nccl|c10d|tcpstore|torch[/.]distributed|torch[/.]nn[/.]parallel", re.IGNORECASE)


def is_collateral(exception: str, message: str, callstack: str = "") -> bool:
    """Whether an exception says that a peer is gone, and nothing about this worker.

    Args:
        exception: its type, possibly with a module.
        message: its text.
        callstack: its traceback. The exceptions of a chain are judged as well. A user's own network error has the same
            words, so torch's communication has to be in the message or the traceback.
    """
    chain = [(exception, message), *exceptions_in(callstack)]
    return any(_says_peer_is_gone(name.rpartition(".")[2], text, callstack) for name, text in chain)


def in_words(message: str) -> str:
    """The message of an error without what says nothing about it."""
    return _OF_GLOO.sub("", message)


def announced_address(message: str) -> str:
    """The address at which another worker was not reached; "" if it is not in the message."""
    found = _ANNOUNCED.search(message)
    return next(filter(None, found.groups()), "") if found else ""


def is_of_a_collective(exception: str, message: str, callstack: str = "") -> bool:
    """Whether an exception comes from torch's communication. Its text does not matter: a cut group has many."""
    name = exception.rpartition(".")[2]
    return name in _NETWORK_TYPES | _COLLECTIVE_TYPES and bool(
        name.startswith("Dist") or _COMMUNICATION.search(message) or _COMMUNICATION.search(callstack)
    )


def _says_peer_is_gone(name: str, text: str, callstack: str) -> bool:
    if name in _NETWORK_TYPES:
        return True
    if name not in _COLLECTIVE_TYPES or not PEER_IS_GONE.search(text):
        return False
    return name.startswith("Dist") or bool(_COMMUNICATION.search(text) or _COMMUNICATION.search(callstack))


_EXCEPTION_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
TRACEBACK = "Traceback (most recent call last):"


def exceptions_in(callstack: str) -> list[tuple[str, str]]:
    """Type and message of the exceptions in a printed traceback: one for each block of a chain."""
    found, inside = [], False
    for line in callstack.splitlines():
        if line.endswith(TRACEBACK):
            inside = True
        elif inside and line and not line.startswith(" "):
            match = _EXCEPTION_LINE.match(line)
            if match:
                found.append((match[1], match[2] or ""))
            inside = False
    return found
