"""Random number generators: captured, put back, derived."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from elasticrt.checkpoint import rng_state
from elasticrt.checkpoint.state_copy import plain_copy
from elasticrt.errors import CheckpointError

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


def _without_tensors(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_tensors(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_without_tensors, value))
    return None if isinstance(value, torch.Tensor) else value


PLACES = [pytest.param(name, marks=CUDA if name == "GPU" else ()) for name in DRAWS]


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The generators are as they were, after each test."""
    before = rng_state.capture()
    yield
    rng_state.restore(before)


@pytest.mark.parametrize("name", PLACES)
def test_a_captured_state_goes_through_a_file_and_back(name: str) -> None:
    """S6: also in the middle of a pair of normal numbers, of which the second is kept for the next call."""
    draw = DRAWS[name]
    draw()
    file = io.BytesIO()
    torch.save(plain_copy(rng_state.capture(), "rng"), file)
    expected = [draw() for _ in range(5)]
    rng_state.derive(1, 2, 3)
    file.seek(0)
    rng_state.restore(torch.load(file, weights_only=True))
    assert [draw() for _ in range(5)] == expected


def test_a_captured_state_has_few_plain_numbers() -> None:
    """Its hundreds of words lie in tensors: a newcomer reads every other number by itself, and all wait for it."""
    assert sum(1 for _ in pickletools.genops(pickle.dumps(plain_copy(_without_tensors(rng_state.capture()), "")))) < 99


@pytest.mark.parametrize("name", PLACES)
def test_a_state_of_plain_numbers_is_put_back_as_well(name: str) -> None:
    """As checkpoints hold it that were saved before its words lay in tensors."""
    state = rng_state._with_lists(rng_state.capture_raw())
    state = {**state, "torch": torch.get_rng_state()}
    expected = [DRAWS[name]() for _ in range(5)]
    rng_state.derive(1, 2, 3)
    rng_state.restore(state)
    assert [DRAWS[name]() for _ in range(5)] == expected


@pytest.mark.parametrize("name", PLACES)
def test_each_rank_and_step_has_numbers_of_its_own(name: str) -> None:
    """What is derived follows from seed, rank and step alone, and differs in each of them."""
    drawn = []
    for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 0, 0)]:
        rng_state.derive(*place)
        drawn.append(DRAWS[name]())
    assert drawn[0] == drawn[-1]
    assert len(set(drawn)) == len(drawn) - 1


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_a_script_may_choose_another_generator_of_numpy_s(kind: str) -> None:
    """`numpy.random.set_bit_generator`: what is saved is the state of that one, and it goes through a file and back."""
    before = np.random.get_bit_generator()
    rng_state.capture()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(1))
        np.random.rand()
        file = io.BytesIO()
        torch.save(plain_copy(rng_state.capture(), "rng"), file)
        fingerprints = rng_state._fingerprints()
        expected = np.random.rand(5)
        assert rng_state._fingerprints() != fingerprints
        file.seek(0)
        rng_state.restore(torch.load(file, weights_only=True))
        assert rng_state._fingerprints() == fingerprints
        assert np.array_equal(np.random.rand(5), expected)
        drawn = []
        for step in (1, 2, 1):
            rng_state.derive(7, 0, step)
            drawn.append(np.random.rand())
        assert drawn[0] == drawn[2] != drawn[1]
    finally:
        np.random.set_bit_generator(before)
    assert rng_state.capture()["numpy"]["state"]["key"].tolist() == np.random.get_state()[1].tolist()


def test_whatever_changes_numpy_s_generator_is_seen() -> None:
    """Its state is made anew only when it has changed: by drawing, seeding, or another generator with equal words."""
    before, state = np.random.get_bit_generator(), np.random.get_state()
    changes = [np.random.rand, np.random.randn, np.random.randn, lambda: None, lambda: np.random.seed(3),
               lambda: np.random.set_state(state), lambda: np.random.set_bit_generator(np.random.MT19937(5)),
               lambda: np.random.set_bit_generator(np.random.MT19937(5)), np.random.randn, np.random.randn]  # fmt: skip
    try:
        for change in changes:
            change()
            for _ in range(2):
                kind, words, place, *gauss = np.random.get_state()
                seen = rng_state.capture()["numpy"]
                assert (seen["bit_generator"], seen["state"]["key"].tolist()) == (kind, words.tolist())
                assert [seen["state"]["pos"], seen["has_gauss"], seen["gauss"]] == [place, *gauss]
    finally:
        np.random.set_bit_generator(before)
        np.random.set_state(state)


def test_whatever_changes_python_s_generator_is_seen() -> None:
    """Its state is made anew only when it has changed: by drawing, seeding, or half of a pair of normal numbers."""
    assert rng_state._pythons()._window is not None
    state = random.getstate()
    changes = [random.random, lambda: random.gauss(0, 1), lambda: random.gauss(0, 1), lambda: None,
               lambda: random.seed(3), lambda: random.setstate(state), lambda: random.shuffle([1, 2, 3]),
               lambda: random.gauss(0, 1), lambda: random.setstate((*random.getstate()[:2], None))]  # fmt: skip
    for change in changes:
        change()
        for _ in range(2):
            assert rng_state.capture_raw()["python"] == random.getstate()


@pytest.mark.parametrize("saved, now", [("PCG64", "MT19937"), ("MT19937", "PCG64"), ("PCG64", "SFC64")])
def test_another_generator_of_numpy_s_than_the_saved_one_is_refused(saved: str, now: str) -> None:
    """In words: neither can go on from the other's state."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, saved)(1))
        state = rng_state.capture()
        np.random.set_bit_generator(getattr(np.random, now)(1))
        with pytest.raises(CheckpointError, match=f"not the one that was saved.*expected {saved}"):
            rng_state.restore(state)
    finally:
        np.random.set_bit_generator(before)


@CUDA
@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_the_state_is_that_of_the_rank_s_own_gpu(index: int) -> None:
    """`init` makes a rank's GPU the current one, and that one's generator is captured, and put back, and no other."""
    with torch.cuda.device(index):
        place = f"cuda:{index}"
        torch.rand(1, device=place)
        state = rng_state.capture()
        expected = torch.rand(3, device=place)
        others = [torch.cuda.get_rng_state(other) for other in range(torch.cuda.device_count()) if other != index]
        rng_state.restore(state)
        assert torch.equal(torch.rand(3, device=place), expected)
        after = [torch.cuda.get_rng_state(other) for other in range(torch.cuda.device_count()) if other != index]
        assert all(map(torch.equal, others, after))
