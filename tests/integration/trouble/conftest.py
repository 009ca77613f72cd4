"""A real etcd server for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import EtcdServer, wheel_binary


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server of the test's own, whatever state the test leaves it in."""
    with EtcdServer(wheel_binary(), tmp_path / "etcd") as server:
        yield server
