"""Control groups for tests: how the kernel describes them, trees of files that look like them, and real ones."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from elasticrt.ipc.cgroups import VERSIONS, memory_groups

DISK = "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
ONE = "31 25 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
MEMORY = "35 25 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
CPU = "32 25 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
BESIDE = "41 25 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
NAMELESS = "65 44 0:39 / /mnt rw,relatime - tmpfs  rw\n"  # `mount` with "" as its source.
SPACED = "35 25 0:32 / /mnt/my\\040groups rw - cgroup cgroup rw,memory\n"


def container(root: str) -> str:
    """The mount of a container that shares its host's names of control groups."""
    return f"35 25 0:32 {root} /sys/fs/cgroup/memory ro master:14 - cgroup cgroup rw,memory\n"


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    """Files by name, below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """A real control group without a limit, inside one with `limit_bytes`, inside our own. Skips where none can be."""
    found = memory_groups()
    if not found:
        pytest.skip("this machine has no control groups for memory")
    # Where both versions are mounted, it is the old one that knows of memory.
    own, names = next((each for each in found if each[1] is VERSIONS["cgroup"]), found[0])
    outer = own / f"elasticrt-test-{secrets.token_hex(4)}"
    made: list[Path] = []
    try:
        try:
            for path in (outer, outer / "inner"):
                path.mkdir()
                made.append(path)
            (outer / names.limits[0]).write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"no control group can be made in {own}: {error}")
        yield outer / "inner"
    finally:
        for path in reversed(made):
            path.rmdir()
