"""How much memory a process may use: what the machine has, and what each control group around the process allows.

A container, a scheduler's job and a slice of systemd are control groups inside others, and each may have a limit of its
own: the one with the least room decides. Both versions are found, also side by side, wherever they are mounted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

STAT = "memory.stat"


@dataclass(frozen=True)
class Names:
    """How a version of control groups calls what it says of memory.

    Attributes:
        limits, usage: files with a number of bytes.
        cache: in the file `STAT`: the bytes that the kernel can drop.
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
"""By the type of file system that they are mounted as."""


def groups(memberships: str, mounts: str) -> list[tuple[str, Names]]:
    """The directories of the memory control groups that a process is in, from its own up to each mount's top. Pure.

    Args:
        memberships: /proc/self/cgroup.
        mounts: /proc/self/mountinfo.
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
        kind, _, options = what.split(" ")[:3]  # The second one, the mount's source, may be empty.
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            root, top = (_unescaped(field) for field in place.split(" ")[3:5])
            found += [(directory, VERSIONS[kind]) for directory in _upwards(paths[kind], root, top)]
    return found


def _lines(text: str) -> list[str]:
    """Those of the kernel. Names may hold what `splitlines` takes for an end as well."""
    return [line for line in text.split("\n") if line]


def _upwards(path: str, root: str, top: str) -> list[str]:
    """From the group `path` up to the group `root`, which is mounted at `top`.

    Where the mount shows another part of the tree, as a container's may, its top is all that can be seen of us.
    """
    group = PurePosixPath(path)
    visible = group.is_relative_to(root) and ".." not in group.parts
    below = group.relative_to(root) if visible else PurePosixPath()
    return [str(PurePosixPath(top) / each) for each in (below, *below.parents)]


def _unescaped(field: str) -> str:
    """Blanks and the like are octal numbers in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def memory_groups(root: Path = Path("/")) -> list[tuple[Path, Names]]:
    """Those that this process is in, as `groups` finds them. `root`: where /proc and /sys are."""
    found = groups(text_of(root / "proc/self/cgroup"), text_of(root / "proc/self/mountinfo"))
    return [(root / directory.lstrip("/"), names) for directory, names in found]


def text_of(path: Path) -> str:
    """A file's content; "" where there is none to read: then the kernel has nothing to say."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


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
