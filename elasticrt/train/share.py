"""Training state from those who have it to those who have not, over the process group, tensors straight into place.

Ranks of a world differ by at most one finished step when it loses somebody, and newcomers have nothing. So all say how
far they are, and who is behind gets the state of the first of those that are furthest. Structure and plain values
travel as one small message that is read with `weights_only`; tensors follow in chunks, to those alone that need them.
The receiver's own tensors are written to where they fit. A checksum of each tensor comes last: state that has changed
on its way is refused.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elasticrt.errors import explain
from elasticrt.train import collective
from elasticrt.train.archive import parse
from elasticrt.train.room import available_bytes

CHUNK_BYTES = 16 * 1024 * 1024
PACK_BYTES = 1024 * 1024
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
    told = collective.gather_numbers([mine.step, int(mine.whole)])
    agreed = plan([Standing(step, bool(whole)) for step, whole in told])
    if agreed is None:
        raise RuntimeError(explain("no rank of this generation has a state", "share", expected="one that lives on"))
    rank, _ = collective.rank_and_world()
    if rank == agreed.source and agreed.behind:
        _send(state(), agreed.behind)
    elif rank in agreed.behind:
        return _receive(state(), agreed.source, overwrites, keeps=mine.whole)
    return None


def _send(state: dict[str, Any], ranks: Sequence[int]) -> None:
    tensors: list[torch.Tensor] = []
    buffer = io.BytesIO()
    torch.save(_outline(state, tensors), buffer)
    outline = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    _to_all(torch.tensor([outline.numel()], dtype=torch.int64), ranks)
    _to_all(outline, ranks)
    sums = []
    for pack in _packs(tensors):
        flat = _bytes(pack[0]) if len(pack) == 1 else torch.cat([_bytes(each) for each in pack])
        for chunk in torch.split(flat, CHUNK_BYTES):
            _to_all(chunk, ranks)
        sums.append(_checksum(flat))
    _to_all(torch.tensor([*sums, 0], dtype=torch.int64), ranks)


def _receive(own: dict[str, Any], source: int, overwrites: Callable[[], None], *, keeps: bool) -> dict[str, Any]:
    size = _from(torch.empty(1, dtype=torch.int64), source)
    outline = _from(torch.empty(int(size.item()), dtype=torch.uint8), source)
    told = parse(bytearray(outline.numpy().tobytes()))
    places: list[torch.Tensor] = []
    filled: dict[str, Any] = _filled(told, own, places)
    beside = keeps and sum(map(_size, places)) < available_bytes() // 2
    targets = [torch.empty(each.shape, dtype=each.dtype) for each in places] if beside else places
    if not beside:
        overwrites()
    sums = []
    for pack in _packs(targets):
        direct = len(pack) == 1 and pack[0].is_contiguous()
        flat = _bytes(pack[0]) if direct else torch.empty(sum(map(_size, pack)), dtype=torch.uint8)
        for chunk in torch.split(flat, CHUNK_BYTES):
            _from(chunk, source)
        sums.append(_checksum(flat))
        if not direct or flat.data_ptr() != pack[0].data_ptr():
            for place, part in zip(pack, torch.split(flat, [_size(each) for each in pack]), strict=True):
                place.copy_(part.clone().view(place.dtype).reshape(place.shape))
    if _from(torch.empty(len(sums) + 1, dtype=torch.int64), source).tolist() != [*sums, 0]:
        raise RuntimeError(
            explain(
                "the state has changed on its way to this rank",
                f"rank {collective.rank_and_world()[0]}",
                remedy="If it happens again, the memory or the network of this node is bad",
            )
        )
    if beside:
        overwrites()
        for place, target in zip(places, targets, strict=True):
            place.copy_(target)
    return filled


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
        place = own if fits else torch.empty(shape, dtype=dtype, device=device)
        places.append(place)
        return place
    if isinstance(told, dict):
        has = own if isinstance(own, dict) else {}
        return {key: _filled(each, has.get(key), places) for key, each in told.items()}
    if isinstance(told, (list, tuple)):
        has_list = own if isinstance(own, (list, tuple)) and len(own) == len(told) else [None] * len(told)
        return type(told)(_filled(each, mine, places) for each, mine in zip(told, has_list, strict=True))
    return told


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor: itself where it is contiguous and aligned, else a copy."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return flat if flat.storage_offset() % 8 == 0 else flat.clone()


def _checksum(flat: torch.Tensor) -> int:
    """A sum over 8-byte words, pieces weighted by their place: an accident of wire or memory changes it."""
    whole = flat.numel() // 8 * 8
    total = int(flat[whole:].to(torch.int64).sum().item()) if whole < flat.numel() else 0
    if whole:
        for i, piece in enumerate(torch.split(flat[:whole].view(torch.int64), 1 << 16)):
            total = (total + (2 * i + 1) * int(piece.sum().item())) & 0x7FFFFFFFFFFFFFFF
    return total


def _to_all(tensor: torch.Tensor, ranks: Sequence[int]) -> None:
    travelling = tensor.to(collective.device())
    for work in [dist.isend(travelling, rank) for rank in ranks]:
        assert work is not None, "this rank is in the group"
        work.wait()


def _from(tensor: torch.Tensor, source: int) -> torch.Tensor:
    """Receive into `tensor`, through another one where it lies on a device that the group cannot reach."""
    place = collective.device()
    travelling = tensor if tensor.device.type == place.type else torch.empty_like(tensor, device=place)
    dist.recv(travelling, source)
    return tensor if travelling is tensor else tensor.copy_(travelling)
