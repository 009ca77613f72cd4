"""How much memory a process may still use: of the machine, and of every control group that it is in.

Each of the groups may have a limit of its own: the one with the least room decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from elasticrt.ipc.cgroups import STAT, Names, memory_groups, text_of


def room(files: Mapping[str, str], names: Names) -> int | None:
    """Bytes that may still be used in one control group, from its files' texts; None for no limit. Pure.

    The kernel drops cached files that nobody has used lately before it runs out: they count as free.
    """
    limits = [int(text) for name in names.limits if (text := files.get(name, "").strip()).isdigit()]
    usage = files.get(names.usage, "").strip()
    if not limits or not usage.isdigit():
        return None
    stat = dict(line.split(None, 1) for line in files.get(STAT, "").splitlines())
    used = max(0, int(usage) - int(stat.get(names.cache, 0)))
    return max(0, min(limits) - used)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may still use. `root`: where /proc and /sys are."""
    fields = dict(line.split(":", 1) for line in text_of(root / "proc/meminfo").splitlines())
    free = [int(fields["MemAvailable"].split()[0]) * 1024]
    for group, names in memory_groups(root):
        left = room({name: text_of(group / name) for name in (*names.limits, names.usage, STAT)}, names)
        free += [] if left is None else [left]
    return min(free)
