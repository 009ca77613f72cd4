"""Warming up: import what workers will need, so that a worker that is a fork finds it there.

That is torch, its optimizers, the parts that torch imports on first use, and the modules of --preload. Whether this
process can be forked afterwards is found out by `trial`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from importlib.machinery import PathFinder

from elasticrt.worker import trial

_ROOTS = ("torch", "numpy", "elasticrt")
_LAZY = (
    # What DistributedDataParallel, the optimizers and the first backward import on first use: 0.9 s of a restart.
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.optim.lr_scheduler",
    "torch.optim.swa_utils",
    "torch.profiler",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "torch.distributed.elastic.multiprocessing.errors",
    # What the first checkpoint and the first DataLoader with workers import.
    "torch.utils.serialization.config",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
)


def warm_up(modules: Sequence[str], directory: str) -> tuple[str, int]:
    """Import torch and `modules`; returns why forking is not possible ("" when it is), and torch's thread count.

    `directory` is what the script has first on its path. The thread count is the one that a fresh interpreter would
    have used, where OMP_NUM_THREADS is not set.
    """
    gc.disable()  # Imports make no garbage worth the time to look for it.
    try:
        return _warm_up(modules, directory)
    finally:
        gc.enable()


def _warm_up(modules: Sequence[str], directory: str) -> tuple[str, int]:
    sockets_before = trial.sockets()
    for name in _ROOTS:
        if directory and _shadows(name, directory):
            return f"the script's directory has a {name!r} of its own", 0
    try:
        threads = _import_torch()
    except ImportError as error:
        return f"torch cannot be imported: {error}", 0
    with trial.first_on_path(directory):
        for name in modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                return f"--preload {name}: {error}", threads
    freeze()
    if trial.has_children():
        return "a preloaded module has started a process", threads
    why = trial.why_unsafe(sockets_before)
    return f"a preloaded module {why}" if why else "", threads


def freeze() -> None:
    """Nothing that exists now is ever garbage: the collector must not touch (and so copy) it in every worker."""
    gc.freeze()


def _shadows(name: str, directory: str) -> bool:
    """Whether `directory` holds the module itself, and is not just where the package is installed."""
    spec = PathFinder.find_spec(name, [directory])
    if spec is None or spec.origin is None:
        return False  # A directory without __init__.py gives way to a real package anywhere on the path.
    installed = importlib.util.find_spec(name)
    return installed is None or installed.origin != spec.origin


def _import_torch() -> int:
    import torch

    threads = torch.get_num_threads()
    # Before anything else: a pool of threads that exists once does not survive a fork, and every child would hang.
    torch.set_num_threads(1)
    import torch.distributed
    import torch.nn.parallel
    import torch.optim

    ours = pkgutil.iter_modules(importlib.import_module("elasticrt.train").__path__)
    for name in (*_LAZY, "numpy", "elasticrt.worker.boot", *(f"elasticrt.train.{module.name}" for module in ours)):
        # Not in every version or installation; a script that needs it gets the error where it imports it.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _train_a_little()
    return threads


def _train_a_little() -> None:
    """One step on tiny tensors imports what no list could name. It must stay too small for a second thread."""
    import torch

    model = torch.nn.Linear(1, 1)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind(model.parameters(), lr=0.0)
        torch.nn.functional.mse_loss(model(torch.zeros(1, 1)), torch.zeros(1, 1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
