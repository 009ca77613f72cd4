"""How a state on GPUs is copied, without one: what is decided, and what is asked of CUDA in which order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticrt.checkpoint import snapshot, state_copy
from elasticrt.checkpoint.snapshot import Snapshot, gpus_with_room
from elasticrt.checkpoint.state_copy import Buffers

GPU = torch.device("cuda", 1)


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    is_cuda = True
    device = GPU


def on_gpu(size: int) -> torch.Tensor:
    """Of so many bytes."""
    made: torch.Tensor = torch.Tensor._make_subclass(OnGpu, torch.zeros(size, dtype=torch.uint8))
    return made


@pytest.mark.parametrize(
    ("free", "idle", "room"), [(2000, 0, True), (1999, 0, False), (0, 2000, True), (1000, 999, False)]
)
def test_a_copy_stays_on_the_gpu_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, *, free: int, idle: int, room: bool
) -> None:
    """For the state once more, and as much again; memory that torch holds and does not use counts."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5000 + idle)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80_000))
    state = {"a": on_gpu(600), "b": [on_gpu(400), torch.zeros(10_000)]}
    assert gpus_with_room(state) == ([GPU] if room else [])


def test_without_cuda_nothing_is_asked_of_it() -> None:
    """Asking would initialize it, which takes seconds and forbids forks."""
    assert gpus_with_room({"a": on_gpu(1)}) == []


class Cuda:
    """Streams and events that note what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self._current = "training"
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: self.stream(self._current))
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: self.stream("own"))
        monkeypatch.setattr(torch.cuda, "stream", self.using)
        monkeypatch.setattr(snapshot, "gpus_with_room", lambda _: [GPU])

    def stream(self, name: str) -> Any:
        """Its calls are noted with its name."""
        return SimpleNamespace(
            name=name,
            record_event=lambda: self.asked.append(f"{name}: record") or "event",
            wait_event=lambda event: self.asked.append(f"{name}: wait for {event}"),
            synchronize=lambda: self.asked.append(f"{name}: synchronize"),
        )

    @contextlib.contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        """What is copied in this block is copied on `stream`."""
        self.asked.append(f"{stream.name}: begin")
        self._current = stream.name
        yield
        self._current = "training"
        self.asked.append(f"{stream.name}: end")


def written(taken: Snapshot) -> Any:
    """What it writes to a file."""
    with os.fdopen(os.memfd_create("copy"), "rb") as file:
        taken.write_to(file.fileno())
        file.seek(0)
        return torch.load(file, weights_only=True)


def test_the_training_waits_for_no_copy_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on once the copy on the GPU is queued; a stream of its own waits for that, and fetches it later."""
    cuda = Cuda(monkeypatch)
    state = {"weights": torch.ones(100_000)}
    taken = Snapshot(state, Buffers())
    assert cuda.asked == ["training: record"]
    state["weights"].zero_()
    assert written(taken)["weights"].eq(1).all()
    assert cuda.asked[1:] == ["own: wait for event", "own: begin", "own: end"]
    written(taken)
    assert len(cuda.asked) == 4, "it is fetched once"


def test_a_copy_for_which_a_gpu_lacks_one_piece_of_memory_goes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be room in all, but not in one piece."""
    cuda, real = Cuda(monkeypatch), state_copy.plain_copy

    def plain_copy(*args: Any, on_device: bool = False) -> Any:
        if on_device:
            raise torch.OutOfMemoryError
        return real(*args)

    monkeypatch.setattr(snapshot, "plain_copy", plain_copy)
    assert written(Snapshot({"weights": torch.ones(5)}))["weights"].eq(1).all()
    assert cuda.asked == []


def test_host_memory_of_a_gpu_is_pinned_where_the_system_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And taken over from the copy before: at most one state's size is pinned."""
    asked, real = [], torch.empty_like

    def empty_like(like: torch.Tensor, *, device: str, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory and len(asked) > 1:
            raise RuntimeError("cannot pin")
        return real(like.as_subclass(torch.Tensor), device=device)

    monkeypatch.setattr(torch, "empty_like", empty_like)
    buffers, state = Buffers(), on_gpu(1 << 20)
    with buffers.reused():
        first = buffers.take(state)
    with buffers.reused():
        assert buffers.take(state) is first
        assert buffers.take(state) is not first
    assert asked == [True, True, False]
