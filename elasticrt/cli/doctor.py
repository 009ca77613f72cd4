"""`elasticrt doctor`: looks at what a run needs on this machine, and says in a line each what is wrong, and the remedy.

What follows from what is seen is in `doctor_findings`. Here is the looking: each look has a deadline, none loads torch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from elasticrt.agent.file_limits import files_needed
from elasticrt.agent.network_interfaces import interface_of, interfaces, why_no_loopback
from elasticrt.agent.store_discovery import address_towards, check_listening, outward_address
from elasticrt.cli import doctor_findings as findings
from elasticrt.cli.configure import count_workers, own_address, read_credentials, where_etcd_is
from elasticrt.cli.doctor_findings import Finding
from elasticrt.cli.doctor_reach import answer_peers, ask_peer
from elasticrt.cli.options import declare, read
from elasticrt.cli.slurm import Slurm
from elasticrt.cli.torchrun_flags import MeetingFlags
from elasticrt.errors import EXIT_OK, EXIT_WORKERS
from elasticrt.ipc.cgroups import available_bytes, text_of
from elasticrt.ipc.std_streams import write
from elasticrt.option_values import NODES_MAX, host_and_port, option
from elasticrt.run_options import EtcdOptions
from elasticrt.store import embedded, etcd_server
from elasticrt.store.address import is_loopback
from elasticrt.store.protocol import Address, Put, Txn

LOOK_S = 120.0
"""What one look may take: torch takes more than a minute to load from a cold disk in the network."""

TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip, "gloo": dist.is_gloo_available(),
    "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
}))
"""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(EtcdOptions):
    """Of `elasticrt doctor`."""

    local_addr: str | None = option("--local-addr ADDRESS", None, "this node's address, as for `run`")
    checkpoint: Path | None = option("--checkpoint DIR", None, "look at this checkpoint directory as well", Path)
    listen: bool = option("--listen", False, "let other machines try to reach this one, for ten minutes")
    peer: tuple[str, int] | None = option("--peer HOST:PORT", None, "try with the one that listens", host_and_port)
    json: bool = option("--json", False, "a JSON object in each line")


Look = Callable[[DoctorOptions], Iterator[tuple[str, Finding]]]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="look for what would keep a run from working on this machine",
        description="Look at what a run needs on this machine; say what is wrong, and the remedy.",
        epilog="example: elasticrt doctor --etcd https://10.0.0.5:2379 --checkpoint /shared/ckpt",
        allow_abbrev=False,
    )
    declare(parser, DoctorOptions, MeetingFlags)
    parser.set_defaults(func=main)


def main(arguments: argparse.Namespace) -> int:
    """Look, and say. Exit code 0 where no check fails, else 1. Raises ConfigError for options that cannot be used."""
    options = read(MeetingFlags(), arguments, os.environ).placed(read(DoctorOptions(), arguments, os.environ))
    if options.listen:
        answer_peers(_address(options)[0])
        return EXIT_OK
    failed = False
    for title, look in (LOOKS if options.peer is None else {"peer": _peer}).items():
        for name, finding in looked(title, look, options):
            said = json.dumps({"check": name, **vars(finding)}) if options.json else findings.line(name, finding)
            write(sys.stdout, said + "\n")
            failed = failed or finding.level == "fail"
    return EXIT_WORKERS if failed else EXIT_OK


def looked(title: str, look: Look, options: DoctorOptions, wait_s: float = LOOK_S) -> list[tuple[str, Finding]]:
    """What `look` finds within `wait_s` seconds. What cannot be seen is told under its `title`, and hides no other."""
    found: list[tuple[str, Finding]] = []

    def work() -> None:
        try:
            found.extend(look(options))
        except Exception as error:  # noqa: BLE001  As said above.
            found.append((title, Finding("fail", str(error) or repr(error))))

    thread = threading.Thread(target=work, name="elasticrt-doctor", daemon=True)
    thread.start()
    thread.join(wait_s)
    late = [(title, Finding("fail", f"no answer within {wait_s:g} s"))] if thread.is_alive() else []
    return [*found, *late]


def _etcd(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    endpoints, serve = where_etcd_is(options)
    if serve is not None:
        etcd_server.claim(serve, "--rdzv-endpoint")
    for endpoint in endpoints:
        yield "etcd", _asked(endpoint, options, own=False)
    if endpoints:
        return
    data = embedded.make_data()
    etcd = etcd_server.EtcdProcess(etcd_server.find_binary(), data, etcd_server.socket_in(data), uuid4().hex)
    try:
        etcd.start()
        yield "etcd", _asked(etcd.address, options, own=True)
    finally:
        etcd.stop()
        embedded.remove_data(data)


def _asked(endpoint: Address, options: DoctorOptions, *, own: bool) -> Finding:
    from elasticrt.store.etcd import EtcdStore

    check_listening((endpoint,))
    store = EtcdStore((endpoint,), read_credentials(options))
    key = f"/elasticrt/{options.run_id or 'doctor'}/doctor/{uuid4().hex}"
    try:
        server = store.status()
        read_s = _median_s(lambda: store.read(key))
        lease = store.grant(10.0).lease_id
        write_s = _median_s(lambda: store.commit(Txn((), (Put(key, b"", lease),), "see whether it may write")))
        store.revoke(lease)
    finally:
        store.close()
    open_to_all = endpoint.scheme == "http" and not is_loopback(endpoint) and options.etcd_user is None
    return findings.etcd(str(endpoint), server, read_s, write_s, own=own, open_to_all=open_to_all)


def _median_s(act: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.monotonic()
        act()
        times.append(time.monotonic() - began)
    return median(times)


def _address(options: DoctorOptions) -> tuple[str, str]:
    """The address that `run` would publish, and why that one. Raises ConfigError, StoreUnavailable."""
    endpoints, serve = where_etcd_is(options)
    told = own_address(options.local_addr, NODES_MAX)
    if told is not None:
        return told, "as --local-addr says"
    if endpoints or serve is not None:
        where = serve or endpoints[0]
        return address_towards(where), f"the way to etcd at {where} begins there"
    return outward_address() or "127.0.0.1", "the way to other machines begins there; they need an --etcd"


def _network(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    yield "loopback", findings.loopback(why_no_loopback())
    own, why = _address(options)
    told = os.environ.get("GLOO_SOCKET_IFNAME")
    yield "address", findings.address(own, why, interface_of(own), told, interfaces())
    host, began, error, addresses, back = socket.gethostname(), time.monotonic(), "", set[str](), ""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
        back = socket.getnameinfo((own, 0), 0)[0]
    except OSError as failure:
        error = failure.strerror or str(failure)
    yield "names", findings.names(host, addresses, back, error, time.monotonic() - began)


def _machine(_: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    first, last = map(int, text_of(Path("/proc/sys/net/ipv4/ip_local_port_range")).split())
    lines = [line for name in ("tcp", "tcp6") for line in text_of(Path("/proc/net", name)).splitlines()[1:]]
    used = {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    yield "ports", findings.ports(first, last, len(used & set(range(first, last + 1))))
    state = ctypes.CDLL(None).adjtimex((ctypes.c_long * 64)())  # All zero: it only looks.
    yield "clock", findings.clock({-1: None, 5: False}.get(state, True))
    room = os.statvfs("/dev/shm")  # noqa: S108  Nothing is made there.
    yield "memory", findings.shared_memory(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize)
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    files, processes, locked = (resource.getrlimit(kind)[1] for kind in kinds)
    needed = files_needed(count_workers(None, os.environ), NODES_MAX, serves=True)
    rdma = any(Path("/sys/class").glob("infiniband/*"))
    yield "limits", findings.limits(files, needed, processes, locked, rdma=rdma)


def _checkpoints(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    if options.checkpoint is None:
        return
    wanted, error, flush_s = options.checkpoint.absolute(), "", 0.0
    there = next(each for each in (wanted, *wanted.parents) if each.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".elasticrt-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            began = time.monotonic()
            os.fsync(file.fileno())
            flush_s = time.monotonic() - began
    except OSError as failure:
        error = f"{there} cannot be written to: {failure.strerror}"
    mounts = [line.split(" - ") for line in text_of(Path("/proc/self/mountinfo")).splitlines()]
    kinds = {place.split()[2]: what.split()[0] for place, what in mounts}
    device, room = there.stat().st_dev, os.statvfs(there)
    kind = kinds.get(f"{os.major(device)}:{os.minor(device)}", "unknown")
    yield "checkpoints", findings.checkpoints(str(wanted), error, kind, room.f_bavail * room.f_frsize, flush_s)


def _torch(_: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    command, error, seen = [os.environ.get("PYTHON_EXEC", sys.executable), "-c", TORCH], "", {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S - 5, check=False)
        if done.returncode == 0:
            seen = json.loads(done.stdout.splitlines()[-1])
        else:
            error = next(reversed(done.stderr.splitlines()), f"importing torch ends it with {done.returncode}")
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    yield "torch", findings.torch(platform.python_version(), seen, error)
    if seen:
        shown = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()]
        yield "gpus", findings.gpus(len(shown), seen)


def _scheduler(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    slurm = Slurm.from_env(os.environ)
    if slurm is not None:
        said = f"job {slurm.job}, step {slurm.step}, node {slurm.node or 'none'} of {slurm.job_nodes}"
        yield "slurm", findings.slurm(said, slurm.step_nodes, meets=bool(options.etcd or options.meet_at))
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        cpus = len(os.sched_getaffinity(0))
        yield "kubernetes", findings.kubernetes(socket.gethostname(), available_bytes(), cpus)


def _peer(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    assert options.peer is not None
    try:
        yield "peer", ask_peer(*options.peer)
    except OSError as error:
        remedy = "Start `elasticrt doctor --listen` there, and let nodes reach each other at all ports"
        yield "peer", Finding("fail", f"{options.peer[0]}:{options.peer[1]}: {error.strerror or error}", remedy)


LOOKS: dict[str, Look] = {
    "etcd": _etcd,
    "network": _network,
    "machine": _machine,
    "checkpoints": _checkpoints,
    "torch": _torch,
    "scheduler": _scheduler,
}
