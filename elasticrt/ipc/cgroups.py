"""How much memory a process may use: the rest of the machine's, and of each control group around the process.

Containers, the jobs of schedulers and the slices of systemd are nested control groups, each with its own limit. The one
with the least room decides. Versions 1 and 2 are found, also side by side, wherever they are mounted.
"""

from __future__ import annotations

import re
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


def groups(memberships: str, mounts: str) -> list[tuple[str, Names]]:
    """The directories of a process's memory control groups, from its own up to the top of each mount. Pure.

    Args:
        memberships: the text of /proc/self/cgroup.
        mounts: the text of /proc/self/mountinfo.
    """
    paths = {}
    for line in _lines(memberships):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    found = []
    for line in _lines(mounts):
        place, _, what = line.partition(" - ")
        # The second field, the mount's source, may be empty, so the fields are split at single blanks.
        kind, _, options = what.split(" ")[:3]
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            # mountinfo writes blanks and other special characters as octal numbers.
            octal = re.compile(r"\\([0-7]{3})")
            root, top = (octal.sub(lambda found: chr(int(found[1], 8)), field) for field in place.split(" ")[3:5])
            found += [(directory, VERSIONS[kind]) for directory in _upwards(paths[kind], root, top)]
    return found


def _lines(text: str) -> list[str]:
    """The lines of `text`, split at "\\n" alone: names may have other characters at which `splitlines` would split."""
    return [line for line in text.split("\n") if line]


def _upwards(path: str, root: str, top: str) -> list[str]:
    """The directories from the group `path` up to the group `root`, which is mounted at `top`.

    If the mount shows another part of the tree, as in some containers, only its top is known.
    """
    group = PurePosixPath(path)
    visible = group.is_relative_to(root) and ".." not in group.parts
    below = group.relative_to(root) if visible else PurePosixPath()
    return [str(PurePosixPath(top) / each) for each in (below, *below.parents)]


def memory_groups(root: Path = Path("/")) -> list[tuple[Path, Names]]:
    """The memory control groups of this process, as in `groups`. `root` is the parent of /proc and /sys."""
    found = groups(text_of(root / "proc/self/cgroup"), text_of(root / "proc/self/mountinfo"))
    return [(root / directory.lstrip("/"), names) for directory, names in found]


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
