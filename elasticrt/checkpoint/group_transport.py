"""Sends tensors on GPUs from rank to rank through the process group. Their bytes never come to the host.

This works with NCCL alone. Each rank of a chain receives one parcel while it sends the parcel before. A parcel is
packed from the bytes of many tensors: each send costs the same time, however small it is, and a parcel does not depend
on the types and layouts of its tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from elasticrt.distributed import collectives
from elasticrt.distributed.regroup import Overtaken

# Each rank needs room for two parcels on its GPU.
PARCEL_BYTES = 16 * 1024 * 1024
# So many parcels may be queued on the GPU, so that the GPU does not wait for Python. They share two buffers; the order
# of the stream keeps them apart.
AHEAD = 4
# The pause, in seconds, between two looks at an event of the GPU. CUDA's own wait for an event has no time limit.
LOOK_S = 0.001

# The checksum adds up words of 64 bits.
WORD_BYTES = 8


def device() -> torch.device | None:
    """The device whose tensors the process group sends itself; None if all tensors travel through the host."""
    if not dist.is_initialized():
        return None
    place = collectives.device()
    return None if place.type == "cpu" else place


def parcels(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The bytes of contiguous tensors, in order, as parcels: lists of parts of tensors.

    Each parcel has PARCEL_BYTES, but the last one may be smaller.
    """
    parcel: list[torch.Tensor] = []
    room = PARCEL_BYTES
    for tensor in tensors:
        rest = tensor.reshape(-1).view(torch.uint8)
        while rest.numel():
            part, rest = rest[:room], rest[room:]
            parcel.append(part)
            room -= part.numel()
            if not room:
                yield parcel
                parcel, room = [], PARCEL_BYTES
    if parcel:
        yield parcel


class GroupTransport:
    """One rank's place in a chain of ranks.

    Args:
        device: where the parcels lie.
        before: the rank to receive from; None for the sender.
        behind: the rank to send to; None at the end of the chain.
        stall_s: a rank counts as lost when nothing has moved for so many seconds.
        over: tells whether another generation has begun.
    """

    def __init__(
        self, device: torch.device, before: int | None, behind: int | None, stall_s: float, over: Callable[[], bool]
    ) -> None:
        self._device = device
        self._before = before
        self._behind = behind
        self._stall_s = stall_s
        self._over = over
        self._under_way: deque[torch.cuda.Event] = deque()  # One event for each queued parcel, the oldest first.

    def carries(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` travels through the process group, and not through the host."""
        return tensor.device.type == self._device.type

    def carry(self, tensors: Sequence[torch.Tensor]) -> int:
        """Send contiguous tensors, or receive into them and pass them on. Returns a checksum of 64 bits.

        Raises DistNetworkError when nothing moves, Overtaken when another generation has begun, and torch's error when
        the group fails. An aborted send ends like any other, so what was received counts only if the checksum is the
        sender's.
        """
        # Two buffers in turn: one is sent while the next one is filled.
        stages = [torch.empty(PARCEL_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2 if tensors else 0)]
        checksum = torch.zeros((), dtype=torch.int64, device=self._device)
        filled: torch.Tensor | None = None
        for number, parcel in enumerate(parcels(tensors)):
            sizes = [each.numel() for each in parcel]
            size = sum(sizes)
            # Rounded up to whole words, for the checksum.
            stage = stages[number % 2][: -(-size // WORD_BYTES) * WORD_BYTES]
            places = list(torch.split(stage[:size], sizes))
            if self._before is None:
                stage[size:].zero_()
                torch._foreach_copy_(places, parcel)
                self._move(None, filled)
            else:
                self._move(stage, filled)
                torch._foreach_copy_(parcel, places)
            checksum.mul_(31).add_(stage.view(torch.int64).sum())
            filled = stage
        self._move(None, filled)
        self._settle(0)
        return int(checksum) % 2**64

    def _move(self, into: torch.Tensor | None, filled: torch.Tensor | None) -> None:
        """Receive a parcel `into` one buffer, and send the `filled` one, both at once. None: nothing to do."""
        moves = []
        if into is not None and self._before is not None:
            moves.append(dist.P2POp(dist.irecv, into, self._before))
        if filled is not None and self._behind is not None:
            moves.append(dist.P2POp(dist.isend, filled, self._behind))
        for work in dist.batch_isend_irecv(moves) if moves else ():
            # With NCCL this makes the stream wait, not this thread.
            work.wait()
        if self._device.type == "cuda":
            self._under_way.append(torch.cuda.current_stream(self._device).record_event())
        self._settle(AHEAD)

    def _settle(self, most: int) -> None:
        """Wait until no more than `most` parcels are queued on the GPU."""
        deadline = time.monotonic() + self._stall_s
        while len(self._under_way) > most:
            if self._under_way[0].query():  # type: ignore[no-untyped-call]
                self._under_way.popleft()
                deadline = time.monotonic() + self._stall_s
                continue
            if self._over():
                break
            if time.monotonic() > deadline:
                how = f"nothing has moved for {self._stall_s:g} s"
                raise dist.DistNetworkError(f"the state of another rank did not arrive through the group: {how}")
            time.sleep(LOOK_S)
        # Also without a wait: an abort ends the sends, and with them the loop above.
        if self._over():
            raise Overtaken
