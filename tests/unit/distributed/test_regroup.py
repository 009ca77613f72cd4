"""A group's connections are cut and nothing else is; a step is undone; a seat is waited for."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from elasticrt.distributed import agent_client, regroup
from elasticrt.distributed.regroup import GroupSockets
from elasticrt.ipc.messages import Release, Reseat
from elasticrt.train.training_state import TrainingState
from elasticrt.train.undo import Undo
from tests.fake_worker import WORKER, Agent, under


@contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection over loopback."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        server = stack.enter_context(listener.accept()[0])
        yield client, server


def _works(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Whether a byte still goes through."""
    first, second = pair
    try:
        first.sendall(b"x")
        second.settimeout(5)
        return second.recv(1) == b"x"
    except OSError:
        return False


def _is_cut(pair: tuple[socket.socket, socket.socket]) -> bool:
    """Whether both ends find that nothing more comes."""
    for each in pair:
        each.settimeout(5)
    return [each.recv(1) for each in pair] == [b"", b""]


def test_only_connections_of_the_block_are_cut() -> None:
    """Connections from before and after the block live on, and so do listening and unix sockets made inside of it."""
    with ExitStack() as stack:
        sockets = GroupSockets()
        before = stack.enter_context(_connection())
        with sockets.noting_group(2):
            ours = stack.enter_context(_connection())
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            left, right = socket.socketpair()
            stack.callback(left.close)
            stack.callback(right.close)
        after = stack.enter_context(_connection())
        sockets.cut()
        assert _is_cut(ours)
        assert _works(before)
        assert _works(after)
        assert _works((left, right))
        stack.enter_context(socket.create_connection(listener.getsockname()))


def test_a_number_that_is_used_again_is_left_alone() -> None:
    """A descriptor of the group was closed, and the user's own connection has its number now: that is not cut."""
    sockets = GroupSockets()
    with ExitStack() as stack:
        with sockets.noting_group(2), _connection() as (client, server):
            numbers = {client.fileno(), server.fileno()}
            kept = stack.enter_context(_connection())
        again = stack.enter_context(_connection())
        assert numbers & {each.fileno() for each in again}
        sockets.cut()
        assert _is_cut(kept)
        assert _works(again)


def _stored(listener: socket.socket) -> bytes:
    """What gloo stores of a rank that listens there: the name of a host, here none, and a `sockaddr`, with lengths."""
    host, port = listener.getsockname()
    address = socket.AF_INET.to_bytes(2, sys.byteorder) + port.to_bytes(2, "big") + socket.inet_aton(host) + bytes(8)
    return (0).to_bytes(8, sys.byteorder) + len(address).to_bytes(8, sys.byteorder) + address


@pytest.mark.parametrize(("known", "cut"), [(True, False), (False, True)], ids=["", "in a form that is not known"])
def test_a_group_that_fails_takes_nothing_of_the_scripts_with_it(known: bool, cut: bool) -> None:
    """It has closed the socket at which it listened; only where its addresses cannot be read all that is new is cut."""
    sockets = GroupSockets()
    with ExitStack() as stack:
        with pytest.raises(ConnectionError), sockets.noting_group(2, stores_tell=True):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                sockets.note_addresses([_stored(listener) if known else b"somewhere"])
            own = stack.enter_context(_connection())
            raise ConnectionError
        sockets.cut()
        assert _is_cut(own) if cut else _works(own)


def test_a_group_in_the_making_is_cut_until_it_has_failed() -> None:
    """A connection that is made after the cut, while the block is still open, is cut as well."""
    sockets = GroupSockets()
    with ExitStack() as stack:
        thread = threading.Thread(target=sockets.cut)
        with sockets.noting_group(2):
            first = stack.enter_context(_connection())
            thread.start()
            assert first[0].recv(1) == b""  # It has been cut.
            second = stack.enter_context(_connection())
            assert second[0].recv(1) == b""
        thread.join(10)
        assert not thread.is_alive()


def test_a_group_of_nccl_in_the_making_waits_for_nobody_any_more() -> None:
    """A listening socket that was made in the block fails, so that who waits for a connection there is free; one that
    was there before is as it was."""
    sockets, failed = GroupSockets(), threading.Event()

    def wait(listener: socket.socket) -> None:
        try:
            listener.accept()
        except OSError:
            failed.set()

    cuts = threading.Thread(target=sockets.cut)
    with socket.create_server(("127.0.0.1", 0)) as before:
        with sockets.noting_group(2, "nccl"), socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=wait, args=(listener,), daemon=True).start()
            cuts.start()
            assert failed.wait(10)
        cuts.join(10)
        assert not cuts.is_alive()
        socket.create_connection(before.getsockname()).close()


def test_a_group_that_was_left_is_let_go_of_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left lately is kept, what was left long ago goes, and nothing while a thread of a group has work: such a
    one is stuck, if its group was cut."""
    now = time.monotonic()
    retired: list[tuple[float, list[object]]] = [(now - 60, [object()]), (now - 30, [object()]), (now, [object()])]
    monkeypatch.setattr(regroup, "_retired", retired)
    busy, done = threading.Event(), threading.Event()

    def work() -> None:
        (regroup.Path(f"/proc/self/task/{threading.get_native_id()}/comm")).write_text(regroup.GROUP_THREAD)
        busy.set()
        done.wait(60)  # With a limit, as a work of gloo waits for its peer.

    thread = threading.Thread(target=work)
    thread.start()
    busy.wait(10)
    deadline = time.monotonic() + 10
    while not regroup.is_stuck() and time.monotonic() < deadline:  # The thread waits a moment after it has said so.
        pass
    assert regroup.is_stuck()
    regroup.release_retired()
    assert len(retired) == 3
    done.set()
    thread.join()
    deadline = time.monotonic() + 10
    while len(retired) == 3 and time.monotonic() < deadline:  # The kernel ends the thread a moment after its join.
        regroup.release_retired()
    assert len(retired) == 1


class Net(nn.Module):
    """With buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As usual."""
        return self.norm(self.layer(x))


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_step_is_undone(*, accumulates: bool) -> None:
    """Buffers, random numbers, variables, and gradients that still count go back; others are dropped."""
    torch.manual_seed(3)
    net, variables = Net(), {"ema": 1.0, "list": [1]}
    net(torch.randn(4, 3)).sum().backward()
    before = {name: each.clone() for name, each in net.named_buffers()}
    gradients = {name: each.grad.clone() for name, each in net.named_parameters() if each.grad is not None}
    state = TrainingState({"net": net}, None, None, None, "")
    state.vars = variables
    undo = Undo(state, seeded=False)
    state.accumulates = accumulates
    undo.begin_body()
    undo.note()
    drawn = torch.rand(2), random.random()
    net(torch.randn(4, 3)).sum().backward()
    variables.update(ema=2.0, more=3)
    assert undo.undo()
    assert all(torch.equal(each, before[name]) for name, each in net.named_buffers())
    assert variables == {"ema": 1.0, "list": [1]}
    assert torch.equal(torch.rand(2), drawn[0])
    assert random.random() == drawn[1]
    for name, each in net.named_parameters():
        if accumulates:
            assert each.grad is not None
            assert torch.equal(each.grad, gradients[name])
        else:
            assert each.grad is None


def test_buffers_that_a_step_has_replaced_are_noted_anew() -> None:
    """A module may have other buffers than at the step before."""
    net = Net()
    undo = Undo(TrainingState({"net": net}, None, None, None, ""), seeded=True)
    undo.begin_body()
    undo.note()
    net.register_buffer("late", torch.ones(1))
    undo.begin_body()
    undo.note()
    net.late += 1
    undo.undo()
    assert net.late.item() == 1


@pytest.mark.parametrize("within", [False, True], ids=["after the optimizer", "in its closure"])
def test_a_step_that_communicates_late_is_undone(monkeypatch: pytest.MonkeyPatch, *, within: bool) -> None:
    """Once a step of the script has had a collective since its optimizer began, the next one is known from then on."""
    begun = 0
    monkeypatch.setattr("elasticrt.distributed.collectives.sequence_number", lambda: begun)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(net.parameters())
    undo = Undo(TrainingState({"net": net, "optimizer": optimizer}, None, None, None, ""), seeded=True)

    def closure() -> torch.Tensor:
        nonlocal begun
        begun += within
        optimizer.zero_grad()
        loss = (net(torch.ones(1, 1)) - goal).square().sum()
        loss.backward()
        return loss

    undo.watch(lambda *_: undo.before_optimizer())
    for goal in (3, 5):
        undo.has_stepped = False
        undo.begin_body()
        undo.note()
        before = {name: each.clone() for name, each in net.state_dict().items()}
        optimizer.step(closure)
        begun += not within
        if goal == 3:
            undo.end_step()
    assert any(not torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert undo.undo()
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    undo.unwatch()


def _reseat(generation: int) -> Reseat:
    here = agent_client.worker_env()
    assert here is not None
    return Reseat(replace(here, generation=generation, rank=1).to_env())


def test_the_newest_seat_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seats come before anybody asks: the second is taken; each is announced before anything is cut for it."""
    agent, seen = Agent(), []
    with under(agent, monkeypatch):
        mine = agent_client.agent_link()
        assert mine is not None
        cuts = threading.Semaphore(0)

        def on_seat() -> None:
            seen.append((mine.is_overtaken, mine.has_seat))
            cuts.release()

        mine.call_on_seat(on_seat)
        for generation in (2, 3):
            agent.channel.send(_reseat(generation))
            assert cuts.acquire(timeout=10)
        deadline = time.monotonic() + 10
        taken = mine.wait_for_seat()
        while taken is not None and taken.generation == 2 and time.monotonic() < deadline:
            taken = mine.wait_for_seat()
        assert taken is not None
        assert (taken.generation, taken.rank) == (3, 1)
        assert not mine.is_overtaken
        assert not mine.has_seat
        assert [overtaken for overtaken, _ in seen] == [True, True]


def test_without_a_seat_there_is_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a seat ends when the agent says that there is none, and when the agent is gone."""
    agent = Agent()
    with under(agent, monkeypatch):
        mine = agent_client.agent_link()
        assert mine is not None
        mine.call_on_seat(lambda: None)
        agent.channel.send(Release())
        assert mine.wait_for_seat() is None
    agent = Agent()
    with under(agent, monkeypatch):
        mine = agent_client.agent_link()
        assert mine is not None
        mine.call_on_seat(lambda: None)
        agent.close()
        assert mine.wait_for_seat() is None


@pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "require_manual_backward_finalization"), reason="torch before 2.15"
)
def test_a_new_reducer_leaves_finalizing_to_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the script finalizes backward passes itself it still does so after its group was made anew."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = DistributedDataParallel(nn.Linear(2, 1))
        layer.require_manual_backward_finalization = True
        for _ in range(2):
            regroup.rebuild([(layer, regroup.exchanged_parameters(layer))])
            layer(torch.ones(1, 2)).sum().backward()
            layer.finalize_backward()
        assert layer.module.weight.grad.tolist() == [[2, 2]]
    finally:
        del layer  # See below.
        dist.destroy_process_group()


def test_a_new_reducer_lies_in_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a group is made anew, this process holds the buckets of one reducer."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = DistributedDataParallel(nn.Linear(4096, 2048))
        sizes = []
        for _ in range(6):
            regroup.rebuild([(layer, regroup.exchanged_parameters(layer))])
            layer.zero_grad()
            layer(torch.ones(1, 4096)).sum().backward()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE"))
        assert sizes[-1] - sizes[1] < layer.module.weight.nbytes
    finally:
        del layer  # Torch 2.13 can hang where a reducer lets the last reference to a group go.
        dist.destroy_process_group()


def test_a_meeting_that_is_overtaken_is_not_begun() -> None:
    """A seat that came before there was anything to cut: the meeting ends at once, and keeps no descriptor."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = os.dup(listener.fileno())
        here = replace(WORKER, master_port=listener.getsockname()[1], listen_fd=fd)
        with pytest.raises(regroup.Overtaken):
            regroup.meet(here, "gloo", 10, lambda: True)
        with pytest.raises(OSError):
            os.fstat(fd)


def _run(script: str) -> None:
    """Run processes that meet. Those that hang are ended."""
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    with subprocess.Popen([sys.executable, "-c", script], env=env, start_new_session=True) as ranks:
        try:
            assert ranks.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)


MEETS_THE_DEAD = """
import os, signal, socket, sys, threading
from dataclasses import replace
from tests.fake_worker import WORKER
from elasticrt.distributed import regroup
from elasticrt.distributed.group_store import GroupStore

def meet(rank, port, fd=-1):
    worker = replace(WORKER, rank=rank, world_size=2, master_addr="127.0.0.1", master_port=port, listen_fd=fd)
    regroup.meet(worker, "gloo", 600, lambda: False)

def dies(port):
    made = GroupStore.set
    def set(store, key, value):
        made(store, key, value)
        os.kill(os.getpid(), signal.SIGKILL)
    GroupStore.set = set
    meet(1, port)

victims = []
for _ in range(8):
    told, tell = os.pipe()
    victims.append((os.fork(), tell))
    if not victims[-1][0]:
        dies(int(os.read(told, 10)))
for victim, tell in victims:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    cuts = threading.Thread(target=lambda: (os.waitpid(victim, 0), regroup.SOCKETS.cut()))
    cuts.start()
    os.write(tell, b"%d" % port)
    try:
        meet(0, port, listening.detach())
    except RuntimeError as error:
        print(error)
    cuts.join()
    regroup.leave()
os._exit(0)
"""


CUT_WHILE_SENDING = """
import os, random, socket, threading, time
from dataclasses import replace
import torch, torch.distributed as dist
from tests.fake_worker import WORKER
from elasticrt.distributed import regroup

ROUNDS, RANKS = 40, 3
stores = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
rank = 0 if os.fork() else 1 if os.fork() else 2
draw = random.Random(rank)
value = torch.zeros(8)
for number in range(ROUNDS):
    place = {"rank": rank, "world_size": RANKS, "generation": number, "nonce": str(number)}
    store = stores[number % len(stores)]
    port, fd = store.getsockname()[1], os.dup(store.fileno()) if rank == 0 else -1
    worker = replace(WORKER, **place, master_addr="127.0.0.1", master_port=port, listen_fd=fd)
    regroup.meet(worker, "gloo", 600, lambda: False)
    dist.barrier()
    cuts = threading.Timer(draw.uniform(0, 0.004), regroup.SOCKETS.cut)
    cuts.start()
    try:
        while True:
            dist.broadcast(value, 0)
            dist.all_reduce(value)
    except RuntimeError:
        pass
    cuts.join()
    regroup.leave()
    regroup.release_retired()
os._exit(0 if rank else os.waitpid(-1, 0)[1])
"""


OWN_GROUP = """
import os, socket
from dataclasses import replace
import torch, torch.distributed as dist
from torch.distributed import new_group
from tests.fake_worker import WORKER
from elasticrt.distributed import regroup

store, (told, tell) = socket.create_server(("127.0.0.1", 0)), os.pipe()
rank = 0 if os.fork() else 1
os.close(told if rank == 0 else tell)
place = {"rank": rank, "world_size": 2, "master_addr": "127.0.0.1", "master_port": store.getsockname()[1]}
fd = store.detach() if rank == 0 else -1
regroup.meet(replace(WORKER, **place, listen_fd=fd), "gloo", 60, lambda: False)
regroup.note_groups()
own = new_group()
if rank:
    os._exit(len(os.read(told, 1)))  # Until rank 0 ends.
regroup.SOCKETS.cut()
try:
    dist.all_reduce(torch.ones(1), group=own)
except RuntimeError:
    os._exit(0)
os._exit(1)
"""


OWN_CONNECTIONS = """
import os, socket, threading
import pytest, torch.distributed as dist
import elasticrt
from elasticrt.distributed import regroup
from tests.fake_worker import Agent, under

def connected():
    client = socket.create_connection(other.getsockname())
    return client, other.accept()[0]

def meanwhile():
    while True:  # Until rank 0 waits for rank 1 at the store.
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            pass
    own.extend(connected() for _ in range(2))
    os.write(tell, b" ")

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
(told, tell), own = os.pipe(), []
rank = 0 if os.fork() else 1
other = socket.create_server(("127.0.0.1", 0))
place = {"rank": rank, "world_size": 2, "master_addr": "127.0.0.1", "master_port": port}
with pytest.MonkeyPatch.context() as patch, under(Agent(), patch, **place):
    if rank:
        os.read(told, 1)
    else:
        threading.Thread(target=meanwhile).start()
    elasticrt.init()
    assert regroup.SOCKETS.knows_peers(2)
    if rank == 0:
        for each in own.pop():
            each.close()
        assert not regroup.SOCKETS.lost_a_peer()
        regroup.SOCKETS.cut()
        own[0][0].sendall(b"x")
        assert own[0][1].recv(1) == b"x"
        try:
            dist.distributed_c10d._get_default_store().get("nothing")
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    os.close(tell)
    os.read(told, 1)  # Until rank 0 ends.
    os._exit(0)
"""


OWN_CONNECTIONS_MEANWHILE = """
import os, socket, threading
from dataclasses import replace
import pytest, torch, torch.distributed as dist
from torch.distributed import distributed_c10d
import elasticrt
from elasticrt.distributed import regroup
from elasticrt.distributed.group_store import GroupStore
from tests.fake_worker import WORKER, Agent, under

def connected():
    client = socket.create_connection(other.getsockname())
    return client, other.accept()[0]

def meanwhile(made):
    def make(*args, **options):
        own.extend([connected(), connected(), (socket.create_server(("127.0.0.1", 0)),)])
        result = made(*args, **options)
        own.append(connected())
        return result
    return make

def both_are_here():
    mine.send(b"x")
    assert mine.recv(1) == b"x"

def check_watched():
    assert len(own) == 4 and regroup.SOCKETS.knows_peers(2)
    for each in own.pop(0):
        each.close()
    assert not regroup.SOCKETS.lost_a_peer()

def check_cut(*groups):
    both_are_here()
    regroup.SOCKETS.cut()
    for group in groups:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
    check_own()

def check_own():
    while own:
        first, *second = own.pop()
        second = second or [socket.create_connection(first.getsockname())]
        if regroup.listens(first):
            first = first.accept()[0]
        for one, another in [(first, second[0]), (second[0], first)]:
            one.sendall(b"x")
            assert another.recv(1) == b"x"

def meet(number, size=2):
    place = {"rank": rank % size, "world_size": size, "generation": number, "nonce": str(number)}
    store, fd = stores[number], -1
    if not place["rank"]:
        fd = os.dup(store.fileno())
    worker = replace(WORKER, **place, master_addr="127.0.0.1", master_port=store.getsockname()[1], listen_fd=fd)
    regroup.meet(worker, "gloo", 600, lambda: False)

own, stores = [], [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
port = stores[0].getsockname()[1]
stores[0].close()
mine, theirs = socket.socketpair()
child = os.fork()
rank = 0 if child else 1
if rank:
    mine = theirs
other = socket.create_server(("127.0.0.1", 0))
distributed_c10d._new_process_group_helper = meanwhile(distributed_c10d._new_process_group_helper)
place = {"rank": rank, "world_size": 2, "master_addr": "127.0.0.1", "master_port": port}
with pytest.MonkeyPatch.context() as patch, under(Agent(), patch, **place):
    elasticrt.init()
check_watched()
check_cut(dist.new_group(), dist.group.WORLD)
regroup.leave()
meet(1)
check_watched()
check_cut(dist.new_group(), dist.group.WORLD)
regroup.leave()
if rank:
    GroupStore.set = lambda *_: os._exit(0)
else:
    meet(2, size=1)
    regroup.leave()
    check_own()
    ends = threading.Thread(target=lambda: (os.waitpid(child, 0), regroup.SOCKETS.cut()))
    ends.start()
with pytest.raises(RuntimeError):
    meet(3)
check_own()
os._exit(0)
"""


FEW_QUESTIONS = """
import os, socket
from dataclasses import replace
import torch, torch.distributed as dist
from tests.fake_worker import WORKER
from elasticrt.distributed import regroup
from elasticrt.distributed.group_store import GroupStore

RANKS = 4
store, rank, asked = socket.create_server(("127.0.0.1", 0)), 0, []
for number in range(1, RANKS):
    if not os.fork():
        rank = number
        break
ask = GroupStore._ask

def noted(store, **question):
    asked.append(question["op"])
    return ask(store, **question)

GroupStore._ask = noted
place = {"rank": rank, "world_size": RANKS, "master_port": store.getsockname()[1]}
fd = store.detach() if rank == 0 else -1
regroup.meet(replace(WORKER, **place, master_addr="127.0.0.1", listen_fd=fd), "gloo", 60, lambda: False)
value = torch.ones(1)
dist.all_reduce(value)
assert value.item() == RANKS
assert asked == ["check", "set", "get"], asked
codes = [os.waitpid(-1, 0)[1] for _ in range(RANKS - 1)] if rank == 0 else [0]
os._exit(max(codes))
"""


def test_a_rank_asks_for_all_addresses_at_once() -> None:
    """How often each rank asks the store while a group is made does not depend on how many ranks there are."""
    _run(FEW_QUESTIONS)


def test_who_is_cut_off_while_it_sends_comes_back() -> None:
    """Ranks are cut, each at a moment of its own, while all of them send: none waits for what it could not send."""
    _run(CUT_WHILE_SENDING)


def test_a_rank_that_waits_for_one_that_has_died_is_freed() -> None:
    """Peers die when their address is known and before they connect: who waits for that, as every other one, is cut."""
    _run(MEETS_THE_DEAD)


def test_connections_of_the_script_are_not_those_of_the_group() -> None:
    """What another thread opens while `init` waits for a rank is neither watched nor cut; the store's is, as before."""
    _run(OWN_CONNECTIONS)


def test_connections_that_the_script_makes_beside_those_of_a_group_are_its_own() -> None:
    """What is opened while a group is made, at first, anew, alone, or with a dying rank, is neither watched nor cut."""
    _run(OWN_CONNECTIONS_MEANWHILE)


def test_a_group_of_the_script_is_cut_as_well() -> None:
    """A rank that waits in a group that the script has made is freed, although its name was imported earlier."""
    _run(OWN_GROUP)


def test_a_hook_with_a_state_of_its_own_hinders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's PowerSGD would begin anew beside the others', unless the Loop gives it their state."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        compressed = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=1)
        for state, hook, given, hinders in (
            (None, default_hooks.allreduce_hook, [], False),
            (dist.group.WORLD, default_hooks.fp16_compress_hook, [], False),
            (compressed, powerSGD_hook.powerSGD_hook, [object()], True),
            (compressed, powerSGD_hook.powerSGD_hook, [object(), compressed], False),
        ):
            layer = DistributedDataParallel(nn.Linear(2, 1))
            layer.register_comm_hook(state, hook)
            said = regroup.rebuild_obstacle(layer, regroup.exchanged_parameters(layer), given)
            expected = "DDP has a communication hook with a state that was not given to the Loop"
            assert said == (expected if hinders else "")
    finally:
        del layer, compressed, state, given  # As above.
        dist.destroy_process_group()
