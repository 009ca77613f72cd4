"""Random number generators of a training process: saved, restored, and derived where nothing is saved.

A checkpoint holds the states of one process: rank 0, or in a memory copy the process that took it. A generator that all
ranks have seeded alike when they enter the Loop gets the saved state on every rank, so that what ranks must draw alike
(a layer to skip, an image size) stays alike. Of any other generator only rank 0 gets the saved state; on other ranks it
is derived from (seed, rank, step), so that two restarts from one checkpoint draw the same, and no two ranks do.

With a seed for the Loop none of this is needed: the numbers of each step follow from (seed, rank, step).
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch

from elasticrt.data.position import Position
from elasticrt.distributed.collectives import gather_numbers, rank_and_world
from elasticrt.errors import CheckpointError, explain

# The generators. A GPU's goes with torch's, because `torch.manual_seed` seeds both.
KINDS = ("python", "torch", "numpy")


class RngState:
    """The random numbers of a Loop. What each step draws follows from the `seed`; without one the generators go on as
    the script has seeded them. Raises TypeError for a seed that is no int."""

    def __init__(self, seed: int | None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(explain("not a whole number", "Loop(seed=)", got=seed, expected="an int or None"))
        self._seed = seed
        self.rank = 0  # Of this process.
        self.alike: list[str] = []  # The generators that were in the same state on all ranks, after `compare`.
        self._restored: dict[str, Any] = {}

    def compare(self) -> None:
        """Find out which generators are in the same state on all ranks. Before anything is restored. Collective."""
        self.rank, _ = rank_and_world()
        everyones = gather_numbers(_fingerprints())
        self.alike = [kind for kind, *seen in zip(KINDS, *everyones, strict=True) if len(set(seen)) == 1]

    def restore(self, state: dict[str, Any], step: int, alike: Collection[str] | None = None) -> None:
        """Go on from a state that was captured after `step`. `alike`: as a rank has it that goes on beside this one."""
        if alike is not None:
            self.alike = list(alike)
        kinds = KINDS if alike is None and self.rank == 0 else self.alike
        restore(state, kinds)
        derive(state["seed"], self.rank, step, kinds=set(KINDS) - set(kinds))
        self._restored = capture()

    def go_back(self, earlier: dict[str, Any]) -> None:
        """Go on from an earlier state of another rank, as far as ranks draw alike. With a seed each draws its own."""
        if self._seed is None:
            restore(earlier, self.alike)

    def begin_step(self, position: Position) -> None:
        """With a seed: what is drawn from here to the end of the next step follows from it and from `position`."""
        if self._seed is not None:
            derive(self._seed, self.rank, position.steps, position.epoch)

    @contextmanager
    def beginning(self, position: Position, *, resumed: bool) -> Iterator[None]:
        """Wrap what an epoch's loader draws when it begins. `resumed`: the epoch goes on in its middle.

        A resumed epoch has drawn this before, as has the script on entering it, so the generators go back afterwards.
        With a seed the loader draws what it drew the first time: one that shuffles has the same order again.
        """
        if resumed:
            self.begin_step(position._replace(steps=position.steps - position.batches))
        yield
        if resumed:
            self.begin_step(position)
        if resumed and self._seed is None and self._restored:  # Else it has made steps without a loader.
            restore(self._restored)


def capture() -> dict[str, Any]:
    """The states of all generators in use: python's, torch's, numpy's, the current GPU's.

    Plain values, but for the 625 words of python's and the 624 of numpy's generator: torch reads a tensor at once, and
    takes 4 us for each plain number. A newcomer reads them while all others wait for it.
    """
    state = {**note(), "seed": torch.initial_seed()}
    version, words, gauss = state["python"]
    state["python"] = (version, _in_tensor(words), gauss)
    if "numpy" in state:
        state["numpy"] = _with_lists(state["numpy"])
        if state["numpy"]["bit_generator"] == "MT19937":  # The words of others are few, and may have 64 bits or more.
            state["numpy"]["state"]["key"] = _in_tensor(state["numpy"]["state"]["key"])
    return state


def _in_tensor(words: Sequence[int]) -> torch.Tensor:
    """What `torch.tensor` makes of them, in a tenth of the time."""
    return torch.frombuffer(array("q", words), dtype=torch.int64)


def note() -> dict[str, Any]:
    """The same as the generators give it, in a tenth of the time: done at each step, for `restore`, not for a file."""
    state: dict[str, Any] = {"python": _pythons().state(), "torch": torch.default_generator.get_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:  # Else the script does not use its generator.
        state["numpy"] = _numpys(sys.modules["numpy"].random.mtrand._rand._bit_generator).state()
    return state


# The usual generator, python's and numpy's, has 624 words, and its position before or after them. Each draw changes the
# position or all words: so with the words next to it, it tells whether one was drawn, or another state was set.
_Window: Any = ctypes.c_char * (5 * 4)
_PYTHONS: Any = getattr(random.getstate, "__self__", None)


class _Noted:
    """A global generator with its state as it was last noted. To make that takes python 25 us of a step, and numpy 30.

    Most scripts draw from it only before the steps. What a window of its memory does not show is the second of two
    Gaussian numbers, which is kept elsewhere.

    Args:
        address: of the window; 0 if it is not found.
        make: makes its state.
        gauss_is_kept: whether that second number is as a state says.
    """

    def __init__(self, address: int, make: Callable[[], Any], gauss_is_kept: Callable[[Any], bool]) -> None:
        self._window = _Window.from_address(address) if address else None
        self._make, self._gauss_is_kept = make, gauss_is_kept
        self._seen, self._state = b"", None

    def state(self) -> Any:
        now = self._window.raw if self._window is not None else b""
        if not now or now != self._seen or not self._gauss_is_kept(self._state):
            self._seen, self._state = now, self._make()
        return self._state


@lru_cache(maxsize=1)
def _pythons() -> _Noted:
    address = 0
    if sys.implementation.name == "cpython":  # Elsewhere `id` is no address.
        *words, position = random.getstate()[1]
        memory = ctypes.string_at(id(_PYTHONS), type(_PYTHONS).__basicsize__)
        at = memory.find(array("I", [position, *words]).tobytes())
        address = id(_PYTHONS) + at if at >= 0 else 0
    return _Noted(address, random.getstate, lambda state: state[2] == _PYTHONS.gauss_next)


@lru_cache(maxsize=1)  # The script may set another one.
def _numpys(generator: Any) -> _Noted:
    numpy = sys.modules["numpy"]
    usual = type(generator) is numpy.random.MT19937
    make = partial(numpy.random.get_state, legacy=False)
    address = generator.ctypes.state_address + 620 * 4 if usual else 0
    return _Noted(address, make, lambda state: not state["has_gauss"])


def restore(state: dict[str, Any], kinds: Collection[str] = KINDS) -> None:
    """Put the result of `capture` back, for generators of `kinds`, as far as this process has them.

    Raises CheckpointError when the script has set another of numpy's generators than the saved one.
    """
    if "python" in kinds:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(_with_lists(words)), gauss))
    if "torch" in kinds:
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    if "numpy" not in kinds or "numpy" not in state or "numpy" not in sys.modules:
        return
    try:
        sys.modules["numpy"].random.set_state(_with_lists(state["numpy"]))
    except (ValueError, TypeError) as error:
        what, expected = "numpy's generator is not the one that was saved", state["numpy"]["bit_generator"]
        remedy = "Call numpy.random.set_bit_generator before the Loop as when it was saved"
        text = explain(what, "numpy.random", got=error, expected=expected, remedy=remedy)
        raise CheckpointError(text) from error


def derive(*numbers: int, kinds: Collection[str] = KINDS) -> None:
    """Seed generators of `kinds` with what follows from the numbers, in this order, and from nothing else."""
    # Hashed, because the sum of a seed, a rank and a step is that of others, too.
    digest = hashlib.sha256(f"elasticrt rng {' '.join(map(str, numbers))}".encode()).digest()
    if "torch" in kinds:
        number = int.from_bytes(digest[:8], "big") >> 1
        # Not `torch.manual_seed`: for a GPU that is not in use it takes 0.1 ms, and this is done at every step.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(number)
    if "python" in kinds:
        random.seed(digest)
    if "numpy" in kinds and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(digest[8:12], "big"))


def _with_lists(value: Any) -> Any:
    """A state with lists for its tensors and numpy's arrays."""
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _fingerprints() -> list[int]:
    """64 bits of each generator's state, 0 for one that is not in use: equal on two ranks that will draw alike."""
    state = _with_lists(note())
    texts = [repr(state[kind]) if kind in state else "" for kind in KINDS]
    heads = [hashlib.sha256(text.encode()).digest()[:8] if text else b"" for text in texts]
    return [int.from_bytes(head, "big", signed=True) for head in heads]
