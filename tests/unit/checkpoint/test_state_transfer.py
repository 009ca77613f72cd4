"""State from one rank to others: who sends, what arrives, where it is written to, and how a transfer fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from elasticrt.checkpoint import group_transport, state_transfer
from elasticrt.checkpoint.group_transport import GroupTransport, parcels
from elasticrt.checkpoint.state_transfer import RankConnection, SpareTensors, chain, rehearse, transfer_state
from elasticrt.distributed.group_store import GroupStore, GroupStoreServer
from elasticrt.distributed.regroup import Meeting, Overtaken
from elasticrt.errors import ConfigError

NEW = -1  # A newcomer, or a rank in the middle of a step that its optimizer has begun.


@pytest.mark.parametrize(
    ("steps", "nodes", "order"),
    [
        ([7], "a", (0,)),
        ([7, 7], "ab", (0,)),
        ([7, 8], "ab", (1, 0)),
        ([7, 8, 8, 7], "abcd", (1, 0, 3)),
        ([NEW, 0], "ab", (1, 0)),
        ([NEW, NEW, 3, NEW], "abcd", (2, 0, 1, 3)),
        ([NEW, 7, 8], "abc", (2, 0, 1)),
        ([NEW, NEW], "ab", ()),
        ([], "", ()),
        ([1, 0, 0, 0], "aabb", (0, 1, 2, 3)),
        ([0, 0, 1, 0], "aabb", (2, 3, 0, 1)),
        ([0, 0, 0, 1, 0, 0], "abcacb", (3, 0, 1, 5, 2, 4)),
    ],
)
def test_who_sends_to_whom(steps: list[int], nodes: str, order: tuple[int, ...]) -> None:
    """The first of the furthest to all others, if any has a state: to those of its node, then to each node once."""
    assert chain(steps, list(nodes)) == order


def _rank(number: int, world: int, listening: socket.socket, work: Callable[[Meeting], Any], answers: Any) -> None:
    torch.set_num_threads(1)
    if number == 0:
        GroupStoreServer(listening, "nonce")
    store = GroupStore("127.0.0.1", listening.getsockname()[1], "nonce", 60, bool)
    try:
        answer = work(Meeting(store, number, world, "nonce", lambda: False))
    except Exception as error:  # noqa: BLE001  It is the answer.
        answer = f"{type(error).__name__}: {error}"
    answers.put((number, answer))
    answers.close()
    answers.join_thread()
    time.sleep(0 if number else 1)  # The others may still be asking its store.
    os._exit(0)


def by_group(work: Callable[[Meeting], Any], meeting: Meeting) -> Any:
    """Do `work` where the group itself sends tensors, as NCCL does on GPUs: here gloo, on the host, in many parcels."""
    store = dist.PrefixStore("group", meeting.store)  # type: ignore[attr-defined]  # torch does not declare it.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=meeting.world_size)
    group_transport.device = lambda: torch.device("cpu")
    group_transport.PARCEL_BYTES = 4096
    real = GroupTransport.carry

    def carry(line: GroupTransport, tensors: Any) -> int:
        assert sum(each.nbytes for each in tensors) > 10 * group_transport.PARCEL_BYTES or not tensors
        RankConnection.fill = RankConnection.send = lambda *_: pytest.fail("by way of the host")  # type: ignore[method-assign]
        try:
            return real(line, tensors)
        finally:
            RankConnection.fill, RankConnection.send = fill, send  # type: ignore[method-assign]

    fill, send = RankConnection.fill, RankConnection.send
    GroupTransport.carry = carry  # type: ignore[method-assign]
    return work(meeting)


WAYS = pytest.mark.parametrize("way", [lambda work: work, lambda work: partial(by_group, work)], ids=["host", "group"])


def ranks(work: Callable[[Meeting], Any], world: int = 2, dead: int = 0) -> list[Any]:
    """What `work` gives in each process of a generation, by rank, without so many of the last that die."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        processes = [context.Process(target=_rank, args=(n, world, listening, work, answers)) for n in range(world)]
        for process in processes:
            process.start()
    found = dict(answers.get(timeout=60) for _ in range(world - dead))
    for process in processes:
        process.kill()
        process.join(30)
    return [found[number] for number in range(world - dead)]


def _state(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=draw)

    return {
        "model": {
            "double": numbers(5, 7).double(),
            "half": numbers(9).half(),
            "brain": numbers(3, 3).bfloat16(),
            "truth": numbers(11) > 50,
            "small": numbers(13).to(torch.int8),
            "complex": torch.complex(numbers(4).float(), numbers(4).float()),
            "turned": numbers(6, 4).float().t(),
            "every other": numbers(20).float()[::2],
            "misaligned": numbers(9).to(torch.uint8)[1:],
            "odd half": numbers(8).half()[3:],
            "alone": numbers(1).double().reshape(()),
            "empty": torch.empty(0, 3),
            "large": numbers(700_000).float(),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(seed))}, 7: {"moment": (numbers(3).float(), seed)}},
            "groups": [{"lr": seed / 10, "params": [0, 7], "on": None}],
        },
        "text": f"seed {seed}",
    }


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in _leaves(each, f"{path}/{key!r}").items()}
    if isinstance(value, (list, tuple)):
        kind = type(value).__name__
        return {k: v for i, each in enumerate(value) for k, v in _leaves(each, f"{path}/{kind}{i}").items()}
    return {path: value}


def _exchange(meeting: Meeting) -> Any:
    rank = meeting.rank
    own, expected = _state(rank + 1), _leaves(_state(2))
    places = {path: each.data_ptr() for path, each in _leaves(own).items() if isinstance(each, torch.Tensor)}
    called: list[int] = []
    told, _ = transfer_state(rank + 4, meeting, lambda: own, lambda: called.append(1))
    if rank == 1:
        return told is None and not called
    assert told is not None
    found = _leaves(told)
    assert found.keys() == expected.keys()
    for path, each in expected.items():
        if isinstance(each, torch.Tensor):
            assert found[path].dtype == each.dtype, path
            assert torch.equal(found[path], each), path
            assert found[path].data_ptr() == places[path], path
        else:
            assert found[path] == each, path
    return called == [1]


@WAYS
def test_tensors_of_all_kinds_arrive_in_place(way: Any) -> None:
    """Odd types, views, a scalar, an empty one: each is equal afterwards, and the receiver's own tensor holds it."""
    assert ranks(way(_exchange)) == [True, True]


def _to_a_newcomer(meeting: Meeting) -> Any:
    rank = meeting.rank
    own = _state(2) if rank == 1 else {"model": {"half": torch.zeros(2)}, "optimizer": {}}
    told, _ = transfer_state(4 if rank == 1 else NEW, meeting, lambda: own, lambda: None)
    if rank == 1:
        return told is None
    found, expected = _leaves(told), _leaves(_state(2))
    return all(
        torch.equal(found[path], each) if isinstance(each, torch.Tensor) else found[path] == each
        for path, each in expected.items()
    )


@WAYS
def test_who_lacks_parts_gets_them(way: Any) -> None:
    """A newcomer whose optimizer has no state yet, and whose tensor has another shape, gets new ones; three ranks."""
    assert ranks(way(_to_a_newcomer), 3) == [True, True, True]


def _to_one_with_spare_memory(meeting: Meeting) -> Any:
    moments = {name: torch.full((5, 3), float(value)) for name, value in zip("abcde", range(5), strict=True)}
    own: dict[str, Any] = {"moments": {} if meeting.rank else moments}
    spare = SpareTensors([torch.zeros(5, 3), torch.zeros(2)])
    ready = {each.data_ptr() for each in spare._tensors[torch.Size((5, 3)), torch.float32]}
    told, _ = transfer_state(NEW if meeting.rank else 1, meeting, lambda: own, lambda: None, spare)
    if told is None:
        return True
    found = told["moments"]
    assert all(torch.equal(found[name], each) for name, each in moments.items())
    assert len(ready) == 4  # A gradient and a bucket have room as well.
    return len({each.data_ptr() for each in found.values()} & ready) == 4


def test_a_newcomer_receives_into_memory_that_it_has_touched() -> None:
    """Four tensors like each parameter are there already; what is beyond them gets new memory."""
    assert ranks(_to_one_with_spare_memory) == [True, True]


def _with_a_flipped_bit(meeting: Meeting) -> Any:
    if meeting.rank == 0:
        received, real = [], RankConnection.fill

        def fill(line: RankConnection, room: Any) -> None:
            real(line, room)
            received.append(1)
            if len(received) == 4:
                room[5] ^= 16

        RankConnection.fill = fill  # type: ignore[method-assign]
    return str(transfer_state(meeting.rank, meeting, lambda: _state(meeting.rank), lambda: None)[0])


def test_a_flipped_bit_is_refused() -> None:
    """One bit that changes on the way: the receiver says so instead of training on."""
    told, sent = ranks(_with_a_flipped_bit)
    assert "the state was corrupted on its way" in told
    assert sent == "None"


LARGE = 96 * 1024 * 1024


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def _measured(meeting: Meeting) -> Any:
    rank = meeting.rank
    own = {"weights": torch.full((LARGE // 4,), float(rank))}
    Path("/proc/self/clear_refs").write_text("5")  # The peak is counted from now on.
    before = _peak_bytes()
    told, _ = transfer_state(1 if rank else NEW, meeting, lambda: own, lambda: None)
    more = _peak_bytes() - before
    if told is not None:
        assert told["weights"].data_ptr() == own["weights"].data_ptr()
        assert own["weights"][-1].item() == 1.0
    return more


def test_a_receiver_needs_no_second_copy() -> None:
    """96 MiB arrive at a newcomer, and neither side ever holds half as much more."""
    more = ranks(_measured)
    assert max(more) < LARGE / 2, more


def _in_the_middle(what: Callable[[], Any]) -> None:
    """Have `what` happen when a part of the large tensor has been sent."""
    real = RankConnection.send

    def send(line: RankConnection, data: Any) -> None:
        if len(data) < state_transfer.PIECE_BYTES:
            return real(line, data)
        real(line, data[:1000])
        what()
        return real(line, data[1000:])

    RankConnection.send = send  # type: ignore[method-assign]


def _keeps_its_own(meeting: Meeting, number: int) -> bool:
    """Whether a rank with a whole state has it still after a transfer that fails."""
    own, called = _state(number), []
    with pytest.raises(dist.DistNetworkError, match="the state of another rank did not arrive"):
        transfer_state(7, meeting, lambda: own, lambda: called.append(1))
    expected, found = _leaves(_state(number)), _leaves(own)
    tensors = [path for path, each in expected.items() if isinstance(each, torch.Tensor)]
    return not called and all(torch.equal(found[path], expected[path]) for path in tensors)


def _sender_is_lost(meeting: Meeting, number: int) -> Any:
    if meeting.rank < 2:
        return _keeps_its_own(meeting, meeting.rank)
    _in_the_middle(lambda: os.kill(os.getpid(), number))
    transfer_state(8, meeting, lambda: _state(2), lambda: None)
    return "sent"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_is_lost_in_the_middle(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It dies or stops while it sends: nobody hangs, and who was a step behind has that step's state still, whole."""
    monkeypatch.setattr(state_transfer, "STALL_S", 0.5)
    assert ranks(partial(_sender_is_lost, number=number), 3, dead=1) == [True, True]


def _receiver_is_lost(meeting: Meeting, number: int) -> Any:
    if meeting.rank == 1:
        RankConnection.fill = lambda *_: os.kill(os.getpid(), number)  # type: ignore[method-assign]
    own = {"weights": torch.ones(LARGE // 4)}
    return str(transfer_state(NEW if meeting.rank else 1, meeting, lambda: own, lambda: None)[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_is_lost_in_the_middle(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It dies or stops while it receives: who sends does not hang."""
    monkeypatch.setattr(state_transfer, "STALL_S", 0.5)
    (told,) = ranks(partial(_receiver_is_lost, number=number), dead=1)
    assert "the state of another rank did not arrive" in told


def _overtaken(meeting: Meeting) -> Any:
    if meeting.rank == 1:
        _in_the_middle(lambda: (meeting.gather("the middle", ""), time.sleep(600)))
        return transfer_state(1, meeting, lambda: _state(1), lambda: None)
    begun = threading.Event()
    threading.Thread(target=lambda: (meeting.gather("the middle", ""), begun.set()), daemon=True).start()
    with pytest.raises(Overtaken):
        transfer_state(0, replace(meeting, over=begun.is_set), lambda: _state(0), lambda: None)
    return True


def test_another_generation_ends_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seat comes while a rank waits for the rest of a state: it goes there at once."""
    monkeypatch.setattr(state_transfer, "STALL_S", 60.0)
    (told,) = ranks(_overtaken, dead=1)
    assert told is True


def _strangers(meeting: Meeting) -> Any:
    if meeting.rank == 1:
        listens, real = [], socket.create_server

        def create_server(*args: Any, **options: Any) -> socket.socket:
            listens.append(real(*args, **options))
            for said in (b"", b"nonce 7", b"GET / HTTP/1.1" + bytes(100)):
                with socket.create_connection(listens[0].getsockname()) as stranger:
                    stranger.sendall(said)
            return listens[0]

        socket.create_server = create_server
    told, _ = transfer_state(meeting.rank, meeting, lambda: _state(meeting.rank), lambda: None)
    return told is None or told["text"]


def test_strangers_get_nothing() -> None:
    """Who connects and does not know the generation is let go of; the one that does gets the state."""
    assert ranks(_strangers) == ["seed 1", True]


def _nobody(meeting: Meeting) -> Any:
    return transfer_state(NEW, meeting, dict, lambda: None)


def test_without_a_state_all_are_told() -> None:
    """When no rank has a whole state every rank raises, and none waits."""
    assert all("no rank of this generation has a training state" in each for each in ranks(_nobody))


def test_a_rehearsal_leaves_the_state_where_and_as_it_is() -> None:
    """What is practised alone is what is done with a peer: the same values, in the very same tensors."""
    state = _state(3)
    expected = _state(3)
    told = rehearse(state)
    for name, tensor in state["model"].items():
        assert told["model"][name] is tensor
        assert torch.equal(tensor, expected["model"][name])


class _Odd(NamedTuple):
    number: int


def test_values_travel_as_they_are_saved() -> None:
    """Numbers of numpy become plain ones; what cannot be saved, as it is, is named by its place."""
    state = {
        "vars": {"best": np.float64(0.5), "count": np.int64(3), "pair": (4, 5), "seen": {1, 2}},
        "counter": Counter(a=2),
        "ordered": OrderedDict(b=torch.ones(1)),
    }
    told = rehearse(state)
    assert told["vars"] == {"best": 0.5, "count": 3, "pair": (4, 5), "seen": {1, 2}}
    assert [type(each) for each in told["vars"].values()] == [float, int, tuple, set]
    assert (told["counter"]["none"], type(told["ordered"])) == (0, OrderedDict)
    for last, kind in ((deque([1]), "collections.deque"), (_Odd(4), r"\S*_Odd")):
        with pytest.raises(ConfigError, match=rf"saved \(state\['vars'\]\['last'\]\): got {kind}"):
            rehearse({"vars": {"last": last}})


# By the group itself.


def test_parcels_hold_all_bytes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors share one, a large one goes through several, nothing is sent for an empty one."""
    monkeypatch.setattr(group_transport, "PARCEL_BYTES", 16)
    tensors = [torch.arange(3, dtype=torch.int16), torch.empty(0), torch.tensor(7.0), torch.arange(5).double()]
    found = [[each.numel() for each in parcel] for parcel in parcels(tensors)]
    assert found == [[6, 4, 6], [16], [16], [2]]
    sent = torch.cat([part for parcel in parcels(tensors) for part in parcel])
    assert sent.tolist() == [byte for each in tensors for byte in bytes(each.reshape(-1).view(torch.uint8).tolist())]
    assert not list(parcels([]))


def _with_a_flipped_bit_in_the_group(meeting: Meeting) -> Any:
    if meeting.rank == 0:
        real = GroupTransport._move

        def move(line: GroupTransport, into: torch.Tensor | None, filled: torch.Tensor | None) -> None:
            real(line, into, filled)
            if into is not None:
                into[5] ^= 16

        GroupTransport._move = move  # type: ignore[method-assign]
    return _with_its_own(meeting)


def _with_its_own(meeting: Meeting) -> str:
    return str(transfer_state(meeting.rank, meeting, lambda: _state(meeting.rank), lambda: None)[0])


def test_a_bit_that_the_group_flips_is_refused() -> None:
    """What a group of NCCL has received is not trusted either: an aborted kernel ends like any other."""
    told, sent = ranks(partial(by_group, _with_a_flipped_bit_in_the_group))
    assert "the state was corrupted on its way" in told
    assert sent == "None"


def _sender_of_the_group_is_lost(meeting: Meeting) -> Any:
    if meeting.rank == 1:
        real = GroupTransport._move
        moved: list[int] = []

        def move(*args: Any) -> None:
            moved.append(1)
            if len(moved) == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args)

        GroupTransport._move = move  # type: ignore[method-assign]
        return transfer_state(8, meeting, lambda: _state(2), lambda: None)
    own, called = _state(0), []
    with pytest.raises(RuntimeError):
        transfer_state(7, meeting, lambda: own, lambda: called.append(1))
    expected = _leaves(_state(0))
    found = _leaves(own)
    return not called and all(torch.equal(found[k], v) for k, v in expected.items() if isinstance(v, torch.Tensor))


def test_a_sender_in_the_group_that_is_lost_in_the_middle() -> None:
    """Who was a step behind has that step's state still, whole."""
    assert ranks(partial(by_group, _sender_of_the_group_is_lost), dead=1) == [True]


def _line(events: list[list[bool]], over: list[bool]) -> GroupTransport:
    """A line with so many parcels under way; each answers whether it is done, and the last answer stands."""
    line = GroupTransport(torch.device("cpu"), 0, None, 0.2, lambda: over.pop(0) if len(over) > 1 else over[0])
    for answers in events:
        query = lambda answers=answers: answers.pop(0) if len(answers) > 1 else answers[0]  # noqa: E731
        line._under_way.append(SimpleNamespace(query=query))  # type: ignore[arg-type]
    return line


def test_a_gpu_is_waited_for_with_a_limit() -> None:
    """Until as few parcels as wanted are under way; what does not come is a lost rank."""
    line = _line([[False, True], [True], [False]], [False])
    line._settle(1)
    assert len(line._under_way) == 1
    with pytest.raises(dist.DistNetworkError, match=r"nothing has moved for 0\.2 s"):
        line._settle(0)


@pytest.mark.parametrize(("done", "over"), [(False, [False, True]), (True, [True])])
def test_another_generation_ends_a_wait_for_a_gpu(*, done: bool, over: list[bool]) -> None:
    """At once; and a send that has ended counts for nothing then, because an abort ends it as well."""
    with pytest.raises(Overtaken):
        _line([[done]], over)._settle(0)


def test_only_nccl_carries_tensors_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not without a group, and not with gloo, which brings tensors of a GPU to the host for each send."""
    assert group_transport.device() is None
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for backend, expected in (("gloo", None), ("nccl", torch.device("cuda", 3))):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        assert group_transport.device() == expected
    line = GroupTransport(torch.device("cuda", 3), 0, None, 1.0, lambda: False)
    assert not line.carries(torch.zeros(1)), "an optimizer counts its steps on the host"
    assert line.carries(SimpleNamespace(device=torch.device("cuda", 1)))  # type: ignore[arg-type]
