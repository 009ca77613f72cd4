"""Writes to stdout and stderr, which may be closed, full, or without a reader (`elasticrt status | head -3`)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

_Aside = Callable[[bool], AbstractContextManager[None]]
_last_line: list[_Aside] = []
"""What takes away the line that this process keeps at the end of its terminal: one, or none."""


def keep_last_line(aside: _Aside | None) -> None:
    """From now on there is a line at the end, which `aside` takes away while something is written. None: no line."""
    _last_line[:] = [aside] if aside is not None else []


def aside(*, ends_line: bool) -> AbstractContextManager[None]:
    """A context in which the terminal may be written to. `ends_line`: the text ends with a whole line."""
    return _last_line[0](ends_line) if _last_line else nullcontext()


class Unwritable(OSError):  # noqa: N818  A stream is unwritable.
    """A stream cannot be written to, as on a full disk. All later output is dropped."""


def write(stream: TextIO | None, text: str) -> bool:
    """Write `text` and flush. False if the stream has no reader: then this and all later output is dropped.

    A missing reader is no error: the command goes on, and its exit code stays the same. Raises Unwritable after any
    other error, such as a full disk.
    """
    if stream is None:  # It was closed before this process began.
        return False
    try:
        with aside(ends_line=text.endswith("\n")):
            stream.write(text)
            stream.flush()
    except BrokenPipeError:
        _drop(stream)
        return False
    except OSError as error:
        _drop(stream)
        raise Unwritable(error.errno, error.strerror) from error
    return True


def tell(text: str) -> None:
    """Write the last `text` of a process to stderr. If that is impossible, only the exit code remains."""
    with contextlib.suppress(Unwritable):
        write(sys.stderr, text)


def occupy() -> None:
    """Open /dev/null for each closed standard descriptor. The next file would get its number, and workers' output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _drop(stream: TextIO) -> None:
    """Drop all later output, and what is still buffered, which Python flushes at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
