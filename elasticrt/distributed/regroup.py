"""A process group that is left and made anew while its process lives on: sockets, group, DDP's reducer.

A rank that waits in a gloo collective for a lost peer waits for ever, unless it is that peer's neighbour. No call of
torch frees it. Shutting down the group's own sockets from another thread does, within milliseconds. So the sockets of
every group are noted while it is made, and `cut` shuts down just these. The script may open others meanwhile, so gloo's
are told by the addresses at which its ranks listen: all ranks read them in the store, and so do we. After that the
group is only destroyed, and the next one meets in a store of its own. A group of NCCL is aborted: its kernels end, and
what they have written is worthless (`InPlace.check_results`).

DDP's reducer keeps buckets in an order that it learns from backward passes. Ranks with different orders would add up
different gradients without an error, so every rank gets a new reducer with every new group, newcomer or not.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elasticrt.distributed.group_store import GroupStore, GroupStoreServer
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.proc import end_in, ends_of, is_connection, is_open_socket, listens, ports_of, sockets_of
from elasticrt.torch_versions import reducer_was_renewed

_log = logging.getLogger(__name__)

RETIRED_S = 2.0
"""How long at least a group that was left is kept. Its threads may still be finishing failed works, and need the
interpreter's lock for that. Destroying the group waits for these threads while holding the lock (torch 2.13)."""

CONNECT_AGAIN_S = 0.005
"""Between two tries to reach the generation's store."""

GROUP_THREAD = "pt_gloo_runloop"
"""What torch calls the threads of a gloo group that carry out its works."""

CUT_AGAIN_S = 0.02
CUT_S_MAX = 60.0
"""A group that is just being made may connect again after a cut. It is cut again until making it has failed."""

ABORTED = ("nccl",)
"""Backends whose groups are freed by aborting them: their kernels wait, not their sockets."""

KNOCK_S = 1.0
"""How long a connection to this process itself may take."""


class Overtaken(Exception):  # noqa: N818  Not an error: the ordinary end of a meeting that is no longer needed.
    """A newer seat has come, so the others will not come to this meeting."""


class GroupSockets:
    """The TCP connections of the present groups, noted while they are made. `cut` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._known: dict[int, str] = {}
        self._peers: list[int] = []  # Those of the default group to the other ranks.
        self._open_peers: select.epoll | None = None  # Knows each of them until it is closed.
        self._before: dict[int, str] | None = None  # Sockets from before the group that is being made; None: none is.
        # Where the ranks of that group listen, as far as they have said so. None: all that is new is taken for its own.
        self._addresses: set[bytes] | None = None
        self._store_port = 0  # The default group's.
        # Frees a thread that waits at a listening socket of the group that is being made.
        self._free: Callable[[socket.socket], bool] = bool
        self._freed: set[str] = set()

    @contextlib.contextmanager
    def noted(self, ranks: int, backend: str = "gloo", store_port: int = 0, *, hears: bool = False) -> Iterator[None]:
        """In this block, in any thread, connections of a group of at most so many ranks are made.

        `store_port`: where the default group's store listens, if this is that group. Its connections belong to the
        group as well, whenever they are made. `hears`: whether `hear` is told what ranks store. Until it is, or `heard`
        is called, and with another backend than gloo, all that is opened in this block is taken for the group's.
        """
        if self._before is not None:  # A part of a group that is noted as a whole.
            yield
            return
        with self._lock:
            self._before, self._store_port = sockets_of(), store_port or self._store_port
            # A rank that is alone connects to nobody.
            self._addresses = set() if backend == "gloo" and (hears or ranks == 1) else None
            self._free = _deafen if backend in ABORTED else partial(_knock, ranks=ranks)
            self._freed.clear()
        try:
            yield
        finally:
            with self._lock:
                new = self._new()
                self._known |= new
                if store_port:
                    ports = {(fd, name): ports_of(fd) for fd, name in sockets_of().items()}
                    stores = dict(each for each in ports if store_port in ports[each])
                    self._follow({fd: name for fd, name in new.items() if ports.get((fd, name)) and fd not in stores})
                    self._known |= stores
                self._before = self._addresses = None
                self._lock.notify_all()

    def hear(self, values: Iterable[bytes]) -> None:
        """Ranks of the group that is being made have stored these: among them may be where they listen."""
        if self._addresses is not None:
            self._addresses.update(map(_address_in, values))

    def heard(self, values: Iterable[bytes]) -> None:
        """All ranks of the group that is being made have stored these."""
        self._addresses = set(map(_address_in, values))

    def cut(self) -> None:
        """Shut all of them down, and those of a group that is being made until that has ended."""
        until = time.monotonic() + CUT_S_MAX
        with self._lock:
            self._shut_all()
            while self._before is not None and time.monotonic() < until:
                self._lock.wait(CUT_AGAIN_S)
                self._shut_all()

    def knows_peers(self, ranks: int) -> bool:
        """Whether the connections of the default group, of so many ranks, are known."""
        return len(self._peers) >= ranks - 1

    def lost_a_peer(self) -> bool:
        """Whether a connection of the default group to another rank has ended: gloo closes it when it sees that."""
        try:
            for fd in self._peers:
                # Fails where `fd` is closed, and where it is another file now. Nothing is as cheap, and this is asked
                # at each step.
                self._open_peers.modify(fd, 0)  # type: ignore[union-attr]  # Made before there are any.
        except OSError:
            return True
        return False

    def _follow(self, peers: dict[int, str]) -> None:
        if self._open_peers is not None:
            self._open_peers.close()
        self._peers, self._open_peers = list(peers), select.epoll() if peers else None
        for fd, name in peers.items():
            with contextlib.suppress(OSError):
                self._open_peers.register(fd, 0)  # type: ignore[union-attr]
                if not is_open_socket(fd, name):  # It was closed before that.
                    self._open_peers.unregister(fd)  # type: ignore[union-attr]

    def _shut_all(self) -> None:
        new = self._new()
        doomed, self._known = {**self._known, **new}, {}
        for fd, name in new.items():
            if name not in self._freed and _with_socket(fd, name, self._free):
                self._freed.add(name)
        for fd, name in doomed.items():
            _with_socket(fd, name, partial(_shut, complete=fd not in new))

    def _new(self) -> dict[int, str]:
        before, addresses = self._before, self._addresses
        new = {} if before is None else {fd: name for fd, name in sockets_of().items() if before.get(fd) != name}
        if addresses is None or b"" in addresses:  # What ranks have stored is in no form that we know.
            return new
        group = {fd: name for fd, name in new.items() if not addresses.isdisjoint(ends_of(fd))}
        return group | {fd: name for fd, name in new.items() if self._store_port and self._store_port in ports_of(fd)}


def _address_in(value: bytes) -> bytes:
    """Where a rank listens, in what gloo stores of it (torch 2.13); b"" for anything else.

    After the length of the host's name come the name, the length of an address, and the address, a `sockaddr`.
    """
    return end_in(value[16 + int.from_bytes(value[:8], sys.byteorder) :][:28])


def _ask(store: Any, ranks: int) -> None:
    """Ask a store of torch's, which tells nobody what is stored, where the ranks of a new group of gloo listen."""
    keys = [f"cpu//0/{rank}" for rank in range(ranks)]
    torch_dist = cast("Any", dist)  # It offers more than it declares.
    if store is None:  # This process is not among the ranks.
        SOCKETS.heard([])
    elif torch_dist.get_debug_level() != torch_dist.DebugLevel.DETAIL:  # Then torch makes another group beside each.
        with contextlib.suppress(RuntimeError):  # Not every store has these calls.
            if store.check(keys):
                SOCKETS.heard(store.multi_get(keys))


def _with_socket(fd: int, name: str, act: Callable[[socket.socket], Any]) -> Any:
    """What `act` returns for the socket `name` behind `fd`; None if it fails, because it was closed meanwhile.

    The number may be another socket's by then, and that one is left alone.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
        return act(each) if is_open_socket(each.fileno(), name) else None


def _shut(each: socket.socket, *, complete: bool) -> None:
    """Shut down a TCP connection, and nothing else: gloo aborts the process without its listening sockets.

    Of a group that is `complete` only reading is shut down, and the connection is held for a while, so that its other
    end can go on writing. When a write fails, gloo (torch 2.13) keeps the message, and does not wake a thread that
    waits for it to be sent when the connection ends. The end of what is read wakes all that wait for messages.
    """
    is_ours = is_connection(each)
    if is_ours and complete:
        _retired.append((time.monotonic(), [each.dup()]))
    if is_ours:
        each.shutdown(socket.SHUT_RD if complete else socket.SHUT_RDWR)


def _knock(each: socket.socket, ranks: int) -> bool:
    """Connect to a listening socket of a group that is being made, as each rank would, and hang up.

    Of two ranks one waits for the other to connect. If that one dies before it does, there is no connection to cut, and
    no call of torch ends the wait before the time of a collective is over (torch 2.13). Returns whether it listens.
    """

    if not listens(each):
        return False
    for rank in range(ranks):
        with socket.socket(each.family, socket.SOCK_STREAM) as knocking:
            knocking.settimeout(KNOCK_S)
            knocking.connect(each.getsockname())
            knocking.sendall(struct.pack("=q", rank))  # By this number gloo knows the rank.
    return True


def _deafen(each: socket.socket) -> bool:
    """Shut down a listening socket of a group of NCCL that is being made. Returns whether it was one.

    A communicator is made in one call, and torch knows it only afterwards, so there is nothing to abort yet. In that
    call each rank waits for others to connect until its listening socket fails.
    """

    if not listens(each):
        return False
    each.shutdown(socket.SHUT_RDWR)
    return True


SOCKETS = GroupSockets()
_store_in_use: Any = None
_served: list[GroupStoreServer] = []
"""The store that this process serves to its generation. It is closed at once, although the group is kept for a while:
the next generation may have the same port, and two stores behind it would each get some of its ranks."""

_retired: list[tuple[float, list[Any]]] = []


_kept: list[Any] = []
"""Every process group since `keep`, until `tidy` finds that its threads have no work left."""


class _Kept(dict[Any, Any]):
    """Torch's map of the groups that it knows. Torch removes a destroyed group; `_kept` keeps it until `tidy`."""

    def __setitem__(self, group: Any, about: Any) -> None:
        _kept.append(group)
        super().__setitem__(group, about)

    def __delitem__(self, group: Any) -> None:
        _retired.append((time.monotonic(), [group]))
        super().__delitem__(group)


def keep() -> None:
    """Keep every process group that is made from now on. Does nothing if torch has no such map.

    Torch destroys a gloo group with the last reference to it, which is often held by a DistributedDataParallel in a
    local variable. The destructor joins gloo's threads while it holds the interpreter's lock (torch 2.13). A thread
    that drops the last result of a collective at that moment needs the same lock, so that both wait for ever.
    `destroy_process_group` still shuts a group down.
    """
    known = getattr(dist.distributed_c10d, "_pg_map", None)
    if type(known) is dict:
        dist.distributed_c10d._pg_map = _Kept(known)  # Torch has no hook for a group's birth or end.


def note_groups() -> None:
    """From now on the connections of all groups are noted, whichever call of torch makes them."""
    made: Any = dist.distributed_c10d._new_process_group_helper
    if getattr(made, "noted", False):
        return

    @functools.wraps(made)
    def make(*args: Any, **options: Any) -> Any:
        with SOCKETS.noted(args[0], args[3], hears=_store_in_use is not None):
            group, store = made(*args, **options)
            if _store_in_use is None and args[3] == "gloo":
                _ask(store, args[0])
            return group, store

    make.noted = True  # type: ignore[attr-defined]
    # Private, but `new_subgroups`, `init_device_mesh` and a `new_group` that was imported earlier all come here.
    dist.distributed_c10d._new_process_group_helper = make


def cut() -> None:
    """Free the threads that wait in a group for a lost peer. May be called from any thread."""
    _abort()
    SOCKETS.cut()


_aborts: dict[Any, threading.Thread] = {}
"""Groups that are being aborted, each by a thread. The kernels end at once. Then NCCL waits up to a second for threads
of its own (2.28, 2.30), which nobody has to wait for."""


def _abort() -> None:
    """Begin to abort all communicators of NCCL at once: each could wait for a kernel that waits for the next."""
    for group in _aborted_ones():
        thread = threading.Thread(target=_abort_one, args=(group,), daemon=True)
        if _aborts.setdefault(group, thread) is thread:
            thread.start()


def _aborted_ones() -> list[Any]:
    world: Any = dist.distributed_c10d._world
    return [each for each in list(world.pg_names) if dist.get_backend(each) in ABORTED]


def _abort_one(group: Any) -> None:
    try:
        group.abort()
    except Exception as error:  # noqa: BLE001  In a thread. A lost GPU fails the worker's next call.
        _log.info("a process group could not be aborted: %s", error)


def leave() -> None:
    """Leave the default group and all others. Their sockets have been cut, or no thread waits in them."""
    cut()
    while _served:
        _served.pop().close()
    if dist.is_initialized():
        _retired.append((time.monotonic(), list(dist.distributed_c10d._world.pg_map)))
        _end_group()


def _end_group() -> None:
    """Make torch forget the default group and all others."""
    names = dist.distributed_c10d._world.pg_names
    for group in _aborted_ones():
        del names[group]  # It is being aborted. Torch shuts down what is in this table, and would wait for that.
    dist.destroy_process_group()


def tidy() -> None:
    """Release the groups that were left long ago. Called where no collective is under way."""
    if _retired and time.monotonic() - _retired[0][0] > RETIRED_S and _idle():
        until = time.monotonic() - RETIRED_S
        _aborts.clear()
        while _retired and _retired[0][0] < until:
            _, left = _retired.pop(0)
            _kept[:] = [each for each in _kept if all(each is not old for old in left)]
            for each in left:
                if isinstance(each, socket.socket):
                    each.close()
            del left


def _idle() -> bool:
    """Whether no thread of any group has a work left: all wait for one, without a limit, as the kernel shows.

    The time alone is not enough: a process that was stopped, or had no share of the CPU, has older works than its clock
    says. It decides only where the kernel does not show system calls.
    """
    aborting = any(each.is_alive() for each in _aborts.values())
    return not aborting and all(call is not None and not _has_limit(call) for call in _waits())


def is_stuck() -> bool:
    """Whether a thread of a group waits for a peer. After a cut that ends, but see `InPlace._end_if_stuck`."""
    return any(call is not None and _has_limit(call) for call in _waits())


def _waits() -> Iterator[list[str] | None]:
    """The system call in which each thread of a group waits, with its arguments; None for one that runs."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # It ended meanwhile, or the kernel does not show it.
            if (task / "comm").read_text().strip() == GROUP_THREAD:
                call = (task / "syscall").read_text().split()
                yield call if len(call) >= 5 else None


def _has_limit(call: list[str]) -> bool:
    """Whether a thread waits until a certain time: for a peer, or for a lock."""
    return int(call[4], 16) != 0


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a generation have met, for messages that do not need the group.

    Attributes:
        store: the generation's.
        rank: this process's.
        world_size: how many ranks there are.
        nonce: the generation's.
        over: whether another generation has begun.
    """

    store: GroupStore
    rank: int
    world_size: int
    nonce: str
    over: Callable[[], bool]

    def gather(self, name: str, value: str) -> list[str]:
        """The values of all ranks under a name, by rank. A name is used once. Collective."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        return [each.decode() for each in self.store.exchange(keys[self.rank], value, keys)]


def meet(
    worker: WorkerEnv,
    backend: str,
    timeout_s: float,
    over: Callable[[], bool],
    make_group: Callable[..., None] = dist.init_process_group,
) -> Meeting:
    """Make the default group of a generation. Any error means that a rank did not come, or was cut off.

    Args:
        worker: this process's seat.
        backend: torch's name of it.
        timeout_s: how long a collective may take, and how long to wait for the others now, who may be busy outside of a
            step.
        over: whether another seat has come; then this raises `Overtaken`.
        make_group: makes the group, with the arguments of `init_process_group`.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    global _store_in_use  # noqa: PLW0603  As below.
    timeout = datetime.timedelta(seconds=timeout_s)
    hook = sys.excepthook
    # Groups are named by a count, which a meeting that failed leaves behind: ranks that count differently never meet.
    dist.distributed_c10d._world.group_count = 0
    # Gloo then asks a store for all addresses at once, not for one after the other, each twice.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    try:
        with SOCKETS.noted(worker.world_size, backend, worker.master_port, hears=True):
            prefix = f"{worker.run_id}/{worker.generation}/{worker.nonce}"
            _store_in_use = _store(worker, timeout_s, over)  # Torch keeps no reference to a store made in Python.
            store = PrefixStore(prefix, _store_in_use)
            make_group(backend, store=store, rank=worker.rank, world_size=worker.world_size, timeout=timeout)
    finally:
        sys.excepthook = hook  # Each init wraps it once more.
    return Meeting(_store_in_use, worker.rank, worker.world_size, worker.nonce, over)


def _store(worker: WorkerEnv, timeout_s: float, over: Callable[[], bool]) -> GroupStore:
    """The generation's store; rank 0 serves it, on the socket that its node has held for that."""
    if over():  # It may have come before there was anything to cut.
        if worker.listen_fd >= 0:
            os.close(worker.listen_fd)
        raise Overtaken
    if worker.rank == 0:
        _served.append(GroupStoreServer(socket.socket(fileno=worker.listen_fd), worker.nonce))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return GroupStore(worker.master_addr, worker.master_port, worker.nonce, timeout_s, SOCKETS.hear)
        except RuntimeError:  # Rank 0 may still be leaving the store of the generation before, at the same port.
            if over():
                raise Overtaken from None
            if time.monotonic() > deadline:
                raise
        time.sleep(CONNECT_AGAIN_S)


def has_subgroups() -> bool:
    """Whether the script has groups of its own in this generation."""
    return len(dist.distributed_c10d._world.pg_map) > 1


def exchanged(layer: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters of a DDP module that are not frozen now. If it was just made, it exchanges their gradients."""
    ignored = layer.parameters_to_ignore
    return [each for name, each in layer.module.named_parameters() if each.requires_grad and name not in ignored]


def obstacle(
    layer: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], given: Collection[object]
) -> str:
    """Why a DDP module that exchanges gradients of `parameters` cannot be given another group, "" if it can.

    `given`: the Loop's objects.
    """
    logger: Any = layer.logger
    if logger._get_ddp_logging_data().ints_map["num_parameter_tensors"] != len(parameters):
        return "parameters were frozen or unfrozen between DDP and the Loop"
    if layer.process_group is not dist.group.WORLD:
        return "DDP has a process group of its own"
    if layer.mixed_precision is not None:
        return "DDP's own mixed precision"
    if layer._use_python_reducer:
        return "DDP's python reducer"
    if getattr(layer, "device_mesh", None) is not None:
        return "DDP has a device mesh"
    # A newcomer's would be at its beginning (PowerSGD counts steps), and its collectives others than the survivors'.
    states = [state for _, state in layer._comm_hooks if state is not None and state is not dist.group.WORLD]
    if any(all(state is not each for each in given) for state in states):
        return "DDP has a communication hook with a state that was not given to the Loop"
    return ""


def rebuild(layers: Iterable[tuple[DistributedDataParallel, Sequence[torch.nn.Parameter]]]) -> None:
    """Give DDP modules the present default group, with a new reducer each for the same parameters as before.

    Everything below is private to torch and tested at each version that is supported; a public way does not exist.
    """
    for layer, parameters in layers:
        with _unfrozen(layer, parameters):
            _rebuild(layer, dist.group.WORLD)


@contextlib.contextmanager
def _unfrozen(layer: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Only `parameters` of a module are not frozen in this block.

    A reducer exchanges what is not frozen when it is made, for good. A survivor may have frozen layers since, and a
    newcomer not yet.
    """
    wanted = {id(each) for each in parameters}
    differ = [each for each in layer.module.parameters() if each.requires_grad != (id(each) in wanted)]
    for each in differ:
        each.requires_grad_(not each.requires_grad)
    try:
        yield
    finally:
        for each in differ:
            each.requires_grad_(not each.requires_grad)


def _rebuild(layer: Any, world: Any) -> None:
    old, layer.process_group = layer.process_group, world
    layer._remove_autograd_hooks()
    # Let go of before there is another, whose buckets then lie in the same memory: new memory may take as long as the
    # step. A work of the old group that has not ended holds what it writes into.
    layer.reducer = layer.logger = None
    static, layer.static_graph = layer.static_graph, False
    parameters, sparse = layer._build_params_for_reducer()
    names = layer._build_debug_param_to_name_mapping(parameters)
    layer._ddp_init_helper(parameters, sparse, names, static)
    layer._has_rebuilt_buckets = False
    layer._lazy_init_ran = False
    if static:
        layer._set_static_graph()
    hooks, layer._comm_hooks = layer._comm_hooks, []
    reducer_was_renewed(layer)
    for hook, state in hooks:
        if getattr(state, "process_group", None) is old:
            state.process_group = world
        layer.register_comm_hook(world if state is old else state, hook)


def warm_up(place: torch.device) -> None:
    """Make a step of a tiny model in the present group, because the first step takes ten times as long as the next."""
    with torch.random.fork_rng(devices=[]):
        layer = DistributedDataParallel(torch.nn.Linear(1, 1).to(place))
    optimizer = torch.optim.AdamW(layer.parameters())
    # Not `sum` alone: where cuBLAS is the first to use a GPU in a thread, torch prints a warning.
    layer(torch.zeros(1, 1, device=place)).square().sum().backward()
    optimizer.step()
    _retired.append((time.monotonic(), [layer]))
