"""The store in which ranks in place meet: what it keeps, who waits, and what strangers and slow clients do to it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from elasticrt.distributed.group_store import GroupStore, GroupStoreServer
from tests.servers import wait_until

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # A client's connections end with its threads.

NONCE = "a nonce"


@pytest.fixture
def port() -> Iterator[int]:
    """Where a store listens, closed at the end."""
    listening = socket.create_server(("127.0.0.1", 0))
    number = listening.getsockname()[1]
    server = GroupStoreServer(listening, NONCE)
    yield number
    server.close()
    server._thread.close(10)
    assert not server._thread._thread.is_alive()


def _client(port: int, timeout_s: float = 20.0) -> GroupStore:
    return GroupStore("127.0.0.1", port, NONCE, timeout_s, bool)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def test_keys_and_values(port: int) -> None:
    """Bytes of any kind are kept as they are; numbers add up; a key that is deleted is not there."""
    one, other = _client(port), _client(port)
    every = bytes(range(256))
    one.set("key", every)
    assert other.get("key") == every
    assert [one.add("sum", 2), other.add("sum", 3)] == [2, 5]
    assert other.get("sum") == b"5"
    assert other.get_all(["sum", "key"]) == [b"5", every]
    assert one.check(["key", "sum"])
    assert not one.check(["key", "none"])
    assert one.delete_key("key")
    assert not one.delete_key("key")


def test_a_server_without_descriptors_waits_for_one() -> None:
    """A connection that cannot be accepted makes no busy loop, and is accepted once a descriptor is free."""
    limits, listening = resource.getrlimit(resource.RLIMIT_NOFILE), socket.create_server(("127.0.0.1", 0))
    server = GroupStoreServer(listening, NONCE)
    with ThreadPoolExecutor() as pool, socket.socket() as client:
        wait_until(lambda: server._thread.watches(listening), "the server")
        try:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(int(each.name) for each in Path("/proc/self/fd").iterdir()), limits[1])
            )
            fill = []
            with contextlib.suppress(OSError):
                while True:
                    fill.append(os.dup(client.fileno()))
            client.connect(listening.getsockname())
            wait_until(lambda: not server._thread.watches(listening), "a pause")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for each in fill:
                os.close(each)
        client.sendall(_line({"op": "check", "nonce": NONCE, "keys": []}))
        assert pool.submit(client.recv, 10).result(20) == b"true\n"
    server.close()


def test_ranks_exchange_values_by_one_question_each(port: int) -> None:
    """Each stores its own, and gets those of all as soon as the last has come."""
    clients, asked = [_client(port) for _ in range(3)], []
    keys = [f"x/{rank}" for rank in range(3)]

    def exchange(rank: int) -> list[bytes]:
        send = clients[rank]._ask
        clients[rank]._ask = lambda **question: (asked.append(rank), send(**question))[1]  # type: ignore[method-assign]
        return clients[rank].exchange(keys[rank], bytes([rank, 255]), keys)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(exchange, range(3))) == [[b"\x00\xff", b"\x01\xff", b"\x02\xff"]] * 3
    assert sorted(asked) == [0, 1, 2]


def test_torch_uses_it(port: int) -> None:
    """Behind torch's prefix, as a process group asks for it."""
    client = _client(port)  # Torch does not keep it.
    store = dist.PrefixStore("generation/1", client)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("sum", 1) == 1
    assert client.get("generation/1/key") == b"value"
    assert store.multi_get(["key", "sum"]) == [b"value", b"1"]
    assert [store.delete_key("key"), store.delete_key("key"), store.check(["key"])] == [True, False, False]


def test_who_waits_is_told_when_all_keys_are_there(port: int) -> None:
    """A wait for two keys ends with the second; one for a key that never comes ends with its time."""
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(_client(port).wait, ["a", "b"])
        _client(port).set("a", "1")
        assert not waits.done()
        _client(port).set("b", "2")
        waits.result(20)
    late = _client(port)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms"):
        late.wait(["never"], datetime.timedelta(milliseconds=50))
    late.set("c", "3")
    assert late.get("c") == b"3", "its next question has an answer of its own"


def test_a_server_that_ends_lets_all_go() -> None:
    """Who waits when the store is closed, and who asks it later, finds the connection closed."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = GroupStoreServer(listening, NONCE)
    later, client = _client(port), _client(port)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.get, "never")
        later.add("asked", 1)
        server.close()
        with pytest.raises(dist.DistNetworkError, match="closed by peer"):
            waits.result(20)
    with pytest.raises(dist.DistNetworkError):
        later.set("key", "value")
    with pytest.raises(dist.DistNetworkError):
        _client(port)


def test_another_generation_is_not_answered(port: int) -> None:
    """Behind a port that is used again there may be a store of another nonce."""
    with pytest.raises(dist.DistNetworkError):
        GroupStore("127.0.0.1", port, "another nonce", 20.0, bool)
    assert _client(port).add("its own", 1) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64 + b"\n",
        _line([]),
        _line({"op": "get", "key": "key"}),
        _line({"op": "check", "keys": []}),
        _line({"op": "set", "nonce": "another", "key": "key", "value": "x", "keys": []}),
        b"\xff{]:,\n",
        b"[" * 100_000 + b"\n",
        b"x" * (17 << 20),
        _line({"op": "no such question", "nonce": NONCE}),
        _line({"op": "add", "nonce": NONCE, "key": [], "amount": {}}),
    ],
    ids=lambda text: repr(text[:24]),
)
def test_strangers_are_hung_up_on(port: int, text: bytes) -> None:
    """Whatever somebody says who is no rank: the connection is closed, and the others are served."""
    before = _client(port)
    stranger = socket.create_connection(("127.0.0.1", port), timeout=20)
    with stranger, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        stranger.sendall(text)
        while stranger.recv(1 << 16):
            pass
    before.set("key", "value")
    assert _client(port).get("key") == b"value"


def test_a_slow_client_delays_nobody(port: int) -> None:
    """A question that comes byte by byte is answered when it is whole; others are answered between two bytes."""
    client = _client(port)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
        question = {"op": "set", "nonce": NONCE, "key": "slow", "value": "x", "keys": []}
        for byte in _line(question):
            slow.sendall(bytes([byte]))
            client.add("others", 1)
        assert client.get("slow") == b"x"


def test_many_clients_and_threads(port: int) -> None:
    """Each thread of each client has a connection of its own; no sum is lost."""
    clients = [_client(port) for _ in range(20)]

    def work(number: int) -> None:
        clients[number % 20].add("sum", 1)
        clients[number % 20].wait(["go"])

    with ThreadPoolExecutor(60) as pool:
        done = [pool.submit(work, number) for number in range(60)]
        _client(port).set("go", "")
        for each in done:
            each.result(20)
    assert _client(port).get("sum") == b"60"


def test_large_values(port: int) -> None:
    """A value of two megabytes comes back whole."""
    value = os.urandom(1 << 21)
    _client(port).set("large", value)
    assert _client(port).get("large") == value


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_nothing_is_left_of_stores_that_ended() -> None:
    """After two hundred stores with clients in two threads each no descriptor and no thread is left of them."""

    def one() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        server = GroupStoreServer(listening, NONCE)
        client = _client(port)
        _thread(lambda: client.add("sum", 1))
        assert client.add("sum", 1) == 2
        server.close()
        server._thread.close(20)

    one()
    descriptors, threads = _descriptors(), set(threading.enumerate())
    for _ in range(200):
        one()
    # Those of other tests may end meanwhile.
    assert _descriptors() <= descriptors
    assert not set(threading.enumerate()) - threads
