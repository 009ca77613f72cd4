"""stdout and stderr, whose reader may go before we do (`elasticrt status | head -3`): also full, or closed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

_Aside = Callable[[bool], AbstractContextManager[None]]
_last_line: list[_Aside] = []
"""What makes room where this process keeps a line at the end of its terminal: at most one."""


def keep_last_line(aside: _Aside | None) -> None:
    """From now on all that is written goes above a line that `aside` takes away meanwhile; None: there is none."""
    _last_line[:] = [aside] if aside is not None else []


def aside(*, ends_line: bool) -> AbstractContextManager[None]:
    """Write to the terminal in this context. `ends_line`: whether what is written leaves no line unfinished."""
    return _last_line[0](ends_line) if _last_line else nullcontext()


class Unwritable(OSError):  # noqa: N818  What it says of a stream is the whole of it.
    """A stream does not take what is written, as on a full disk. From now on it leads nowhere."""


def write(stream: TextIO | None, text: str) -> bool:
    """Write `text` and flush; False when the stream's reader has gone, and then all that follows is dropped.

    That is no error: a command goes on, and its exit code says what it says with a reader. Raises Unwritable for
    anything else, such as a full disk.
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
    """Write to stderr `text`, which a process ends with. Where that is impossible, its exit code has to do."""
    with contextlib.suppress(Unwritable):
        write(sys.stderr, text)


def occupy() -> None:
    """Let standard descriptors that are closed lead nowhere: else the next files that are opened would be in their
    place, and get the output of workers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _drop(stream: TextIO) -> None:
    """From now on it leads nowhere, also for what is still buffered, which Python flushes at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
