"""stdout and stderr, whose reader may go before we do: `elasticrt status | head -3`."""

from __future__ import annotations

import os
from typing import TextIO


def write(stream: TextIO | None, text: str) -> bool:
    """Write and flush; False when nobody reads the stream any more, and then all that follows is dropped.

    That is no error: a command goes on, and its exit code says what it says with a reader. Raises OSError for anything
    else, such as a full disk.
    """
    if stream is None:  # It was closed before this process began.
        return False
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        drop(stream)
        return False
    return True


def drop(stream: TextIO) -> None:
    """From now on it leads nowhere, also for what is still buffered, which Python flushes at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
