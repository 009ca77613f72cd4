"""How `elasticrt doctor` looks at a machine. Each look has a deadline, and none loads torch into this process."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import queue
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from uuid import uuid4

from elasticrt.agent.network_interfaces import interface_of, interfaces, why_no_loopback
from elasticrt.agent.resource_limits import files_needed
from elasticrt.agent.store_discovery import address_towards, check_listening, outward_address
from elasticrt.cli import configure
from elasticrt.cli import doctor_findings as findings
from elasticrt.cli.doctor import DoctorOptions
from elasticrt.cli.doctor_findings import Finding
from elasticrt.cli.slurm import Slurm
from elasticrt.errors import ElasticError
from elasticrt.ipc.cgroups import available_bytes
from elasticrt.ipc.proc import gpus, start_of, text_of
from elasticrt.option_values import NODES_MAX
from elasticrt.store import embedded, etcd_server
from elasticrt.store.address import is_loopback
from elasticrt.store.protocol import Address, Put, Store, StoreRefused, Txn

LOOK_S = 120.0
"""How long one look may take: torch takes more than a minute to load from a cold disk in the network."""

TIME_ERROR = 5
"""What adjtimex(2) returns for a clock that is not synchronised."""

# Runs in a process of its own, so that a broken torch or driver cannot end the command.
TORCH = """
import json, torch, torch.distributed as dist
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip, "gloo": dist.is_gloo_available(),
    "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
}))
"""


Look = Callable[[DoctorOptions], Iterator[tuple[str, Finding]]]


def looked(title: str, look: Look, options: DoctorOptions, wait_s: float = LOOK_S) -> Iterator[tuple[str, Finding]]:
    """The findings of `look` within `wait_s` seconds, each as soon as it is known.

    A look that fails or hangs is a finding as well, with the look's `title`.
    """
    found: queue.SimpleQueue[tuple[str, Finding] | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for each in look(options):
                found.put(each)
        except Exception as error:  # noqa: BLE001  As said above.
            found.put((title, Finding("fail", str(error) or repr(error))))
        found.put(None)

    threading.Thread(target=work, name="elasticrt-doctor", daemon=True).start()
    deadline = time.monotonic() + wait_s
    try:
        while (each := found.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            yield each
    except queue.Empty:
        yield title, Finding("fail", f"no answer within {wait_s:g} s")


def etcd(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    """Look at each endpoint of etcd; without any, at an etcd of this machine's own, started for this."""
    endpoints, serve = configure.where_etcd_is(options)
    if serve is not None:
        etcd_server.resolve_listen_address(serve, "--rdzv-endpoint")
    for endpoint in endpoints:
        try:
            yield "etcd", _asked(endpoint, options, own=False)
        except ElasticError as error:
            # The other endpoints may answer, and agents then use these.
            yield "etcd", Finding("fail", str(error))
    if endpoints:
        return
    with embedded.new_data_directory() as data:
        etcd = etcd_server.EtcdProcess(etcd_server.find_binary(), data, etcd_server.socket_in(data))
        try:
            etcd.start()
            # A record is written and removed as agents do it, so that a full disk is found as well.
            with embedded.locked() as (directory, _):
                record = embedded.record_of(directory, data.name)
                embedded.write_record(record, embedded.EmbeddedServer(etcd.address, os.getpid(), start_of(os.getpid())))
                record.unlink()
            yield "etcd", _asked(etcd.address, options, own=True)
        finally:
            etcd.stop()


def _asked(endpoint: Address, options: DoctorOptions, *, own: bool) -> Finding:
    from elasticrt.store.etcd import EtcdStore

    check_listening((endpoint,))
    store, read_s, write_s, refused = EtcdStore((endpoint,), configure.read_credentials(options)), 0.0, 0.0, ""
    prefix = f"/elasticrt/{options.run_id or 'doctor'}/"
    # Below the prefix of the run if one is named: an etcd user may have permission for this prefix alone.
    key = f"{prefix}doctor/{uuid4().hex}"
    try:
        server = store.status()
        try:
            read_s, write_s = (0.0, 0.0) if server.troubles else _times(store, key)
        except StoreRefused as error:
            if options.run_id is not None or "permission denied" not in str(error):
                raise
            # No run needs to write below doctor's own prefix.
            refused = prefix
    finally:
        store.close()
    open_to_all = endpoint.scheme == "http" and not is_loopback(endpoint) and options.etcd_user is None
    return findings.etcd(str(endpoint), server, read_s, write_s, own=own, open_to_all=open_to_all, refused=refused)


def _times(store: Store, key: str) -> tuple[float, float]:
    """How many seconds a read and a write of `key` take. Raises StoreError."""
    reads = timeit.repeat(lambda: store.read(key), number=1)
    # With a lease the key goes even if this process is killed.
    lease = store.grant(10.0).lease_id
    writing = Txn((), (Put(key, b"", lease),), "see whether it may write")
    writes = timeit.repeat(lambda: store.commit(writing), number=1)
    store.revoke(lease)
    return median(reads), median(writes)


def own_address(options: DoctorOptions) -> tuple[str, str]:
    """The address that `run` would publish, and why this one. Raises ConfigError, StoreUnavailable."""
    endpoints, serve = configure.where_etcd_is(options)
    told = configure.own_address(options.local_addr, NODES_MAX)
    if told is not None:
        return told, "as --local-addr says"
    if endpoints or serve is not None:
        where = serve or endpoints[0]
        return address_towards(where), f"the way to etcd at {where} begins there"
    return outward_address() or "127.0.0.1", "the way to other machines begins there; they need an --etcd"


def network(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    """Look at the address that this node would publish, its name, and 127.0.0.1."""
    yield "loopback", findings.loopback(why_no_loopback())
    own, why = own_address(options)
    told = os.environ.get("GLOO_SOCKET_IFNAME")
    yield "address", findings.address(own, why, interface_of(own), told, interfaces())
    host, began, error, addresses, back = socket.gethostname(), time.monotonic(), "", set[str](), ""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
        back = socket.getnameinfo((own, 0), 0)[0]
    except OSError as failure:
        error = failure.strerror or str(failure)
    yield "names", findings.names(host, addresses, back, error, time.monotonic() - began)


def machine(_: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    """Look at what the kernel gives out: ports, the time, shared memory, and limits."""
    first, last = map(int, text_of(Path("/proc/sys/net/ipv4/ip_local_port_range")).split())
    lines = [line for name in ("tcp", "tcp6") for line in text_of(Path("/proc/net", name)).splitlines()[1:]]
    # The second column is the local address, with its port in hexadecimal.
    used = {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    yield "ports", findings.ports(first, last, len(used & set(range(first, last + 1))))
    # A timex structure full of zeros changes nothing.
    state = ctypes.CDLL(None).adjtimex((ctypes.c_long * 64)())
    yield "clock", findings.clock({-1: None, TIME_ERROR: False}.get(state, True))
    room = os.statvfs("/dev/shm")  # noqa: S108  Nothing is made there.
    yield "memory", findings.shared_memory(room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize)
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    # The hard limits: within these a process can raise its own soft limits.
    files, processes, locked = (resource.getrlimit(kind)[1] for kind in kinds)
    needed = files_needed(configure.count_workers(None, os.environ), NODES_MAX)
    rdma = any(Path("/sys/class").glob("infiniband/*"))
    yield "limits", findings.limits(files, needed, processes, locked, rdma=rdma)


def checkpoints(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    """Write to the checkpoint directory, or if it does not exist yet, to the nearest directory above it."""
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
    # The file system is found by its device number, because the path may be below any mount.
    mounts = [line.split(" - ") for line in text_of(Path("/proc/self/mountinfo")).splitlines()]
    kinds = {place.split()[2]: what.split()[0] for place, what in mounts}
    device, room = there.stat().st_dev, os.statvfs(there)
    kind = kinds.get(f"{os.major(device)}:{os.minor(device)}", "unknown")
    shown = str(wanted) if there == wanted else f"{wanted} (not there yet; looked at {there})"
    yield "checkpoints", findings.checkpoints(shown, error, kind, room.f_bavail * room.f_frsize, flush_s)


def torch(_: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    """Look at torch and the GPUs that it sees, in a process of its own."""
    command, error, seen = [os.environ.get("PYTHON_EXEC", sys.executable), "-c", TORCH], "", {}
    try:
        # Its time ends before this look's own, so that the reason is shown.
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S - 5, check=False)
        if done.returncode == 0:
            seen = json.loads(done.stdout.splitlines()[-1])
        else:
            # The last line of a traceback is the error.
            error = next(reversed(done.stderr.splitlines()), f"importing torch ends the process with {done.returncode}")
    except (OSError, subprocess.TimeoutExpired) as failure:
        error = str(failure)
    yield "torch", findings.torch(platform.python_version(), seen, error)
    if seen:
        yield "gpus", findings.gpus(gpus(), seen)


def scheduler(options: DoctorOptions) -> Iterator[tuple[str, Finding]]:
    """Look at the SLURM job or the Kubernetes pod around this process, if there is one."""
    job = Slurm.from_env(os.environ)
    if job is not None:
        said = f"job {job.job}, step {job.step}, node {job.node or 'none'} of {job.job_nodes}"
        yield "slurm", findings.slurm(said, job.step_nodes, meets=bool(options.etcd or options.meet_at))
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        cpus = len(os.sched_getaffinity(0))
        yield "kubernetes", findings.kubernetes(socket.gethostname(), available_bytes(), cpus)


LOOKS: dict[str, Look] = {
    "etcd": etcd,
    "network": network,
    "machine": machine,
    "checkpoints": checkpoints,
    "torch": torch,
    "scheduler": scheduler,
}
