"""Saves and restores the random number generators of a training process, and seeds those for which nothing is saved.

A checkpoint holds the generator states of one process: rank 0, or in a memory copy the process that took it. If all
ranks have a generator in the same state when they enter the Loop, every rank gets the saved state. So what ranks must
draw alike (a layer to skip, an image size) stays alike. Of any other generator only rank 0 gets the saved state. On
other ranks it is seeded by (seed, rank, step), so that two restarts from one checkpoint draw the same, and no two ranks
do.

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

# The global generators. The current GPU's belongs to torch's, because `torch.manual_seed` seeds both.
KINDS = ("python", "torch", "numpy")


class RngState:
    """The random numbers of a Loop.

    Args:
        seed: what each step draws follows from this number. None: the generators go on as the script has seeded them.

    Attributes:
        rank: the rank of this process.
        alike: the generators that were in the same state on all ranks, after `compare`.

    Raises TypeError for a seed that is not an int.
    """

    def __init__(self, seed: int | None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(explain("not a whole number", "Loop(seed=)", got=seed, expected="an int or None"))
        self._seed = seed
        self.rank = 0
        self.alike: list[str] = []
        # The generators that `restore` took from the saved state.
        self._kinds: Collection[str] = ()
        # The states with which the steps go on behind the head of an epoch's body; None: as the head leaves them.
        self._before_head: dict[str, Any] | None = None

    def compare(self) -> None:
        """Find out which generators are in the same state on all ranks. Call this before a restore. Collective."""
        self.rank, _ = rank_and_world()
        everyones = gather_numbers(_fingerprints())
        self.alike = [kind for kind, *seen in zip(KINDS, *everyones, strict=True) if len(set(seen)) == 1]

    def restore(self, state: dict[str, Any], step: int, alike: Collection[str] | None = None) -> None:
        """Go on from saved generator states.

        Args:
            state: a result of `capture`.
            step: the step after which the state was captured.
            alike: if the state comes from a rank that lives on beside this one, that rank's attribute `alike`. Any
                other generator is then seeded by (seed, rank, step), also on rank 0.
        """
        if alike is not None:
            self.alike = list(alike)
        kinds = KINDS if alike is None and self.rank == 0 else self.alike
        restore(state, kinds)
        derive(state["seed"], self.rank, step, kinds=set(KINDS) - set(kinds))
        self._kinds = kinds

    def go_back(self, earlier: dict[str, Any]) -> None:
        """Go on from a state that is `earlier` than the one of `restore`, for the generators that `restore` has set.

        Does nothing with a seed: then each rank has numbers of its own.
        """
        if self._seed is None and earlier:
            restore(earlier, self._kinds)

    def present(self) -> dict[str, Any]:
        """The states of the present position, for `go_on`. Empty with a seed."""
        return {} if self._seed is not None else self._before_head or capture_raw()

    def go_on(self, states: dict[str, Any]) -> None:
        """Go on from a result of `present`; if it is empty, from where the generators are."""
        if states:
            restore(states)

    # The head of an epoch's body is the script's code before its batches. A process that enters an epoch in its middle
    # runs the head once more, and has to draw there what was drawn the first time: the epoch's negative samples, for
    # example. After the beginning of the loader, which draws a number as well, it goes on as it was before the head.

    def begin_head(self) -> dict[str, Any]:
        """Begin the head for the first time. Returns the states to save, empty with a seed."""
        self._before_head = None
        return capture() if self._seed is None else {}

    def repeat_head(self, earlier: dict[str, Any], position: Position) -> None:
        """Go back to where the head began.

        Args:
            earlier: the result of `begin_head`.
            position: the present position.
        """
        # With a seed, the numbers of an epoch's first step follow those of its head.
        self._before_head = capture_raw() if self._seed is None or position.batches else None
        self.begin_step(position._replace(steps=position.steps - position.batches))
        self.go_back(earlier)

    def pass_evaluation(self, number: int, position: Position) -> dict[str, Any]:
        """Go on behind evaluation `number` of the head, from 0. Returns the states to save, empty with a seed."""
        if self._seed is None:
            return capture()
        derive(self._seed, self.rank, position.steps - position.batches, position.epoch, number)
        return {}

    def skip_evaluation(self, number: int, passed: dict[str, Any], position: Position) -> None:
        """Go on behind evaluation `number` of the head without making it. `passed`: what `pass_evaluation` returned."""
        if self._seed is not None:
            self.pass_evaluation(number, position)
        self.go_back(passed)

    def take(self, states: dict[str, Any]) -> None:
        """Go on from a result of `capture_raw`; in a head that runs once more, only behind it."""
        if self._before_head is None:
            restore(states)
        else:
            self._before_head = states

    def _end_head(self) -> None:
        if self._before_head is not None:
            restore(self._before_head)
        self._before_head = None

    def begin_step(self, position: Position) -> None:
        """With a seed, make all that is drawn until the end of the next step follow from the seed and `position`."""
        if self._seed is not None:
            derive(self._seed, self.rank, position.steps, position.epoch)

    @contextmanager
    def beginning(self, *, resumed: bool) -> Iterator[None]:
        """Wrap the beginning of an epoch's loader, which may draw numbers.

        If the epoch is `resumed` in its middle, the loader has drawn these numbers already when the epoch began, behind
        the head. It draws them once more: a loader that shuffles has the same order again.
        """
        if not resumed:
            self._end_head()
        yield
        self._end_head()


def capture() -> dict[str, Any]:
    """The states of all generators in use, to save: python's, torch's, numpy's, and the current GPU's.

    All are plain values, except for the 625 words of python's generator and the 624 words of numpy's. These are in
    tensors, because torch reads a tensor at once, and takes 4 us for each plain number. A newcomer reads the state
    while all other ranks wait.
    """
    state = {**capture_raw(), "seed": torch.initial_seed()}
    version, words, gauss = state["python"]
    state["python"] = (version, _in_tensor(words), gauss)
    if "numpy" in state:
        state["numpy"] = _with_lists(state["numpy"])
        # Other generators have only a few words, which may have 64 bits or more.
        if state["numpy"]["bit_generator"] == "MT19937":
            state["numpy"]["state"]["key"] = _in_tensor(state["numpy"]["state"]["key"])
    return state


def _in_tensor(words: Sequence[int]) -> torch.Tensor:
    """A tensor of `words`, made in a tenth of the time that `torch.tensor` takes."""
    return torch.frombuffer(array("q", words), dtype=torch.int64)


def capture_raw() -> dict[str, Any]:
    """The states of all generators in use, as the generators give them: for `restore`, not for a file.

    This takes a tenth of the time of `capture`, and is called at each step.
    """
    state: dict[str, Any] = {"python": _pythons().state(), "torch": torch.default_generator.get_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    # A script that has not imported numpy does not use numpy's generator.
    if "numpy" in sys.modules:
        state["numpy"] = _numpys(sys.modules["numpy"].random.mtrand._rand._bit_generator).state()
    return state


# The Mersenne Twister, which python and numpy use by default, has 624 words, and in memory its position lies next to
# them. Each draw changes the position, or all words. So a window of memory with the position and the words beside it
# tells whether a number was drawn or another state was set.
_Window: Any = ctypes.c_char * (5 * 4)
_PYTHONS: Any = getattr(random.getstate, "__self__", None)


class _CachedState:
    """A global generator, with its state as it was last noted. The state is made anew only if it has changed.

    To make a state takes 25 us of a step for python's generator, and 30 us for numpy's, and most scripts draw from them
    only before the steps. The window does not show one part of a state: Gaussian numbers are made in pairs, and the
    second number of a pair is kept elsewhere.

    Args:
        address: the address of the window; 0 if it is not found.
        make: makes the state.
        gauss_is_kept: whether that second number is still the one in the given state.
    """

    def __init__(self, address: int, make: Callable[[], Any], gauss_is_kept: Callable[[Any], bool]) -> None:
        self._window = _Window.from_address(address) if address else None
        self._make, self._gauss_is_kept = make, gauss_is_kept
        self._seen, self._state = b"", None

    def state(self) -> Any:
        """The generator's present state."""
        now = self._window.raw if self._window is not None else b""
        if not now or now != self._seen or not self._gauss_is_kept(self._state):
            self._seen, self._state = now, self._make()
        return self._state


@lru_cache(maxsize=1)
def _pythons() -> _CachedState:
    address = 0
    # In other implementations of Python, `id` is not an address. The C struct is private, so the state is searched for
    # in the object's memory: the position comes first, then the words.
    if sys.implementation.name == "cpython":
        *words, position = random.getstate()[1]
        memory = ctypes.string_at(id(_PYTHONS), type(_PYTHONS).__basicsize__)
        at = memory.find(array("I", [position, *words]).tobytes())
        address = id(_PYTHONS) + at if at >= 0 else 0
    return _CachedState(address, random.getstate, lambda state: state[2] == _PYTHONS.gauss_next)


# By generator, because the script may set another one.
@lru_cache(maxsize=1)
def _numpys(generator: Any) -> _CachedState:
    numpy = sys.modules["numpy"]
    usual = type(generator) is numpy.random.MT19937
    # In numpy's struct the position follows the 624 words: the window has the last four words and the position.
    make = partial(numpy.random.get_state, legacy=False)
    address = generator.ctypes.state_address + 620 * 4 if usual else 0
    return _CachedState(address, make, lambda state: not state["has_gauss"])


def restore(state: dict[str, Any], kinds: Collection[str] = KINDS) -> None:
    """Put back a result of `capture` or `capture_raw`, for the generators in `kinds` that this process has.

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
    """Seed the generators in `kinds` by `numbers` and their order, and by nothing else."""
    # Hashed, because different seeds, ranks and steps can have the same sum.
    digest = hashlib.sha256(f"elasticrt rng {' '.join(map(str, numbers))}".encode()).digest()
    if "torch" in kinds:
        number = int.from_bytes(digest[:8], "big") >> 1
        # Not `torch.manual_seed`, which takes 0.1 ms for a GPU that is not in use. This is done at every step.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed(number)
    if "python" in kinds:
        random.seed(digest)
    if "numpy" in kinds and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(digest[8:12], "big"))


def _with_lists(value: Any) -> Any:
    """A copy of a state with lists in place of tensors and numpy's arrays."""
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _fingerprints() -> list[int]:
    """A hash of each generator's state, of 64 bits: equal on two ranks that will draw alike. 0: it is not in use."""
    state = _with_lists(capture_raw())
    texts = [repr(state[kind]) if kind in state else "" for kind in KINDS]
    heads = [hashlib.sha256(text.encode()).digest()[:8] if text else b"" for text in texts]
    return [int.from_bytes(head, "big", signed=True) for head in heads]
