"""What differs between the versions of torch that are supported, 2.10 to 2.15: each difference in one function.

A worker's process alone imports this.
"""

from __future__ import annotations

from typing import Any


def find_gloo() -> None:
    """Do before a fork what the first group of each process would do: find the backend among the entry points of all
    installed packages (2.15: 20 ms for 70 of them). Not nccl's: which one it is may still be said by a variable.
    """
    from torch.distributed.distributed_c10d import Backend

    find = getattr(Backend, "_ensure_backend_registered", None)
    if find is not None:
        find("gloo")


def bound_to(device: Any, backend: str) -> dict[str, Any]:
    """What `init_process_group` is told of the device that this process computes on.

    With nccl: its communicator is made at once, on that GPU, and an error of it is seen there. From 2.15 the default
    nccl (nccl2) takes any GPU that it is not told of by the rank, which is wrong where LOCAL_RANK is 0 for all.
    """
    return {"device_id": device} if device.type == "cuda" and backend.startswith("nccl") else {}


def reducer_was_renewed(layer: Any) -> None:
    """DDP has another reducer: tell it what DDP itself only tells the first (2.15: who finalizes a backward pass)."""
    if getattr(layer, "_require_manual_backward_finalization", False):
        layer.require_manual_backward_finalization = True
