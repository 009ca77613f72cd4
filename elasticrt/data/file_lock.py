"""A lock between processes that dies with its holder. It needs no agent.

POSIX record locks: released by the kernel when the process ends in any way, and, unlike flock, not inherited by forked
children (a DataLoader worker that outlives a killed trainer would otherwise keep everybody waiting). The file stays;
removing a lock file is a race.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from elasticrt.ipc.file_modes import FILE_MODE

_threads: dict[str, threading.Lock] = {}
_HOLDER_BYTES = 200


class FileLock:
    """The lock at `path`. Between threads of one process it is an ordinary lock (record locks know only processes)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread_lock = _threads.setdefault(os.path.realpath(path), threading.Lock())
        self._fd = -1

    def acquire(self, holder: str) -> bool:
        """Take it if it is free, without waiting; `holder` is told to whoever finds it taken. Raises OSError."""
        if not self._thread_lock.acquire(blocking=False):
            return False
        held = False
        try:
            if self._fd < 0:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, FILE_MODE)
            held = self._lock()
            if held:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, holder.encode()[:_HOLDER_BYTES], 0)
        finally:
            if not held:
                self._close()
                self._thread_lock.release()
        return held

    def holder(self) -> str:
        """Who held it when last seen taken; "" when unknown. Never call it while holding: closing would release."""
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return os.pread(fd, _HOLDER_BYTES, 0).decode(errors="replace")
            finally:
                os.close(fd)
        return ""

    def release(self) -> None:
        """Let go."""
        self._close()
        self._thread_lock.release()

    def _lock(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
