"""Training state from those who have it to those who have not, over the process group, tensors straight into place.

Ranks of a world differ by at most one finished step when it loses somebody, and newcomers have nothing. So all say how
far they are, and who is behind gets the state of the first of those that are furthest. Structure and plain values
travel as one small message that is read with `weights_only`; tensors follow in pieces, along a chain of those alone
that need them. The receiver's own tensors are written to where they fit. A checksum of each piece comes last: state
that has changed on its way is refused.
"""

from __future__ import annotations

import ctypes
import io
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from elasticrt.checkpoint.checkpoint_dir import parse
from elasticrt.distributed import collectives
from elasticrt.errors import explain
from elasticrt.ipc.cgroups import available_bytes

CHUNK_BYTES = 8 * 1024 * 1024
PACK_BYTES = 1024 * 1024
ROW_BYTES = 64 * 1024
HUGE_BYTES = 2 * 1024 * 1024
AHEAD = 4
"""Pieces that are on their way at a time, for each of receiving and sending."""
_MARK = "elasticrt-tensor"


@dataclass(frozen=True)
class Standing:
    """How far one rank is: `step` finished, or -1 without a state; `whole`: its state is that of just this step."""

    step: int
    whole: bool


@dataclass(frozen=True)
class Plan:
    """Who sends to whom: rank `source` to `behind`. Nobody when all are equally far."""

    source: int
    behind: tuple[int, ...]


def plan(standings: Sequence[Standing]) -> Plan | None:
    """The first of the furthest sends to all who are not as far as it. None when nobody has a whole state. Pure.

    A rank whose optimizer has stepped in a step that it did not end has the state of no step: it is behind.
    """
    furthest = max((each.step for each in standings if each.whole and each.step >= 0), default=-1)
    if furthest < 0:
        return None
    level = [rank for rank, each in enumerate(standings) if each.whole and each.step == furthest]
    behind = tuple(rank for rank in range(len(standings)) if rank not in level)
    return Plan(level[0], behind)


def share(mine: Standing, state: Callable[[], dict[str, Any]], overwrites: Callable[[], None]) -> dict[str, Any] | None:
    """Agree on the furthest state. What this rank has to take over, None if it is as far as anybody. Collective.

    Args:
        mine: how far this rank is.
        state: gives this rank's own state, to send or to be written to: nested dicts, lists and tuples of tensors and
            plain values. What the receiver has may lack parts.
        overwrites: called before this rank's own tensors are written to: until all is here they are of no step. A rank
            whose state is whole receives beside it, where there is room: should the sender die, nothing is lost.

    Raises RuntimeError when nobody has a state, or when it does not arrive as it was sent.
    """
    told = collectives.gather_numbers([mine.step, int(mine.whole)])
    agreed = plan([Standing(step, bool(whole)) for step, whole in told])
    if agreed is None:
        raise RuntimeError(explain("no rank of this generation has a state", "share", expected="one that lives on"))
    rank, _ = collectives.rank_and_world()
    if rank == agreed.source and agreed.behind:
        _send(state(), agreed.behind[0])
    elif rank in agreed.behind:
        index = agreed.behind.index(rank)
        along = (agreed.source, *agreed.behind)
        following = next(iter(agreed.behind[index + 1 :]), None)
        return _receive(state(), along[index], following, overwrites, keeps=mine.whole)
    return None


def rehearse(state: dict[str, Any]) -> dict[str, Any]:
    """What `share` does with a state, without a peer: the state in the tensors that it is in already."""
    tensors: list[torch.Tensor] = []
    buffer = io.BytesIO()
    torch.save(_outline(state, tensors), buffer)
    told: dict[str, Any] = _filled(parse(bytearray(buffer.getbuffer())), state, [])
    for piece, _ in islice(_pieces(tensors, arrive=False), 1):
        _checksum(piece)
    return told


def _send(state: dict[str, Any], behind: int) -> None:
    tensors: list[torch.Tensor] = []
    buffer = io.BytesIO()
    torch.save(_outline(state, tensors), buffer)
    outline = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    way = _Way(None, behind)
    way.one(torch.tensor([outline.numel()], dtype=torch.int64))
    way.one(outline)
    way.one(torch.tensor([*way.carry(_pieces(tensors, arrive=False)), 0], dtype=torch.int64))


def _receive(
    own: dict[str, Any], before: int, behind: int | None, overwrites: Callable[[], None], *, keeps: bool
) -> dict[str, Any]:
    way = _Way(before, behind)
    size = way.one(torch.empty(1, dtype=torch.int64))
    outline = way.one(torch.empty(int(size.item()), dtype=torch.uint8))
    told = parse(bytearray(outline.numpy().tobytes()))
    places: list[torch.Tensor] = []
    filled: dict[str, Any] = _filled(told, own, places)
    beside = keeps and sum(map(_size, places)) < available_bytes() // 2
    targets = [torch.empty(each.shape, dtype=each.dtype) for each in places] if beside else places
    if not beside:
        overwrites()
    sums = way.carry(_pieces(targets, arrive=True))
    if way.one(torch.empty(len(sums) + 1, dtype=torch.int64)).tolist() != [*sums, 0]:
        raise RuntimeError(
            explain(
                "the state has changed on its way to this rank",
                f"rank {collectives.rank_and_world()[0]}",
                remedy="If it happens again, the memory or the network of this node is bad",
            )
        )
    if beside:
        overwrites()
        for place, target in zip(places, targets, strict=True):
            place.copy_(target)
    return filled


_Piece = tuple[torch.Tensor, Callable[[], None] | None]
"""Bytes that travel at a time, and what to do when they have arrived."""


class _Way:
    """The state's way along the ranks that need it: each takes it from the one before and passes it on at once.

    So nobody sends it more than once, however many need it. The next pieces travel while one is summed up.
    """

    def __init__(self, before: int | None, behind: int | None) -> None:
        self._before, self._behind = before, behind
        self._place = collectives.device()
        self._going: deque[tuple[Any, torch.Tensor]] = deque()

    def one(self, tensor: torch.Tensor) -> torch.Tensor:
        """A message of its own."""
        self.carry([(tensor, None)])
        return tensor

    def carry(self, pieces: Iterable[_Piece]) -> list[int]:
        """Receive the pieces, where there is a rank before; send them, where there is one behind. Their checksums."""
        sums = []
        coming: deque[tuple[_Piece, Callable[[], torch.Tensor]]] = deque()
        for piece in pieces:
            coming.append((piece, self._begin(piece[0])))
            if len(coming) > AHEAD:
                sums.append(self._end(*coming.popleft()))
        sums += [self._end(*each) for each in coming]
        self._sent(0)
        return sums

    def _begin(self, piece: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Gives what waits until the piece is here, and where the group can reach it."""
        if self._before is None:
            return lambda: piece.to(self._place)
        here = piece.device.type == self._place.type
        travelling = piece if here else torch.empty_like(piece, device=self._place)
        work: Any = dist.irecv(travelling, self._before)

        def arrived() -> torch.Tensor:
            work.wait()
            if not here:
                piece.copy_(travelling)
            return travelling

        return arrived

    def _end(self, piece: _Piece, arrived: Callable[[], torch.Tensor]) -> int:
        travelling = arrived()
        if self._behind is not None:
            self._going.append((dist.isend(travelling, self._behind), travelling))
        total = _checksum(travelling)
        if piece[1] is not None:
            piece[1]()
        self._sent(AHEAD)
        return total

    def _sent(self, left: int) -> None:
        """Wait until all but so many sends are over."""
        while len(self._going) > left:
            self._going.popleft()[0].wait()


def _pieces(tensors: Sequence[torch.Tensor], *, arrive: bool) -> Iterator[_Piece]:
    """The bytes of the tensors, the same pieces on all ranks. `arrive`: they are to be written to."""
    for pack in _packs(tensors):
        direct = len(pack) == 1 and _lies_flat(pack[0])
        if direct:
            flat = _bytes(pack[0])
        elif arrive:
            flat = torch.empty(sum(map(_size, pack)), dtype=torch.uint8)
        else:
            flat = torch.cat([_bytes(each.cpu()) for each in pack])
        *others, last = torch.split(flat, CHUNK_BYTES)
        for chunk in others:
            yield chunk, None
        yield last, partial(_unpack, flat, pack) if arrive and not direct else None


def _unpack(flat: torch.Tensor, pack: Sequence[torch.Tensor]) -> None:
    for place, part in zip(pack, torch.split(flat, [_size(each) for each in pack]), strict=True):
        aligned = part if part.storage_offset() % place.element_size() == 0 else part.clone()
        place.copy_(aligned.view(place.dtype).reshape(place.shape))


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, small ones together: a message costs as much as some hundred kilobytes. None is empty."""
    pack: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if pack and size + _size(tensor) > PACK_BYTES:
            yield pack
            pack, size = [], 0
        if _size(tensor):
            pack.append(tensor.detach())
            size += _size(tensor)
    if pack:
        yield pack


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a mark in place of each tensor, which is appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return (_MARK, str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type)
    if isinstance(value, dict):
        return {key: _outline(each, tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_outline(each, tensors) for each in value) if type(value) in (list, tuple) else value
    return value


def _filled(told: Any, own: Any, places: list[torch.Tensor]) -> Any:
    """`told` with a tensor for each mark: this rank's own where it fits, else a new one. They are appended in order."""
    if isinstance(told, tuple) and len(told) == 4 and told[0] == _MARK:
        dtype, shape, device = getattr(torch, told[1]), torch.Size(told[2]), told[3]
        fits = isinstance(own, torch.Tensor) and own.dtype == dtype and own.shape == shape and own.device.type == device
        place = own if fits else _fresh(shape, dtype, device)
        places.append(place)
        return place
    if isinstance(told, dict):
        has = own if isinstance(own, dict) else {}
        return {key: _filled(each, has.get(key), places) for key, each in told.items()}
    if isinstance(told, (list, tuple)):
        has_list = own if isinstance(own, (list, tuple)) and len(own) == len(told) else [None] * len(told)
        return type(told)(_filled(each, mine, places) for each, mine in zip(told, has_list, strict=True))
    return told


def _fresh(shape: torch.Size, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A new tensor. A large one is of huge pages where the kernel has them: touching small ones costs more than
    receiving does."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    first, end = -(-tensor.data_ptr() // mmap.PAGESIZE), (tensor.data_ptr() + _size(tensor)) // mmap.PAGESIZE
    if device == "cpu" and _size(tensor) >= HUGE_BYTES:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((end - first) * mmap.PAGESIZE), mmap.MADV_HUGEPAGE
        )
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor: itself where it lies flat, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _lies_flat(tensor: torch.Tensor) -> bool:
    """Whether its bytes can travel as they lie, and be summed up as words of 8."""
    return tensor.is_contiguous() and tensor.storage_offset() * tensor.element_size() % 8 == 0


def _checksum(flat: torch.Tensor) -> int:
    """A sum over 8-byte words, rows of them weighted by their place: an accident of wire or memory changes it."""
    whole = flat.numel() // ROW_BYTES * ROW_BYTES
    rows = flat[:whole].view(torch.int64).view(-1, ROW_BYTES // 8).sum(1)
    rest = flat[whole:].to(torch.int64)
    odd = torch.arange(1, 2 * max(len(rows), len(rest)) + 1, 2, device=flat.device)
    return int(((rows * odd[: len(rows)]).sum() + (rest * odd[: len(rest)]).sum()).item()) & 0x7FFFFFFFFFFFFFFF
