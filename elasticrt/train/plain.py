"""State as plain values: containers, numbers, texts and tensors on the host, copied so that training can go on.

A checkpoint holds nothing else, so that `torch.load(weights_only=True)` opens it, on any machine, without running code.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from elasticrt.errors import ConfigError, explain
from elasticrt.train.deferred import Deferred, Later, Steady

_EXACT = frozenset({type(None), bool, int, float, str, bytes, complex, torch.Size, torch.dtype, torch.device})
_BASES: tuple[type, ...] = (bool, int, float, str, bytes)


POOLED_BYTES_MIN = 1 << 16

ONE_THREAD_BYTES_MAX = 4 << 20
"""Up to this size a tensor is copied by the training thread alone. Torch would wake its pool of threads for it, and on
a machine whose cores are taken two of them may spin on one core for some time slices: 12 ms instead of 2 for 12 MB."""


class Buffers:
    """Host memory for the copies of one state after the other, the last of which is no longer needed.

    Memory that is fresh from the kernel takes several times as long to be written to as memory that was used before,
    and the training waits for the copying. The price is to keep the size of a state on the host between two copies.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def begin(self) -> None:
        """The copy made last is no longer needed, and another one begins."""
        self._free, self._taken = self._taken, {}

    def end(self) -> None:
        """The copy is complete: what it did not need is let go."""
        self._free = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor on the host with the shape, strides and type of `like`, and any content."""
        key = (like.shape, like.stride(), like.dtype)
        free = self._free.get(key)
        buffer = free.pop() if free else torch.empty_like(like, device="cpu")
        self._taken.setdefault(key, []).append(buffer)
        return buffer


def plain_copy(value: object, where: str, buffers: Buffers | None = None, deferred: Deferred | None = None) -> Any:
    """A deep copy of `value` made of plain values only. Raises ConfigError naming the place of anything else.

    With `buffers` the copy before is overwritten. With `deferred` too, what is marked as `Steady` or `Later` is left to
    it: the copy is complete when it is.
    """
    copier = _Copier(buffers, deferred)
    if buffers is not None:
        buffers.begin()
    try:
        copied = copier.copy(value)
    except _UnfitError as unfit:
        # Looked for only now: to know the place of everything that is copied would take longer than to copy it.
        raise ConfigError(unfit.text(_place(value, unfit.value, where) or where)) from None
    copier.end()
    return copied


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this tensor is only a part of one: FSDP's, or another kind of distributed tensor."""
    return type(tensor) is not torch.Tensor and type(tensor).__name__ in ("DTensor", "ShardedTensor")


class _UnfitError(Exception):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def text(self, where: str) -> str:
        kind = type(self.value)
        if isinstance(self.value, torch.Tensor):
            return explain(
                "sharded state",
                where,
                got=kind.__name__,
                expected="whole tensors, as DDP has them",
                remedy="FSDP is not supported; use torch.distributed.checkpoint for it",
            )
        return explain(
            "state that can't be saved",
            where,
            got=f"{kind.__module__}.{kind.__qualname__}",
            expected="tensors, numbers, texts, and lists, tuples or dicts of them",
            remedy="Return only these from state_dict()",
        )


def _place(value: object, culprit: object, where: str) -> str:
    """Where in `value` this very object is; "" if it is not there."""
    if value is culprit:
        return where
    parts: list[tuple[object, str]] = []
    if isinstance(value, Steady):
        parts = [(value.value, where)]
    elif isinstance(value, Mapping):
        parts = [(key, f"{where} key") for key in value]
        parts += [(item, f"{where}[{key!r}]") for key, item in value.items()]
        parts += [(getattr(value, "_metadata", None), f"{where}._metadata")]
    elif isinstance(value, (list, tuple)):
        parts = [(item, f"{where}[{i}]") for i, item in enumerate(value)]
    elif isinstance(value, set):
        parts = [(item, f"{where}{{}}") for item in value]
    return next((found for part, name in parts if (found := _place(part, culprit, name))), "")


class _Copier:
    def __init__(self, buffers: Buffers | None, deferred: Deferred | None) -> None:
        self._buffers = buffers
        self._deferred = deferred
        self._steady = self._filling = False
        self._gaps: list[tuple[Any, Any, Any]] = []  # A container, its key, and what is to be made for it.
        self._copies: dict[int, tuple[tuple[torch.Tensor, torch.Tensor], ...]] = {}  # By the address of the original.

    def copy(self, value: object) -> Any:
        kind = type(value)
        if kind in _EXACT:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (dict, Mapping)):  # Most are dicts, which are known faster.
            return self._mapping(value)
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, tuple):
            return tuple([self.copy(item) for item in value])
        if isinstance(value, Steady):
            before, self._steady = self._steady, True
            copied = self.copy(value.value)
            self._steady = before
            return copied
        if isinstance(value, Later):
            return value.make()
        if isinstance(value, set):
            return {self.copy(item) for item in value}
        for base in _BASES:
            # np.float64 is a float, an IntEnum is an int: the value is kept, the type is not.
            if isinstance(value, base):
                return base(value)
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()  # type: ignore[attr-defined]  # A numpy scalar, recognised without importing numpy.
        raise _UnfitError(value)

    def end(self) -> None:
        """All is copied that can't wait. The rest is for `deferred`."""
        if self._gaps and self._deferred is not None:
            self._deferred.add(self._fill)
        elif self._buffers is not None:
            self._buffers.end()

    def _may_wait(self, value: object) -> bool:
        """Whether `value` may be made later. A tensor of which that is said is watched from then on."""
        if self._deferred is None:
            return False
        if type(value) is torch.Tensor:
            plain = self._steady and value.is_cpu and value.layout is torch.strided and value.is_contiguous()
            return plain and self._deferred.watch(value)
        return isinstance(value, Later)

    def _fill(self) -> None:
        self._filling = True
        for container, key, item in self._gaps:
            container[key] = self.copy(item)
        self._gaps = []
        if self._buffers is not None:
            self._buffers.end()

    def _list(self, value: list[Any]) -> list[Any]:
        copied: list[Any] = []
        for item in value:
            if self._may_wait(item):
                self._gaps.append((copied, len(copied), item))
                copied.append(None)
            else:
                copied.append(self.copy(item))
        return copied

    def _mapping(self, value: Mapping[Any, object]) -> Any:
        if isinstance(value, Counter):
            return self._into(Counter(), value)
        if not isinstance(value, OrderedDict):
            return self._into({}, value)
        ordered = self._into(OrderedDict(), value)
        metadata = getattr(value, "_metadata", None)  # Module versions, which load_state_dict looks at.
        if metadata is not None:
            ordered._metadata = self.copy(metadata)  # type: ignore[attr-defined]
        return ordered

    def _into(self, copied: dict[Any, Any], value: Mapping[Any, object]) -> dict[Any, Any]:
        for key, item in value.items():
            name = key if type(key) in _EXACT else self.copy(key)
            if type(item) in _EXACT:
                copied[name] = item
            elif type(item) is torch.Tensor and not self._steady:
                copied[name] = self._tensor(item)
            elif self._may_wait(item):
                copied[name] = None  # Its place in the order.
                self._gaps.append((copied, name, item))
            else:
                copied[name] = self.copy(item)
        return copied

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if is_sharded(value):
            raise _UnfitError(value)
        tensor = value.detach() if value.requires_grad else value
        if tensor.layout is not torch.strided:
            return tensor.detach().to("cpu", copy=True)
        # Tied weights are one tensor under two names: copied once, stored once.
        address = tensor.data_ptr()
        same_place = self._copies.get(address, ())
        for other, copy in same_place:
            if _is_same(other, tensor):
                return copy
        found = self._on_host(tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor))
        if address:
            # While its memory is held, no other tensor can have the same address.
            self._copies[address] = (*same_place, (tensor, found))
        return found

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.nbytes
        if self._buffers is None or size < POOLED_BYTES_MIN or tensor.is_quantized:
            return tensor.clone() if tensor.is_cpu else tensor.to("cpu", copy=True)
        buffer = self._buffers.take(tensor)
        plain_memory = tensor.is_cpu and tensor.is_contiguous() and buffer.is_contiguous()
        if not plain_memory or tensor.is_conj() or tensor.is_neg():
            return buffer.copy_(tensor)
        if self._filling and self._deferred is not None:
            self._deferred.add_copy(tensor, buffer)
            return buffer
        if size > ONE_THREAD_BYTES_MAX:
            return buffer.copy_(tensor)
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), size)
        return buffer


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that begin at the same address are the same numbers."""
    return (one.dtype, one.device, one.shape, one.stride()) == (other.dtype, other.device, other.shape, other.stride())
