"""How many processes the kernel has killed for memory: as each version of control groups says it, and for real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elasticrt.workers.worker_io import oom_kills
from tests.cgroups import limited_group, write_tree

MIB = 2**20
TOP = "sys/fs/cgroup"
OLD = f"{TOP}/memory"


def _events(kills: int) -> str:
    return f"low 0\nhigh 7\nmax 8\noom 9\noom_kill {kills}\noom_group_kill 6\n"


def _control(kills: int) -> str:
    return f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        pytest.param(
            "0::/job/step\n",
            {f"{TOP}/job/step/memory.events": _events(2), f"{TOP}/job/memory.events": _events(5)},
            2,
            id="version 2: the own group, which counts those in it and below",
        ),
        pytest.param(
            "0::/job/step\n",
            {f"{TOP}/job/memory.events": _events(5)},
            5,
            id="version 2: the own group has no say in memory, and the one around it counts",
        ),
        pytest.param(
            "0::/kubepods/pod1/abc\n",
            {f"{TOP}/memory.events": _events(3)},
            3,
            id="version 2: a container that sees its own part of the tree",
        ),
        pytest.param("0::/\n", {f"{TOP}/memory.events": _events(4)}, 4, id="version 2: a namespace of its own"),
        pytest.param(
            "4:memory:/job\n3:cpu,cpuacct:/\n",
            {f"{OLD}/job/memory.oom_control": _control(1), f"{OLD}/memory.oom_control": _control(9)},
            1,
            id="version 1",
        ),
        pytest.param(
            "4:memory:/docker/abc\n",
            {f"{OLD}/memory.oom_control": _control(2)},
            2,
            id="version 1: a container",
        ),
        pytest.param(
            "4:memory:/job\n0::/user.slice\n",
            {f"{TOP}/unified/user.slice/cgroup.events": "populated 1\n", f"{OLD}/job/memory.oom_control": _control(6)},
            6,
            id="both: version 1 has the memory",
        ),
        pytest.param(
            "3:cpu:/job\n0::/job\n",
            {f"{TOP}/unified/job/memory.events": _events(7), f"{TOP}/cpu/job/memory.oom_control": _control(1)},
            7,
            id="both: version 2 has the memory",
        ),
        pytest.param("", {}, 0, id="no control groups"),
        pytest.param("0::/job\n", {}, 0, id="no files"),
        pytest.param(
            "4:memory:/job\n",
            {f"{OLD}/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"},
            0,
            id="a kernel that does not count them",
        ),
        pytest.param("0::/\n", {f"{TOP}/memory.events": "oom_kill\n"}, 0, id="a field without a number"),
    ],
)
def test_the_nearest_group_that_counts_says_it(
    tmp_path: Path, memberships: str, files: dict[str, str], expected: int
) -> None:
    """W17: the kills of the process's own group are counted, in each version; where nobody says any, there are none."""
    write_tree(tmp_path, {"proc/self/cgroup": memberships, **files})
    assert oom_kills(tmp_path) == expected


IN_GROUP = """
import os, signal, subprocess, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from elasticrt.workers.worker_io import oom_kills
before = oom_kills()
# The greedy one is to be the victim, and not this process; and its memory must not go to swap.
greedy = (
    "import ctypes; from pathlib import Path; Path('/proc/self/oom_score_adj').write_text('1000'); "
    "ctypes.CDLL(None).mlockall(2); bytearray(2**30).count(1)"
)
code = subprocess.run([sys.executable, "-c", greedy]).returncode
print(code == -signal.SIGKILL, before, oom_kills())
"""


def test_a_real_kill_is_counted_though_the_limit_is_that_of_the_group_around() -> None:
    """W17: a child that takes more than an outer group may have is killed, and counted in the group that it was in."""
    with limited_group(256 * MIB) as inner:
        done = subprocess.run(
            [sys.executable, "-c", IN_GROUP, str(inner)], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "0", "1"]
