"""Modes of what we make: never writable by everybody, whatever the umask is; a stricter umask makes them stricter.

A umask of 000 is common in containers. A checkpoint directory made with it would let strangers plant files, and is
refused when it is opened.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

DIRECTORY_MODE = 0o775
FILE_MODE = 0o664


def make_directory(path: Path) -> None:
    """Make the directory `path` and those above it that are missing. Raises OSError."""
    for each in reversed((path, *path.parents)):
        if not os.path.lexists(each):
            with contextlib.suppress(FileExistsError):  # Another process was faster.
                each.mkdir(DIRECTORY_MODE)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory")


def opener(path: str, flags: int) -> int:
    """Open `path` with `flags`: for `open(..., opener=opener)`."""
    return os.open(path, flags, FILE_MODE)


def write_text(path: Path, text: str) -> None:
    """Write `text` to the file `path` anew. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
