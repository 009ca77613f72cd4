"""How much memory a process may use: the rest of the machine's, and of each control group around the process.

Containers, the jobs of schedulers and the slices of systemd are nested control groups, each with its own limit. The one
with the least room decides. Versions 1 and 2 are found, also side by side, where systemd and containers mount them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from elasticrt.ipc.proc import text_of

STAT = "memory.stat"


@dataclass(frozen=True)
class Names:
    """The names of files and fields in one version of control groups.

    Attributes:
        limits, usage: files with a number of bytes.
        cache: the field of the file `STAT` with the bytes that the kernel can drop.
        events: the file that has a field `oom_kill`.
    """

    limits: tuple[str, ...]
    usage: str
    cache: str
    events: str


VERSIONS = {
    "cgroup2": Names(("memory.max", "memory.high"), "memory.current", "inactive_file", "memory.events"),
    "cgroup": Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control"),
}
"""By the type of file system as which a version is mounted."""

TOPS = {"cgroup2": ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "cgroup": ("sys/fs/cgroup/memory",)}
"""Where a version is mounted."""


def memory_groups(root: Path = Path("/")) -> list[tuple[Path, Names]]:
    """The directories of this process's memory control groups, from its own up to the top of each version.

    Some containers know their groups by the names that these have on the host. Only the top exists there then, which is
    the container's own group. `root` is the parent of /proc and /sys.
    """
    found: list[tuple[Path, Names]] = []
    # Split at "\n" alone: names may have other characters at which `splitlines` would split.
    for line in filter(None, text_of(root / "proc/self/cgroup").split("\n")):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            version, group = "cgroup" if controllers else "cgroup2", PurePosixPath(path.lstrip("/"))
            directories = [root / top / each for top in TOPS[version] for each in (group, *group.parents)]
            found += [(each, VERSIONS[version]) for each in directories if each.is_dir()]
    return found


def free_bytes(files: Mapping[str, str], names: Names) -> int | None:
    """How many more bytes may be used in one control group; None for no limit. Pure.

    The page cache of files that were not used lately counts as free, because the kernel drops it first.

    Args:
        files: the texts of the group's files by name.
        names: those of the group's version.
    """
    limits = [int(text) for name in names.limits if (text := files.get(name, "").strip()).isdigit()]
    usage = files.get(names.usage, "").strip()
    if not limits or not usage.isdigit():
        return None
    # The page cache of files that were read lately counts as used, because training reads these files again.
    stat = dict(line.split(None, 1) for line in files.get(STAT, "").splitlines())
    used = max(0, int(usage) - int(stat.get(names.cache, 0)))
    return max(0, min(limits) - used)


def available_bytes(root: Path = Path("/")) -> int:
    """How many more bytes of memory this process may use. `root` is the parent of /proc and /sys."""
    fields = dict(line.split(":", 1) for line in text_of(root / "proc/meminfo").splitlines())
    free = [int(fields["MemAvailable"].split()[0]) * 1024]
    for group, names in memory_groups(root):
        left = free_bytes({name: text_of(group / name) for name in (*names.limits, names.usage, STAT)}, names)
        free += [] if left is None else [left]
    return min(free)
