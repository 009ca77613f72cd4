"""Tensors on GPUs from rank to rank by the process group's own sends: their bytes never come to the host.

With NCCL alone. Each rank of a chain receives a parcel while it sends the one before. A parcel is packed from many
tensors, because each send costs the same time however small it is, and no type or layout of a tensor matters to it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from elasticrt.distributed import collectives
from elasticrt.distributed.regroup import Overtaken

# Each rank has room for two of these on its GPU.
PARCEL_BYTES = 16 * 1024 * 1024
# So many parcels may be under way on the GPU, so that it does not wait for Python. Their order there keeps them apart.
AHEAD = 4
# Between two questions whether a GPU has come so far. CUDA can be waited for, but not with a limit.
LOOK_S = 0.001

WORD_BYTES = 8


def device() -> torch.device | None:
    """Where tensors lie that the group sends itself; None if all go by way of the host."""
    if not dist.is_initialized():
        return None
    place = collectives.device()
    return None if place.type == "cpu" else place


def parcels(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The bytes of contiguous tensors in their order: lists of parts, which fill PARCEL_BYTES but for the last one."""
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


class GroupLine:
    """One rank's place in a chain: it receives from the rank `before`, if any, and sends to the one `behind`, if any.

    A rank is taken for lost when nothing has moved for `stall_s`. `over` tells whether another generation has begun.
    """

    def __init__(
        self, device: torch.device, before: int | None, behind: int | None, stall_s: float, over: Callable[[], bool]
    ) -> None:
        self._device = device
        self._before = before
        self._behind = behind
        self._stall_s = stall_s
        self._over = over
        self._under_way: deque[torch.cuda.Event] = deque()

    def carries(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor travels so, and not by way of the host."""
        return tensor.device.type == self._device.type

    def carry(self, tensors: Sequence[torch.Tensor]) -> int:
        """Send contiguous tensors, or receive into them and pass them on. Returns a checksum of 64 bits.

        Raises DistNetworkError when nothing moves, Overtaken when another generation has begun, torch's error when the
        group fails. An aborted send ends like any other: what was received counts only with the sender's checksum.
        """
        stages = [torch.empty(PARCEL_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2 if tensors else 0)]
        checksum = torch.zeros((), dtype=torch.int64, device=self._device)
        filled: torch.Tensor | None = None
        for number, parcel in enumerate(parcels(tensors)):
            sizes = [each.numel() for each in parcel]
            size = sum(sizes)
            stage = stages[number % 2][: -(-size // WORD_BYTES) * WORD_BYTES]  # Whole words.
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
        """Receive a parcel, and send the one before."""
        moves = []
        if into is not None and self._before is not None:
            moves.append(dist.P2POp(dist.irecv, into, self._before))
        if filled is not None and self._behind is not None:
            moves.append(dist.P2POp(dist.isend, filled, self._behind))
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()  # On a GPU only the stream waits.
        if self._device.type == "cuda":
            self._under_way.append(torch.cuda.current_stream(self._device).record_event())
        self._settle(AHEAD)

    def _settle(self, most: int) -> None:
        """Wait until no more than `most` parcels are under way on the GPU."""
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
                raise dist.DistNetworkError(f"the state of another rank has not come through the group: {how}")
            time.sleep(LOOK_S)
        if self._over():  # An aborted send ends as well.
            raise Overtaken
