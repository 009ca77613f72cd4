"""A rank's part in `test_curve_in_process.py`: the script of the bench, without agents."""

from __future__ import annotations

import contextlib
from pathlib import Path

import sklearn.datasets  # Here once for all ranks, which are forks.

from tests.bench import curve_ddp

__all__ = ["sklearn", "train"]

EPOCHS = 2


def train(directory: Path, *, name: str, kind: str, until: int | None = None, crash: int | None = None) -> None:
    """Go on with the run `name`. A crash leaves nothing saved since the last third step."""
    folder = directory / name
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(curve_ddp.CrashError):
        curve_ddp.train(str(folder), EPOCHS, 0.0, kind, every="3 steps", until=until, crash=crash)
