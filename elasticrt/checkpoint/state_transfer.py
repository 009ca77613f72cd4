"""Training state from a rank that has it to those that have not, straight into their tensors.

When a world loses a rank, the others differ by at most one finished step; newcomers have no state. So all say how far
they are, and the ranks behind get the state of the first of the furthest.

It travels over TCP connections of its own, along a chain of those alone that need it: each rank takes it from the one
before and passes it on at once. Every wait ends when nothing has moved for `STALL_S`, or when another generation has
begun; so a rank that dies, stops or is cut off in the middle of a state costs seconds. Structure and plain values come
first, as one small message that is read with `weights_only`, then the bytes of the tensors as they lie, then their
checksum: state that has changed on its way is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from elasticrt.checkpoint.checkpoint_dir import parse
from elasticrt.distributed.regroup import Meeting, Overtaken
from elasticrt.errors import explain
from elasticrt.ipc.cgroups import available_bytes

STALL_S = 5.0
"""A rank from which, or to which, no byte has moved for so long is gone."""

LOOK_S = 0.05
"""How often a wait looks whether another generation has begun."""

PIECE_BYTES = 8 * 1024 * 1024
"""What is sent and summed up at a time, and passed on to the next rank."""

PACK_BYTES = 1024 * 1024
"""Small tensors travel together, up to so much."""

SPARE_COPIES = 2
"""Tensors like each parameter that an optimizer keeps, at the most: more than that are made when they come."""

ROW_BYTES = 64 * 1024
_NUMBER = struct.Struct("!Q")
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


class Spare:
    """Memory on the host for what a newcomer has not yet: touched while nobody waits for it.

    An optimizer makes its state in its first step, for Adam two tensors like each parameter. Memory that is new takes
    several times as long to be written to as what is received takes to come.

    Args:
        parameters: of the newcomer's modules. Nothing is made where there is little room.
    """

    def __init__(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        here = [each.detach() for each in parameters if each.device.type == "cpu"]
        if SPARE_COPIES * sum(map(_size, here)) > available_bytes() // 2:
            here = []
        self._tensors: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for each in here:
            made = [torch.empty(each.shape, dtype=each.dtype).zero_() for _ in range(SPARE_COPIES)]
            self._tensors.setdefault((each.shape, each.dtype), []).extend(made)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A tensor with any content, of this memory where it fits, else a new one."""
        fitting = self._tensors.get((shape, dtype)) if device == "cpu" else None
        return fitting.pop() if fitting else torch.empty(shape, dtype=dtype, device=device)


def share(
    mine: Standing,
    meeting: Meeting,
    state: Callable[[], dict[str, Any]],
    overwrites: Callable[[], None],
    spare: Spare | None = None,
) -> dict[str, Any] | None:
    """Agree on the furthest state. What this rank has to take over, None if it is as far as anybody. Collective.

    Args:
        mine: how far this rank is.
        meeting: where the ranks of the generation have met.
        state: gives this rank's own state, to send or to be written to: nested dicts, lists and tuples of tensors and
            plain values. What the receiver has may lack parts.
        overwrites: called before this rank's own tensors are written to: until all is here they are of no step. A rank
            whose state is whole receives beside it, where there is room: should the sender die, nothing is lost.
        spare: memory for what this rank's own state lacks.

    Raises RuntimeError when nobody has a state, or when it does not arrive as it was sent; DistNetworkError when a rank
    is gone; Overtaken when another generation has begun.
    """
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(_listening(meeting.address))
        said = json.dumps([mine.step, mine.whole, meeting.address, listening.getsockname()[1]])
        told = [json.loads(each) for each in meeting.gather("standing", said)]
        agreed = plan([Standing(step, whole) for step, whole, *_ in told])
        if agreed is None:
            raise RuntimeError(explain("no rank of this generation has a state", "share", expected="one that lives on"))
        chain = (agreed.source, *agreed.behind)
        if meeting.rank not in chain:
            return None
        place = chain.index(meeting.rank)
        before = behind = None
        if place:
            before = stack.enter_context(_connected(tuple(told[chain[place - 1]][2:]), meeting))
        if place + 1 < len(chain):
            behind = stack.enter_context(_accepted(listening, chain[place + 1], meeting))
        if before is not None:
            return _receive(state(), spare or Spare(), before, behind, overwrites, keeps=mine.whole)
        if behind is not None:
            _send(state(), behind)
    return None


def rehearse(state: dict[str, Any]) -> dict[str, Any]:
    """What `share` does with a state, without a peer: the state in the tensors that it is in already."""
    tensors: list[torch.Tensor] = []
    told: dict[str, Any] = _filled(parse(bytearray(_outlined(state, tensors))), state, Spare(), [])
    for pack in islice(_packs(tensors), 1):
        _checksum(torch.split(_together(pack), PIECE_BYTES)[0])
    return told


class Line:
    """A connection to one rank, used by one thread. It is closed at the end of a `with` block.

    Args:
        connection: the socket.
        over: whether another generation has begun.
    """

    def __init__(self, connection: socket.socket, over: Callable[[], bool]) -> None:
        connection.settimeout(LOOK_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._over = over

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it."""
        left = memoryview(data)
        while left:
            left = left[self._moved(self._connection.send, left) :]

    def fill(self, room: bytearray | memoryview) -> None:
        """Receive until `room` is full."""
        left = memoryview(room)
        while left:
            left = left[self._moved(self._connection.recv_into, left) :]

    def _moved(self, move: Callable[[memoryview], int], data: memoryview) -> int:
        deadline = time.monotonic() + STALL_S
        while not self._over():
            try:
                count = move(data)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise _gone(f"nothing has moved for {STALL_S:g} s") from None
                continue
            except OSError as error:
                raise _gone(str(error)) from error
            if not count:
                raise _gone("connection closed by peer")
            return count
        raise Overtaken


def _gone(how: str) -> Exception:
    gone: Exception = dist.DistNetworkError(f"the state of another rank has not come through: {how}")
    return gone


def _listening(address: str) -> socket.socket:
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def _hello(rank: int, meeting: Meeting) -> bytes:
    """What a rank that wants the state says first: a stranger does not know it."""
    return f"{meeting.nonce} {rank}".encode()


def _connected(address: tuple[str, int], meeting: Meeting) -> Line:
    try:
        line = Line(socket.create_connection(address, timeout=STALL_S), meeting.over)
    except OSError as error:
        raise _gone(str(error)) from error
    line.send(_hello(meeting.rank, meeting))
    return line


def _accepted(listening: socket.socket, rank: int, meeting: Meeting) -> Line:
    """The connection of `rank`. Strangers are let go of."""
    expected, deadline = _hello(rank, meeting), time.monotonic() + STALL_S
    listening.settimeout(LOOK_S)
    while not meeting.over():
        try:
            line = Line(listening.accept()[0], meeting.over)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise _gone(f"rank {rank} has not come for it in {STALL_S:g} s") from None
            continue
        said = bytearray(len(expected))
        with contextlib.suppress(dist.DistNetworkError):
            line.fill(said)
        if said == expected:
            return line
        line.__exit__()
    raise Overtaken


def _send(state: dict[str, Any], behind: Line) -> None:
    tensors: list[torch.Tensor] = []
    outline = _outlined(state, tensors)
    behind.send(_NUMBER.pack(len(outline)) + outline)
    total = 0
    for pack in _packs(tensors):
        for piece in torch.split(_together(pack), PIECE_BYTES):
            behind.send(_view(piece))
            total = _checksum(piece, total)
    behind.send(_NUMBER.pack(total))


def _receive(
    own: dict[str, Any], spare: Spare, before: Line, behind: Line | None, overwrites: Callable[[], None], *, keeps: bool
) -> dict[str, Any]:
    def passed(size: int) -> bytearray:
        room = bytearray(size)
        before.fill(room)
        if behind is not None:
            behind.send(room)
        return room

    told = parse(passed(_NUMBER.unpack(passed(_NUMBER.size))[0]))
    places: list[torch.Tensor] = []
    filled: dict[str, Any] = _filled(told, own, spare, places)
    beside = keeps and sum(map(_size, places)) < available_bytes() // 2
    targets = [torch.empty(each.shape, dtype=each.dtype) for each in places] if beside else places
    if not beside:
        overwrites()
    total = 0
    for pack in _packs(targets):
        direct = _travels_as_it_lies(pack)
        flat = _bytes(pack[0]) if direct else torch.empty(sum(map(_size, pack)), dtype=torch.uint8)
        for piece in torch.split(flat, PIECE_BYTES):
            view = _view(piece)
            before.fill(view)
            if behind is not None:
                behind.send(view)
            total = _checksum(piece, total)
        if not direct:
            _unpack(flat, pack)
    if _NUMBER.unpack(passed(_NUMBER.size))[0] != total:
        remedy = "If it happens again, the memory or the network of this node is bad"
        raise RuntimeError(explain("the state has changed on its way to this rank", "share", remedy=remedy))
    if beside:
        overwrites()
        for place, target in zip(places, targets, strict=True):
            place.copy_(target)
    return filled


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in order, small ones together: a piece costs as much as some kilobytes. None is empty."""
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


def _travels_as_it_lies(pack: Sequence[torch.Tensor]) -> bool:
    """Whether the bytes of a pack lie flat on the host, where they can be summed up as words of 8."""
    first = pack[0]
    aligned = first.storage_offset() * first.element_size() % 8 == 0
    return len(pack) == 1 and first.device.type == "cpu" and first.is_contiguous() and aligned


def _together(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of a pack on the host: as they lie, else in a copy."""
    return _bytes(pack[0]) if _travels_as_it_lies(pack) else torch.cat([_bytes(each.cpu()) for each in pack])


def _view(piece: torch.Tensor) -> memoryview:
    """The memory of a flat piece, which has to be kept meanwhile."""
    return memoryview((ctypes.c_char * piece.numel()).from_address(piece.data_ptr())).cast("B")


def _unpack(flat: torch.Tensor, pack: Sequence[torch.Tensor]) -> None:
    for place, part in zip(pack, torch.split(flat, [_size(each) for each in pack]), strict=True):
        aligned = part if part.storage_offset() % place.element_size() == 0 else part.clone()
        place.copy_(aligned.view(place.dtype).reshape(place.shape))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _outlined(state: dict[str, Any], tensors: list[torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(_outline(state, tensors), buffer)
    return buffer.getvalue()


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


def _filled(told: Any, own: Any, spare: Spare, places: list[torch.Tensor]) -> Any:
    """`told` with a tensor for each mark: this rank's own where it fits, else a spare one. They are appended in
    order."""
    if isinstance(told, tuple) and len(told) == 4 and told[0] == _MARK:
        dtype, shape, device = getattr(torch, told[1]), torch.Size(told[2]), told[3]
        fits = isinstance(own, torch.Tensor) and own.dtype == dtype and own.shape == shape and own.device.type == device
        place = own if fits else spare.take(shape, dtype, device)
        places.append(place)
        return place
    if isinstance(told, dict):
        has = own if isinstance(own, dict) else {}
        return {key: _filled(each, has.get(key), spare, places) for key, each in told.items()}
    if isinstance(told, (list, tuple)):
        has_list = own if isinstance(own, (list, tuple)) and len(own) == len(told) else [None] * len(told)
        return type(told)(_filled(each, mine, spare, places) for each, mine in zip(told, has_list, strict=True))
    return told


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor: itself where it lies flat, else a copy."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _checksum(piece: torch.Tensor, before: int = 0) -> int:
    """A sum over 8-byte words, rows of them weighted by their place, on top of the one of the pieces before.

    An accident of wire or memory changes it.
    """
    whole = piece.numel() // ROW_BYTES * ROW_BYTES
    rows = piece[:whole].view(torch.int64).view(-1, ROW_BYTES // 8).sum(1)
    rest = piece[whole:].to(torch.int64)
    odd = torch.arange(1, 2 * max(len(rows), len(rest)) + 1, 2)
    total = int(((rows * odd[: len(rows)]).sum() + (rest * odd[: len(rest)]).sum()).item())
    return (before * 31 + total) & 0xFFFFFFFFFFFFFFFF
