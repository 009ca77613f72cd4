"""What a worker's end says of its GPU."""

from __future__ import annotations

import pytest

from elasticrt.workers.gpu_failures import TROUBLES, blames_hardware, trouble_of
from tests.unit.workers.test_failures import error_file, failure

ECC, LOST, LINK, MEMORY, STICKY = TROUBLES


@pytest.mark.parametrize(
    ("exception", "message", "trouble"),
    [
        ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered", ECC),
        ("RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution", LINK),
        ("RuntimeError", "No CUDA GPUs are available", LOST),
        ("RuntimeError", "CUDA error: no CUDA-capable device is detected", LOST),
        ("RuntimeError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable", LOST),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...", MEMORY),
        ("DistBackendError", "NCCL error in: x.cu:9, unhandled cuda error: Cuda failure 'out of memory'", MEMORY),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", MEMORY),
        ("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered", STICKY),
        ("RuntimeError", "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` ...", STICKY),
        ("RuntimeError", "CUDA error: unspecified launch failure", STICKY),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error", None),
        ("RuntimeError", "DataLoader worker (pid 1) is killed by signal: Killed.", None),
        ("MemoryError", "", None),
        ("", "", None),
    ],
)
def test_troubles(exception, message, trouble):
    """W12: a sticky error, an ECC error, a lost GPU and a lack of its memory are told from each other."""
    assert trouble_of(exception, message) is trouble
    found = failure(error_file=error_file(f"{exception}: {message}")) if exception else failure()
    assert (trouble is not None and trouble.text in found.summary) is (trouble is not None)
    assert blames_hardware(found.summary) is (trouble in (ECC, LOST, LINK))


def test_a_long_message_does_not_hide_the_trouble():
    """It is said first: a report has room for so many words only."""
    found = failure(
        error_file=error_file("RuntimeError: CUDA error: uncorrectable ECC error encountered " + "x" * 9000)
    )
    assert blames_hardware(found.summary)
