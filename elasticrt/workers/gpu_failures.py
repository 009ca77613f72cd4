"""Tells which failure of a GPU ended a worker, and its remedy, from the worker's last error message. Pure.

CUDA reports an error at a later call, and repeats it for the rest of the process, so the traceback often points at
innocent code. The words of the message are exact, so only they are matched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuCause:
    """A cause for which a GPU fails.

    Attributes:
        name: the cause, in a few words.
        remedy: what to do about it.
        words: a pattern of the messages that name the cause, in any case of letters.
        suspect: whether the GPU may be broken, so that this node must be checked before it starts a worker again.
    """

    name: str
    remedy: str
    words: str = ""
    suspect: bool = False


_RESET = "Drain the node and reset the GPU (`nvidia-smi --gpu-reset`) or reboot; if it comes again, have it replaced"
_DEBUG = "CUDA_LAUNCH_BLOCKING=1 shows the line, compute-sanitizer the access"
# The first cause that matches counts: a GPU that is lost causes several of these messages. An Xid is the number of an
# error in the NVIDIA driver's kernel log.
_CAUSES = (
    GpuCause(
        "the GPU has fallen off the bus",
        "Reboot the node; check its power and PCIe seating (`dmesg | grep -i xid`)",
        r"fallen off the bus|GPU is lost|Xid\b.*?: 79\b",
        suspect=True,
    ),
    GpuCause(
        "a fault of the GPU: of its memory (ECC), an NVLink, or its own firmware",
        "`nvidia-smi -q` and `nvidia-smi nvlink --errorcounters` show which. " + _RESET,
        (
            r"uncorrectable (ECC|memory|NVLink) error|ECC uncorrectable|GSP RPC timeout|"
            r"Xid\b.*?: (48|61|62|63|64|74|94|95|119|120)\b"
        ),
        suspect=True,
    ),
    GpuCause(
        "the GPU cannot be used, or its driver is not ready",
        "See `nvidia-smi`: another process may hold it, it may need a reset, or the driver (with NVSwitch also "
        "nvidia-fabricmanager) does not run",
        (
            r"hardware stack error|CUDA-capable device\(s\) is/are busy or unavailable|no CUDA-capable device is "
            r"detected|CUDA devices are busy or unavailable|cudaErrorDevicesUnavailable|system not yet "
            r"initialized|system driver mismatch|driver version is insufficient|driver shutting down|Driver/library "
            r"version mismatch"
        ),
        suspect=True,
    ),
    GpuCause(
        "the GPU is out of memory",
        "Use smaller batches, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; `nvidia-smi` shows who uses it",
        (
            r"CUDA out of memory|OutOfMemoryError: CUDA|CUDA error: out of memory|cudaErrorMemoryAllocation|"
            r"CUBLAS_STATUS_ALLOC_FAILED|Cuda failure.{0,20}out of memory|unhandled cuda error: out of memory"
        ),
    ),
    GpuCause(
        "an assertion of a kernel has failed, most often an index out of range",
        _DEBUG,
        r"device-side assert triggered",
    ),
    GpuCause(
        "a kernel has accessed memory that is not its own",
        f"{_DEBUG}. If only one node shows it, suspect its GPU",
        (
            r"illegal memory access|misaligned address|invalid program counter|illegal instruction was encountered|"
            r"illegal address|Xid\b.*?: (13|31)\b"
        ),
    ),
    GpuCause(
        "a kernel was ended in the middle",
        f"{_DEBUG}; `dmesg | grep -i xid` says what the driver saw",
        r"unspecified launch failure|launch timed out and was terminated|Xid\b.*?: (43|45|8)\b",
        suspect=True,
    ),
    GpuCause(
        "torch has been built without this GPU's architecture",
        "Install the torch build for this CUDA version and GPU",
        r"no kernel image is available",
    ),
    GpuCause(
        "several ranks use one GPU with nccl",
        'Give each its own GPU, or init(backend="gloo"); NCCL 2.30 allows it with NCCL_MULTI_RANK_GPU_ENABLE=1',
        r"multiple ranks are using the same GPU|Duplicate GPU detected",
    ),
    GpuCause(
        "NCCL could not make a connection, or map shared memory",
        "NCCL_DEBUG=INFO says which; check NCCL_SOCKET_IFNAME, and the size of /dev/shm in containers",
        r"unhandled system error",
    ),
    GpuCause(
        "a CUDA call of NCCL has failed",
        "NCCL_DEBUG=INFO says which; `nvidia-smi` and `dmesg | grep -i xid` say whether the GPU is well",
        r"unhandled cuda error|NCCL error.{0,80}ncclInternalError",
        suspect=True,
    ),
)

# Other errors of CUDA, cuBLAS and cuDNN.
_ANY = re.compile(r"\bCUDA error: (.{1,120})|\bAcceleratorError\b|\bCUBLAS_STATUS_\w+|\bCUDNN_STATUS_\w+")


def gpu_cause(text: str) -> GpuCause | None:
    """The cause that `text`, an exception's type and message, names; None if it mentions no GPU.

    Do not pass other output of a worker: it may be advice, or tell of a failure that was handled.
    """
    for cause in _CAUSES:
        if re.search(cause.words, text, re.IGNORECASE):
            return cause
    found = _ANY.search(text)
    return GpuCause(f"a CUDA error: {(found[1] or found[0]).strip()}", _DEBUG) if found else None


def suspects_gpu(summary: str) -> bool:
    """Whether the `summary` of a failure names a cause for which the GPU may be broken."""
    return any(cause.suspect and cause.name in summary for cause in _CAUSES)
