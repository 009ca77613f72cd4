"""Workers that train apart are found by their sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from elasticrt.agent.apart import connected, unconnected

TABLE = [
    "   0: 0100007F:0FA0 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 100 1 0 100 0 0 10 0",
    "   1: 0100007F:0FA0 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 101 1 0 20 4 30 10 -1",
    "   2: 0100007F:C001 0100007F:0FA0 01 00000000:00000000 00:00000000 00000000     0        0 102 1 0 20 4 30 10 -1",
    "   3: 0100007F:C002 0100007F:0FA1 01 00000000:00000000 00:00000000 00000000     0        0 103 1 0 20 4 30 10 -1",
    "   4: 0100007F:C003 0100007F:0FA0 06 00000000:00000000 03:00000000 00000000     0        0 0 3 00000000",
    "cut",
]


@pytest.mark.parametrize(("port", "inodes"), [(4000, {"101", "102"}), (4001, {"103"}), (4002, set())])
def test_connected(port: int, inodes: set[str]) -> None:
    """Established connections with the port at either end count; listening and closing ones do not."""
    assert connected(TABLE, port) == inodes


def test_a_session() -> None:
    """A worker counts as connected when a process that it has started is."""
    code = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, *sys.argv[1:]])"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", child, str(port)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        other = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, start_new_session=True
        )
        with worker, other:
            server.settimeout(60)
            connection, _ = server.accept()
            with connection:
                assert unconnected({0: worker.pid, 1: other.pid}, port) == [1]
                assert unconnected({0: worker.pid}, port + 1) == [0]
            for process in (worker, other):
                assert process.stdin is not None
                process.stdin.close()
    assert unconnected({5: os.getpid()}, port) == [5]
