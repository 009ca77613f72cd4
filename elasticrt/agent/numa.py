"""Which CPUs each worker of a node runs on: those near its GPU. What is chosen is pure; the machine is read from /sys.

The ways are torchrun's. Without GPUs the workers are spread over the NUMA nodes, one node after the other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticrt.errors import ConfigError, explain

MODES = ("node", "socket", "exclusive", "core-complex")
"""All CPUs of the GPU's NUMA node; of its socket; a share of the node's cores; cores that share a cache there."""

_SYSTEM = Path("/sys/devices/system")
_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Cpu:
    """One logical CPU. `core` and `cache` are the lowest number of those that share the core, the largest cache."""

    number: int
    node: int
    socket: int
    core: int
    cache: int


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver shows it."""

    uuid: str
    node: int


def bind(mode: str | None, workers: int, env: Mapping[str, str]) -> tuple[frozenset[int], ...]:
    """The CPUs of each of this node's workers; () for a `mode` of None. Raises ConfigError when there are too few."""
    if mode is None:
        return ()
    cpus = read_cpus(_SYSTEM, os.sched_getaffinity(0))
    return choose(mode, cpus, places(workers, cpus, read_gpus(_DRIVER), env.get("CUDA_VISIBLE_DEVICES")))


def places(workers: int, cpus: Sequence[Cpu], gpus: Sequence[Gpu], visible: str | None) -> list[int]:
    """The NUMA node of each worker: its GPU's, by local rank among those that are `visible`. Pure.

    Raises ConfigError when `visible` names a GPU that is not there.
    """
    if visible is not None and gpus:
        gpus = [_named(name.strip(), gpus) for name in visible.split(",") if name.strip() not in ("", "-1")]
    nodes = sorted({cpu.node for cpu in cpus})
    near = [gpu.node if gpu.node in nodes else nodes[0] for gpu in gpus]
    if not near:
        return [nodes[local_rank * len(nodes) // workers] for local_rank in range(workers)]
    return [near[local_rank % len(near)] for local_rank in range(workers)]


def choose(mode: str, cpus: Sequence[Cpu], nodes: Sequence[int]) -> tuple[frozenset[int], ...]:
    """The CPUs of each worker, given the NUMA node of each. Pure. Raises ConfigError when a node has too few."""
    found = []
    for local_rank, node in enumerate(nodes):
        mates = [other for other, where in enumerate(nodes) if where == node]
        index = mates.index(local_rank)
        own = [cpu for cpu in cpus if cpu.node == node]
        if mode == "socket":
            sockets = {cpu.socket for cpu in own}
            own = [cpu for cpu in cpus if cpu.socket in sockets]
        elif mode == "exclusive":
            cores = _share(sorted({cpu.core for cpu in own}), index, len(mates))
            own = [cpu for cpu in own if cpu.core in cores]
        elif mode == "core-complex":
            sizes = [(-sum(other.cache == cpu.cache for other in own), cpu.cache) for cpu in own]
            _, cache = sorted(set(sizes))[index % len(set(sizes))]
            own = [cpu for cpu in own if cpu.cache == cache]
        if not own:
            raise ConfigError(
                explain(
                    "too few cores to bind workers to",
                    f"--numa-binding {mode}",
                    got=f"{len(mates)} workers on NUMA node {node}",
                    expected="a core for each",
                    remedy="Start fewer workers, or use --numa-binding node",
                )
            )
        found.append(frozenset(cpu.number for cpu in own))
    return tuple(found)


def _share(items: Sequence[int], index: int, shares: int) -> Sequence[int]:
    """Part `index` of `items`, divided as evenly as it goes; the first parts get what is left over."""
    size, more = divmod(len(items), shares)
    start = index * size + min(index, more)
    return items[start : start + size + (index < more)]


def _named(name: str, gpus: Sequence[Gpu]) -> Gpu:
    fits = [gpu for gpu in gpus if gpu.uuid.startswith(name)] if not name.isdigit() else list(gpus[int(name) :][:1])
    if not fits:
        raise ConfigError(
            explain("no such GPU", "CUDA_VISIBLE_DEVICES", got=name, expected=f"one of the {len(gpus)} of this machine")
        )
    return fits[0]


def read_cpus(system: Path, allowed: set[int]) -> list[Cpu]:
    """The CPUs below `system` that this process may use; a machine without NUMA is one node."""
    nodes = {
        number: int(path.name.removeprefix("node"))
        for path in (system / "node").glob("node[0-9]*")
        for number in _numbers(path / "cpulist", set())
    }
    found = []
    for number in sorted(allowed):
        base = system / "cpu" / f"cpu{number}"
        socket = min(_numbers(base / "topology" / "physical_package_id", {0}))
        core = min(_numbers(base / "topology" / "thread_siblings_list", {number}))
        found.append(Cpu(number, nodes.get(number, 0), socket, core, min(_largest_cache(base, number))))
    return found


def _largest_cache(base: Path, number: int) -> set[int]:
    """The CPUs that share the cache of the highest level with this one."""
    levels = {
        max(_numbers(path / "level", {0})): path
        for path in (base / "cache").glob("index[0-9]*")
        if (path / "type").is_file() and (path / "type").read_text().strip() in ("Unified", "Data")
    }
    return _numbers(levels[max(levels)] / "shared_cpu_list", {number}) if levels else {number}


def read_gpus(driver: Path) -> list[Gpu]:
    """NVIDIA's GPUs in the order of their places on the bus, which is CUDA's where they are all alike."""
    found = []
    for path in sorted(driver.glob("*/information")):
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        node = min(_numbers(Path("/sys/bus/pci/devices") / path.parent.name.lower() / "numa_node", {0}))
        found.append(Gpu(fields.get("GPU UUID", "").strip(), node))
    return found


def _numbers(path: Path, default: set[int]) -> set[int]:
    """The numbers in a file such as `0-3,8`; `default` where there is no such file, or it says -1 (unknown)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return default
    if not text or text.startswith("-"):
        return default
    ends = [part.split("-") for part in text.split(",")]
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}
