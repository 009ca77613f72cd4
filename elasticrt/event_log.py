"""Writes and reads events: JSON lines in the run directory and, if asked for, on an inherited descriptor.

`elasticrt.events` is the schema of a line. A run can be read from these files without etcd.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import cache
from operator import itemgetter
from pathlib import Path

from elasticrt import events
from elasticrt.ipc.file_modes import make_directory

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 16
# How many bytes of a file are read at once.

OFTEN = (events.Step, events.Progress)
OFTEN_SHARE = 1000
"""The file gets an event of a frequent kind once in a thousandth of the log's age: about 10,000 lines in a week."""

KEPT = 1000
"""How many of the newest lines are kept in memory while the file takes nothing."""

LOCK_AGAIN_S = 0.01
"""How long to wait before another try to lock a file."""


def files(directory: Path) -> list[Path]:
    """The event files of a run's directory, one for each node. A warning names what cannot be read as a file, once."""
    found = sorted(directory.glob("events-*.jsonl"))
    # Opening a FIFO would wait for a writer, so only regular files are read.
    read = [path for path in found if path.is_file() and os.access(path, os.R_OK)]
    for path in set(found) - set(read):
        _leave_out(path)
    return read


@cache
def _leave_out(path: Path) -> None:
    """Warn of a file, once (`cache`): views look at the same directory again and again."""
    log.warning("left out, as it is no regular file that can be read (check its permissions): %s", path)


def writers(directory: Path) -> set[str]:
    """The event files of a run's directory that living agents write, by name, as far as locks tell."""
    found = set()
    for path in files(directory):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if not _lock(file.fileno(), fcntl.LOCK_SH):
                found.add(path.name)
    return found


def _lock(file: int, kind: int) -> bool:
    """Lock an event file. Returns whether no other process has it; True where files cannot be locked."""
    # Twice, because `writers` holds a lock for a moment.
    for pause_s in (LOCK_AGAIN_S, 0.0):
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
        except OSError as error:
            log.debug("event files cannot be locked here: %s", error)
            return True
        else:
            return True
    return False


def records(path: Path, tail_bytes: int | None = None) -> Iterator[events.Record]:
    """The records of an event file in its order, of its last `tail_bytes` bytes only if given. Raises OSError."""
    at = max(0, path.stat().st_size - tail_bytes) if tail_bytes is not None else 0
    return (record for _, record in lines(path, {path: at}, whole=False))


def lines(path: Path, offsets: dict[Path, int], *, whole: bool) -> Iterator[tuple[str, events.Record]]:
    """The events in what `added` reads: each line with its record.

    Malformed lines are skipped: a killed agent or a full disk leaves half a line at the end of a file.
    """
    for text in added(path, offsets, whole=whole):
        for line in text.splitlines():
            if (record := events.decode(line)) is not None:
                yield line, record


def added(path: Path, offsets: dict[Path, int], *, whole: bool) -> Iterator[str]:
    """What a file has beyond its offset in `offsets`, in pieces that end with a line. Moves the offset.

    The file is open only while a piece of it is read, because a run may have thousands of files. Raises OSError.

    `offsets` are in bytes. With `whole` the last line is left for later if it has no end yet.
    """
    # `data` is not empty, so that the loop begins: an empty piece means the end of the file.
    begun, data = bytearray(), b" "
    while data:
        with path.open("rb") as file:
            file.seek(offsets.get(path, 0) + len(begun))
            data = file.read(PIECE_BYTES)
        begun += data
        end = begun.rfind(b"\n", len(begun) - len(data)) + 1 if data or whole else len(begun)
        if end:
            offsets[path] = offsets.get(path, 0) + end
            yield begun[:end].decode(errors="replace")
            del begun[:end]


def store_of(path: Path) -> str:
    """The identity of the etcd that the last writer of an event file has joined; "" if it is not known."""
    try:
        joined = [each.event.store for each in records(path) if isinstance(each.event, events.AgentStarted)]
    except OSError as error:
        log.warning("which etcd an agent has joined cannot be read: %s: %s", path, error.strerror)
        return ""
    return joined[-1] if joined else ""


def newest_result(directory: Path) -> events.Result | None:
    """The newest result in a run's directory; None if there is none, or if a later attempt has begun."""
    ends: list[tuple[float, events.Result | None]] = [(0.0, None)]
    for path in files(directory):
        try:
            for number, each in enumerate(records(path, PIECE_BYTES)):
                found = each.event if isinstance(each.event, events.Result) else None
                # A long attempt may have started before this piece of its file. The first record of the piece then
                # stands for the start.
                if number == 0 or found is not None or isinstance(each.event, events.AgentStarted):
                    ends.append((each.time, found))
        except OSError as error:
            log.warning("how the run ended cannot be read: %s: %s", path, error.strerror)
    return max(ends, key=itemgetter(0))[1]


class Sparse:
    """Chooses the lines of a file: ever fewer of frequent kinds, but the newest of them before any other kind."""

    def __init__(self) -> None:
        # When the first event came, and by kind when the last line went to the file.
        self._began: float | None = None
        self._kept_at: dict[type[events.Event], float] = {}
        # The newest line of each frequent kind, if the file does not have it yet.
        self._held: dict[type[events.Event], bytes] = {}

    def due(self, kind: type[events.Event], line: bytes, at: float) -> bytes:
        """The lines that the file gets after an event: none, one or several.

        `at` is when its line was written, in seconds.
        """
        self._began = at if self._began is None else self._began
        if kind not in OFTEN:
            return self.rest() + line
        self._held[kind] = line
        if at - self._kept_at.get(kind, self._began) < (at - self._began) / OFTEN_SHARE:
            return b""
        self._kept_at[kind] = at
        return self._held.pop(kind)

    def rest(self) -> bytes:
        """The lines that were held back. They are not held any longer."""
        lines = b"".join(self._held.values())
        self._held.clear()
        return lines


class EventLog:
    """Writes events, from any thread. If the directory is deleted, there is one warning.

    While the file cannot be written to, because the disk is full for instance, the newest lines are kept, and each
    event tries again to write them.

    Without a `directory` there is no file. `fd` is a descriptor that gets every event as well; -1 for none.
    """

    def __init__(self, node: str, directory: Path | None, fd: int = -1) -> None:
        self._node = node
        self._directory = directory  # None also after it was deleted.
        self._fd = fd
        self._lock = threading.Lock()
        self._file = -1
        # Whether the file ends within a line. What follows must then begin with a line's end.
        self._torn = False
        self._fails = False  # Whether the file takes no lines.
        self._waiting: deque[bytes] = deque(maxlen=KEPT)  # Lines that the file does not have yet.
        self._listeners: list[Callable[[events.Record], object]] = []
        self._sparse = Sparse()

    def follow(self, heard: Callable[[events.Record], object]) -> None:
        """From now on call `heard` with each event, on the thread that writes the event. It must not block."""
        self._listeners.append(heard)

    def rename(self, node: str) -> None:
        """Set the node's final name. Call it before the first event."""
        self._node = node

    def write(self, event: events.Event) -> None:
        """Write `event` with the present time. Nothing is synced to disk."""
        at, now = time.monotonic(), datetime.now(timezone.utc)
        line = events.encode(event, self._node, at, now) + b"\n"
        with self._lock:
            if self._directory is not None:
                self._keep(event, line, at)
            self._fd = self._put(self._fd, line)
            self._tell(events.Record(event, self._node, at, now.timestamp()))

    def close(self) -> None:
        """Close the file. The inherited descriptor stays open until the process ends."""
        with self._lock:
            if self._directory is None or self._file < 0:
                return
            self._flush(self._sparse.rest())
            self._end()

    def _tell(self, record: events.Record) -> None:
        for heard in tuple(self._listeners):
            try:
                heard(record)
            except Exception:
                # An error in a view does not end the run.
                self._listeners.remove(heard)
                log.exception("lines about this run end here, with an error at %s", events.kind_of(record.event))

    # The file.

    def _keep(self, event: events.Event, line: bytes, at: float) -> None:
        """Write `event` to the file, or keep it until the file takes it."""
        if self._file >= 0 and not os.fstat(self._file).st_nlink:
            log.warning("no further events are written: %s was deleted", self._directory)
            self._end()
            return
        if lines := self._sparse.due(type(event), line, at):
            self._flush(lines)

    def _flush(self, lines: bytes) -> None:
        """Write the lines that wait and `lines`, or keep them until the next try."""
        self._waiting.append(lines)
        try:
            self._open()
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._fails:
                log.warning("events are kept in memory, as %s cannot be written: %s", self._directory, error.strerror)
            self._fails = True
        else:
            if self._fails:
                log.warning("events are written again")
            self._fails = False

    def _append(self, lines: bytes) -> None:
        """Append `lines` to the file. Raises OSError."""
        left = b"\n" * self._torn + lines
        while left:
            # A full disk may take a part of a line. `_torn` remembers that.
            written = os.write(self._file, left)
            left = left[written:]
            self._torn = bool(left)

    def _open(self) -> None:
        """Open the file, unless it is open. Raises OSError."""
        if self._file >= 0 or self._directory is None:
            return
        make_directory(self._directory)
        path = self._directory / f"events-{self._node}.jsonl"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not _lock(file, fcntl.LOCK_EX):
            # The agent before this one may still be ending, and one in another etcd may have these names by mistake.
            os.close(file)
            raise OSError(errno.EBUSY, f"another agent writes {path.name}")
        self._file = file
        size = os.fstat(self._file).st_size
        # A killed agent may have left half a line.
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def _end(self) -> None:
        """Write no more to the file."""
        os.close(self._file)
        self._file, self._directory = -1, None

    @staticmethod
    def _put(fd: int, line: bytes) -> int:
        """Write `line` to the inherited descriptor. Returns the descriptor, or -1 after an error."""
        if fd < 0:
            return fd
        try:
            # An error may leave half a line, so nothing else may follow.
            while line:
                line = line[os.write(fd, line) :]
        except OSError as error:
            log.warning("no further events are written: %s", error.strerror)
            return -1
        return fd
