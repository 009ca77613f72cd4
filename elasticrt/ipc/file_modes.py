"""The modes of new files and directories: never writable by all users, whatever the umask is.

A umask of 000 is common in containers. In a checkpoint directory with mode 0777 any user could plant files, so such a
directory is refused when it is opened. A stricter umask makes the modes stricter.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

DIRECTORY_MODE = 0o775
FILE_MODE = 0o664


def make_directory(path: Path) -> None:
    """Make the directory `path`, with missing parents. Raises OSError."""
    for each in reversed((path, *path.parents)):
        if not os.path.lexists(each):
            # Another process may be faster.
            with contextlib.suppress(FileExistsError):
                each.mkdir(DIRECTORY_MODE)
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory")


def opener(path: str, flags: int) -> int:
    """Open `path` with `flags`, for `open(..., opener=opener)`."""
    return os.open(path, flags, FILE_MODE)


def write_text(path: Path, text: str) -> None:
    """Write `text` to the file `path`, which it replaces. Raises OSError."""
    with open(path, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
