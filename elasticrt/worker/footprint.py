"""What a process costs in memory, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path


def resident_and_shared() -> tuple[int, int]:
    """Bytes of this process that are in memory, and how many of them some other process maps as well.

    Where the kernel keeps no such sums (before 4.14, or without access), shared means mapped from files.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_bytes().splitlines()[1:]
        fields = dict(line.split(b":", 1) for line in lines)
        kib = {name: int(value.split()[0]) for name, value in fields.items()}
        return kib[b"Rss"] * 1024, (kib[b"Shared_Clean"] + kib[b"Shared_Dirty"]) * 1024
    except (OSError, KeyError):
        page = os.sysconf("SC_PAGE_SIZE")
        _, resident, shared = Path("/proc/self/statm").read_bytes().split()[:3]
        return int(resident) * page, int(shared) * page
