"""Training state from those who have it to those who have not, over the process group, tensors straight into place.

Ranks of a world differ by at most one finished step when it loses somebody, and newcomers have nothing. So all say how
far they are, and who is behind gets the state of the first of those that are furthest. Structure and plain values
travel as one small message that is read with `weights_only`; tensors follow in pieces, along a chain of those alone
that need them. The receiver's own tensors are written to where they fit. A checksum of each piece comes last: state
that has changed on its way is refused.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from elasticrt.checkpoint.checkpoint_dir import parse
from elasticrt.checkpoint.memory_budget import available_bytes
from elasticrt.distributed import collectives
from elasticrt.errors import explain

MESSAGE_BYTES = 2 * 1024 * 1024
"""What travels at a time: enough for full bandwidth, small beside any state."""

AHEAD = 2
"""Messages that are on their way to the next rank at a time."""

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
    """Do with `state` what `share` does, without another rank, because a first time takes longest.

    Args:
        state: this rank's own.

    Returns the state, in the tensors that it was in.
    """
    tensors: list[torch.Tensor] = []
    filled: dict[str, Any] = _filled(parse(_described(state, tensors)), state, [])
    for parts in islice(_messages(tensors), 1):
        _checksum(_joined(parts))
    return filled


def _described(state: dict[str, Any], tensors: list[torch.Tensor]) -> bytearray:
    """The structure and plain values of `state` as a file of torch's; its tensors are appended to `tensors`."""
    buffer = io.BytesIO()
    torch.save(_outline(state, tensors), buffer)
    return bytearray(buffer.getbuffer())


def _send(state: dict[str, Any], following: int) -> None:
    chain, tensors = _Chain(None, following), list[torch.Tensor]()
    outline = torch.frombuffer(_described(state, tensors), dtype=torch.uint8)
    chain.carry(torch.tensor([outline.numel()]))
    chain.carry(outline)
    sums = [chain.carry(_joined(parts)) for parts in _messages(tensors)]
    chain.carry(torch.tensor(sums or [0]))
    chain.end()


def _receive(
    own: dict[str, Any], before: int, following: int | None, overwrites: Callable[[], None], *, keeps: bool
) -> dict[str, Any]:
    chain = _Chain(before, following)
    size, places = torch.empty(1, dtype=torch.int64), list[torch.Tensor]()
    chain.carry(size)
    outline = torch.empty(int(size.item()), dtype=torch.uint8)
    chain.carry(outline)
    filled: dict[str, Any] = _filled(parse(bytearray(outline.tolist())), own, places)
    beside = keeps and sum(place.nbytes for place in places) < available_bytes() // 2
    if not beside:
        overwrites()
    # What does not lie in one piece is received beside its place, too.
    targets = [place if place.is_contiguous() and not beside else _host_tensor(place) for place in places]
    sums = []
    for parts in _messages(targets):
        flat = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
        sums.append(chain.carry(flat))
        for part, arrived in zip(parts, torch.split(flat, [len(each) for each in parts]), strict=True):
            part.copy_(arrived)
    sent = torch.empty(len(sums) or 1, dtype=torch.int64)
    chain.carry(sent)
    chain.end()
    if sent.tolist() != (sums or [0]):
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
        if target is not place:
            place.copy_(target)
    return filled


class _Chain:
    """The way of the state along the ranks that need it: each receives a message and passes it on to the next.

    So no rank sends the state more than once, however many need it. A message is sent while the next one arrives.
    """

    def __init__(self, before: int | None, following: int | None) -> None:
        self._before = before
        self._following = following
        self._going: deque[tuple[Any, torch.Tensor]] = deque()

    def carry(self, message: torch.Tensor) -> int:
        """Receive into `message`, where there is a rank before, and send it to the next, if any. Its checksum."""
        if self._before is not None:
            dist.recv(message, self._before)
        if self._following is not None:
            self._going.append((dist.isend(message, self._following), message))
            if len(self._going) > AHEAD:
                self._going.popleft()[0].wait()
        return _checksum(message.view(torch.uint8))

    def end(self) -> None:
        """Wait until all is sent."""
        while self._going:
            self._going.popleft()[0].wait()


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The bytes of the tensors as they travel, the same on all ranks: the parts of one message after the other."""
    parts: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        for part in torch.split(tensor.detach().contiguous().reshape(-1).view(torch.uint8), MESSAGE_BYTES):
            if parts and size + len(part) > MESSAGE_BYTES:
                yield parts
                parts, size = [], 0
            parts.append(part)
            size += len(part)
    if parts:
        yield parts


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.cpu() for part in parts])


def _host_tensor(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype)


def _checksum(flat: torch.Tensor) -> int:
    """The sum of its words of 8 bytes: an accident of the wire or the memory changes it."""
    words, rest = flat[: len(flat) // 8 * 8], flat[len(flat) // 8 * 8 :]
    return int(words.view(torch.int64).sum() + rest.sum())


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
