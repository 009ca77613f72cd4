"""State as plain values: containers, numbers, texts and tensors on the host, copied so that training can go on.

A checkpoint holds nothing else, so that `torch.load(weights_only=True)` opens it, on any machine, without running code.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from elasticrt.errors import ConfigError

_EXACT = frozenset({type(None), bool, int, float, str, bytes, complex, torch.Size, torch.dtype, torch.device})
_BASES: tuple[type, ...] = (bool, int, float, str, bytes)

POOLED_BYTES_MIN = 1 << 16
# Tensors like each parameter that an optimizer keeps, at the most. Adam keeps two.
MOMENTS = 2


class Buffers:
    """Host memory that one copy of a state takes over from the copy before.

    Fresh memory takes several times as long to write to as memory that was used before, and the training waits for the
    copying. The price is one state's size on the host between two copies. What comes from a GPU is copied to pinned
    memory, which the GPU can write to while it computes.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = {}

    @contextmanager
    def reused(self) -> Iterator[None]:
        """For one copy: it is made over the one before, and the memory that it does not need is freed."""
        self._free, self._taken = self._taken, {}
        yield
        self._free = {}

    def touch(self, likes: Iterable[torch.Tensor]) -> None:
        """Have memory for tensors like these, which the first copy finds written to already."""
        for each in likes:
            if each.nbytes >= POOLED_BYTES_MIN:
                self.take(each).zero_()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor on the host with the shape, strides and type of `like`, and any content."""
        key = (like.shape, like.stride(), like.dtype, like.is_cuda)
        free = self._free.get(key)
        buffer = free.pop() if free else _memory_for(like)
        self._taken.setdefault(key, []).append(buffer)
        return buffer


def _memory_for(like: torch.Tensor) -> torch.Tensor:
    if like.is_cuda:
        try:
            return torch.empty_like(like, device="cpu", pin_memory=True)
        except RuntimeError:
            pass  # The system limits pinned memory. The copy takes longer then.
    return torch.empty_like(like, device="cpu")


def plain_copy(value: object, where: str, buffers: Buffers | None = None, *, on_device: bool = False) -> Any:
    """A deep copy of `value`, of plain values only. Raises ConfigError, with the place in `where` of any other.

    The copy before, which is in `buffers`, is overwritten. `on_device`: tensors stay on their GPU, and nothing waits.
    """
    copier = Copier(buffers, on_device=on_device)
    with buffers.reused() if buffers is not None else nullcontext():
        copied = copier.plain(value, where)
    for device in copier.under_way:
        torch.cuda.current_stream(device).synchronize()
    return copied


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this tensor is only a part of one: FSDP's, or another kind of distributed tensor."""
    return type(tensor) is not torch.Tensor and type(tensor).__name__ in ("DTensor", "ShardedTensor")


_VARS = "['elasticrt']['vars']"
"""Where a Loop's state has `loop.vars`."""


class _UnfitError(Exception):
    """A value that is no plain one, and the keys that lead to it."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.place = ""


class Copier:
    """Makes the copy of one state; see `plain_copy`. Its children do something else with the tensors."""

    def __init__(self, buffers: Buffers | None, *, on_device: bool) -> None:
        self._buffers = buffers
        self._on_device = on_device
        self.under_way: set[torch.device] = set()  # GPUs that are still writing to buffers.
        # Original and copy, by what makes two tensors the same numbers.
        self._copies: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def plain(self, value: object, where: str) -> Any:
        """A copy of `value`. Raises ConfigError, with the place in `where` of what is no plain value."""
        try:
            return self.copy(value)
        except _UnfitError as unfit:
            kind, what, at = type(unfit.value), "state that can't be saved", where + unfit.place
            expected = "whole tensors, numbers, texts, and lists, plain tuples or dicts of them"
            remedy = "Return only these from state_dict(). For sharded ones (FSDP) use torch.distributed.checkpoint"
            if unfit.place.startswith(_VARS):
                at, remedy = "loop.vars" + unfit.place.removeprefix(_VARS), "Keep a tensor, a list or a dict"
            got = f"{kind.__module__}.{kind.__qualname__}"
            raise ConfigError(what, at, got=got, expected=expected, remedy=remedy) from None

    def copy(self, value: object) -> Any:
        """The same without the place: raises _UnfitError."""
        kind = type(value)
        if kind in _EXACT:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (dict, Mapping)):  # Most are dicts, which are known faster.
            return self._mapping(value)
        if isinstance(value, list):
            return [self.copy(item) for item in value]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):  # A named one would come back without its names.
            return tuple([self.copy(item) for item in value])
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
        copied: Any = Counter() if isinstance(value, Counter) else {}
        if isinstance(value, OrderedDict):
            copied = OrderedDict()
            if hasattr(value, "_metadata"):  # Module versions, which load_state_dict looks at.
                copied._metadata = self.copy(value._metadata)
        for key, item in value.items():
            try:
                name = key if type(key) in _EXACT else self.copy(key)
                copied[name] = item if type(item) in _EXACT else self.copy(item)
            except _UnfitError as unfit:
                unfit.place = f"[{key!r}]{unfit.place}"
                raise
        return copied

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if is_sharded(value):
            raise _UnfitError(value)
        tensor = value.detach() if value.requires_grad else value
        if tensor.layout is not torch.strided:
            return tensor.detach().to("cpu", copy=True)
        # Tied weights are one tensor under two names: copied once, stored once.
        key = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if key in self._copies:
            return self._copies[key][1]
        found = self._on_host(tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor))
        if key[0]:
            # While its memory is held, no other tensor can have the same address.
            self._copies[key] = (tensor, found)
        return found

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.nbytes
        if self._on_device and tensor.is_cuda:
            return tensor.clone()
        if self._buffers is None or size < POOLED_BYTES_MIN or tensor.is_quantized:
            return tensor.clone() if tensor.is_cpu else tensor.to("cpu", copy=True)
        buffer = self._buffers.take(tensor)
        if tensor.is_cuda:
            self.under_way.add(tensor.device)
            return buffer.copy_(tensor, non_blocking=True)
        plain_memory = tensor.is_cpu and tensor.is_contiguous() and buffer.is_contiguous()
        if not plain_memory or tensor.is_conj() or tensor.is_neg():
            return buffer.copy_(tensor)
        # On this thread alone: torch would use its pool, which takes two to five times as long where all cores are busy
        # (12 MB: 12 ms instead of 2; 300 MB: 400 instead of 150).
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), size)
        return buffer


class Note(Copier):
    """A state as it is now, at next to no cost: small tensors are copied, large ones are watched for changes.

    Torch counts the changes of a tensor, but for those by way of `.data`. Raises as `plain_copy`.
    """

    def __init__(self, state: object) -> None:
        super().__init__(None, on_device=True)
        self._versions: list[tuple[torch.Tensor, int]] = []  # The large tensors, each with the count of its changes.
        self._state = self.plain(state, "state")

    @property
    def state(self) -> Any | None:
        """The state as it was; None when one of its large tensors has changed since."""
        return self._state if all(each._version == version for each, version in self._versions) else None

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes < POOLED_BYTES_MIN or tensor.is_inference():
            return tensor.clone()
        self._versions.append((tensor, tensor._version))
        return tensor
