"""Which control groups have a say: nested ones of both versions, and in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrt.ipc.cgroups import VERSIONS, memory_groups
from tests.cgroups import write_tree

OLD, NEW = VERSIONS["cgroup"], VERSIONS["cgroup2"]
TOP = "sys/fs/cgroup"
JOB = "system.slice/slurmstepd.scope/job_7"


@pytest.mark.parametrize(
    ("memberships", "directories", "expected"),
    [
        pytest.param("0::/\n", [TOP], [(TOP, NEW)], id="top"),
        pytest.param(
            f"0::/{JOB}/step_0\n",
            [f"{TOP}/{JOB}/step_0"],
            [
                (f"{TOP}/{JOB}/step_0", NEW),
                (f"{TOP}/{JOB}", NEW),
                (f"{TOP}/system.slice/slurmstepd.scope", NEW),
                (f"{TOP}/system.slice", NEW),
                (TOP, NEW),
            ],
            id="slurm",
        ),
        pytest.param(
            "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n",
            [f"{TOP}/memory/docker/abc", f"{TOP}/cpu/docker/abc"],
            [(f"{TOP}/memory/docker/abc", OLD), (f"{TOP}/memory/docker", OLD), (f"{TOP}/memory", OLD)],
            id="old",
        ),
        pytest.param(
            "4:memory:/job\n1:cpu,cpuacct:/\n0::/user.slice\n",
            [f"{TOP}/memory/job", f"{TOP}/cpu", f"{TOP}/unified/user.slice"],
            [
                (f"{TOP}/memory/job", OLD),
                (f"{TOP}/memory", OLD),
                (TOP, NEW),
                (f"{TOP}/unified/user.slice", NEW),
                (f"{TOP}/unified", NEW),
            ],
            id="both versions side by side",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            [f"{TOP}/memory"],
            [(f"{TOP}/memory", OLD)],
            id="a container with its host's names",
        ),
        pytest.param("0::/a\x0cb\n", [f"{TOP}/a\x0cb"], [(f"{TOP}/a\x0cb", NEW), (TOP, NEW)], id="a form feed"),
        pytest.param(
            "4:memory:/a:b\n", [f"{TOP}/memory/a:b"], [(f"{TOP}/memory/a:b", OLD), (f"{TOP}/memory", OLD)], id="a colon"
        ),
        pytest.param("4:memory:/a\n", [f"{TOP}/cpu/a"], [], id="not mounted"),
        pytest.param("", [], [], id="no control groups"),
    ],
)
def test_groups_are_found_from_the_own_one_up(
    tmp_path: Path, memberships: str, directories: list[str], expected: list[tuple[str, object]]
) -> None:
    """Every group that has a say is looked at, and no other."""
    for each in directories:
        (tmp_path / each).mkdir(parents=True)
    write_tree(tmp_path, {"proc/self/cgroup": memberships})
    assert memory_groups(tmp_path) == [(tmp_path / directory, names) for directory, names in expected]
