"""Copies a state as plain values (containers, numbers, texts and tensors on the host), so that training can go on.

A checkpoint holds nothing else. So `torch.load(weights_only=True)` opens it, on any machine, without running code.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from elasticrt.errors import ConfigError

# Values of exactly these types are immutable, and `weights_only` loads them: they are not copied.
_EXACT = frozenset({type(None), bool, int, float, str, bytes, complex, torch.Size, torch.dtype, torch.device})
# Values of subclasses of these types are saved as the type itself.
_BASES: tuple[type, ...] = (bool, int, float, str, bytes)

# Smaller tensors get new memory at each copy, and those that WatchedState watches are at least as large.
POOLED_BYTES_MIN = 1 << 16
# The largest number of tensors like each parameter that an optimizer keeps. Adam keeps two.
MOMENTS = 2


class Buffers:
    """Host memory that one copy of a state takes over from the copy before.

    Writing to fresh memory takes several times as long as writing to memory that was used before, and the training
    waits for the copying. The price is host memory for one state between two copies. Tensors from a GPU are copied to
    pinned memory, which the GPU can write to while it computes.
    """

    def __init__(self) -> None:
        # Buffers by shape, strides, type, and whether they are for a GPU's tensors.
        self._taken: dict[tuple[object, ...], list[torch.Tensor]] = {}  # In use by the newest copy.
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = {}  # Of the copy before, while a copy is made.

    @contextmanager
    def reused(self) -> Iterator[None]:
        """Make one copy in this block. It overwrites the copy before, and memory that it does not need is freed."""
        self._free, self._taken = self._taken, {}
        yield
        self._free = {}

    def touch(self, likes: Iterable[torch.Tensor]) -> None:
        """Get memory for tensors like these, and write to it, so that the first copy does not have to do that."""
        for each in likes:
            if each.nbytes >= POOLED_BYTES_MIN:
                self.take(each).zero_()

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor on the host with the shape, strides and type of `like`, and undefined content."""
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
            # The system limits pinned memory. A copy to other memory works too, but takes longer.
            pass
    return torch.empty_like(like, device="cpu")


def plain_copy(value: object, where: str, buffers: Buffers | None = None, *, on_device: bool = False) -> Any:
    """A deep copy of `value`, of plain values only.

    Args:
        value: the state.
        where: the name of the state in errors.
        buffers: host memory for large tensors. The copy before, which is in it, is overwritten.
        on_device: copies of tensors on a GPU stay on that GPU, and nothing waits for the GPU.

    Raises ConfigError, with the place in `where`, for a value that is not a plain one.
    """
    copier = Copier(buffers, on_device=on_device)
    with buffers.reused() if buffers is not None else nullcontext():
        copied = copier.plain(value, where)
    for device in copier.under_way:
        torch.cuda.current_stream(device).synchronize()
    return copied


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a state, in the order of its containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one rank's part of a distributed tensor, such as FSDP's."""
    # By the name of its type, so that nothing has to be imported for this question.
    return type(tensor) is not torch.Tensor and type(tensor).__name__ in ("DTensor", "ShardedTensor")


_VARS = "['elasticrt']['vars']"
"""The place of `loop.vars` in a Loop's state, as it appears in an error."""


class _UnfitError(Exception):
    """A value is not a plain one. `place` has the keys that lead to it, and grows on the way out of the containers."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.place = ""


class Copier:
    """Makes the copy of one state, see `plain_copy`. Subclasses do something else with the tensors."""

    def __init__(self, buffers: Buffers | None, *, on_device: bool) -> None:
        self._buffers = buffers
        self._on_device = on_device
        self.under_way: set[torch.device] = set()  # GPUs that may still be writing to buffers.
        # Original and copy of each tensor, by all that makes two tensors the same numbers in the same memory.
        self._copies: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def plain(self, value: object, where: str) -> Any:
        """A copy of `value`. Raises ConfigError, with the place in `where`, for a value that is not a plain one."""
        try:
            return self.copy(value)
        except _UnfitError as unfit:
            kind, what, at = type(unfit.value), "state that can't be saved", where + unfit.place
            expected = "whole tensors, numbers, texts, and lists, plain tuples or dicts of them"
            remedy = "Return only these from state_dict()"
            if kind.__module__ == "numpy":
                remedy = "Return torch.from_numpy(...) of it from state_dict()"
            elif isinstance(unfit.value, torch.Tensor):
                remedy = "Use torch.distributed.checkpoint for sharded state (FSDP)"
            if unfit.place.startswith(_VARS):
                at, remedy = "loop.vars" + unfit.place.removeprefix(_VARS), "Keep a tensor, a list or a dict"
            got = f"{kind.__module__}.{kind.__qualname__}"
            raise ConfigError(what, at, got=got, expected=expected, remedy=remedy) from None

    def copy(self, value: object) -> Any:
        """As `plain`, but raises _UnfitError."""
        # Frequent types come first, because this runs for every value of a state.
        kind = type(value)
        if kind in _EXACT:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        # `dict` is implied by `Mapping`, but its test is faster, and most mappings are dicts.
        if isinstance(value, (dict, Mapping)):
            return self._mapping(value)
        if isinstance(value, list):
            return [self.copy(item) for item in value]
        # A named tuple would come back without its names, so it is refused.
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple([self.copy(item) for item in value])
        if isinstance(value, set):
            return {self.copy(item) for item in value}
        for base in _BASES:
            # np.float64 is a float, and an IntEnum is an int. Their values are kept, their types are not.
            if isinstance(value, base):
                return base(value)
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()  # type: ignore[attr-defined]  # A numpy scalar, recognised without importing numpy.
        raise _UnfitError(value)

    def _mapping(self, value: Mapping[Any, object]) -> Any:
        copied: Any = Counter() if isinstance(value, Counter) else {}
        if isinstance(value, OrderedDict):
            copied = OrderedDict()
            # A module's state_dict has the versions of its modules here, which load_state_dict looks at.
            if hasattr(value, "_metadata"):
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
        # A sparse tensor has no strides and no single piece of memory.
        if tensor.layout is not torch.strided:
            return tensor.detach().to("cpu", copy=True)
        # Tied weights are one tensor under two names. They are copied once and stored once.
        key = (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if key in self._copies:
            return self._copies[key][1]
        found = self._on_host(tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor))
        # Empty tensors all have the address 0.
        if key[0]:
            # The original is held as well: while its memory lives, no other tensor can have the same address.
            self._copies[key] = (tensor, found)
        return found

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor: on the host, or with `on_device` on the tensor's own GPU."""
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
        # `memmove` copies on this thread alone. Torch would use its pool of threads, which takes two to five times as
        # long where all cores are busy (12 MB: 12 ms instead of 2 ms; 300 MB: 400 ms instead of 150 ms).
        ctypes.memmove(buffer.data_ptr(), tensor.data_ptr(), size)
        return buffer


class WatchedState(Copier):
    """A state as it is now, noted at next to no cost: small tensors are copied, large ones are watched for changes.

    Torch counts the changes of a tensor, except for changes by way of `.data`. Raises as `plain_copy`.
    """

    def __init__(self, state: object) -> None:
        super().__init__(None, on_device=True)
        self._versions: list[tuple[torch.Tensor, int]] = []  # The large tensors, with torch's counts of their changes.
        self._state = self.plain(state, "state")

    @property
    def state(self) -> Any | None:
        """The state as it was noted; None if one of its large tensors has changed since."""
        return self._state if all(each._version == version for each, version in self._versions) else None

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        # Torch does not count the changes of inference tensors.
        if tensor.nbytes < POOLED_BYTES_MIN or tensor.is_inference():
            return tensor.clone()
        self._versions.append((tensor, tensor._version))
        return tensor
