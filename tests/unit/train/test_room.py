"""How much memory is left: in nested control groups of both versions, in containers, and in a real one."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrt.train.room import VERSIONS, available_bytes, groups, room

MIB, GIB = 2**20, 2**30
OLD, NEW = VERSIONS["cgroup"], VERSIONS["cgroup2"]

DISK = "25 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
ONE = "31 25 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
MEMORY = "35 25 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
CPU = "32 25 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
BESIDE = "41 25 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
SPACED = "35 25 0:32 / /mnt/my\\040groups rw - cgroup cgroup rw,memory\n"


def _container(root: str) -> str:
    """The mount of a container that shares its host's names of control groups."""
    return f"35 25 0:32 {root} /sys/fs/cgroup/memory ro master:14 - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("memberships", "mounts", "expected"),
    [
        pytest.param("0::/\n", DISK + ONE, [("/sys/fs/cgroup", NEW)], id="top"),
        pytest.param(
            "0::/system.slice/slurmstepd.scope/job_7/step_0\n",
            DISK + ONE,
            [
                ("/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0", NEW),
                ("/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7", NEW),
                ("/sys/fs/cgroup/system.slice/slurmstepd.scope", NEW),
                ("/sys/fs/cgroup/system.slice", NEW),
                ("/sys/fs/cgroup", NEW),
            ],
            id="slurm",
        ),
        pytest.param(
            "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            DISK + CPU + MEMORY,
            [
                ("/sys/fs/cgroup/memory/docker/abc", OLD),
                ("/sys/fs/cgroup/memory/docker", OLD),
                ("/sys/fs/cgroup/memory", OLD),
            ],
            id="old",
        ),
        pytest.param(
            "4:memory:/job\n1:cpu,cpuacct:/\n0::/user.slice\n",
            CPU + MEMORY + BESIDE,
            [
                ("/sys/fs/cgroup/memory/job", OLD),
                ("/sys/fs/cgroup/memory", OLD),
                ("/sys/fs/cgroup/unified/user.slice", NEW),
                ("/sys/fs/cgroup/unified", NEW),
            ],
            id="both versions side by side",
        ),
        pytest.param(
            "4:memory:/docker/abc/inner\n",
            _container("/docker/abc"),
            [("/sys/fs/cgroup/memory/inner", OLD), ("/sys/fs/cgroup/memory", OLD)],
            id="a container with its host's names",
        ),
        pytest.param("4:memory:/abc\n", _container("/ab"), [("/sys/fs/cgroup/memory", OLD)], id="not by letters"),
        pytest.param("4:memory:/a\n", _container("/b"), [("/sys/fs/cgroup/memory", OLD)], id="another part mounted"),
        pytest.param("0::/../other\n", ONE, [("/sys/fs/cgroup", NEW)], id="outside of its namespace"),
        pytest.param("4:memory:/a\n", SPACED, [("/mnt/my groups/a", OLD), ("/mnt/my groups", OLD)], id="a blank"),
        pytest.param("4:memory:/a:b\n", MEMORY, [("/sys/fs/cgroup/memory/a:b", OLD), ("/sys/fs/cgroup/memory", OLD)]),
        pytest.param("4:memory:/a\n", DISK + CPU, [], id="not mounted"),
        pytest.param("", "", [], id="no control groups"),
    ],
)
def test_groups_are_found_from_the_own_one_up(memberships: str, mounts: str, expected: list[object]) -> None:
    """Every group that has a say is looked at, wherever it is mounted, and no other."""
    assert groups(memberships, mounts) == expected


UNLIMITED = str(0x7FFFFFFFFFFFF000)


@pytest.mark.parametrize(
    ("names", "files", "expected"),
    [
        (NEW, {"memory.max": "1000\n", "memory.current": "300\n"}, 700),
        (NEW, {"memory.max": "max\n", "memory.high": "500\n", "memory.current": "300\n"}, 200),
        (NEW, {"memory.max": "400", "memory.high": "500", "memory.current": "300"}, 100),
        (NEW, {"memory.max": "max", "memory.high": "max", "memory.current": "300"}, None),
        (NEW, {"memory.max": "1000"}, None),
        (NEW, {"memory.current": "300"}, None),
        (NEW, {}, None),
        (
            NEW,
            {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 300\ninactive_file 500\nslab 9\n"},
            600,
        ),
        (NEW, {"memory.max": "1000", "memory.current": "10", "memory.stat": "inactive_file 50"}, 1000),
        (NEW, {"memory.max": "1000", "memory.current": "1200"}, 0),
        (OLD, {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "300"}, 700),
        (
            OLD,
            {
                "memory.limit_in_bytes": "1000",
                "memory.usage_in_bytes": "900",
                "memory.stat": "inactive_file 1\ntotal_inactive_file 500",
            },
            600,
        ),
        (OLD, {"memory.limit_in_bytes": UNLIMITED, "memory.usage_in_bytes": "300"}, int(UNLIMITED) - 300),
        (OLD, {"memory.limit_in_bytes": "-1", "memory.usage_in_bytes": "300"}, None),
    ],
)
def test_room_is_the_limit_less_what_cannot_be_dropped(names: object, files: dict[str, str], expected: object) -> None:
    """Cached files that nobody uses are free memory; what a file does not say is no limit."""
    assert room(files, names) == expected  # type: ignore[arg-type]  # One of VERSIONS' values.


def _tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param({}, 8 * GIB, id="the machine's"),
        pytest.param({"job_7/step_0": 3 * GIB}, 2 * GIB, id="the own group's"),
        pytest.param({"job_7": 2 * GIB, "job_7/step_0": 3 * GIB}, GIB, id="that of the group around it"),
        pytest.param({"": 4 * GIB, "job_7": 5 * GIB}, 3 * GIB, id="that at the top"),
        pytest.param({"job_7": 100 * GIB}, 8 * GIB, id="the machine's, below a higher limit"),
    ],
)
def test_the_group_with_the_least_room_decides(tmp_path: Path, limits: dict[str, int], expected: int) -> None:
    """A limit of any group around the process counts, not only that of the one at the top or of the process's own."""
    _tree(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {16 * MIB} kB\nMemAvailable:  {8 * MIB} kB\nHugePages_Total: 0\n",
            "proc/self/cgroup": "0::/job_7/step_0\n",
            "proc/self/mountinfo": DISK + ONE,
        },
    )
    for group in ("", "job_7", "job_7/step_0"):
        where = f"sys/fs/cgroup/{group}/memory"
        limit = str(limits.get(group, "max"))
        _tree(tmp_path, {f"{where}.max": limit, f"{where}.high": "max", f"{where}.current": str(GIB)})
    assert available_bytes(tmp_path) == expected


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    """A kernel without any has no such files."""
    _tree(tmp_path, {"proc/meminfo": "MemAvailable: 2048 kB\n"})
    assert available_bytes(tmp_path) == 2 * MIB


IN_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from elasticrt.train.room import available_bytes
before = available_bytes()
fd = os.memfd_create("room")
for _ in range(100):
    os.write(fd, bytes(2**20))
print(before, available_bytes())
"""


@contextlib.contextmanager
def _real_group(limit: int) -> Iterator[Path]:
    """A control group without a limit, inside one with `limit`, inside our own."""
    found = groups(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    if not found:
        pytest.skip("this machine has no control groups for memory")
    # Where both versions are mounted, it is the old one that knows of memory.
    own, names = next((each for each in found if each[1] is OLD), found[0])
    outer = Path(own) / f"elasticrt-test-{secrets.token_hex(4)}"
    made: list[Path] = []
    try:
        try:
            for path in (outer, outer / "inner"):
                path.mkdir()
                made.append(path)
            (outer / names.limits[0]).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no control group can be made in {own}: {error}")
        yield outer / "inner"
    finally:
        for path in reversed(made):
            path.rmdir()


def test_the_limit_of_a_real_group_is_found() -> None:
    """A process in a group inside a limited one knows the limit, and what its own memory files take of it."""
    limit = 512 * MIB
    if available_bytes() < 2 * limit:
        pytest.skip(f"less than {2 * limit // MIB} MiB are free here: the limit would not be the least")
    with _real_group(limit) as inner:
        done = subprocess.run(
            [sys.executable, "-c", IN_GROUP, str(inner)], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert limit - 128 * MIB < before < limit
    # The kernel counts in batches on each core, so it is a little late.
    assert before - after == pytest.approx(100 * MIB, abs=16 * MIB)
