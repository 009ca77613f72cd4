"""What differs between the supported versions of torch, 2.10 to 2.15: each difference in one function.

Only processes with torch import this: worker parents and workers.
"""

from __future__ import annotations

from typing import Any


def find_gloo() -> None:
    """Find the gloo backend before a fork, so that the first process group of each fork need not.

    From 2.15 on torch looks for backends among the entry points of all installed packages (20 ms for 70 of them). NCCL
    is not looked up here, because a variable of the script may still choose which one.
    """
    from torch.distributed.distributed_c10d import Backend

    find = getattr(Backend, "_ensure_backend_registered", None)
    if find is not None:
        find("gloo")


def bound_to(device: Any, backend: str) -> dict[str, Any]:
    """The arguments of `init_process_group` for the device that this process computes on.

    With NCCL the communicator is then made at once, on this GPU, and an error shows there. Without `device_id` the
    default NCCL backend from 2.15 on (nccl2) chooses a GPU by the rank, which is wrong if LOCAL_RANK is 0 for all
    workers.
    """
    return {"device_id": device} if device.type == "cuda" and backend.startswith("nccl") else {}


def reducer_was_renewed(layer: Any) -> None:
    """Configure a new reducer as DDP configures only its first (2.15: how a backward pass is finalized)."""
    if getattr(layer, "_require_manual_backward_finalization", False):
        layer.require_manual_backward_finalization = True
