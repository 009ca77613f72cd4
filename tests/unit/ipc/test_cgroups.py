"""Which control groups have a say: nested ones of both versions, in containers, and wherever they are mounted."""

from __future__ import annotations

import pytest

from elasticrt.ipc.cgroups import VERSIONS, groups
from tests.cgroups import BESIDE, CPU, DISK, MEMORY, NAMELESS, ONE, SPACED, container

OLD, NEW = VERSIONS["cgroup"], VERSIONS["cgroup2"]


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
            container("/docker/abc"),
            [("/sys/fs/cgroup/memory/inner", OLD), ("/sys/fs/cgroup/memory", OLD)],
            id="a container with its host's names",
        ),
        pytest.param("4:memory:/abc\n", container("/ab"), [("/sys/fs/cgroup/memory", OLD)], id="not by letters"),
        pytest.param("4:memory:/a\n", container("/b"), [("/sys/fs/cgroup/memory", OLD)], id="another part mounted"),
        pytest.param("0::/../other\n", ONE, [("/sys/fs/cgroup", NEW)], id="outside of its namespace"),
        pytest.param("4:memory:/a\n", SPACED, [("/mnt/my groups/a", OLD), ("/mnt/my groups", OLD)], id="a blank"),
        pytest.param("0::/\n", NAMELESS + ONE, [("/sys/fs/cgroup", NEW)], id="a mount without a source"),
        pytest.param(
            "0::/a\x0cb\n",
            "25 1 8:1 / /mnt/a\x0cb rw - ext4 /dev/sda1 rw\n" + ONE,
            [("/sys/fs/cgroup/a\x0cb", NEW), ("/sys/fs/cgroup", NEW)],
            id="a form feed",
        ),
        pytest.param("4:memory:/a:b\n", MEMORY, [("/sys/fs/cgroup/memory/a:b", OLD), ("/sys/fs/cgroup/memory", OLD)]),
        pytest.param("4:memory:/a\n", DISK + CPU, [], id="not mounted"),
        pytest.param("", "", [], id="no control groups"),
    ],
)
def test_groups_are_found_from_the_own_one_up(memberships: str, mounts: str, expected: list[object]) -> None:
    """Every group that has a say is looked at, wherever it is mounted, and no other."""
    assert groups(memberships, mounts) == expected
