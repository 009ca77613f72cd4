"""Copies from a GPU beside the training: what may be copied so, and where; on a GPU, that a copy is of its moment."""

from __future__ import annotations

import pytest
import torch

from elasticrt.checkpoint.gpu_copy import SPARE_BYTES, GpuCopies, host_buffer, is_dense, room_bytes
from elasticrt.checkpoint.state_copy import Buffers, plain_copy

GB = 1 << 30


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "room"),
    [
        (60 * GB, 20 * GB, 15 * GB, 65 * GB - SPARE_BYTES),
        (1 * GB, 79 * GB, 78 * GB, 2 * GB - SPARE_BYTES),
        (0, 79 * GB, 79 * GB, 0),
    ],
)
def test_a_copy_takes_what_the_training_never_needed(free: int, reserved: int, peak: int, room: int) -> None:
    """Of what the driver has and torch holds, less the highest use so far and a little; never below 0."""
    assert room_bytes(free=free, reserved=reserved, peak=peak) == room


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(3, 4), True),
        (torch.zeros(3, 4).t(), True),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), True),
        (torch.zeros(5, 1, 2), True),
        (torch.tensor(1.0), True),
        (torch.zeros(20)[::2], False),
        (torch.zeros(3).expand(4, 3), False),
        (torch.zeros(6, 6)[:, :3], False),
    ],
)
def test_what_fills_its_memory(tensor: torch.Tensor, *, dense: bool) -> None:
    """In whatever order; not with gaps, and not one number as many."""
    assert is_dense(tensor.shape, tensor.stride()) is dense
    assert not GpuCopies.fits(tensor), "it is on no GPU"


def test_the_host_has_ordinary_memory_for_its_own() -> None:
    """A tensor of the host is copied as before, into memory that lies as it does."""
    like = torch.zeros(4, 3).t()
    buffer = host_buffer(like)
    assert buffer.stride() == like.stride()
    assert not buffer.is_cuda


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("room", [True, False])
def test_a_copy_is_of_its_moment(monkeypatch: pytest.MonkeyPatch, *, room: bool) -> None:
    """The training changes the state at once, again and again: each copy is what the state was when it was taken."""
    if not room:
        monkeypatch.setattr("elasticrt.checkpoint.gpu_copy.SPARE_BYTES", 1 << 50)
    state = {"large": torch.zeros(1 << 26, device="cuda"), "turned": torch.zeros(512, 256, device="cuda").t()}
    state["gaps"] = torch.zeros(64, device="cuda")[::2]
    buffers = Buffers()
    for number in range(20):
        copied = plain_copy(state, "state", buffers)
        for each in state.values():
            each.add_(1.0)
        buffers.arrival.wait()
        assert all(bool((each == float(number)).all()) for each in copied.values())
        assert copied["turned"].stride() == state["turned"].stride()
