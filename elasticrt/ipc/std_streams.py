"""Writes to stdout and stderr, which may be closed, full, or without a reader (`elasticrt status | head -3`).

An agent shares these streams with its workers. A line of one writer may be unfinished, such as a progress bar; what
another one writes then begins a line of its own.
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
"""Takes away the line that this process keeps at the end of its terminal, while something is written: one such
function, or none."""


def keep_last_line(aside: _Aside | None) -> None:
    """From now on there is a line at the end, which `aside` takes away while something is written. None: no line."""
    _last_line[:] = [aside] if aside is not None else []


LOCK_S_MAX = 0.5
"""A terminal that is stopped (Ctrl-S) blocks its writer. Other threads wait no longer than this for the lock."""

# Reentrant, because a signal's handler may write while its thread does.
_lock = threading.RLock()
_unfinished: dict[tuple[int, int], tuple[object, bool]] = {}
"""By terminal, pipe or file: the owner of the unfinished line at its end, and whether the line may be overwritten
because it ends with a carriage return."""


@contextmanager
def held() -> Iterator[None]:
    """A context that one thread at a time is in. After LOCK_S_MAX it is entered without the lock."""
    got = _lock.acquire(timeout=LOCK_S_MAX)
    try:
        yield
    finally:
        if got:
            _lock.release()


@contextmanager
def turn(fd: int, text: bytes, owner: object = None) -> Iterator[tuple[bool, bytes]]:
    """A context in which `owner` writes `text` to `fd`. What is written without an owner is a line of its own.

    Yields whether the text continues an unfinished line of this owner, and what must be written first to end another
    one's line.
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
"""The descriptors for which `write` does as `put`, and what is written to in their place: the same file, without
blocking."""

_unread: dict[int, int] = {}
"""By descriptor whose reader has stopped reading: how many lines were dropped since."""


def hurry(fds: Collection[int] = (1, 2)) -> None:
    """From now on do not wait for the readers of `fds`: the training would wait for this process."""
    for fd in fds:
        _ways[fd] = fd
        # The stream may be closed, or another user's terminal.
        with contextlib.suppress(OSError):
            if modes.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
                # The file is opened again, because O_NONBLOCK on the descriptor itself would hold for all processes
                # that share it.
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                _ways[fd] = os.open(f"/proc/self/fd/{fd}", flags)


def put(fd: int, data: bytes) -> None:
    """Write `data` to `fd`, but drop them while the reader reads nothing. The next output says so. Raises OSError."""
    way, wait_s, note = _ways.get(fd, fd), READER_S_MAX, b""
    if fd in _unread:
        wait_s = 0.0
        if _unread[fd]:
            note = f"\n[elasticrt: {_unread[fd]} lines are missing here: the output was not read]\n".encode()
    view = memoryview(note + data)
    poll = select.poll()
    poll.register(way, select.POLLOUT)
    while view:
        if not poll.poll(wait_s * 1000):
            # The last line of a terminal has no end, and is not counted.
            _unread[fd] = _unread.get(fd, 0) + data.count(b"\n")
            return
        # A stream with room takes PIPE_BUF bytes without blocking, unless another process has taken the room meanwhile.
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
    """Write `text` and flush. Returns false if the stream has no reader: then this and all later output is dropped.

    A missing reader is no error: the command goes on, and its exit code stays the same. Raises Unwritable after any
    other error, such as a full disk.
    """
    # The stream was closed before this process began.
    if stream is None:
        return False
    fd = _fd(stream)
    try:
        with turn(fd, text[-1:].encode()) if fd >= 0 else nullcontext((False, b"")) as (_, end):
            emit(stream, end.decode() + text)
    except BrokenPipeError:
        # What is still buffered is dropped as well; otherwise Python would fail to flush it at its end.
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
    """Print one line from a training process to stderr, marked as elasticrt's.

    For information; warnings go through `logging`. As long as nobody configures logging it shows only warnings, and a
    library must not configure it.
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
