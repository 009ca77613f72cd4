"""Random number generators of a training process: saved, restored, or derived for ranks that have no saved state.

One process's state is in a checkpoint, rank 0's; in a copy in memory it is that of the process that took it. A restart
at the same world size gives rank 0 exactly that back; every other rank, and every rank at another world size, gets a
state that follows from (seed, rank, step), so that two restarts from one checkpoint draw the same numbers, and no two
ranks draw each other's.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The state of python's, torch's, and where in use numpy's and the current GPU's generator, as plain values."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "torch": torch.get_rng_state(),
        "seed": torch.initial_seed(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [str(name), torch.tensor(keys.tolist(), dtype=torch.int64), position, has_gauss, cached]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put a captured state back, as far as this process has the generators."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys.tolist(), dtype="uint32"), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is drawn in here, the generators are afterwards as they were before."""
    before = capture()
    try:
        yield
    finally:
        restore(before)


def derive(seed: int, rank: int, step: int) -> None:
    """Seed all generators with what follows from the three numbers, and nothing else."""
    digest = hashlib.sha256(f"elasticrt rng {seed} {rank} {step}".encode()).digest()
    random.seed(digest)
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # Seeds the GPUs as well.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(int.from_bytes(digest[8:12], "big"))
