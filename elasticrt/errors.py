"""Errors, named by who must act. The exit code of the process is part of the error.

Every message has one form: what is wrong, where, what was found, what was expected, and one remedy. An error makes its
message from its arguments; other exceptions and log lines call `explain`. A user's mistake never ends in a traceback. A
bug of elasticrt always does (exit code 70).
"""

from __future__ import annotations

import os
from pathlib import Path

from elasticrt.text import plain

# Scripts and schedulers act on these codes, so they do not change.
EXIT_OK = 0
EXIT_WORKERS = 1
EXIT_USAGE = 2
EXIT_RENDEZVOUS = 3
EXIT_STORE = 4
EXIT_CHECKPOINT = 5
EXIT_PREPARATION = 6
EXIT_DUPLICATE = 7
EXIT_BUG = 70
# As a shell has it for a process that SIGTERM has ended: 128 + 15.
EXIT_TERMINATED = 143

GOT_MAX = 240
"""How many characters `explain` shows of a value. Some values are messages themselves, whose end says what happened."""


class ElasticError(Exception):
    """Base of all errors that elasticrt raises on purpose. The arguments are those of `explain`.

    Without `where`, `what` is the whole message. Pickling relies on this: a copy is made from the message alone.
    """

    exit_code: int = EXIT_BUG

    def __init__(self, what: str, where: str = "", *, got: object = None, expected: str = "", remedy: str = "") -> None:
        super().__init__(explain(what, where, got=got, expected=expected, remedy=remedy) if where else what)


class ConfigError(ElasticError):
    """For the user, before anything starts: an option, a path or an environment variable is wrong."""

    exit_code = EXIT_USAGE


class ReadAheadError(ConfigError):
    """For the user's code: it draws batches ahead of their steps. The error travels in the error file and is final."""


class RendezvousTimeoutError(ElasticError):
    """For the scheduler: the minimum of nodes did not come together in time."""

    exit_code = EXIT_RENDEZVOUS


class StoreError(ElasticError):
    """For the operator of etcd: etcd is unreachable, refuses requests, or has lost its data."""

    exit_code = EXIT_STORE


class WorkersFailedError(ElasticError):
    """For the user's code: workers failed, and the restarts are used up."""

    exit_code = EXIT_WORKERS


class CheckpointError(ElasticError):
    """Nothing valid to resume from. The error travels in the error file and is final: no restart can help."""

    exit_code = EXIT_CHECKPOINT


class RankZeroCheckpointError(CheckpointError):
    """Other ranks raise it where rank 0 raises a CheckpointError, and tells people. They are not to blame."""


class MisfitError(CheckpointError):
    """The script of this worker differs from the one that the run trains. Only the worker's node leaves the run."""


class PreparationError(ElasticError):
    """The user's build function failed. The error travels in the error file and is final."""

    exit_code = EXIT_PREPARATION


class DuplicateError(ElasticError):
    """Another live agent or run has this name or this directory."""

    exit_code = EXIT_DUPLICATE


class Handover(BaseException):
    """This worker is asked to leave its training loop, because the membership changes.

    A `BaseException`, so that `except Exception` in a training script does not swallow it. `finally` and `with` run.
    """


def whole_number(value: object, name: str, where: str, least: int = 0) -> int:
    """`value`, if it is an int of at least `least`. Raises TypeError or ValueError with the `name` of the argument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(explain(f"{name} is not a whole number", where, got=repr(value), expected=f"an int >= {least}"))
    if value < least:
        raise ValueError(explain(f"{name} is too small", where, got=value, expected=f">= {least}"))
    return value


def path_of(value: object, where: str) -> str:
    """`value` as text, if it is the path of a directory. Raises TypeError, ValueError, and ConfigError if the absolute
    path is not UTF-8."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(explain("not a path", where, got=repr(value), expected="a directory's path"))
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(
            explain("not the path of a directory", where, got=repr(path), expected="one that is not empty")
        )
    try:
        str(Path(path).absolute()).encode()
    except UnicodeEncodeError:
        remedy = "Rename the directory, or the one that it is in"
        raise ConfigError("a path that is not UTF-8", where, got=ascii(path), remedy=remedy) from None
    return path


def flag(value: object, name: str, where: str) -> bool:
    """`value`, if it is a bool. Raises TypeError with the `name` of the argument."""
    if not isinstance(value, bool):
        raise TypeError(explain(f"{name} is neither True nor False", where, got=repr(value)))
    return value


def explain(what: str, where: str, *, got: object = None, expected: str = "", remedy: str = "") -> str:
    """The one form of every message: `what (where): got X; expected Y. Remedy`.

    `got` is cut to GOT_MAX characters, and escaped if it is empty or not printable, so no value can flood a terminal or
    begin a second line in a log. No part of the message has control characters.
    """
    message = f"{what} ({where})"
    details = []
    if got is not None:
        value = _text_of(got, where) if isinstance(got, BaseException) else got
        text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
        details.append("got " + (text if len(text) <= GOT_MAX else text[: GOT_MAX - 3] + "..."))
    if expected:
        details.append(f"expected {expected}")
    if details:
        message += ": " + "; ".join(details)
    if remedy:
        message += f". {remedy}"
    return plain(message)


def _text_of(error: BaseException, where: str) -> str:
    """The text of `error`. For an error of the system: without its number, and without a path that `where` has."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    return f"{path}: {error.strerror}" if path and path != where else error.strerror
