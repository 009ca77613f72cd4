"""Snapshots of a training state: copied at once, and written in the background.

The training thread makes the copy, over the one before, and trains on. Another thread serialises it once: into a memory
file for the agent (`memory_tier`), into a file on disk (`checkpointer`), or into both, the second from the bytes of the
first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import IO, Any, cast

import torch

from elasticrt.checkpoint.state_copy import Buffers, plain_copy
from elasticrt.data.durable_files import put, transfer

_log = logging.getLogger(__name__)

GATHERED_BYTES_MAX = 1 << 16
"""How much of small writes a file is written at once."""


class Sink:
    """Writes to a descriptor, counting and hashing on the way: the digest is of what was meant, not of a copy.

    Small writes are gathered: torch makes four for each tensor, and what they take would be taken from the training.

    A failed write is kept in `error`, and what follows is dropped: torch's writer would turn the OSError that says why
    into a RuntimeError that does not.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._gathered = bytearray()
        self.hash = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Take all of `data`."""
        size = len(data)
        self.size += size
        if size >= GATHERED_BYTES_MAX:
            self.flush()
            self._put(memoryview(data).cast("B"))
        else:
            self._gathered += data
            if len(self._gathered) >= GATHERED_BYTES_MAX:
                self.flush()
        return size

    def flush(self) -> None:
        """Write what is gathered."""
        gathered, self._gathered = self._gathered, bytearray()
        self._put(gathered)

    def _put(self, data: bytearray | memoryview) -> None:
        if self.error is None:
            self.hash.update(data)
            try:
                put(self._fd, data)
            except OSError as error:
                self.error = error


def hashed(fd: int, produce: Callable[[Sink], object]) -> tuple[int, str]:
    """Write what `produce` writes to a sink; size in bytes and SHA-256 in hex. Raises OSError, and what it raises."""
    sink = Sink(fd)
    produce(sink)
    sink.flush()
    if sink.error is not None:
        raise sink.error
    return sink.size, sink.hash.hexdigest()


class Snapshot:
    """A copy of a state as plain values, which nobody changes any more.

    What lies on a GPU is copied there first, and comes to the host when the copy is used, on a stream of its own: the
    training waits for neither. Where the GPU has no room for that, it waits.

    Attributes:
        stall_s: seconds that the training has waited for it.
    """

    def __init__(self, state: Mapping[str, Any], buffers: Buffers | None = None) -> None:
        """Copies `state`. Raises ConfigError when something in it can't be saved."""
        began = time.monotonic()
        self._buffers = buffers
        self._on_device: dict[torch.device, torch.cuda.Event] = {}
        self._copied = self._copy(state)
        self.stall_s = time.monotonic() - began
        self._file: tuple[int, int, str] | None = None

    def in_memory(self) -> tuple[int, int, str]:
        """A memory file that holds it, open until `close`; its size in bytes and SHA-256. OSError without memory."""
        if self._file is None:
            fd = os.memfd_create("elasticrt-copy", os.MFD_CLOEXEC)
            try:
                self._file = (fd, *hashed(fd, self._serialise))
            except BaseException:
                os.close(fd)
                raise
        return self._file

    def write_to(self, fd: int) -> tuple[int, str]:
        """Write it to a file; size in bytes and SHA-256. Raises OSError."""
        if self._file is None:
            return hashed(fd, self._serialise)
        source, size, digest = self._file
        transfer(source, fd, size)
        return size, digest

    def close(self) -> None:
        """Let go of the memory file, if there is one."""
        if self._file is not None:
            os.close(self._file[0])
            self._file = None

    def _copy(self, state: Mapping[str, Any]) -> Any:
        devices = gpus_with_room(state)
        if devices:
            try:
                copied = plain_copy(state, "state", on_device=True)
            except torch.OutOfMemoryError:
                pass  # There is room, but not in one piece.
            else:
                self._on_device = {each: torch.cuda.current_stream(each).record_event() for each in devices}
                return copied
        return plain_copy(state, "state", self._buffers)

    def _fetch(self) -> None:
        """Bring to the host what was copied on GPUs."""
        with ExitStack() as streams:
            for device, copied in self._on_device.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(copied)
                streams.enter_context(torch.cuda.stream(stream))
            if self._on_device:
                self._copied = plain_copy(self._copied, "state", self._buffers)
        self._on_device = {}

    def _serialise(self, sink: Sink) -> None:
        self._fetch()
        torch.save(self._copied, cast("IO[bytes]", sink))


def gpus_with_room(state: object) -> list[torch.device]:
    """The GPUs that tensors of `state` lie on, if each has room for these once more, and as much again; else none."""
    taken: Counter[torch.device] = Counter()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _count(state, taken)
    for device, size in taken.items():
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.mem_get_info(device)[0] + idle < 2 * size:
            return []
    return list(taken)


def _count(value: object, taken: Counter[torch.device]) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            taken[value.device] += value.nbytes
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            _count(each, taken)


Use = Callable[[Snapshot], object]


class Snapshots:
    """Takes them one after the other: at most one is in flight, whose memory on the host the next one takes.

    The thread that writes them is begun with the first and ends with its owner: to start one for each would take the
    training a millisecond or two. It is a daemon: one that is stuck in the file system hangs nobody.
    """

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._taken: SimpleQueue[tuple[Snapshot, Sequence[Use]] | None] = SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether one is being written. Not in a process that was forked meanwhile, which has no such thread."""
        return self._thread is not None and self._thread.is_alive() and not self._idle.is_set()

    def take(self, state: Mapping[str, Any], uses: Sequence[Use]) -> None:
        """Copy `state` to the host now; the thread then gives it to each of `uses`. None is in flight.

        Raises ConfigError when something in `state` can't be saved.
        """
        snapshot = Snapshot(state, self._buffers)
        if self._thread is None or not self._thread.is_alive():
            self._idle, self._taken = threading.Event(), SimpleQueue()
            arguments = (self._taken, self._idle)
            self._thread = threading.Thread(target=_serve, args=arguments, name="elasticrt-snapshot", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._taken.put, None).atexit = False
        self._idle.clear()
        self._taken.put((snapshot, uses))

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is in flight; False if one still is."""
        return not self.busy or self._idle.wait(timeout_s)


def _serve(taken: SimpleQueue[tuple[Snapshot, Sequence[Use]] | None], idle: threading.Event) -> None:
    while (each := taken.get()) is not None:
        _give(*each)
        del each  # It may hold the owner, whose end is the thread's.
        idle.set()


def _give(snapshot: Snapshot, uses: Sequence[Use]) -> None:
    for use in uses:
        try:
            use(snapshot)
        except Exception:  # noqa: BLE001  There is nobody here to raise it to, and others want it as well.
            _log.exception("a snapshot of the state could not be used")
    snapshot.close()
