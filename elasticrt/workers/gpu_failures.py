"""What a worker's end says of its GPU: which well-known trouble it is, and whether the hardware is to blame. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuTrouble:
    """One kind. `text`: in words; `of_hardware`: another process on this GPU may well meet it again."""

    text: str
    of_hardware: bool
    said: re.Pattern[str]


def _trouble(text: str, said: str, *, of_hardware: bool = False) -> GpuTrouble:
    return GpuTrouble(text, of_hardware, re.compile(said, re.IGNORECASE))


TROUBLES = (
    _trouble(
        "the GPU's memory has an error that cannot be corrected (ECC)",
        r"uncorrectable ECC|cudaErrorECCUncorrectable|row remapp",
        of_hardware=True,
    ),
    _trouble(
        "the GPU has fallen off the bus",
        r"GPU is lost|fallen off the bus|No CUDA GPUs are available|no CUDA-capable device is detected|"
        r"CUDA-capable device\(s\) is/are busy or unavailable|invalid device ordinal|cudaErrorNoDevice|"
        r"cudaErrorDevicesUnavailable|CUDA unknown error",
        of_hardware=True,
    ),
    _trouble(
        "a link between GPUs has failed (NVLink)",
        r"uncorrectable NVLink error|cudaErrorNvlinkUncorrectable|unknown error on.*nvlink",
        of_hardware=True,
    ),
    _trouble(
        "out of GPU memory",
        r"CUDA out of memory|torch\.OutOfMemoryError|cuda error: out of memory|'out of memory'|"
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|CU(BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED",
    ),
    _trouble(
        "a CUDA error that stays until the process ends",
        r"an illegal memory access was encountered|device-side assert triggered|unspecified launch failure|"
        r"an illegal instruction was encountered|misaligned address|the launch timed out and was terminated|"
        r"hardware stack error|invalid program counter|operation not supported on global/shared address space",
    ),
)
"""In this order: what is said of the hardware goes before what follows from it."""


def trouble_of(exception: str, message: str) -> GpuTrouble | None:
    """What an exception says of the GPU; None: nothing.

    `exception`: the name of its type, `message`: its text. What else was printed does not count: it may be advice.
    """
    said = f"{exception}: {message}"
    return next((each for each in TROUBLES if each.said.search(said)), None)


def blames_hardware(summary: str) -> bool:
    """Whether the summary of a failure names a trouble of the GPU itself."""
    return any(each.of_hardware and each.text in summary for each in TROUBLES)
