"""Leaves a process group and makes the next one while the process lives on: sockets, group, DDP's reducer.

A rank in a gloo collective that has lost a peer waits for ever, unless the rank is a neighbour of that peer. No call of
torch frees the rank. Shutting down the group's own sockets from another thread does, within milliseconds. This module
therefore notes the sockets of every group while the group is made, and `cut` shuts down exactly these. The script may
open other connections at the same time. Gloo's connections are recognised by the addresses on which its ranks listen:
the ranks exchange these addresses through the store, and this module reads them there. After a cut the group is only
destroyed, and the next group meets in a store of its own. An NCCL group is aborted instead: its kernels end, and their
results are worthless (`InPlace.check_results`).

DDP's reducer keeps its buckets in an order that it learns from backward passes. Ranks with different orders would add
up different gradients without an error. So every rank, survivor or newcomer, gets a new reducer with every new group.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
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
from elasticrt.ipc.proc import (
    is_connection,
    is_open_socket,
    listens,
    ports_of,
    sockets_of,
    tcp_address_in,
    tcp_addresses_of,
)
from elasticrt.torch_versions import reducer_was_renewed

_log = logging.getLogger(__name__)

RETIRED_S = 2.0
"""The minimum time, in seconds, for which a group is kept after it was left. Its threads may still be finishing failed
works, and need the interpreter's lock for that. Destroying the group waits for these threads while holding the lock
(torch 2.13), so both would wait for ever."""

CONNECT_AGAIN_S = 0.005
"""The pause, in seconds, between two attempts to connect to the generation's store."""

GROUP_THREAD = "pt_gloo_runloop"
"""The name of the threads that carry out the works (queued collectives) of a gloo group in torch."""

CUT_AGAIN_S = 0.02
CUT_S_MAX = 60.0
"""A group that is still being made may open new connections after a cut. The cut is repeated every CUT_AGAIN_S seconds
until making the group has failed, for at most CUT_S_MAX seconds."""

ABORTED = ("nccl",)
"""Backends whose groups are freed by an abort: their ranks wait for a peer in a kernel, not at a socket."""

CONNECT_TO_SELF_S = 1.0
"""The timeout, in seconds, of a connection from this process to itself."""


class Overtaken(Exception):  # noqa: N818  Not an error: the ordinary end of a meeting that is no longer needed.
    """A newer seat has come for this process, so the other ranks will not come to the present meeting."""


class GroupSockets:
    """The TCP connections of the present process groups, noted while the groups are made.

    A connection is known by its descriptor and its name, `socket:[inode]`, because descriptors are used again. `cut`
    may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._known: dict[int, str] = {}  # The connections of complete groups: names by descriptor.
        self._peers: dict[int, str] = {}  # The default group's connections to the other ranks, as in `_known`.
        # All sockets from before the group that is being made. None: no group is being made.
        self._before: dict[int, str] | None = None
        # Where the ranks of the group that is being made listen, as far as they have stored that. None: this is not
        # known, and every new socket counts as the group's.
        self._addresses: set[bytes] | None = None
        self._store_port = 0  # The TCP port of the default group's store.
        # Frees a thread that waits at a listening socket of the group that is being made: `_connect_and_close` or
        # `_stop_listening`.
        self._free_waiter: Callable[[socket.socket], bool] = bool
        self._freed: set[str] = set()  # The names of listening sockets that `_free_waiter` has dealt with.

    @contextlib.contextmanager
    def noting_group(
        self, ranks: int, backend: str = "gloo", store_port: int = 0, *, stores_tell: bool = False
    ) -> Iterator[None]:
        """Note the connections of a group that is made in this block, by whichever thread.

        Args:
            ranks: the number of ranks in the group, at most.
            backend: torch's name of the group's backend.
            store_port: the TCP port of the default group's store, if this is the default group; else 0. Connections to
                this port belong to the group as well, whenever they are made.
            stores_tell: whether `note_addresses` will get what the ranks of a gloo group store. If not, or with another
                backend, every socket that is opened in this block counts as the group's, until `set_addresses` is
                called.
        """
        if self._before is not None:
            # Inside of the block of `meet` or `init`, which notes the default group as a whole: torch's helper, which
            # `note_groups` has wrapped, comes here once more.
            yield
            return
        with self._lock:
            self._before, self._store_port = sockets_of(), store_port or self._store_port
            # With a single rank there is no address to hear of, and no connection to note.
            self._addresses = set() if backend == "gloo" and (stores_tell or ranks == 1) else None
            self._free_waiter = _stop_listening if backend in ABORTED else partial(_connect_and_close, ranks=ranks)
            self._freed.clear()
        try:
            yield
        finally:
            with self._lock:
                new = self._new()
                self._known |= new
                if store_port:
                    # All sockets are searched, not only new ones: `init` may meet in the store before it makes the
                    # group. The other new connections lead to the peers.
                    ports = {(fd, name): ports_of(fd) for fd, name in sockets_of().items()}
                    stores = dict(each for each in ports if store_port in ports[each])
                    self._peers = {fd: new[fd] for fd in new.keys() - stores.keys() if ports.get((fd, new[fd]))}
                    self._known |= stores
                self._before = self._addresses = None
                self._lock.notify_all()

    def note_addresses(self, values: Iterable[bytes]) -> None:
        """Take note of `values` that ranks of the group being made have stored: the addresses on which they listen."""
        if self._addresses is not None:
            self._addresses.update(map(_address_in, values))

    def set_addresses(self, values: Iterable[bytes]) -> None:
        """As `note_addresses`, with the `values` of all ranks of the group that is being made."""
        self._addresses = set(map(_address_in, values))

    def cut(self) -> None:
        """Shut down all noted connections. Repeat that for a group that is being made, until making it has ended."""
        until = time.monotonic() + CUT_S_MAX
        with self._lock:
            self._shut_all()
            while self._before is not None and time.monotonic() < until:
                self._lock.wait(CUT_AGAIN_S)
                self._shut_all()

    def knows_peers(self, ranks: int) -> bool:
        """Whether all connections of the default group, which has `ranks` ranks, to its other ranks are known."""
        return len(self._peers) >= ranks - 1

    def lost_a_peer(self) -> bool:
        """Whether a connection of the default group to another rank has ended.

        Gloo closes its descriptor when it sees that the other end is gone.
        """
        # By now the descriptor may also be the number of another file.
        return not all(is_open_socket(fd, name) for fd, name in self._peers.items())

    def _shut_all(self) -> None:
        """Shut down every noted connection once, under the lock."""
        new = self._new()
        doomed, self._known = {**self._known, **new}, {}
        for fd, name in new.items():
            if name not in self._freed and _with_socket(fd, name, self._free_waiter):
                self._freed.add(name)
        for fd, name in doomed.items():
            _with_socket(fd, name, partial(_shut, complete=fd not in new))

    def _new(self) -> dict[int, str]:
        """The sockets of the group that is being made, as far as they can be told from the script's."""
        before, addresses = self._before, self._addresses
        new = {} if before is None else {fd: name for fd, name in sockets_of().items() if before.get(fd) != name}
        # The ranks' addresses are not known, or a rank has stored one in an unknown form: every new socket counts, as
        # a connection that is not cut may hold a thread for ever.
        if addresses is None or b"" in addresses:
            return new
        group = {fd: name for fd, name in new.items() if not addresses.isdisjoint(tcp_addresses_of(fd))}
        return group | {fd: name for fd, name in new.items() if self._store_port and self._store_port in ports_of(fd)}


def _address_in(value: bytes) -> bytes:
    """The address on which a rank listens, from the value that gloo stores for the rank; b"" for anything else.

    The value (torch 2.13) is the length of the host's name, the name, the length of the address, and the address, a C
    `sockaddr`. Both lengths have eight bytes in the machine's order. The longest address, of IPv6, has 28 bytes.
    """
    return tcp_address_in(value[16 + int.from_bytes(value[:8], sys.byteorder) :][:28])


def _read_addresses(store: Any, ranks: int) -> None:
    """Read in the store of a new gloo group where its ranks listen: torch's own stores do not report what is stored."""
    # Gloo's keys for the ranks' addresses (torch 2.13).
    keys = [f"cpu//0/{rank}" for rank in range(ranks)]
    torch_dist = cast("Any", dist)  # It offers more than it declares.
    if store is None:
        # This process is not among the group's ranks.
        SOCKETS.set_addresses([])
    # At level DETAIL torch makes a second gloo group beside each group, with other keys. Every new socket then counts.
    elif torch_dist.get_debug_level() != torch_dist.DebugLevel.DETAIL:
        # Not every store has `check` and `multi_get`.
        with contextlib.suppress(RuntimeError):
            if store.check(keys):
                SOCKETS.set_addresses(store.multi_get(keys))


def _with_socket(fd: int, name: str, act: Callable[[socket.socket], Any]) -> Any:
    """Call `act` with the socket `name` behind `fd`. Returns its result; None if the socket was closed meanwhile.

    By then `fd` may be the number of another socket, which is left alone.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:
        return act(each) if is_open_socket(each.fileno(), name) else None


def _shut(each: socket.socket, *, complete: bool) -> None:
    """Shut down a TCP connection. Other sockets are left alone: without its listening sockets gloo aborts the process.

    Args:
        each: the socket.
        complete: whether the group was completely made. Then only reading is shut down, and a duplicate of the
            descriptor is kept for a while, so that the other end can go on writing. When a write fails, gloo (torch
            2.13) keeps the message, and the end of the connection does not wake a thread that waits for the message to
            be sent. The end of the data to read wakes every thread that waits for a message.
    """
    is_ours = is_connection(each)
    if is_ours and complete:
        _retired.append((time.monotonic(), [each.dup()]))
    if is_ours:
        each.shutdown(socket.SHUT_RD if complete else socket.SHUT_RDWR)


def _connect_and_close(each: socket.socket, ranks: int) -> bool:
    """Connect to a listening socket of a group that is being made, as each of `ranks` ranks would, and hang up.

    Of each two ranks, one waits for the other to connect. If the other dies before it connects, there is no connection
    to cut, and no call of torch ends the wait before a collective's timeout (torch 2.13). Returns whether `each`
    listens.
    """

    if not listens(each):
        return False
    for rank in range(ranks):
        with socket.socket(each.family, socket.SOCK_STREAM) as knocking:
            knocking.settimeout(CONNECT_TO_SELF_S)
            knocking.connect(each.getsockname())
            # By this number gloo knows which rank has connected.
            knocking.sendall(struct.pack("=q", rank))
    return True


def _stop_listening(each: socket.socket) -> bool:
    """Shut down a listening socket of an NCCL group that is being made. Returns whether `each` listens.

    One call makes a communicator, and torch knows the communicator only after that call. Until then there is nothing to
    abort: in the call each rank waits for others to connect, until its listening socket fails.
    """

    if not listens(each):
        return False
    each.shutdown(socket.SHUT_RDWR)
    return True


SOCKETS = GroupSockets()
# The store of the present generation; None where a store of torch's own is used.
_store_in_use: Any = None
_served: list[GroupStoreServer] = []
"""The store that this process serves to its generation, if it is rank 0. `leave` closes the store at once, although the
group is kept for a while: the next generation may have the same port, and of two stores behind one port each would get
some of the ranks."""

# What was left, oldest first, and when (`time.monotonic`): groups, DDP modules and sockets for `release_retired`.
_retired: list[tuple[float, list[Any]]] = []


_kept: list[Any] = []
"""Every process group that was made since `keep_groups`, until `release_retired` finds that no group's thread has work
left."""


class _KeptGroups(dict[Any, Any]):
    """A replacement of `_pg_map`, torch's map of known groups, that keeps groups after torch has removed them."""

    def __setitem__(self, group: Any, about: Any) -> None:
        _kept.append(group)
        super().__setitem__(group, about)

    def __delitem__(self, group: Any) -> None:
        _retired.append((time.monotonic(), [group]))
        super().__delitem__(group)


def keep_groups() -> None:
    """Keep every process group that is made from now on. Does nothing in a torch without `_pg_map`.

    A gloo group is destroyed with the last reference to it, which a DistributedDataParallel in a local variable often
    holds. The destructor joins gloo's threads while it holds the interpreter's lock (torch 2.13). If one of these
    threads drops the last result of a collective at that moment, it needs the same lock, and both wait for ever. A kept
    group is still shut down by `destroy_process_group`.
    """
    known = getattr(dist.distributed_c10d, "_pg_map", None)
    if type(known) is dict:
        # Torch has no hook for the beginning or the end of a group.
        dist.distributed_c10d._pg_map = _KeptGroups(known)


def note_groups() -> None:
    """Note the connections of every group that is made from now on, whichever call of torch makes the group."""
    made: Any = dist.distributed_c10d._new_process_group_helper
    if getattr(made, "noted", False):
        return

    @functools.wraps(made)
    def make(*args: Any, **options: Any) -> Any:
        # The helper's first argument is the group's size, its fourth the backend.
        with SOCKETS.noting_group(args[0], args[3], stores_tell=_store_in_use is not None):
            group, store = made(*args, **options)
            # A `GroupStore` has reported the addresses already.
            if _store_in_use is None and args[3] == "gloo":
                _read_addresses(store, args[0])
            return group, store

    make.noted = True  # type: ignore[attr-defined]
    # The helper is private, but `new_subgroups`, `init_device_mesh` and a `new_group` that the script has imported
    # earlier all look it up here. Wrapping the public calls would miss them.
    dist.distributed_c10d._new_process_group_helper = make


def cut() -> None:
    """Free the threads that wait in a group for a lost peer: abort NCCL groups, and shut down sockets.

    May be called from any thread.
    """
    _abort()
    SOCKETS.cut()


_aborts: dict[Any, threading.Thread] = {}
"""NCCL groups that are being aborted, each by a thread of its own. The kernels end at once. After that NCCL (2.28,
2.30) waits up to a second for its own threads, and no caller should have to wait for that."""


def _abort() -> None:
    """Begin to abort all NCCL groups at once. One after the other, each abort could wait for a kernel of the next."""
    for group in _aborted_ones():
        thread = threading.Thread(target=_abort_one, args=(group,), daemon=True)
        if _aborts.setdefault(group, thread) is thread:
            thread.start()


def _aborted_ones() -> list[Any]:
    """The groups that are freed by an abort."""
    world: Any = dist.distributed_c10d._world
    return [each for each in list(world.pg_names) if dist.get_backend(each) in ABORTED]


def _abort_one(group: Any) -> None:
    try:
        group.abort()
    except Exception as error:  # noqa: BLE001  A thread has no caller. After the loss of a GPU the next call fails.
        _log.info("a process group could not be aborted: %s", error)


def leave() -> None:
    """Leave the default group and all others, and close the store that this process serves.

    No thread may wait in a group: its sockets have been cut before, or it is idle.
    """
    # An idle group has not been cut yet.
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
        # The group is being aborted. `destroy_process_group` shuts down each group in this table, and would wait for
        # the abort.
        del names[group]
    dist.destroy_process_group()


def release_retired() -> None:
    """Release what was left more than RETIRED_S ago. Call this where no collective is under way."""
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
    """Whether no thread of any group has work left: all of them wait for work, which they do without a time limit.

    RETIRED_S alone is not enough: in a process that was stopped, or got no processor time, the threads have not come as
    far as the clock suggests. Where the kernel does not show system calls, RETIRED_S alone decides.
    """
    aborting = any(each.is_alive() for each in _aborts.values())
    return not aborting and all(call is not None and not _has_limit(call) for call in _waits())


def is_stuck() -> bool:
    """Whether a thread of a group waits for a peer.

    A cut ends such a wait, except for the cases that `InPlace._end_if_stuck` describes.
    """
    return any(call is not None and _has_limit(call) for call in _waits())


def _waits() -> Iterator[list[str] | None]:
    """For each thread of a gloo group, the system call in which it waits, with its arguments; None for one that runs.

    A call is a line of /proc/PID/task/TID/syscall: the number of the call, then the arguments in hexadecimal digits.
    """
    for task in Path("/proc/self/task").iterdir():
        # The thread has ended meanwhile, or the kernel does not show its system call.
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == GROUP_THREAD:
                call = (task / "syscall").read_text().split()
                # For a thread outside of a system call the line is shorter.
                yield call if len(call) >= 5 else None


def _has_limit(call: list[str]) -> bool:
    """Whether a thread waits with a time limit: for a peer, or for a lock."""
    # The fourth argument of `futex` is a pointer to the time limit. The pointer is null without one.
    return int(call[4], 16) != 0


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a generation have met. They can exchange messages here without the process group.

    Attributes:
        store: the generation's store.
        rank: the rank of this process.
        world_size: the number of ranks.
        nonce: the generation's nonce.
        over: tells whether another generation has begun.
    """

    store: GroupStore
    rank: int
    world_size: int
    nonce: str
    over: Callable[[], bool]

    def gather(self, name: str, value: str) -> list[str]:
        """Store `value` for this rank, and return the values of all ranks under the same `name`, by rank. Collective.

        A `name` may be used once in a generation.
        """
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        return [each.decode() for each in self.store.exchange(keys[self.rank], value, keys)]


def meet(
    worker: WorkerEnv,
    backend: str,
    timeout_s: float,
    over: Callable[[], bool],
    make_group: Callable[..., None] = dist.init_process_group,
) -> Meeting:
    """Make the default group of a generation.

    Args:
        worker: this process's seat.
        backend: torch's name of the backend.
        timeout_s: how long a collective may take, in seconds. It is also how long to wait now for the other ranks,
            which may be busy outside of a step.
        over: tells whether another seat has come.
        make_group: makes the group, with the arguments of `init_process_group`.

    Raises Overtaken when another seat has come. Any other error means that a rank did not come, or was cut off.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    global _store_in_use  # noqa: PLW0603  See where it is set.
    timeout = datetime.timedelta(seconds=timeout_s)
    hook = sys.excepthook
    # Torch names groups by a counter, and a meeting that failed leaves its count behind. Ranks with different counts
    # would look for each other under different names, and never meet.
    dist.distributed_c10d._world.group_count = 0
    # With this interface gloo asks a store for all addresses at once. Without it gloo asks for one after the other,
    # each twice.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    try:
        with SOCKETS.noting_group(worker.world_size, backend, worker.master_port, stores_tell=True):
            prefix = f"{worker.run_id}/{worker.generation}/{worker.nonce}"
            # The global holds the store, because torch keeps no reference to a store that is made in Python.
            _store_in_use = _store(worker, timeout_s, over)
            store = PrefixStore(prefix, _store_in_use)
            make_group(backend, store=store, rank=worker.rank, world_size=worker.world_size, timeout=timeout)
    finally:
        # Each `init_process_group` wraps the hook once more.
        sys.excepthook = hook
    return Meeting(_store_in_use, worker.rank, worker.world_size, worker.nonce, over)


def _store(worker: WorkerEnv, timeout_s: float, over: Callable[[], bool]) -> GroupStore:
    """Connect to the generation's store. Rank 0 serves the store, on the listening socket that its node has held."""
    # The newer seat may have come before there was a connection to cut.
    if over():
        if worker.listen_fd >= 0:
            os.close(worker.listen_fd)
        raise Overtaken
    if worker.rank == 0:
        _served.append(GroupStoreServer(socket.socket(fileno=worker.listen_fd), worker.nonce))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return GroupStore(worker.master_addr, worker.master_port, worker.nonce, timeout_s, SOCKETS.note_addresses)
        except RuntimeError:
            # Rank 0 may still be leaving the store of the generation before, which has the same port.
            if over():
                raise Overtaken from None
            if time.monotonic() > deadline:
                raise
        time.sleep(CONNECT_AGAIN_S)


def has_subgroups() -> bool:
    """Whether the script has made process groups of its own in this generation."""
    return len(dist.distributed_c10d._world.pg_map) > 1


def exchanged_parameters(layer: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """The parameters of a DDP module that are not frozen now.

    A DDP module exchanges the gradients of the parameters that were not frozen when the module was made, so call this
    right after that.
    """
    ignored = layer.parameters_to_ignore
    return [each for name, each in layer.module.named_parameters() if each.requires_grad and name not in ignored]


def rebuild_obstacle(
    layer: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], given: Collection[object]
) -> str:
    """Why a DDP module cannot be given another group; "" if it can.

    Args:
        layer: the DDP module.
        parameters: the parameters whose gradients the module is believed to exchange, by `exchanged_parameters`.
        given: the Loop's objects.
    """
    logger: Any = layer.logger
    # The logger knows the number of parameters that the module's reducer was made for.
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
    # A newcomer's hook would begin with a fresh state (PowerSGD counts steps), and its collectives would differ from
    # the survivors'. An object of the Loop travels to newcomers with its state.
    states = [state for _, state in layer._comm_hooks if state is not None and state is not dist.group.WORLD]
    if any(all(state is not each for each in given) for state in states):
        return "DDP has a communication hook with a state that was not given to the Loop"
    return ""


def rebuild(layers: Iterable[tuple[DistributedDataParallel, Sequence[torch.nn.Parameter]]]) -> None:
    """Give each DDP module the present default group, and a new reducer for the same parameters as before.

    There is no public way to do that. `_rebuild` uses private parts of torch, and is tested with each version of torch
    that is supported.
    """
    for layer, parameters in layers:
        with _unfrozen(layer, parameters):
            _rebuild(layer, dist.group.WORLD)


@contextlib.contextmanager
def _unfrozen(layer: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """In this block exactly `parameters` of the module are not frozen.

    A reducer exchanges, for good, the gradients of the parameters that are not frozen when the reducer is made. A
    survivor may have frozen layers since its first reducer was made, and a newcomer has not frozen them yet.
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
    # The old reducer is released before the new one is made, so that the new buckets lie in the same memory: writing to
    # fresh memory may take as long as the step. A work of the old group that has not ended holds what it writes to.
    layer.reducer = layer.logger = None
    # `_set_static_graph` below does nothing if the module is marked already.
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
        # A hook's state may be the group itself, as for torch's own hooks, or hold it.
        if getattr(state, "process_group", None) is old:
            state.process_group = world
        layer.register_comm_hook(world if state is old else state, hook)


def warm_up(place: torch.device) -> None:
    """Make a step of a tiny model in the present group: a first step takes ten times as long as the next.

    Args:
        place: the device on which the process computes.
    """
    # The script's random numbers must not depend on this model's initial weights.
    with torch.random.fork_rng(devices=[]):
        layer = DistributedDataParallel(torch.nn.Linear(1, 1).to(place))
    optimizer = torch.optim.AdamW(layer.parameters())
    # `square` puts another kernel before the matrix product of the backward pass: torch prints a warning where cuBLAS
    # is the first to use a GPU in a thread.
    layer(torch.zeros(1, 1, device=place)).square().sum().backward()
    optimizer.step()
    _retired.append((time.monotonic(), [layer]))
