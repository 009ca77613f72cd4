"""Takes snapshots of a training state: copied at once, written in the background.

The training thread copies the state into the memory of the copy before, and trains on. Another thread writes the copy:
into a memory file for the agent (`memory_tier`), into a file on disk (`checkpointer`), or both.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

import torch

from elasticrt.checkpoint.state_copy import Buffers, plain_copy, tensors_of
from elasticrt.data.durable_files import put

_log = logging.getLogger(__name__)

# Smaller writes are gathered. Torch makes four of them for each tensor, and each system call would take time from the
# training.
GATHERED_BYTES_MAX = 1 << 16


class _Sink(io.RawIOBase):
    """Writes to a descriptor, and hashes the data on the way: the digest is of what was meant, not of what is stored.

    The error of a failed write is kept in `error`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.hash = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        self.size += len(view)
        # After a failure the rest is dropped, without an exception: torch's writer would turn the OSError, which has
        # the reason, into a RuntimeError, which does not.
        if self.error is None:
            self.hash.update(view)
            try:
                put(self._fd, view)
            except OSError as error:
                self.error = error
        return len(view)


def hashed(fd: int, produce: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    """Call `produce` with a file that writes to `fd`. Returns the size in bytes and the SHA-256 in hex.

    Raises OSError when a write fails, and what `produce` raises.
    """
    sink = _Sink(fd)
    with io.BufferedWriter(sink, GATHERED_BYTES_MAX) as file:
        produce(file)
    if sink.error is not None:
        raise sink.error
    return sink.size, sink.hash.hexdigest()


class Snapshot:
    """A copy of a state as plain values, which does not change any more.

    Tensors on a GPU are first copied on that GPU. They come to the host when the snapshot is used, on a stream of their
    own, so the training waits for neither copy. If the GPU lacks room for that, the training waits for a copy to the
    host.

    Args:
        state: the state to copy.
        buffers: host memory to copy into.

    Attributes:
        stall_s: how long the training has waited for the copy, in seconds.
        is_done: whether no use needs the copy any more, so that the next snapshot may overwrite its memory.

    Raises ConfigError when something in `state` can't be saved.
    """

    def __init__(self, state: Mapping[str, Any], buffers: Buffers | None = None) -> None:
        began = time.monotonic()
        self.is_done = False
        self._buffers = buffers
        # By GPU with copied tensors, the event after which these are complete. Empty once all is on the host.
        self._on_device: dict[torch.device, torch.cuda.Event] = {}
        self._copied = self._copy(state)
        self.stall_s = time.monotonic() - began

    def write_to(self, fd: int) -> tuple[int, str]:
        """Write the snapshot to a file. Returns the size in bytes and the SHA-256 in hex. Raises OSError."""
        if self._on_device:
            self._fetch()
        return hashed(fd, lambda file: torch.save(self._copied, file))

    def _copy(self, state: Mapping[str, Any]) -> Any:
        devices = gpus_with_room(state)
        if devices:
            try:
                copied = plain_copy(state, "state", on_device=True)
            except torch.OutOfMemoryError:
                # There is room, but not in one piece.
                pass
            else:
                self._on_device = {each: torch.cuda.current_stream(each).record_event() for each in devices}
                return copied
        return plain_copy(state, "state", self._buffers)

    def _fetch(self) -> None:
        """Bring the copies on GPUs to the host, on a stream of its own for each GPU."""
        with ExitStack() as streams:
            for device, copied in self._on_device.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(copied)
                streams.enter_context(torch.cuda.stream(stream))
            self._copied = plain_copy(self._copied, "state", self._buffers)
        self._on_device = {}


def gpus_with_room(state: object) -> list[torch.device]:
    """The GPUs on which tensors of `state` lie, if each has room for a copy of these and as much again; else none."""
    # Asking CUDA would initialize it, which takes seconds and forbids forks.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    taken: Counter[torch.device] = Counter()
    for tensor in tensors_of(state):
        if tensor.is_cuda:
            taken[tensor.device] += tensor.nbytes
    for device, size in taken.items():
        # Memory that torch's allocator holds without using it counts as room.
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.mem_get_info(device)[0] + idle < 2 * size:
            return []
    return list(taken)


# What is done with a snapshot, such as writing it to a file.
Use = Callable[[Snapshot], object]


class Snapshots:
    """Takes snapshots one after the other.

    Attributes:
        buffers: the host memory that each snapshot takes over from the one before.
    """

    def __init__(self) -> None:
        self.buffers = Buffers()
        # A weak reference: only the thread keeps a snapshot, which may be large.
        self._newest: Callable[[], Snapshot | None] = lambda: None
        self._thread: threading.Thread | None = None
        # The thread of the snapshot before, whose copy is not needed any more, but whose uses have not ended.
        self._late: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot is in flight. In a process that was forked meanwhile none is, as it lacks the thread."""
        return any(each is not None and each.is_alive() for each in (self._thread, self._late))

    @property
    def have_room(self) -> bool:
        """Whether the next snapshot may be taken: none is in flight, or its copy is not needed any more."""
        newest = self._newest()
        return not self.busy or newest is None or newest.is_done

    def take(self, state: Mapping[str, Any], uses: Sequence[Use]) -> None:
        """Copy `state` now, and call each of `uses` with the snapshot on another thread.

        Call this only while `have_room`, or no snapshot is in flight. Raises ConfigError when something in `state`
        can't be saved.
        """
        if self._thread is not None and self._thread.is_alive():
            self._late = self._thread
        snapshot = Snapshot(state, self.buffers)
        self._newest = weakref.ref(snapshot)
        # A daemon thread, so that a write that is stuck in the file system does not keep the process from ending.
        self._thread = threading.Thread(target=_hand_out, args=(snapshot, uses), name="elasticrt-snapshot", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no snapshot is in flight. Returns False if one still is after `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        for each in (self._thread, self._late):
            if each is not None:
                each.join(max(0.0, until - time.monotonic()))
        return not self.busy


def _hand_out(snapshot: Snapshot, uses: Sequence[Use]) -> None:
    for use in uses:
        try:
            use(snapshot)
        except Exception:  # noqa: BLE001  This thread has no caller, and the other uses want it as well.
            _log.exception("a snapshot of the state could not be used")
    snapshot.is_done = True
