"""Snapshots of a training state: copied at once, written in the background.

The training thread copies the state, over the copy before, and trains on. Another thread writes the copy: into a memory
file for the agent (`memory_tier`), into a file on disk (`checkpointer`), or both.
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

# Smaller writes are gathered: torch makes four for each tensor, and their time would be taken from the training.
GATHERED_BYTES_MAX = 1 << 16


class _Sink(io.RawIOBase):
    """Writes to a descriptor and hashes on the way: the digest is of what was meant, not of a copy."""

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
        # After a failure the rest is dropped: torch's writer would turn an OSError, which says why it failed, into a
        # RuntimeError, which does not.
        if self.error is None:
            self.hash.update(view)
            try:
                put(self._fd, view)
            except OSError as error:
                self.error = error
        return len(view)


def hashed(fd: int, produce: Callable[[IO[bytes]], object]) -> tuple[int, str]:
    """Write what `produce` gives to its file; size in bytes and SHA-256 in hex. Raises OSError, and what it raises."""
    sink = _Sink(fd)
    with io.BufferedWriter(sink, GATHERED_BYTES_MAX) as file:
        produce(file)
    if sink.error is not None:
        raise sink.error
    return sink.size, sink.hash.hexdigest()


class Snapshot:
    """A copy of a state as plain values, which does not change any more. The training has waited `stall_s` for it.

    What lies on a GPU is copied there first, and comes to the host when the copy is used, on a stream of its own: the
    training waits for neither. Where the GPU lacks room for that, it waits.
    """

    def __init__(self, state: Mapping[str, Any], buffers: Buffers | None = None) -> None:
        """Raises ConfigError when something in `state` can't be saved."""
        began = time.monotonic()
        self.is_done = False  # Whether nobody needs the copy any more, so that the next one may be made over it.
        self._buffers = buffers
        self._on_device: dict[torch.device, torch.cuda.Event] = {}
        self._copied = self._copy(state)
        self.stall_s = time.monotonic() - began

    def write_to(self, fd: int) -> tuple[int, str]:
        """Write it to a file; size in bytes and SHA-256. Raises OSError."""
        if self._on_device:
            self._fetch()
        return hashed(fd, lambda file: torch.save(self._copied, file))

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
            self._copied = plain_copy(self._copied, "state", self._buffers)
        self._on_device = {}


def gpus_with_room(state: object) -> list[torch.device]:
    """The GPUs that tensors of `state` lie on, if each has room for these once more, and as much again; else none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    taken: Counter[torch.device] = Counter()
    for tensor in tensors_of(state):
        if tensor.is_cuda:
            taken[tensor.device] += tensor.nbytes
    for device, size in taken.items():
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.mem_get_info(device)[0] + idle < 2 * size:
            return []
    return list(taken)


Use = Callable[[Snapshot], object]


class Snapshots:
    """Takes snapshots one after the other; the next one takes over the `buffers`."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self._newest: Callable[[], Snapshot | None] = lambda: None  # As long as its thread has it: it may be large.
        self._thread: threading.Thread | None = None
        self._late: threading.Thread | None = None  # Of one that is done, but what follows from it is not.

    @property
    def busy(self) -> bool:
        """Whether one is in flight. Not in a process that was forked meanwhile, which has no such thread."""
        return any(each is not None and each.is_alive() for each in (self._thread, self._late))

    @property
    def have_room(self) -> bool:
        """Whether the next one may be taken: none is in flight, or nobody needs the copy of the one that is."""
        newest = self._newest()
        return not self.busy or newest is None or newest.is_done

    def take(self, state: Mapping[str, Any], uses: Sequence[Use]) -> None:
        """Copy `state` to the host now, and hand the copy to each of `uses` on a thread. They have room.

        Raises ConfigError when something in `state` can't be saved.
        """
        if self._thread is not None and self._thread.is_alive():
            self._late = self._thread
        snapshot = Snapshot(state, self.buffers)
        self._newest = weakref.ref(snapshot)
        # A daemon, so that one that is stuck in the file system does not keep the process from ending.
        self._thread = threading.Thread(target=_hand_out, args=(snapshot, uses), name="elasticrt-snapshot", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is in flight; False if one still is."""
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
