"""A real server per test, and sinks that keep what they get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import EtcdServer, etcd_server


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """The wheel's server, this test's own."""
    with etcd_server() as server:
        yield server
