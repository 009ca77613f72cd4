"""What happened, for machines: JSON lines in the run directory and, when asked, on an inherited descriptor.

One object per line with "event", "node", "at" (CLOCK_MONOTONIC seconds, comparable on one machine) and "time" (wall
clock, for people). An ended run can be read from these files without etcd.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

from elasticrt.ipc.file_modes import make_directory

log = logging.getLogger(__name__)


TAIL_BYTES = 1 << 16


def success(directory: Path) -> str:
    """How the run of this directory succeeded, if that is the last end of it that a node has noted; "" if not."""
    ends = []
    for path in directory.glob("events-*.jsonl"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            for line in file:
                with contextlib.suppress(ValueError):  # The tail may begin within a line, a full disk end within one.
                    event = json.loads(line)
                    if isinstance(event, dict) and event.get("event") == "result":
                        ends.append((str(event.get("time")), event.get("status"), str(event.get("reason"))))
    newest = max(ends, default=("", "", ""))
    return newest[2] if newest[1] == "succeeded" else ""


class EventLog:
    """Writes events; may be called from any thread. A directory that cannot be written to costs one warning."""

    def __init__(self, node: str, directory: Path | None, fd: int = -1) -> None:
        self._node = node
        self._directory = directory
        self._fd = fd
        self._lock = threading.Lock()
        self._file = -1
        self._opened = False

    def rename(self, node: str) -> None:
        """The node's name is known for good. Call it before the first event."""
        self._node = node

    def write(self, event: str, **fields: object) -> None:
        """Record one event. Fields are JSON values."""
        now = {"at": round(time.monotonic(), 6), "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds")}
        line = json.dumps({"event": event, "node": self._node, **now, **fields}, default=str).encode() + b"\n"
        with self._lock:
            self._open()
            self._file = self._put(self._file, line)
            self._fd = self._put(self._fd, line)

    def close(self) -> None:
        """Close the file. The inherited descriptor stays open until the process ends."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        if self._opened or self._directory is None:
            return
        self._opened = True
        path = self._directory / f"events-{self._node}.jsonl"
        try:
            make_directory(self._directory)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            log.warning("no events are kept: %s: %s", path, error.strerror)

    @staticmethod
    def _put(fd: int, line: bytes) -> int:
        """Write to a descriptor; the descriptor to go on with, -1 after an error (a full disk ends the log, once)."""
        if fd < 0:
            return fd
        try:
            os.write(fd, line)
        except OSError as error:
            log.warning("no further events are written: %s", error.strerror)
            return -1
        return fd
