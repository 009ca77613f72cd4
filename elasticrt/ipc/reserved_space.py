"""Reserves room on a disk for the end of a file that grows."""

from __future__ import annotations

import ctypes
import errno
import os

from elasticrt.ipc.leash import LIBC

# FALLOC_FL_KEEP_SIZE: the file's size stays as it is, so readers see nothing of the reserved room.
KEEP_SIZE = 1
# The disk is full, or a quota or the largest size of a file is reached.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def reserve_space(fd: int, size: int) -> None:
    """Reserve `size` bytes beyond the end of the file. Its size does not change.

    Does nothing if the file system cannot reserve. Raises OSError if there is no such room; what was
    reserved before remains.
    """
    end = ctypes.c_int64(os.fstat(fd).st_size)
    if LIBC.fallocate(fd, KEEP_SIZE, end, ctypes.c_int64(size)) and ctypes.get_errno() in FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def release_space(fd: int) -> None:
    """Give up the room that is reserved beyond the end of the file. Raises OSError."""
    os.ftruncate(fd, os.fstat(fd).st_size)
