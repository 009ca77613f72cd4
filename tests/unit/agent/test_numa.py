"""Which CPUs workers are bound to: a table of machines, and this one as /sys shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elasticrt.agent.numa import Cpu, Gpu, bind, choose, places, read_cpus, read_gpus
from elasticrt.errors import ConfigError

BIG = [Cpu(n, n // 8, n // 16, n - n % 2, n - n % 4) for n in range(32)]
"""Two sockets of two NUMA nodes each; a node has 8 CPUs, which are 4 cores and 2 complexes."""


def _set(*numbers: int) -> frozenset[int]:
    return frozenset(numbers)


@pytest.mark.parametrize(
    ("mode", "nodes", "expected"),
    [
        ("node", [0, 3], [_set(*range(8)), _set(*range(24, 32))]),
        ("socket", [0, 3], [_set(*range(16)), _set(*range(16, 32))]),
        ("exclusive", [1], [_set(*range(8, 16))]),
        ("exclusive", [0, 0, 1], [_set(0, 1, 2, 3), _set(4, 5, 6, 7), _set(*range(8, 16))]),
        ("exclusive", [0, 0, 0], [_set(0, 1, 2, 3), _set(4, 5), _set(6, 7)]),
        ("core-complex", [0, 0, 0], [_set(0, 1, 2, 3), _set(4, 5, 6, 7), _set(0, 1, 2, 3)]),
    ],
)
def test_what_is_chosen(mode: str, nodes: list[int], expected: list[frozenset[int]]) -> None:
    """Each way of binding: all of the node, of the socket, a share of its cores, a complex of its cores."""
    assert list(choose(mode, BIG, nodes)) == expected


def test_the_larger_complex_comes_first() -> None:
    """When a part of a complex may not be used, the whole ones are taken first."""
    allowed = [cpu for cpu in BIG if cpu.number not in (0, 1)]
    assert choose("core-complex", allowed, [0, 0]) == (_set(4, 5, 6, 7), _set(2, 3))


def test_too_few_cores_are_refused() -> None:
    """More workers on a node than cores, with a core for each asked for: refused by the option's name."""
    with pytest.raises(ConfigError, match="--numa-binding exclusive"):
        choose("exclusive", BIG, [0] * 5)


GPUS = [Gpu("GPU-aa", 3), Gpu("GPU-ab", 0), Gpu("GPU-bc", 9)]


@pytest.mark.parametrize(
    ("workers", "gpus", "visible", "expected"),
    [
        (2, GPUS, None, [3, 0]),
        (3, GPUS, None, [3, 0, 0]),
        (2, GPUS, "1,0", [0, 3]),
        (1, GPUS, "GPU-ab", [0]),
        (4, [], None, [0, 1, 2, 3]),
        (2, [], "4,5", [0, 2]),
        (2, GPUS, "", [0, 2]),
    ],
)
def test_where_workers_are(workers: int, gpus: list[Gpu], visible: str | None, expected: list[int]) -> None:
    """A worker is where its GPU is, among the visible ones; without GPUs they are spread."""
    assert places(workers, BIG, gpus, visible) == expected


def test_a_gpu_that_is_not_there() -> None:
    """CUDA_VISIBLE_DEVICES that names a GPU this machine does not have is refused."""
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        places(1, BIG, GPUS, "7")


def test_this_machine() -> None:
    """/sys of this machine is read: exactly the CPUs that this process may use, and each worker gets some of them."""
    allowed = os.sched_getaffinity(0)
    assert {cpu.number for cpu in read_cpus(Path("/sys/devices/system"), allowed)} == allowed
    (own,) = bind("node", 1, {})
    assert own
    assert own <= allowed
    assert bind(None, 4, {}) == ()


def test_a_machine_on_paper(tmp_path: Path) -> None:
    """CPU lists, sockets, cores, caches and GPUs, as the kernel and the driver write them."""
    for name, text in {
        "node/node0/cpulist": "0-1\n",
        "node/node1/cpulist": "2-3\n",
        "cpu/cpu2/topology/physical_package_id": "1\n",
        "cpu/cpu2/topology/thread_siblings_list": "0,2\n",
        "cpu/cpu2/cache/index0/level": "1\n",
        "cpu/cpu2/cache/index0/type": "Data\n",
        "cpu/cpu2/cache/index0/shared_cpu_list": "2\n",
        "cpu/cpu2/cache/index3/level": "3\n",
        "cpu/cpu2/cache/index3/type": "Unified\n",
        "cpu/cpu2/cache/index3/shared_cpu_list": "1-3\n",
        "gpus/0000:ff:1f.0/information": "Model: \t\t H\nGPU UUID: \t GPU-77\nBus Location: \t 0000:ff:1f.0\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert read_cpus(tmp_path, {2}) == [Cpu(2, 1, 1, 0, 1)]
    assert read_cpus(tmp_path, {9}) == [Cpu(9, 0, 0, 9, 9)]
    assert read_gpus(tmp_path / "gpus") == [Gpu("GPU-77", 0)]
