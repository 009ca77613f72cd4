"""Random number generators: captured, put back, derived."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from elasticrt.train import rng
from elasticrt.train.plain import plain_copy

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python's normal": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy's normal": lambda: float(np.random.randn()),
    "torch": lambda: torch.rand(1).item(),
    "torch's normal": lambda: torch.randn(1).item(),
    "GPU": lambda: torch.rand(1, device="cuda").item(),
}
PLACES = [pytest.param(name, marks=CUDA if name == "GPU" else ()) for name in DRAWS]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The generators are as they were, after each test."""
    before = rng.capture()
    yield
    rng.restore(before)


@pytest.mark.parametrize("name", PLACES)
def test_a_captured_state_goes_through_a_file_and_back(name: str) -> None:
    """S6: also in the middle of a pair of normal numbers, of which the second is kept for the next call."""
    draw = DRAWS[name]
    draw()
    file = io.BytesIO()
    torch.save(plain_copy(rng.capture(), "rng"), file)
    expected = [draw() for _ in range(5)]
    rng.derive(1, 2, 3)
    file.seek(0)
    rng.restore(torch.load(file, weights_only=True))
    assert [draw() for _ in range(5)] == expected


@pytest.mark.parametrize("name", PLACES)
def test_each_rank_and_step_has_numbers_of_its_own(name: str) -> None:
    """What is derived follows from seed, rank and step alone, and differs in each of them."""
    drawn = []
    for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 0, 0)]:
        rng.derive(*place)
        drawn.append(DRAWS[name]())
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) == len(drawn) - 1


@CUDA
@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_the_state_is_that_of_the_rank_s_own_gpu(index: int) -> None:
    """`init` makes a rank's GPU the current one, and that one's generator is captured, and put back, and no other."""
    with torch.cuda.device(index):
        place = f"cuda:{index}"
        torch.rand(1, device=place)
        state = rng.capture()
        expected = torch.rand(3, device=place)
        others = [torch.cuda.get_rng_state(other) for other in range(torch.cuda.device_count()) if other != index]
        rng.restore(state)
        assert torch.equal(torch.rand(3, device=place), expected)
        after = [torch.cuda.get_rng_state(other) for other in range(torch.cuda.device_count()) if other != index]
        assert all(map(torch.equal, others, after))
