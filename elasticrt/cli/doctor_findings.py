"""The checks of `elasticrt doctor`: each is a function from what was seen to a finding. Pure.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elasticrt.store.protocol import ServerStatus

Level = Literal["ok", "warn", "fail"]
MIB, GIB = 1 << 20, 1 << 30

QUOTA_BYTES = 2 * GIB
"""etcd's default quota. Only etcd 3.6 and newer tells its own."""

# The versions with which the tests run.
OLDEST_TORCH, NEWEST_TORCH = (2, 10), (2, 15)
SHARED = re.compile(r"nfs4?|cifs|smb3|lustre|gpfs|ceph|beegfs|glusterfs|9p|virtiofs|afs|fuse\..+")
"""The types of file systems that other nodes may see as well."""


@dataclass(frozen=True)
class Finding:
    """The result of one check, with the remedy ("" if none is needed)."""

    level: Level
    what: str
    remedy: str = ""


def line(name: str, finding: Finding) -> str:
    """The line about the check `name`."""
    return f"{finding.level:<4}  {name:<11}  {finding.what}" + (f". {finding.remedy}" if finding.remedy else "")


def _judged(said: str, *troubles: tuple[object, Level, str, str]) -> Finding:
    """What was `said`, with the first trouble that is there; "ok" without any.

    A trouble is: whether it is there, its level, what is appended to `said`, the remedy.
    """
    for there, level, more, remedy in troubles:
        if there:
            return Finding(level, said + more, remedy)
    return Finding("ok", said)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"


def _version(text: str, parts: int) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:parts]))


def etcd(
    where: str,
    server: ServerStatus,
    read_s: float,
    write_s: float,
    *,
    own: bool,
    open_to_all: bool,
    refused: str = "",
) -> Finding:
    """Judge an etcd, and the times of a read and a write. An etcd that reports troubles was asked for neither.

    `own` is one that was started for this look, `open_to_all` one on another machine without TLS and login. `refused`
    is the key prefix of doctor's own, if this user may not write below it.
    """
    version, quota = _version(server.version, 3), server.quota_bytes or QUOTA_BYTES
    troubles, unsafe = "; ".join(server.troubles), not own and (3, 5, 0) <= version < (3, 5, 5)
    place = "starts here, for agents of this machine alone" if own else f"at {where}"
    # Before 3.6 etcd does not tell its quota. The one that was started here has the default.
    size = f"{_size(server.used_bytes)} of {_size(quota)} used"
    if not (server.quota_bytes or own):
        unknown = "" if troubles else f" (etcd {server.version} does not tell its quota; the default is {_size(quota)})"
        size = f"{_size(server.used_bytes)} used{unknown}"
    times = "" if troubles or refused else f"reads in {_ms(read_s)}, writes in {_ms(write_s)}, "
    no_times = f"; times are unknown, as this user has no readwrite permission on {refused}"
    return _judged(
        f"{server.version} {place}: {times}{size}",
        # 3.5.0 to 3.5.4 can lose writes in a crash ("unsafe"), so none of these is recommended below.
        ("NOSPACE" in troubles, "fail", f"; {troubles}", "Compact and defragment it, then `etcdctl alarm disarm`"),
        (troubles, "fail", f"; {troubles}", "Look at the member that is named, and that a majority runs"),
        (version < (3, 4), "fail", "; it is too old", "Use etcd 3.4.23 or newer, not 3.5.0 to 3.5.4"),
        (server.used_bytes > 0.8 * quota, "warn", "; nearly full", "Compact and defragment it, or raise its quota"),
        (write_s > 0.1, "warn", "; slow", "Give it a disk that flushes within 10 ms, and a place near the nodes"),
        (refused, "warn", no_times, "Give --run-id of a run to which this user may write, or grant that permission"),
        (unsafe, "warn", "; this version can lose its last writes in a crash", "Use 3.5.5 or newer"),
        (open_to_all, "warn", "; anyone who can connect to it can change the runs", "Use TLS with client certificates"),
    )


def address(own: str, why: str, interface: str, told: str | None, interfaces: Mapping[str, Collection[str]]) -> Finding:
    """Judge the address that an agent would publish. `told` is GLOO_SOCKET_IFNAME, if it is set."""
    variable, known = f"; GLOO_SOCKET_IFNAME is {told}", ", ".join(sorted(interfaces))
    return _judged(
        f"{own} on {interface or 'no interface'}: {why}",
        (not interface, "fail", "", "Give an address of this machine with --local-addr"),
        (told is not None and told not in interfaces, "fail", f"{variable}, which is none of {known}", "Unset it"),
        (told not in (None, interface), "warn", variable, "Unset it, or see that the nodes reach each other there"),
    )


def loopback(error: str) -> Finding:
    """Judge whether 127.0.0.1 can be used; `error` says why not."""
    more = f" cannot be used ({error}): processes of one node talk over it"
    remedy = "Bring it up: ip link set lo up; without an address: ip addr add 127.0.0.1/8 dev lo"
    return _judged("127.0.0.1", (error, "fail", more, remedy))


def names(host: str, addresses: Collection[str], back: str, error: str, seconds: float) -> Finding:
    """Judge this machine's name. `back` is the name that its own address resolves to."""
    return _judged(
        f"{host} is {', '.join(sorted(addresses)) or 'unknown'}; its address is called {back or 'nothing'}",
        (error, "warn", f": {error}; nodes need no names, scripts may", "Add it to DNS or /etc/hosts"),
        (seconds > 1, "warn", f"; asking took {seconds:.1f} s, and torch asks", "Fix DNS, or use /etc/hosts"),
    )


def ports(first: int, last: int, used: int) -> Finding:
    """Judge the ports from `first` to `last`, of which the kernel chooses those of a run; `used` of them are taken."""
    free, remedy = last - first + 1 - used, "`ss -tan` shows what uses them; or widen net.ipv4.ip_local_port_range"
    return _judged(
        f"{free:,} of {first} to {last} are free; a run uses any of them",
        (free < 100, "fail", "", remedy),
        (free < 1000, "warn", "", remedy),
    )


def clock(synchronised: bool | None) -> Finding:
    """Judge the wall clock. None: the kernel does not say whether it is synchronised."""
    remedy = "Start chrony or systemd-timesyncd: certificates, and the order of events in reports, depend on it"
    said = {True: "synchronised", False: "not synchronised", None: "the kernel does not say whether it is synchronised"}
    return _judged(said[synchronised], (synchronised is False, "warn", "", remedy))


def shared_memory(total: int, free: int) -> Finding:
    """Judge the shared memory in which the worker processes of loaders hand over their batches."""
    said = f"{_size(free)} of {_size(total)} shared memory are free"
    more = ": loader workers die of SIGBUS where it is full"
    remedy = "Delete what was left there, or enlarge it (docker run --shm-size=8g; an emptyDir of medium Memory)"
    return _judged(said, (total < GIB or free < total / 10, "warn", more, remedy))


def limits(files: int, needed: int, processes: int, locked: int, *, rdma: bool) -> Finding:
    """Judge hard limits; -1 is unlimited. An agent needs `needed` open files. `rdma` devices lock memory."""
    shown = ["unlimited" if each < 0 else f"{each:,}" for each in (files, processes, locked)]
    return _judged(
        "open files {}, processes {}, locked memory {}".format(*shown),
        (
            0 <= files < needed,
            "fail",
            f"; of many nodes each agent opens {needed:,}",
            "Raise ulimit -n",
        ),
        (0 <= processes < 1024, "warn", "; threads count as processes", "Raise ulimit -u"),
        (rdma and locked >= 0, "warn", "; RDMA locks more", "Set ulimit -l unlimited"),
    )


def checkpoints(directory: str, error: str, kind: str, free: int, flush_s: float) -> Finding:
    """Judge the checkpoint directory. `kind` is the type of its file system, `error` why it cannot be written to."""
    whose = "storage that nodes can share" if SHARED.fullmatch(kind) else "this node's own disk"
    if error:
        return Finding("fail", f"{directory}: {error}", "Name a directory that every node can write to")
    return _judged(
        f"{directory}: {whose} ({kind}), {_size(free)} free, flushes in {_ms(flush_s)}",
        (free < 16 * MIB, "fail", "", "Make room: no checkpoint fits there"),
        (free < GIB, "warn", "", "Make room: a last save that fails ends the run with code 5"),
        (
            kind in ("tmpfs", "ramfs", "overlay"),
            "warn",
            "; lost with the node or container",
            "Name a directory on a disk",
        ),
        (flush_s > 1, "warn", "; slow", "Choose faster storage, or save less often: Loop(every=)"),
    )


def torch(python: str, seen: Mapping[str, Any], error: str) -> Finding:
    """Judge the versions of Python and torch.

    `seen` is what a process with torch has reported; `error`: why it has not.
    """
    if error:
        return Finding("fail", f"Python {python}: {error}", "Install torch where this Python finds it")
    version = _version(seen["torch"], 2)
    span = "{}.{} to {}.{}".format(*OLDEST_TORCH, *NEWEST_TORCH)
    return _judged(
        f"torch {seen['torch']}, Python {python}",
        (version < OLDEST_TORCH, "fail", ": too old", f"Install one of {span}"),
        (not seen["gloo"], "fail", ": built without gloo", "Install one of PyTorch's own builds"),
        (version > NEWEST_TORCH, "warn", f": newer than what was tried, {span}", "Try it before you rely on it"),
    )


def gpus(shown: int, seen: Mapping[str, Any]) -> Finding:
    """Judge the GPUs: how many the driver shows, and what torch has `seen` of them."""
    found, build = seen["gpus"], f"CUDA {seen['cuda']}" if seen["cuda"] else "a build for the CPU"
    kinds = ", ".join(f"{found.count(name)} x {name}" for name in dict.fromkeys(found))
    remedy = "Look at CUDA_VISIBLE_DEVICES, nvidia-smi, and for which CUDA torch was built"
    return _judged(
        f"{kinds}, {build}, nccl {seen['nccl']}" if found else "none: workers train on the CPU",
        (len(found) < shown, "fail", f"; the driver shows {shown}, torch ({build}) sees {len(found)}", remedy),
        (found and not seen["nccl"], "warn", "none", "Install a torch with nccl: gloo is slow between GPUs"),
    )


def slurm(said: str, nodes: int, *, meets: bool) -> Finding:
    """Judge a SLURM job of so many `nodes`. `meets`: whether its agents are told where to meet."""
    more, remedy = ": its nodes have no common etcd", "Give --etcd, or --insecure-etcd to `elasticrt run`"
    return _judged(said, (nodes > 1 and not meets, "warn", more, remedy))


def kubernetes(pod: str, memory: int, cpus: int) -> Finding:
    """Judge a pod: the bytes of memory that its processes may still use, and its CPUs."""
    said = f"pod {pod}: {_size(memory)} of memory left, {cpus} CPUs"
    return _judged(said, (memory < GIB, "warn", "", "Raise the container's limit of memory"))
