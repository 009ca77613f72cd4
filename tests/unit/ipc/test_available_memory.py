"""How much memory is left: of the machine, in nested control groups, and in a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.ipc.cgroups import VERSIONS, available_bytes, free_bytes
from tests.cgroups import limited_group, write_tree

MIB, GIB = 2**20, 2**30
OLD, NEW = VERSIONS["cgroup"], VERSIONS["cgroup2"]

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
    assert free_bytes(files, names) == expected  # type: ignore[arg-type]  # One of VERSIONS' values.


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
    write_tree(
        tmp_path,
        {
            "proc/meminfo": f"MemTotal: {16 * MIB} kB\nMemAvailable:  {8 * MIB} kB\nHugePages_Total: 0\n",
            "proc/self/cgroup": "0::/job_7/step_0\n",
        },
    )
    for group in ("", "job_7", "job_7/step_0"):
        where = f"sys/fs/cgroup/{group}/memory"
        limit = str(limits.get(group, "max"))
        write_tree(tmp_path, {f"{where}.max": limit, f"{where}.high": "max", f"{where}.current": str(GIB)})
    assert available_bytes(tmp_path) == expected


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    """A kernel without any has no such files."""
    write_tree(tmp_path, {"proc/meminfo": "MemAvailable: 2048 kB\n"})
    assert available_bytes(tmp_path) == 2 * MIB


IN_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from elasticrt.ipc.cgroups import available_bytes
before = available_bytes()
fd = os.memfd_create("room")
for _ in range(100):
    os.write(fd, bytes(2**20))
print(before, available_bytes())
"""


def test_the_limit_of_a_real_group_is_found() -> None:
    """A process in a group inside a limited one knows the limit, and what its own memory files take of it."""
    limit = 512 * MIB
    if available_bytes() < 2 * limit:
        pytest.skip(f"less than {2 * limit // MIB} MiB are free here: the limit would not be the least")
    with limited_group(limit) as inner:
        done = subprocess.run(
            [sys.executable, "-c", IN_GROUP, str(inner)], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert limit - 128 * MIB < before < limit
    # The kernel counts in batches on each core, so it is a little late.
    assert before - after == pytest.approx(100 * MIB, abs=16 * MIB)
