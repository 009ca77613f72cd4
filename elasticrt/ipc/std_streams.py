"""Writes to stdout and stderr, which may be closed, full, or without a reader (`elasticrt status | head -3`).

An agent shares them with its workers. A line of theirs may be unfinished, such as a progress bar: whatever another one
writes begins a line of its own.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat as modes
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TextIO

_Aside = Callable[[bool], AbstractContextManager[None]]
_last_line: list[_Aside] = []
"""What takes away the line that this process keeps at the end of its terminal: one, or none."""


def keep_last_line(aside: _Aside | None) -> None:
    """From now on there is a line at the end, which `aside` takes away while something is written. None: no line."""
    _last_line[:] = [aside] if aside is not None else []


LOCK_S_MAX = 0.5
"""A terminal that is stopped (Ctrl-S) blocks its writer. Other threads wait no longer than this for it."""

_lock = threading.RLock()  # A signal's handler may write while its thread does.
_unfinished: dict[tuple[int, int], tuple[object, bool]] = {}
"""Whose line is unfinished at the end of a terminal, pipe or file, and whether it may be overwritten, as it ends with a
carriage return."""


@contextmanager
def held() -> Iterator[None]:
    """A context that one thread at a time is in."""
    got = _lock.acquire(timeout=LOCK_S_MAX)
    try:
        yield
    finally:
        if got:
            _lock.release()


@contextmanager
def turn(fd: int, text: bytes, owner: object = None) -> Iterator[tuple[bool, bytes]]:
    """A context in which `owner` writes `text` to `fd`. Without an owner its line does not go on.

    It yields whether it goes on with a line of this owner, and what ends the line of another one first.
    """
    with held():
        stat = os.fstat(fd)
        place, overwrites = (stat.st_dev, stat.st_ino), text.endswith(b"\r") and b"\n" not in text
        last, bar = _unfinished.pop(place, (None, False))
        with _last_line[0](text.endswith(b"\n")) if _last_line else nullcontext():
            mine = last is None or last is owner
            yield last is not None and mine and not bar, b"" if mine or (bar and overwrites) else b"\n"
        if owner is not None and not text.endswith(b"\n"):
            _unfinished[place] = owner, text.endswith(b"\r")


READER_S_MAX = 1.0
"""How long `put` waits for a reader that reads nothing, once: a terminal that is stopped (Ctrl-S), or a pager."""

_ways: dict[int, int] = {}
"""Descriptors for which `write` does as `put`, and what is written to instead: the same file, not blocking."""

_unread: dict[int, int] = {}
"""How many lines were dropped, by the descriptor whose reader has read nothing since."""


def hurry(fds: Collection[int] = (1, 2)) -> None:
    """From now on do not wait for the readers of `fds`: the training waits for this process."""
    for fd in fds:
        _ways[fd] = fd
        with contextlib.suppress(OSError):  # It is closed, or another user's terminal.
            if modes.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
                # Opened again, because a flag of the descriptor itself is shared with other processes.
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                _ways[fd] = os.open(f"/proc/self/fd/{fd}", flags)


def put(fd: int, data: bytes) -> None:
    """Write `data` to `fd`, but drop it while the reader reads nothing. What comes next tells of that. OSError."""
    way, wait_s, note = _ways.get(fd, fd), READER_S_MAX, b""
    if fd in _unread:
        wait_s = 0.0
        if _unread[fd]:
            note = f"\n[elasticrt: {_unread[fd]} lines are missing here: nothing was read]\n".encode()
    view = memoryview(note + data)
    poll = select.poll()
    poll.register(way, select.POLLOUT)
    while view:
        if not poll.poll(wait_s * 1000):
            _unread[fd] = _unread.get(fd, 0) + data.count(b"\n")  # The last line of a terminal has none.
            return
        # What has room takes this much without blocking. Else another process has taken the room meanwhile.
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(way, view[: select.PIPE_BUF]) :]
            _unread.pop(fd, None)
            wait_s = READER_S_MAX


def emit(stream: TextIO, text: str) -> None:
    """Write `text` to `stream` and flush; after `hurry` as `put` does. Raises OSError, ValueError."""
    fd = _fd(stream)
    if fd in _ways:
        put(fd, text.encode(stream.encoding, stream.errors or "strict"))
    else:
        stream.write(text)
        stream.flush()


_without_reader: set[int] = set()
"""Descriptors whose output is dropped, because their reader has ended."""


class Unwritable(OSError):  # noqa: N818  A stream is unwritable.
    """A stream cannot be written to, as on a full disk. All later output is dropped."""


def write(stream: TextIO | None, text: str) -> bool:
    """Write `text` and flush. False if the stream has no reader: then this and all later output is dropped.

    A missing reader is no error: the command goes on, and its exit code stays the same. Raises Unwritable after any
    other error, such as a full disk.
    """
    if stream is None:  # It was closed before this process began.
        return False
    fd = _fd(stream)
    try:
        with turn(fd, text[-1:].encode()) if fd >= 0 else nullcontext((False, b"")) as (_, end):
            emit(stream, end.decode() + text)
    except BrokenPipeError:
        # All later output is dropped, and what is still buffered, which Python flushes at its end.
        _without_reader.add(stream.fileno())
        _drop_all(stream.fileno())
        return False
    except OSError as error:
        _drop_all(stream.fileno())
        raise Unwritable(error.errno, error.strerror) from error
    return True


def has_reader(stream: TextIO | None) -> bool:
    """Whether somebody may still read what is written: false for a pipe whose other end is closed."""
    fd = _fd(stream)
    if fd < 0:
        return True
    poll = select.poll()
    poll.register(fd, 0)
    return fd not in _without_reader and not any(event & select.POLLERR for _, event in poll.poll(0))


def _fd(stream: TextIO | None) -> int:
    """The descriptor of a stream; -1 if it has none, or is closed."""
    try:
        return stream.fileno() if stream is not None else -1
    except ValueError:
        return -1


def _drop_all(fd: int) -> None:
    way = _ways.pop(fd, fd)
    if way != fd:
        os.close(way)
    point_to_null(fd)


def tell(text: str) -> None:
    """Write the last `text` of a process to stderr. If that is impossible, only the exit code remains."""
    with contextlib.suppress(Unwritable):
        write(sys.stderr, text)


def say(line: str) -> None:
    """Print one line from a training process to stderr, marked as ours. It informs; warnings go through `logging`.

    A library must not configure logging, which shows only warnings as long as nobody does.
    """
    print(f"elasticrt: {line}", file=sys.stderr, flush=True)  # noqa: T201  The one place where the training side prints.


def point_to_null(fd: int) -> None:
    """Open /dev/null as the descriptor `fd`, in place of what it was."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, fd)
    os.close(null)


def occupy() -> None:
    """Open /dev/null for each closed standard descriptor. The next file would get its number, and workers' output."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
