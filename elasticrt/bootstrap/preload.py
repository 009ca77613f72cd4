"""Warming up: imports what workers will need, so that a forked worker has it already.

That is torch, the parts that torch imports on first use, the well-known libraries with which the script begins, and the
modules of --preload. A trial fork then shows whether this process can be forked: it must have one thread, no children,
no CUDA, and no new sockets.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from elasticrt import torch_versions
from elasticrt.ipc.proc import children, sockets_of

_LAZY = (
    # What DistributedDataParallel, the optimizers and the first backward import on first use: 0.9 s of a restart.
    "torch._dynamo",
    "torch.nn.parallel.distributed",
    "torch.optim.lr_scheduler",
    "torch.optim.swa_utils",
    "torch.profiler",
    "torch.profiler._cupti_monitor",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "torch.distributed.elastic.multiprocessing.errors",
    # What the first checkpoint and the first DataLoader with workers import.
    "torch.utils.serialization.config",
    "multiprocessing.popen_fork",
    "multiprocessing.queues",
)


def warm_up(modules: Sequence[str], directory: str, wanted: Sequence[str] = ()) -> tuple[str, int]:
    """Import torch and `modules`. Returns why forking is not possible ("" if it is), and torch's number of threads.

    The number of threads is the one that a fresh interpreter uses without OMP_NUM_THREADS.

    Args:
        modules: those of --preload. An error in one of them is a reason not to fork.
        directory: the first entry of the script's path, or "".
        wanted: modules to import if they can be.
    """
    # A library that looks for a GPU while it is imported then asks the driver's own list. Asking CUDA would keep every
    # fork of this process from using CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sockets_before = set(sockets_of().values())
    # Imports make too little garbage to look for it. If they fail, this process only starts programs, and need not
    # collect anything either.
    gc.disable()
    try:
        threads = _import_torch()
    except Exception as error:  # noqa: BLE001  An OSError of a missing library, for example.
        return f"torch cannot be imported: {error}", 0
    # A script in the directory imports with it as the first entry.
    if directory:
        sys.path.insert(0, directory)
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  A library that does not fit torch raises anything.
        return f"--preload {name}: {error}", threads
    finally:
        if directory:
            sys.path.remove(directory)
    for name in wanted:
        _import_if_there(name)
    # A fork has these modules before the script runs, so it would not import a local file of the same name.
    name = _shadowed(directory)
    if name:
        return f"the script's directory has a {name!r} of its own", threads
    # Nothing that exists now is ever garbage. The collector would touch all of it, and so copy its pages, in every
    # worker.
    gc.freeze()
    gc.enable()
    why = _why_unsafe(sockets_before)
    return f"a preloaded module {why}" if why else "", threads


def _why_unsafe(sockets_before: set[str]) -> str:
    """Why this process cannot be forked, by a trial fork: a thread, CUDA, a child or a new socket; "" without any."""
    if children():
        return "has started a process"
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "has initialised CUDA"
    pid = os.fork()
    if pid == 0:
        os._exit((_tasks() != 1) + 2 * torch.cuda._is_in_bad_fork())
    _, status = os.waitpid(pid, 0)
    found = os.waitstatus_to_exitcode(status)
    if found & 1:
        return "starts a thread in a forked process"
    if found and torch.cuda.device_count():
        return "has asked for the GPUs (torch.cuda.is_available()), which no fork can use then"
    # Only after the fork: libraries such as OpenBLAS end their threads before a fork, and have none afterwards.
    if _tasks() != 1:
        return f"keeps {_tasks() - 1} thread(s) running"
    if set(sockets_of().values()) - sockets_before:
        return "has opened a socket"
    return ""


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  Names are all we need.


def _shadowed(directory: str) -> str:
    """A loaded module that `directory` ("" for none) has another one of; "" if there is none."""
    try:
        entries = os.listdir(directory) if directory else []  # noqa: PTH208  Names are all we need.
    except OSError:
        # Nothing can be imported from there.
        return ""
    for name in sorted({entry.partition(".")[0] for entry in entries} & sys.modules.keys() - {"__main__"}):
        spec = PathFinder.find_spec(name, [directory])
        # A directory without __init__.py gives way to a real package anywhere on the path.
        if spec is not None and spec.origin not in (None, getattr(sys.modules[name], "__file__", None)):
            return name
    return ""


def _import_torch() -> int:
    import torch

    threads = torch.get_num_threads()
    # Before anything else: a thread pool does not survive a fork, and every child would hang.
    torch.set_num_threads(1)
    import torch.distributed
    import torch.nn.parallel
    import torch.optim

    ours = pkgutil.iter_modules(importlib.import_module("elasticrt.train").__path__)
    for name in (
        *_LAZY,
        "numpy",
        "elasticrt.bootstrap.run_script",
        *(f"elasticrt.train.{module.name}" for module in ours),
    ):
        _import_if_there(name)
    torch_versions.find_gloo()
    # No optimizer step and no backward pass, however small: where there are GPUs, both ask CUDA for them, and a thread
    # stays.
    return threads


def _import_if_there(name: str) -> None:
    # A module may be missing in this version or installation, or be broken. A script that needs it gets the error at
    # its own import.
    with contextlib.suppress(Exception):
        importlib.import_module(name)
