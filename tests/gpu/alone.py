"""What one process measures by itself, printed as one line of JSON.

python -m tests.gpu.alone facts               # what this machine has
python -m tests.gpu.alone snapshot DEVICE MB  # how long the training waits for a snapshot
python -m tests.gpu.alone fail KIND           # fails on the GPU, for good: memory, assert
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

PIECE_BYTES = 64 * 1000 * 1000
ROUNDS = 3


def facts() -> dict[str, Any]:
    """Versions and devices."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = gpus and torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "missing": [] if gpus else missing(),
        "gpus": [torch.cuda.get_device_name(each) for each in range(gpus)],
        "gpu_bytes": torch.cuda.mem_get_info()[0] if gpus else 0,
        "nccl": nccl_version() if nccl else None,
    }


def nccl_version() -> list[int]:
    """Of the library that is loaded: `torch.cuda.nccl.version()` is that of the one that torch was built with."""
    number = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    return [number.value // 10000, number.value // 100 % 100, number.value % 100]


def missing() -> list[str]:
    """What a process on this machine lacks to use a GPU, in words."""
    found = [] if torch.version.cuda else ["a torch that is built with CUDA"]
    found += [] if list(Path("/dev").glob("nvidia[0-9]*")) else ["a GPU with NVIDIA's driver (/dev/nvidia0)"]
    found += [] if shutil.which("nvidia-smi") else ["nvidia-smi"]
    found += ["a GPU in CUDA_VISIBLE_DEVICES"] if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else []
    return found or ["something that torch.cuda.init() names"]


def snapshot(device: str, size_mb: float) -> dict[str, Any]:
    """Take a snapshot and write it to a file, some times over; the first has no memory to write over."""
    from elasticrt.checkpoint.snapshot import Snapshot
    from elasticrt.checkpoint.state_copy import Buffers

    sizes = [PIECE_BYTES // 4] * int(size_mb * 1e6 // PIECE_BYTES)
    sizes += [size] if (size := int(size_mb * 1e6 % PIECE_BYTES) // 4) else []
    state = {str(index): torch.full((size,), 0.5, device=device) for index, size in enumerate(sizes)}
    buffers, stalls_s, written_s = Buffers(), [], []
    for number in range(ROUNDS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.monotonic()
        taken = Snapshot(state, buffers)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()  # The training's own, no other.
        stalls_s.append(time.monotonic() - began)
        for each in state.values():  # What the next step does to it must not be in the copy.
            each.add_(1.0)
        with tempfile.NamedTemporaryFile() as file:
            began = time.monotonic()
            size, _ = taken.write_to(file.fileno())
            written_s.append(time.monotonic() - began)
            assert size >= size_mb * 1e6, "all of it is in the file"
            if number == ROUNDS:
                found = torch.load(file.name, map_location="cpu", weights_only=True, mmap=True)
                assert all(bool((each == 0.5 + number).all()) for each in found.values()), "a copy is not of its moment"
    return {"first_s": stalls_s[0], "stall_s": sorted(stalls_s[1:])[ROUNDS // 2], "written_s": min(written_s)}


def fail(kind: str) -> dict[str, Any]:
    """Do on the GPU what cannot end well."""
    if kind == "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    elif kind == "assert":
        table = torch.zeros(4, device="cuda")
        table[torch.tensor([1 << 20], device="cuda")] += 1
        torch.cuda.synchronize()
    raise AssertionError(f"{kind}: it did not fail")


def main() -> None:
    """Do what the words say."""
    what, *words = sys.argv[1:]
    if what == "facts":
        found = facts()
    elif what == "snapshot":
        found = snapshot(words[0], float(words[1]))
    else:
        found = fail(words[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
