"""Sends the training state from a rank that has it to the ranks that lack it, straight into their tensors.

After the loss of a rank the survivors differ by at most one finished step, and newcomers have no state. Every rank says
which step it has finished. The ranks behind receive the state of the lowest rank among those that are furthest.

The state travels along a chain of TCP connections, in which each rank passes on what it receives. The ranks of a node
follow one another, so the state comes to each node once. Every wait ends after `STALL_S` without a byte, or when
another generation begins, so a rank that dies or stops costs seconds. With NCCL, tensors on GPUs travel along the same
chain through the process group itself (`group_transport`).

The outline comes first: the structure and all plain values of the state, with a mark for each tensor, in one small
message that is read with `weights_only`. The bytes of the tensors follow, and then a checksum of 64 bits over them all.
For 400 MB the checksum takes 0.03 s of each rank's time; a CRC-32 takes 0.10 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import operator
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist

from elasticrt.checkpoint import group_transport
from elasticrt.checkpoint.checkpoint_dir import parse
from elasticrt.checkpoint.group_transport import GroupTransport
from elasticrt.checkpoint.snapshot import gpus_with_room
from elasticrt.checkpoint.state_copy import MOMENTS, Copier
from elasticrt.distributed.regroup import Meeting, Overtaken
from elasticrt.errors import explain
from elasticrt.ipc import proc
from elasticrt.ipc.cgroups import available_bytes

STALL_S = 5.0
"""A rank counts as lost when no byte has moved from it or to it for so many seconds."""

LOOK_S = 0.05
"""A wait checks at intervals of so many seconds whether another generation has begun."""

PIECE_BYTES = 255 * 1024
"""A rank passes on a tensor in pieces of this size, before the rest has arrived. For the checksum, torch adds up a
piece of twice this size in several threads. These wait for each other where other processes need the cores: measured,
twenty times the work."""

SPARE_COPIES = MOMENTS + 2
"""How many tensors like each parameter a newcomer will need: those of its optimizer, and in the first step a gradient
and a place in a bucket of DDP's reducer."""

WritableMemory = bytearray | memoryview
"""Memory to receive into."""

# The form of a number on the way: eight bytes, the most significant one first.
_NUMBER = struct.Struct("!Q")
# The first item of the tuple that stands for a tensor in an outline.
_MARK = "elasticrt-tensor"


def chain(steps: Sequence[int], addresses: Sequence[str]) -> tuple[int, ...]:
    """The ranks in the order in which the state travels: the lowest of the furthest, then all that are behind. Pure.

    The ranks on the sender's node come first, then the others node by node. Empty when no rank has a state.

    Args:
        steps: by rank, the last step that the rank has finished; -1 for a rank without the whole state of a step. A
            rank whose optimizer has stepped in a step that did not end has the state of no step.
        addresses: by rank, the address of its node.
    """
    furthest = max(steps, default=-1)
    if furthest < 0:
        return ()
    order = [steps.index(furthest), *(rank for rank, step in enumerate(steps) if step != furthest)]
    nodes = [addresses[rank] for rank in order]
    # Sorting is stable, and a node's key is the place of its first rank: the sender stays in front.
    return tuple(sorted(order, key=lambda rank: nodes.index(addresses[rank])))


class SpareTensors:
    """A newcomer's memory for the optimizer state that it does not have yet, touched while no other rank waits.

    A first write to new memory takes several times as long as the state takes to arrive. What the state leaves over is
    freed before the first step, and that step allocates its own tensors there.

    Args:
        parameters: the parameters of the newcomer's modules. For those on GPUs no memory is made, and none at all if it
            would take more than half of the free memory.
    """

    def __init__(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        here = [each.detach() for each in parameters if each.device.type == "cpu"]
        if SPARE_COPIES * sum(each.nbytes for each in here) > available_bytes() // 2:
            here = []
        self._tensors: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for each in here:
            # The kernel assigns a page at the first write: `zero_` makes that happen here.
            made = [torch.empty(each.shape, dtype=each.dtype).zero_() for _ in range(SPARE_COPIES)]
            self._tensors.setdefault((each.shape, each.dtype), []).extend(made)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: str) -> torch.Tensor:
        """A tensor with undefined content, from this memory if one of that shape and type is left, else a new one."""
        fitting = self._tensors.get((shape, dtype)) if device == "cpu" else None
        return fitting.pop() if fitting else torch.empty(shape, dtype=dtype, device=device)


def transfer_state(
    mine: int,
    meeting: Meeting,
    state: Callable[[], dict[str, Any]],
    overwrites: Callable[[], None],
    spare: SpareTensors | None = None,
    *,
    says: object = None,
) -> tuple[dict[str, Any] | None, list[tuple[int, Any]]]:
    """Agree on the furthest state, and send or receive it. Collective.

    Returns the state that this rank has received and has to take over, None if it is among the furthest ranks; and by
    rank the `mine` and the `says` of all ranks.

    Args:
        mine: the last step that this rank has finished; -1 without the whole state of a step.
        meeting: where the ranks of the generation have met.
        state: gives this rank's own state, to be sent or written to: nested dicts, lists and tuples of tensors and
            plain values. The state of a receiver may lack parts.
        overwrites: called before this rank's own tensors are written to. From then on they are of no step, until all
            has arrived. A rank with a whole state receives into other memory first, where there is room, and so loses
            nothing if the sender dies.
        spare: memory for what this rank's own state lacks.
        says: what the other ranks are to know of this one besides, as JSON has it.

    Raises RuntimeError when the state does not arrive as it was sent; DistNetworkError when a rank is lost, or no rank
    has a state; Overtaken when another generation has begun.
    """
    with contextlib.ExitStack() as stack:
        # This process has reached the store from this address, so the other ranks can reach the process there.
        own = meeting.store.address
        # Each rank says the last step that it has finished, and where it listens.
        listening = stack.enter_context(proc.listening(own))
        standing = json.dumps([mine, says, own, listening.getsockname()[1]])
        peers = [json.loads(each) for each in meeting.gather("standing", standing)]
        said = [(step, words) for step, words, *_ in peers]
        order = chain([step for step, _ in said], [address for *_, address, _ in peers])
        if not order:
            # The same error as for a peer that is lost meanwhile: this process waits for what the agents decide.
            raise dist.DistNetworkError("connection closed by peer: no rank of this generation has a training state")
        # Every rank computes the same order. A rank outside of the chain is as far as the sender.
        if meeting.rank not in order:
            return None, said
        place = order.index(meeting.rank)
        rank_before = order[place - 1] if place else None
        rank_behind = order[place + 1] if place + 1 < len(order) else None
        here = _ChainPlace()
        # Connect before accepting. The socket of the rank before listens already, so no cycle of waits can arise.
        if rank_before is not None:
            here.before = stack.enter_context(_connected(tuple(peers[rank_before][2:]), meeting))
        if rank_behind is not None:
            here.behind = stack.enter_context(_accepted(listening, rank_behind, meeting))
        device = group_transport.device()
        if device is not None:
            here.transport = GroupTransport(device, rank_before, rank_behind, STALL_S, meeting.over)
        if here.before is not None:
            return _receive(state(), spare or SpareTensors(), here, overwrites, keeps=mine >= 0), said
        if here.behind is not None:
            _send(state(), here.behind, here.transport)
    return None, said


def rehearse(state: dict[str, Any]) -> dict[str, Any]:
    """Do what `transfer_state` does with a state, without a peer. Returns the state in the tensors that it is in.

    A newcomer calls this while no other rank waits, because the first time takes longest.
    """
    filled: dict[str, Any] = _filled(parse(_outlined(state, [])), state, SpareTensors(), [])
    return filled


class RankConnection:
    """A TCP connection to one rank, used by one thread. The end of a `with` block closes it.

    Args:
        connection: the socket.
        over: tells whether another generation has begun.
    """

    def __init__(self, connection: socket.socket, over: Callable[[], bool]) -> None:
        # Each call ends after LOOK_S, so that `_moved` can look at `over`.
        connection.settimeout(LOOK_S)
        # The small messages at the beginning and the end must not wait for an acknowledgement (Nagle's algorithm).
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._over = over

    def __enter__(self) -> RankConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`."""
        left = memoryview(data)
        while left:
            left = left[self._moved(self._connection.send, left) :]

    def fill(self, room: WritableMemory) -> None:
        """Receive until `room` is full."""
        left = memoryview(room)
        while left:
            left = left[self._moved(self._connection.recv_into, left) :]

    def _moved(self, move: Callable[[memoryview], int], data: memoryview) -> int:
        """Send or receive some of `data`. Returns the number of bytes.

        Raises DistNetworkError after STALL_S without a byte, and when the peer is gone; Overtaken.
        """
        deadline = time.monotonic() + STALL_S
        while not self._over():
            try:
                count = move(data)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise _lost(f"nothing has moved for {STALL_S:g} s") from None
                continue
            except OSError as error:
                raise _lost(str(error)) from error
            if not count:
                raise _lost("connection closed by peer")
            return count
        raise Overtaken


@dataclass
class _ChainPlace:
    """A rank's place in the chain.

    Attributes:
        before: the connection to the rank that this rank receives from; None for the sender.
        behind: the connection to the rank that this rank sends to; None at the end of the chain.
        transport: carries the tensors that travel through the process group; None if all go through the host.
    """

    before: RankConnection | None = None
    behind: RankConnection | None = None
    transport: GroupTransport | None = None

    def passed(self, room: WritableMemory) -> WritableMemory:
        """Receive until `room` is full, and pass its content on. Returns `room`."""
        assert self.before is not None, "a receiver has one before it"
        self.before.fill(room)
        if self.behind is not None:
            self.behind.send(room)
        return room


def _lost(how: str) -> Exception:
    """The error of a rank that is lost, which torch's collectives raise as well."""
    error: Exception = dist.DistNetworkError(f"the state of another rank did not arrive: {how}")
    return error


def _hello(rank: int, meeting: Meeting) -> bytes:
    """The first bytes that a rank sends on its connection. A process outside of this generation does not know them."""
    return f"{meeting.nonce} {rank}".encode()


def _connected(address: tuple[str, int], meeting: Meeting) -> RankConnection:
    try:
        line = RankConnection(socket.create_connection(address, timeout=STALL_S), meeting.over)
    except OSError as error:
        raise _lost(str(error)) from error
    line.send(_hello(meeting.rank, meeting))
    return line


def _accepted(listening: socket.socket, rank: int, meeting: Meeting) -> RankConnection:
    """The connection of `rank`. Connections of processes outside of this generation are closed."""
    expected, deadline = _hello(rank, meeting), time.monotonic() + STALL_S
    listening.settimeout(LOOK_S)
    while not meeting.over():
        try:
            line = RankConnection(listening.accept()[0], meeting.over)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise _lost(f"rank {rank} did not fetch it in {STALL_S:g} s") from None
            continue
        said = bytearray(len(expected))
        with contextlib.suppress(dist.DistNetworkError):
            line.fill(said)
        if said == expected:
            return line
        line.__exit__()
    raise Overtaken


def _send(state: dict[str, Any], behind: RankConnection, transport: GroupTransport | None) -> None:
    """Send `state`: the outline with its length, the bytes of all tensors, their checksum."""
    tensors: list[torch.Tensor] = []
    outline = _outlined(state, tensors)
    behind.send(_NUMBER.pack(len(outline)) + outline)
    checksum = 0
    through_host, through_group = _parted(tensors, transport)
    for tensor in through_host:
        host = tensor.cpu().contiguous()
        for piece in _pieces(host):
            behind.send(piece)
            checksum = _added(piece, checksum)
    if transport is not None:
        checksum ^= transport.carry([each.contiguous() for each in through_group])
    behind.send(_NUMBER.pack(checksum))


def _parted(
    tensors: Sequence[torch.Tensor], transport: GroupTransport | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that travel through the host, and those that travel through the process group. Their order stays."""
    carried = [transport is not None and transport.carries(each) for each in tensors]
    return list(compress(tensors, map(operator.not_, carried))), list(compress(tensors, carried))


def _receive(
    own: dict[str, Any], spare: SpareTensors, here: _ChainPlace, overwrites: Callable[[], None], *, keeps: bool
) -> dict[str, Any]:
    """Receive a state, pass it on, and return it. It lies in the tensors of `own` where these fit.

    Args:
        own: this rank's own state.
        spare: memory for what `own` lacks.
        here: this rank's place in the chain.
        overwrites: called before tensors of `own` are written to.
        keeps: whether `own` is the whole state of a step. If there is room, it stays untouched until all has arrived.
    """
    (outline_bytes,) = _NUMBER.unpack(here.passed(bytearray(_NUMBER.size)))
    outline = bytearray(outline_bytes)
    here.passed(outline)
    places: list[torch.Tensor] = []
    filled: dict[str, Any] = _filled(parse(outline), own, spare, places)
    through_host, through_group = _parted(places, here.transport)
    places = through_host + through_group
    targets = places
    # Into other memory first, so that this rank keeps its whole state until another one has arrived undamaged.
    beside = keeps and _has_room(through_host, through_group)
    if beside:
        through_host = [torch.empty(each.shape, dtype=each.dtype) for each in through_host]
        through_group = [torch.empty_like(each) for each in through_group]
        targets = through_host + through_group
    else:
        overwrites()
    _fill(through_host, through_group, here)
    if beside:
        overwrites()
        for place, target in zip(places, targets, strict=True):
            place.copy_(target)
    return filled


def _has_room(through_host: Sequence[torch.Tensor], through_group: Sequence[torch.Tensor]) -> bool:
    """Whether there is memory for a second set of these tensors: on the GPU for the group's, on the host for others."""
    on_gpu = [each for each in through_group if each.is_cuda]
    on_host = sum(each.nbytes for each in through_host)
    return on_host < available_bytes() // 2 and (not on_gpu or bool(gpus_with_room(on_gpu)))


def _fill(through_host: Sequence[torch.Tensor], through_group: Sequence[torch.Tensor], here: _ChainPlace) -> None:
    """Receive the content of all tensors, and pass it on. Raises RuntimeError when the checksum is not the sender's."""
    checksum = 0
    for target in through_host:
        # Only plain memory on the host can be received into. Other tensors take a detour through a host tensor.
        direct = target.is_cpu and target.is_contiguous()
        host = target if direct else torch.empty(target.shape, dtype=target.dtype)
        for piece in _pieces(host):
            checksum = _added(here.passed(piece), checksum)
        if not direct:
            target.copy_(host)
    if here.transport is not None:
        flat = [each.contiguous() for each in through_group]
        checksum ^= here.transport.carry(flat)
        for target, each in zip(through_group, flat, strict=True):
            # This does nothing if both are the same tensor, as `contiguous` returns a contiguous tensor itself.
            target.copy_(each)
    # The checksum is passed on before it is compared, so the ranks behind check for themselves.
    if _NUMBER.unpack(here.passed(bytearray(_NUMBER.size))) != (checksum,):
        remedy = "If it happens again, the memory or the network of this node is bad"
        raise RuntimeError(explain("the state was corrupted on its way to this rank", "share", remedy=remedy))


def _added(piece: WritableMemory, checksum: int) -> int:
    """The checksum of all pieces up to `piece`, given the `checksum` of the pieces before it.

    It is a polynomial hash over the sums of the pieces. The sum of a piece is that of its 64-bit words and of the bytes
    that are left over, modulo 2**64.
    """
    words = len(piece) // 8
    total = int(torch.frombuffer(piece, dtype=torch.int64, count=words).sum()) if words else 0
    return (31 * checksum + total + sum(piece[8 * words :])) % 2**64


def _pieces(host: torch.Tensor) -> Iterator[memoryview]:
    """The memory of a contiguous host tensor, in pieces. The caller keeps the tensor alive while it uses them."""
    # By the tensor's address: `Tensor.numpy` needs numpy, which may be missing and does not know bfloat16.
    memory = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b""
    view = memoryview(memory).cast("B")
    for start in range(0, host.nbytes, PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


class _Outliner(Copier):
    """Copies a state with a mark in place of each tensor, and appends the tensors to `tensors`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(None, on_device=True)
        self._tensors = tensors

    def _tensor(self, value: torch.Tensor) -> Any:
        self._tensors.append(value.detach())
        return (_MARK, str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type)


def _outlined(state: dict[str, Any], tensors: list[torch.Tensor]) -> bytes:
    """The outline of `state` as bytes. The tensors are appended to `tensors`, in the order of their marks."""
    buffer = io.BytesIO()
    torch.save(_Outliner(tensors).plain(state, "state"), buffer)
    return buffer.getvalue()


def _filled(outline: Any, own: Any, spare: SpareTensors, places: list[torch.Tensor]) -> Any:
    """The state of `outline`, with a tensor for each mark: the one in the same place of `own` if it fits, else a spare.

    The tensors are appended to `places`, in the order of their marks.
    """
    if isinstance(outline, tuple) and len(outline) == 4 and outline[0] == _MARK:
        # A mark: it tells the tensor's type, shape and kind of device.
        dtype, shape, device = getattr(torch, outline[1]), torch.Size(outline[2]), outline[3]
        fits = isinstance(own, torch.Tensor) and own.dtype == dtype and own.shape == shape and own.device.type == device
        place = own if fits else spare.take(shape, dtype, device)
        places.append(place.detach())
        return place
    if isinstance(outline, dict):
        has = own if isinstance(own, dict) else {}
        return type(outline)({key: _filled(each, has.get(key), spare, places) for key, each in outline.items()})
    if isinstance(outline, (list, tuple)):
        items = own if isinstance(own, (list, tuple)) and len(own) == len(outline) else [None] * len(outline)
        return type(outline)(_filled(each, item, spare, places) for each, item in zip(outline, items, strict=True))
    return outline
