"""Copies of tensors from GPUs to the host, beside the training: on a stream of their own, into pinned memory.

The training's stream makes a copy on the GPU first, which takes a thousandth of a second for gigabytes, and goes on;
the way to the host, forty times as slow, begins there. Where the GPU has no room for that, the copy is taken from the
state itself, and what the training queues after it waits on the GPU. The host waits in neither case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SPARE_BYTES = 512 * 1024 * 1024
"""What is left free on a GPU: the next step may need a little more than any before."""


def room_bytes(*, free: int, reserved: int, peak: int) -> int:
    """Bytes of a GPU that a copy may take until the training is at its peak again. Pure.

    Args:
        free: what the driver would still give.
        reserved: what torch has of it, used or not.
        peak: the most that torch has used so far.
    """
    return max(0, free + reserved - peak - SPARE_BYTES)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor fills its memory without gaps, in whatever order: then it is copied as it lies. Pure."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Arrival:
    """Copies that are under way. They may be read after `wait`."""

    def __init__(self, events: Sequence[torch.cuda.Event], sources: Sequence[torch.Tensor]) -> None:
        self._events = events
        self._sources = sources  # Until then nothing else may get their memory.

    def wait(self) -> None:
        """Wait until all are on the host. From any thread."""
        for event in self._events:
            event.synchronize()
        self._sources = ()


class GpuCopies:
    """Those of one state. Used by the training thread; nothing here waits for a GPU."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pairs: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._room: dict[torch.device, int] = {}
        self._stops: set[torch.device] = set()

    @staticmethod
    def fits(tensor: torch.Tensor) -> bool:
        """Whether this tensor can be copied so."""
        dense = tensor.is_cuda and is_dense(tensor.shape, tensor.stride())
        return dense and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)

    def add(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy `tensor`, as it is now for the training's stream, into `buffer`, which lies as it does."""
        place = tensor.device
        if place not in self._room:
            free, _ = torch.cuda.mem_get_info(place)
            reserved, peak = torch.cuda.memory_reserved(place), torch.cuda.max_memory_allocated(place)
            self._room[place] = room_bytes(free=free, reserved=reserved, peak=peak)
        if tensor.nbytes <= self._room[place]:
            self._room[place] -= tensor.nbytes
            tensor = tensor.clone()
        else:
            self._stops.add(place)
        self._pairs.setdefault(place, []).append((tensor, buffer))

    def begin(self) -> Arrival:
        """Set all that was added on its way."""
        events = []
        for place, pairs in self._pairs.items():
            training = torch.cuda.current_stream(place)
            stream = self._streams.setdefault(place, torch.cuda.Stream(place))
            stream.wait_stream(training)
            with torch.cuda.stream(stream):
                for tensor, buffer in pairs:
                    buffer.copy_(tensor, non_blocking=True)
            events.append(stream.record_event())
            if place in self._stops:
                training.wait_event(events[-1])
        arrival = Arrival(events, [tensor for pairs in self._pairs.values() for tensor, _ in pairs])
        self._pairs, self._room, self._stops = {}, {}, set()
        return arrival


def host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Memory on the host for a copy of `like`: pinned for one of a GPU's, where the system allows that."""
    if like.is_cuda:
        try:
            return torch.empty_like(like, device="cpu", pin_memory=True)
        except RuntimeError:
            pass  # A limit on locked memory: the copy then takes longer, and is as good.
    return torch.empty_like(like, device="cpu")
