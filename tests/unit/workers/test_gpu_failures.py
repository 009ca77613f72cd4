"""Which failure of a GPU a worker's last words name, and whether the GPU itself is in doubt."""

from __future__ import annotations

import json

import pytest

from elasticrt.workers.failures import Remains, failure_of
from elasticrt.workers.gpu_failures import gpu_cause, suspects_gpu
from tests.unit.workers.states import worker

ASYNC = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call,so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1."
)
WATCHDOG = "[rank12]:[E817 ProcessGroupNCCL.cpp:1515] Process group watchdog thread terminated with exception: "
NCCL = "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroupNCCL.cpp:1691, "
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
XID = "NVRM: Xid (PCI:0000:3b:00): "
REMOTE = (
    NCCL + "remote process exited or there was a network error, NCCL version 2.27.3\nncclRemoteError: A call failed"
)


@pytest.mark.parametrize(
    ("said", "name", "suspect"),
    [
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered" + ASYNC, "ECC", True),
        (WATCHDOG + "CUDA error: uncorrectable ECC error encountered", "ECC", True),
        (XID + "94, pid=1234, name=python, Contained: CE User Channel", "ECC", True),
        (XID + "79, pid='<unknown>', GPU has fallen off the bus.", "fallen off the bus", True),
        ("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.", "fallen off the bus", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", "NVLink", True),
        (XID + "119, pid=77, Timeout after 6s of waiting for RPC response from GPU0 GSP!", "firmware", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable" + ASYNC, "cannot be used", True),
        ("RuntimeError: No CUDA GPUs are available\nno CUDA-capable device is detected", "cannot be used", True),
        ("CUDA error: system not yet initialized", "driver", True),
        (OOM, "out of memory", False),
        ("RuntimeError: CUDA error: out of memory" + ASYNC, "out of memory", False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory", False),
        (NCCL + "unhandled cuda error\nncclUnhandledCudaError\nLast error:\nCuda failure 2 'out of memory'",
         "out of memory", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered" + ASYNC, "memory that is not", False),
        ("torch.AcceleratorError: CUDA error: misaligned address" + ASYNC, "memory that is not", False),
        ("CUDA error: device-side assert triggered" + ASYNC, "index out of range", False),
        ("CUDA error: unspecified launch failure" + ASYNC, "ended in the middle", True),
        ("CUDA error: no kernel image is available for execution on the device", "architecture", False),
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000", "one GPU with nccl", False),
        (NCCL + "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3", "NCCL", False),
        (NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "CUDA call of NCCL", True),
        ("RuntimeError: CUDA error: operation not permitted when stream is capturing", "not permitted", False),
    ],
)  # fmt: skip
def test_the_words_of_a_gpu_name_the_cause(said: str, name: str, suspect: bool) -> None:
    """Real texts of torch, NCCL and the driver: a cause, what to do, and whether the GPU itself is in doubt."""
    cause = gpu_cause(said)
    assert cause is not None
    assert name in cause.name
    assert cause.suspect is suspect
    assert cause.remedy


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: bad batch",
        "",
        REMOTE,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_other_ends_name_no_gpu(said: str) -> None:
    """A script's own error, none at all, a peer that is gone, the host's memory."""
    assert gpu_cause(said) is None


@pytest.mark.parametrize(
    ("code", "message", "output", "named", "suspect"),
    [
        (1, "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", "", "ECC", True),
        (1, OOM, "", "out of memory", False),
        (1, "ValueError: bad batch", "retried: CUDA out of memory", "", False),
        (-6, "", WATCHDOG + "CUDA error: unspecified launch failure", "ended in the middle", True),
        (1, REMOTE, "CUDA error: uncorrectable ECC error encountered", "", False),
    ],
)
def test_a_failure_names_its_gpu(code: int, message: str, output: str, named: str, *, suspect: bool) -> None:
    """In its summary and at the top of its text, with the remedy: by what was raised, or what an abort has said."""
    error_file = json.dumps({"message": {"message": message, "extraInfo": {}}}) if message else ""
    failure = failure_of(worker(node="n", rank=1, generation=1), Remains(code, error_file, output.splitlines()))
    assert suspects_gpu(failure.summary) is suspect
    first = failure.text.splitlines()[0]
    assert named in failure.summary and named in first if named else first.startswith("rank 1 failed first")
