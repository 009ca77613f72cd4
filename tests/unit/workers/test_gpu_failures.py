"""Which failure of a GPU a worker's last words name, and when its node may start workers again."""

from __future__ import annotations

import pytest

from elasticrt.workers.gpu_failures import gpu_cause
from elasticrt.workers.gpu_health import COOL_DOWN_S, FEW_FIELDS, FORGOTTEN_S, Look, admit, problem_of

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
    cause = gpu_cause(said, 1)
    assert cause is not None
    assert name in cause.name
    assert cause.suspect is suspect
    assert cause.remedy


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ValueError: bad batch", 1),
        ("", -9),
        (REMOTE, 1),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory", 1),
        (OOM, 0),
    ],
)
def test_other_ends_name_no_gpu(said: str, code: int) -> None:
    """A script's own error, a bare signal, a peer that is gone, the host's memory, an end that is none."""
    assert gpu_cause(said, code) is None


FINE = "0, NVIDIA H200, [N/A], No, No\n1, NVIDIA H200, [N/A], No, No\n"


@pytest.mark.parametrize(
    ("code", "out", "found"),
    [
        (0, FINE, ""),
        (0, "0, NVIDIA A100-SXM4-80GB, No, No, No\n", ""),
        (0, "0, NVIDIA GeForce RTX 4090, [N/A], [N/A], [N/A]\n", ""),
        (0, FINE + "2, NVIDIA H200, [N/A], Yes, No\n", "GPU 2 (NVIDIA H200): rows of its memory wait"),
        (0, "0, Tesla V100, Yes, [N/A], [N/A]\n", "GPU 0 (Tesla V100): pages of its memory wait"),
        (0, "0, NVIDIA H200, [N/A], No, Yes\n", "is to be replaced"),
        (0, "", "shows no GPU"),
        (15, "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system", "is lost"),
        (0, FINE + "Unable to determine the device handle for GPU1: Unknown Error\n", "Unknown Error"),
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "exit code 9"),
    ],
)
def test_what_nvidia_smi_says_of_gpus(code: int, out: str, found: str) -> None:
    """Healthy ones, with and without ECC; those that need a reset or are to be replaced, are lost, have no driver."""
    assert found in problem_of(code, out) if found else not problem_of(code, out)


def test_an_older_driver_is_asked_for_less() -> None:
    """Where only names are known, GPUs that answer are well."""
    assert problem_of(0, "0, Tesla K80\n", FEW_FIELDS) == ""


ECC = "an uncorrectable ECC error"


@pytest.mark.parametrize(
    ("look", "failures", "now", "admitted", "look_at"),
    [
        (None, [], 5.0, False, 5.0),
        (Look(5.0), [], 6.0, True, None),
        (Look(5.0, "lost"), [], 6.0, False, 5.0 + COOL_DOWN_S),
        (Look(5.0, "lost"), [], 500.0, False, 500.0),
        (Look(5.0), [(100.0, ECC)], 101.0, False, 100.0 + COOL_DOWN_S),
        (Look(5.0), [(100.0, ECC)], 100.0 + COOL_DOWN_S, False, 100.0 + COOL_DOWN_S),
        (Look(100.0 + COOL_DOWN_S), [(100.0, ECC)], 200.0, True, None),
        (Look(100.0 + COOL_DOWN_S, "lost"), [(100.0, ECC)], 162.0, False, 100.0 + 2 * COOL_DOWN_S),
        (Look(165.0), [(100.0, ECC), (170.0, ECC)], 171.0, False, 170.0 + 2 * COOL_DOWN_S),
        (Look(300.0), [(100.0, ECC), (170.0, ECC)], 301.0, True, None),
        (Look(5.0), [(100.0, ECC)], 101.0 + FORGOTTEN_S, True, None),
    ],
)
def test_when_a_node_may_start_workers(look, failures, now, admitted, look_at) -> None:
    """After a look that finds nothing wrong; after a failure only when it has cooled down, longer each time."""
    verdict = admit(look, failures, now)
    assert (verdict.admitted, verdict.look_at) == (admitted, look_at)
    assert bool(verdict.reason) is not admitted
