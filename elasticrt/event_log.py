"""Writes and reads events: JSON lines in the run directory and, when asked, on an inherited descriptor.

The schema of a line is `elasticrt.events`. A run can be read from these files without etcd.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import cache
from operator import itemgetter
from pathlib import Path

from elasticrt import events
from elasticrt.ipc.file_modes import make_directory
from elasticrt.ipc.room import give_room_back, keep_room

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 16

OFTEN = (events.Step, events.Progress)
OFTEN_SHARE = 1000
"""The file gets an event of a frequent kind once in a thousandth of the log's age: about 10,000 lines in a week."""

RETRY_S = 1.0
KEPT = 100
"""While the file takes nothing, it is tried so often, and so many newest events of each kind are kept for it."""

ROOM_BYTES = 4096
"""So much of the disk is kept for last words about a file that takes nothing."""

LAST_WORDS = (events.Generation, events.Committed, events.Result, events.AgentStopped)
"""What the last words say, where the file takes nothing until the agent ends: the newest of each kind."""


def files(directory: Path) -> list[Path]:
    """The event files of a run's directory, one for each node. What cannot be read as a file gets one warning."""
    found = sorted(directory.glob("events-*.jsonl"))
    # Opening a FIFO would wait for a writer.
    read = [path for path in found if path.is_file() and os.access(path, os.R_OK)]
    for path in set(found) - set(read):
        _leave_out(path)
    return read


@cache
def _leave_out(path: Path) -> None:
    """Warn of a file, once: views look at the same directory again and again."""
    log.warning("left out, as it is no regular file that can be read (check its permissions): %s", path)


def records(path: Path, tail_bytes: int | None = None) -> Iterator[events.Record]:
    """The records of a file of events, in its order; of its last `tail_bytes` bytes only, if given. Raises OSError."""
    at = max(0, path.stat().st_size - tail_bytes) if tail_bytes is not None else 0
    return (record for _, record in lines(path, {path: at}, whole=False))


def lines(path: Path, offsets: dict[Path, int], *, whole: bool) -> Iterator[tuple[str, events.Record]]:
    """The lines of events in what `added` reads, with their records.

    Malformed ones are left out: a killed agent or a full disk ends a file within one.
    """
    for text in added(path, offsets, whole=whole):
        for line in text.splitlines():
            if (record := events.decode(line)) is not None:
                yield line, record


def added(path: Path, offsets: dict[Path, int], *, whole: bool) -> Iterator[str]:
    """What a file has behind its offset, which moves on, in pieces of lines; with `whole` only whole ones.

    The file is open only while a piece of it is read, because a run may have thousands of files. Raises OSError.
    """
    # Not empty, so that the loop begins: an empty piece is the end of the file.
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


def newest_result(directory: Path) -> events.Result | None:
    """The newest result in a run's directory, if nothing tells of a later attempt."""
    ends: list[tuple[float, events.Result | None]] = [(0.0, None)]
    for path in files(directory):
        try:
            for number, each in enumerate(records(path, PIECE_BYTES)):
                found = each.event if isinstance(each.event, events.Result) else None
                # Whatever this piece begins with stands for the start of a long attempt, which is before it.
                if number == 0 or found is not None or isinstance(each.event, events.AgentStarted):
                    ends.append((each.time, found))
        except OSError as error:
            log.warning("how the run ended is not read: %s: %s", path, error.strerror)
    return max(ends, key=itemgetter(0))[1]


class Sparse:
    """Chooses the lines of a file: ever fewer of frequent kinds, but the newest of them before any other kind."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._kept_at: dict[type[events.Event], float] = {}
        self._held: dict[type[events.Event], bytes] = {}  # The newest line of each kind, if the file lacks it.

    def due(self, kind: type[events.Event], line: bytes, at: float) -> bytes:
        """The lines for the file after an event of `kind`, with its own `line`, `at` this time: none, one or some."""
        self._began = at if self._began is None else self._began
        if kind not in OFTEN:
            return self.rest() + line
        self._held[kind] = line
        if at - self._kept_at.get(kind, self._began) < (at - self._began) / OFTEN_SHARE:
            return b""
        self._kept_at[kind] = at
        return self._held.pop(kind)

    def rest(self) -> bytes:
        """The lines that were held back."""
        lines = b"".join(self._held.values())
        self._held.clear()
        return lines


class Backlog:
    """Lines that wait for room in the file, with the kind of event that has brought them."""

    def __init__(self) -> None:
        self.lines: list[tuple[type[events.Event], bytes]] = []
        self._counts: Counter[type[events.Event]] = Counter()
        self._dropped = 0

    @property
    def missing(self) -> int:
        """How many lines the file lacks."""
        return self._dropped + sum(lines.count(b"\n") for _, lines in self.lines)

    def add(self, kind: type[events.Event], lines: bytes) -> None:
        """The next lines. Of each kind only the newest are kept."""
        self.lines.append((kind, lines))
        self._counts[kind] += 1
        if self._counts[kind] > KEPT:
            self._dropped += self.take(next(place for place, (each, _) in enumerate(self.lines) if each is kind))

    def take(self, place: int = 0) -> int:
        """Take away the lines at this place. Returns how many they are."""
        kind, lines = self.lines.pop(place)
        self._counts[kind] -= 1
        return lines.count(b"\n")

    def last_words(self, room: int) -> bytes:
        """Take the lines that `LAST_WORDS` names, as far as there is room for them, in their order."""
        places = {kind: place for place, (kind, _) in enumerate(self.lines) if kind in LAST_WORDS}
        found = []
        for place in sorted(places.values(), reverse=True):
            lines = self.lines[place][1]
            if len(lines) <= room:
                room -= len(lines)
                found.append(lines)
                self.take(place)
        return b"".join(reversed(found))


class EventLog:
    """Writes events, from any thread. If the directory is deleted, there is one warning.

    While the file cannot be written to, because the disk is full for instance, it is tried again about every second.
    Then the file gets what was kept for it, and for how long it took nothing: see `events.Unwritten`.

    Args:
        node: the node's name.
        directory: of the run; None: there is no file.
        fd: a descriptor that gets every event as well; -1 for none.
    """

    def __init__(self, node: str, directory: Path | None, fd: int = -1) -> None:
        self._node = node
        self._directory = directory  # None also when it was deleted.
        self._fd = fd
        self._lock = threading.Lock()
        self._file = -1
        self._torn = False  # Whether the file ends within a line: what follows must not be part of it.
        self._since: float | None = None  # Since when the file takes nothing; None while it does.
        self._reason = ""  # Why.
        self._tried_at = 0.0
        self._backlog = Backlog()
        self._listeners: list[Callable[[events.Record], object]] = []
        self._sparse = Sparse()

    def follow(self, heard: Callable[[events.Record], object]) -> None:
        """From now on call `heard` with each event, on the thread that writes it. It must not block."""
        self._listeners.append(heard)

    def rename(self, node: str) -> None:
        """Set the final name of the node. Call it before the first event."""
        self._node = node

    def write(self, event: events.Event) -> None:
        """Write `event` with the present time. Nothing is synced."""
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
            if rest := self._sparse.rest():
                self._backlog.add(events.Progress, rest)
            self._flush(time.monotonic())
            with contextlib.suppress(OSError):
                if self._since is not None:
                    self._last_words()
                give_room_back(self._file)
            self._end()

    def _tell(self, record: events.Record) -> None:
        for heard in tuple(self._listeners):
            try:
                heard(record)
            except Exception:
                self._listeners.remove(heard)  # An error in a view does not end the run.
                log.exception("the story of this run is not told any further, at %s", events.kind_of(record.event))

    # The file.

    def _keep(self, event: events.Event, line: bytes, at: float) -> None:
        """Write `event` to the file, or keep it until the file takes it."""
        if self._file >= 0 and not os.fstat(self._file).st_nlink:
            log.warning("no further events are written: %s was deleted", self._directory)
            self._end()
            return
        ends = isinstance(event, (events.Result, events.AgentStopped))  # There may be no later event.
        if self._since is not None and (ends or at - self._tried_at >= RETRY_S):
            self._flush(at, resumes=True)
        if lines := self._sparse.due(type(event), line, at):
            self._backlog.add(type(event), lines)
            if self._since is None:
                self._flush(at)

    def _flush(self, at: float, *, resumes: bool = False) -> None:
        """Write what waits for room. With `resumes` say then that the file takes events again."""
        try:
            self._open()
            while self._backlog.lines and (resumes or self._since is None):
                _, lines = self._backlog.lines[0]
                keep_room(self._file, len(lines) + ROOM_BYTES)
                self._append(lines)
                self._backlog.take()
            if resumes and self._since is not None:
                self._append(self._unwritten(self._backlog.missing, over=True))
                log.warning("events are written again, after %.0f s", at - self._since)
                self._since, self._backlog = None, Backlog()
        except OSError as error:
            self._tried_at = at
            if self._since is None:
                self._since, self._reason = at, error.strerror or str(error)
                log.warning("events are kept in memory, as %s takes none: %s", self._directory, error.strerror)
                with contextlib.suppress(OSError):
                    self._append(self._unwritten(0))

    def _unwritten(self, missing: int, *, over: bool = False) -> bytes:
        """The line that says for how long the file takes nothing."""
        at, now = time.monotonic(), datetime.now(timezone.utc)
        for_s = round(at - (self._since or at), 3)
        return events.encode(events.Unwritten(for_s, self._reason, missing, over), self._node, at, now) + b"\n"

    def _last_words(self) -> None:
        """The file takes nothing, and the agent ends: use the room that was kept. Raises OSError."""
        words = self._backlog.last_words(ROOM_BYTES // 2)
        self._append(self._unwritten(self._backlog.missing))
        self._append(words)

    def _append(self, lines: bytes) -> None:
        """Raises OSError."""
        left = b"\n" * self._torn + lines
        while left:
            written = os.write(self._file, left)
            left = left[written:]
            self._torn = bool(left)

    def _open(self) -> None:
        """Raises OSError."""
        if self._file >= 0 or self._directory is None:
            return
        make_directory(self._directory)
        path = self._directory / f"events-{self._node}.jsonl"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        # A killed agent has left half a line.
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def _end(self) -> None:
        """Write no more to the file."""
        os.close(self._file)
        self._file, self._directory = -1, None

    @staticmethod
    def _put(fd: int, line: bytes) -> int:
        """Write to the inherited descriptor. Returns it, or -1 after an error, which may be within a line."""
        if fd < 0:
            return fd
        try:
            while line:
                line = line[os.write(fd, line) :]
        except OSError as error:
            log.warning("no further events are written: %s", error.strerror)
            return -1
        return fd
