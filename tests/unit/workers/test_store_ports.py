"""The sockets held for the stores of generations to come."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from elasticrt.errors import ConfigError
from elasticrt.workers.store_ports import StorePorts


@pytest.fixture
def ports() -> Iterator[StorePorts]:
    """A node's, which has bound one."""
    held = StorePorts()
    held.bind("127.0.0.1")
    yield held
    held.close()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_port_lives_for_two_generations(ports: StorePorts) -> None:
    """A leader that chooses before it has heard of the new port gets a store behind the former one, not an older."""
    bound = [ports.port]
    for _ in range(3):
        ports.bind("127.0.0.1")
        bound.append(ports.port)
        held = [port for port in bound if _answers(port)]
        assert held == bound[-2:]
    for port in bound[-2:]:
        given = ports.take(port, shared=True)
        assert given is not None
        assert given.getsockname()[1] == port
        given.close()
    assert ports.take(bound[0], shared=True) is None


def test_a_shared_port_stays_held_and_another_is_given_away(ports: StorePorts) -> None:
    """Forks inherit the listening socket; a program binds the port itself, so that nobody may hold it by then."""
    for shared in (True, False):
        given = ports.take(ports.port, shared=shared)
        assert given is not None
        given.close()
        assert _answers(ports.port) is shared
    assert ports.take(ports.port, shared=False) is None


def test_an_address_of_another_machine_costs_nothing_that_is_held(ports: StorePorts) -> None:
    """It is refused in words, and the ports of before still answer."""
    before = ports.port
    with pytest.raises(ConfigError, match="assign requested address"):
        ports.bind("192.0.2.1")
    assert ports.port == before
    assert _answers(before)


def test_closing_gives_all_back(ports: StorePorts) -> None:
    """Nobody connects to a node that has left."""
    first = ports.port
    ports.bind("127.0.0.1")
    ports.close()
    assert not _answers(first)
    assert not _answers(ports.port)
