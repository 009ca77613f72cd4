"""Random number generators of a training process: saved, restored, and derived where nothing is saved.

A checkpoint has one process's states: rank 0's, or in a copy in memory those of the process that took it. What the
others had is known where the script seeds all ranks alike: the same. So a generator that stands at the same place on
all ranks when the script enters its Loop gets the saved state on all of them, and what ranks must draw alike (a layer
to skip, a size of images) they go on drawing alike. Of any other generator rank 0 gets the saved state; every other
rank gets one that follows from (seed, rank, step), so that two restarts from one checkpoint draw the same numbers, and
no two ranks draw each other's.

With a seed for the Loop nothing of this is needed: the numbers of each step follow from (seed, rank, step).
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from array import array
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from elasticrt.data.position import Position
from elasticrt.distributed.collectives import gather_numbers, rank_and_world
from elasticrt.errors import CheckpointError, explain

KINDS = ("python", "torch", "numpy")
"""The generators. A GPU's goes with torch's, because `torch.manual_seed` seeds both."""


class RngState:
    """The random numbers of a Loop.

    Args:
        seed: of what each step draws; None: the generators go on as the script has seeded them. TypeError for others.
    """

    def __init__(self, seed: int | None) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(explain("not a whole number", "Loop(seed=)", got=seed, expected="an int or None"))
        self._seed = seed
        self._rank = 0
        self._alike: list[str] = []
        self._restored: dict[str, Any] = {}

    def compare(self) -> None:
        """Which generators stand at the same place on all ranks: before anything is restored. Collective."""
        self._rank, _ = rank_and_world()
        everyones = gather_numbers(_fingerprints())
        self._alike = [kind for kind, *seen in zip(KINDS, *everyones, strict=True) if len(set(seen)) == 1]

    @property
    def alike(self) -> list[str]:
        """The generators that stand at the same place on all ranks."""
        return self._alike

    def moved(self, rank: int) -> None:
        """This process has another rank."""
        self._rank = rank

    def take_over(self, state: dict[str, Any], alike: list[str], step: int) -> None:
        """Go on beside ranks that are after `step`, from the state of one of them."""
        self._alike = list(alike)
        restore(state, self._alike)
        derive(state["seed"], self._rank, step, kinds=set(KINDS) - set(self._alike))
        self._restored = capture()

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Go on from a state that was captured after `step`."""
        taken = KINDS if self._rank == 0 else self._alike
        restore(state, taken)
        derive(state["seed"], self._rank, step, kinds=set(KINDS) - set(taken))
        self._restored = capture()

    def begin_step(self, position: Position) -> None:
        """With a seed: what is drawn from here to the end of the next step follows from it and from `position`."""
        if self._seed is not None:
            _seed_step(self._seed, self._rank, position.steps, position.epoch)

    def beginning(self, position: Position, *, resumed: bool) -> AbstractContextManager[None]:
        """For what an epoch's loader draws to begin, at the epoch's beginning or, when `resumed`, in the middle of it.

        Then that, and what the script draws when it enters the epoch, was drawn before, and leaves no trace the second
        time. With a seed the loader draws what it drew the first time: one that shuffles has the same order again.
        """
        return self._again(position) if resumed else nullcontext()

    @contextmanager
    def _again(self, position: Position) -> Iterator[None]:
        self.begin_step(position._replace(steps=position.steps - position.batches))
        yield
        self.begin_step(position)
        if self._seed is None:
            restore(self._restored)


def capture() -> dict[str, Any]:
    """The state of python's, torch's, and where in use numpy's and the current GPU's generator, as plain values."""
    return note()()


def note() -> Callable[[], dict[str, Any]]:
    """`capture`, in two halves: notes the states now, and gives what makes plain values of them, which takes longer."""
    python, numpys = random.getstate(), _numpys()
    state: dict[str, Any] = {"torch": torch.default_generator.get_state(), "seed": torch.initial_seed()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()

    def make() -> dict[str, Any]:
        version, words, gauss = python
        state["python"] = [version, torch.frombuffer(array("q", words), dtype=torch.int64), gauss]
        if numpys is not None:
            state["numpy"] = _without_arrays(numpys)
        return state

    return make


_numpys_last: tuple[Any, bytes, dict[str, Any]] = (None, b"", {})
"""What was seen of numpy's generator last: which it was, its words in memory, and its state."""

_MT19937_BYTES = 625 * 4
"""Its words, and its place among them."""


def _numpys() -> dict[str, Any] | None:
    """The state of numpy's global generator, where the script uses it; else numpy is not loaded.

    Asked for at each step, and making that state takes 15 us or more. Most scripts draw from it before the steps only:
    words that are as they were tell that nothing was drawn, unless the second of two Gaussian numbers was left, which
    is kept elsewhere.
    """
    global _numpys_last  # noqa: PLW0603  As there is one such generator.
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.mtrand._rand._bit_generator
    words = b""
    if type(generator) is numpy.random.MT19937:
        words = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        seen, before, state = _numpys_last
        if generator is seen and words == before and not state["has_gauss"]:
            return state
    found: dict[str, Any] = numpy.random.get_state(legacy=False)
    _numpys_last = (generator, words, found)
    return found


def restore(state: dict[str, Any], kinds: Collection[str] = KINDS) -> None:
    """Put a captured state back, as far as this process has the generators.

    Args:
        state: from `capture`.
        kinds: which generators.

    Raises CheckpointError when the script has set another of numpy's generators than the saved one.
    """
    if "python" in kinds:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
    if "torch" in kinds:
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in kinds and "numpy" in state:
        _restore_numpy(state["numpy"])


def _restore_numpy(state: dict[str, Any]) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    try:
        numpy.random.set_state(state)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            explain(
                "numpy's generator is not the one that was saved",
                "numpy.random",
                got=numpy.random.get_state(legacy=False)["bit_generator"],
                expected=state["bit_generator"],
                remedy="Call numpy.random.set_bit_generator before the Loop as when it was saved",
            )
        ) from error


def _seed_numpy(number: int) -> None:
    """Seed numpy's global generator with 32 bits. `numpy.random.seed` knows only MT19937, the usual one."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    kind = numpy.random.get_state(legacy=False)["bit_generator"]
    if kind == "MT19937":
        numpy.random.seed(number)
    else:
        fresh = getattr(numpy.random, kind)(number)
        numpy.random.set_state({**fresh.state, "has_gauss": 0, "gauss": 0.0})


def _without_arrays(value: Any) -> Any:
    """A state of numpy's with lists for its arrays."""
    if isinstance(value, dict):
        return {key: _without_arrays(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def derive(seed: int, rank: int, step: int, kinds: Collection[str] = KINDS) -> None:
    """Seed generators with what follows from the three numbers, and nothing else."""
    digest = _digest(seed, rank, step)
    if "torch" in kinds:
        torch.manual_seed(_for_torch(digest))  # Seeds the GPUs as well.
    _seed_others(digest, kinds)


def _seed_step(*numbers: int) -> None:
    """`derive` for every step: `torch.manual_seed` takes 0.1 ms to note its caller, for a GPU not in use yet."""
    digest = _digest(*numbers)
    torch.default_generator.manual_seed(_for_torch(digest))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(_for_torch(digest))
    _seed_others(digest, KINDS)


def _digest(*numbers: int) -> bytes:
    return hashlib.sha256(f"elasticrt rng {' '.join(map(str, numbers))}".encode()).digest()


def _for_torch(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") >> 1


def _seed_others(digest: bytes, kinds: Collection[str]) -> None:
    if "python" in kinds:
        random.seed(digest)
    if "numpy" in kinds:
        _seed_numpy(int.from_bytes(digest[8:12], "big"))


def _fingerprints() -> list[int]:
    """64 bits of each generator's state, 0 for one that is not in use: equal on two ranks that will draw alike."""
    state = capture()
    found = []
    for kind in KINDS:
        each = state.get(kind, [])
        parts = each if isinstance(each, list) else [each]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.numpy().tobytes() if isinstance(part, torch.Tensor) else repr(part).encode())
        found.append(int.from_bytes(digest.digest()[:8], "big", signed=True) if parts else 0)
    return found
