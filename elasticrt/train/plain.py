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
from elasticrt.train.deferred import Deferred, Steady

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

    With `buffers` the copy before is overwritten. With `deferred` too, large tensors of what is marked as `Steady` are
    left to it: the copy is complete when it is.
    """
    if buffers is not None:
        buffers.begin()
    try:
        copied = _Copier(buffers, deferred).copy(value)
    except _UnfitError as unfit:
        # Looked for only now: to know the place of everything that is copied would take longer than to copy it.
        raise ConfigError(unfit.text(_place(value, unfit.value, where) or where)) from None
    if buffers is not None:
        buffers.end()
    return copied


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this tensor is only a part of one: FSDP's, or another kind of distributed tensor."""
    return type(tensor).__name__ in ("DTensor", "ShardedTensor")


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
        self._steady = False
        self._copies: dict[tuple[object, ...], torch.Tensor] = {}
        self._keep: list[torch.Tensor] = []

    def copy(self, value: object) -> Any:
        kind = type(value)
        if kind in _EXACT:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, (list, tuple)):
            items = [self.copy(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, Steady):
            before, self._steady = self._steady, True
            copied = self.copy(value.value)
            self._steady = before
            return copied
        if isinstance(value, set):
            return {self.copy(item) for item in value}
        for base in _BASES:
            # np.float64 is a float, an IntEnum is an int: the value is kept, the type is not.
            if isinstance(value, base):
                return base(value)
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()  # type: ignore[attr-defined]  # A numpy scalar, recognised without importing numpy.
        raise _UnfitError(value)

    def _mapping(self, value: Mapping[Any, object]) -> Any:
        copied = {self.copy(key): self.copy(item) for key, item in value.items()}
        if isinstance(value, Counter):
            return Counter(copied)
        if not isinstance(value, OrderedDict):
            return copied
        ordered = OrderedDict(copied)
        metadata = getattr(value, "_metadata", None)  # Module versions, which load_state_dict looks at.
        if metadata is not None:
            ordered._metadata = self.copy(metadata)  # type: ignore[attr-defined]
        return ordered

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if is_sharded(value):
            raise _UnfitError(value)
        tensor = value.detach() if value.requires_grad else value
        if tensor.layout is not torch.strided:
            return tensor.detach().to("cpu", copy=True)
        # Tied weights are one tensor under two names: copied once, stored once.
        key = (tensor.data_ptr(), tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride())
        found = self._copies.get(key)
        if found is None:
            found = self._on_host(tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor))
            if tensor.numel():
                self._copies[key] = found
                self._keep.append(tensor)  # While its memory is held, no other tensor can have the same address.
        return found

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        if self._buffers is None or size < POOLED_BYTES_MIN or tensor.is_quantized:
            return tensor.to("cpu", copy=True)
        buffer = self._buffers.take(tensor)
        plain_memory = tensor.device.type == "cpu" and tensor.is_contiguous() and buffer.is_contiguous()
        if not plain_memory or tensor.is_conj() or tensor.is_neg():
            return buffer.copy_(tensor)
        if self._deferred is not None and self._steady and not tensor.is_inference():
            self._deferred.add(tensor, buffer)
            return buffer
        if size > ONE_THREAD_BYTES_MAX:
            return buffer.copy_(tensor)
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), size)
        return buffer
