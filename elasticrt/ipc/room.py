"""Keeps room on a disk for the end of a file that grows."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@cache
def _fallocate() -> Any:
    found = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return found


def keep_room(fd: int, size: int) -> None:
    """Keep `size` bytes behind the end of the file, which stays where it is. Nothing is kept where that is unheard of.

    Raises OSError when there is no such room; what was kept before remains.
    """
    fallocate = _fallocate()
    if fallocate is not None and fallocate(fd, KEEP_SIZE, os.fstat(fd).st_size, size) and ctypes.get_errno() in FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def give_room_back(fd: int) -> None:
    """Keep nothing behind the end of the file any more. Raises OSError."""
    os.ftruncate(fd, os.fstat(fd).st_size)
