"""What the kernel shows of a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from elasticrt.ipc.proc import is_dying, machine, start_of, stat, tcp_address_in, tcp_addresses_of

NAMED = "open('/proc/self/comm', 'w').write('a) Z 1 (b'); print(flush=True); input()"


def test_a_process_until_it_is_gone() -> None:
    """Its name may look like fields; one that waits to be reaped has ended, one that was reaped is not there."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        found = stat(process.pid)
        assert found is not None
        assert (found.ended, found.parent, found.ticks >= 0) == (False, os.getpid(), True)
        assert start_of(process.pid) == found.start >= start_of(os.getpid()) > 0
        assert not is_dying(process.pid)
        process.kill()
        assert is_dying(process.pid), "at once"
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = stat(process.pid)
        assert found is not None
        assert (found.ended, start_of(process.pid)) == (True, 0)
        process.wait()
        assert is_dying(process.pid)
        assert (stat(process.pid), start_of(process.pid)) == (None, 0)


def test_a_machine_has_one_monotonic_clock() -> None:
    """A process whose clock counts from elsewhere is on another one."""
    code = [sys.executable, "-c", "from elasticrt.ipc.proc import machine; print(machine())"]
    assert subprocess.check_output(code, text=True).strip() == machine()
    elsewhere = ["unshare", "--time", "--monotonic", "1000", *code]
    unshared = subprocess.run(elsewhere, check=False, capture_output=True, text=True)
    if unshared.returncode:
        pytest.skip("a time namespace needs root and unshare (util-linux)")
    assert unshared.stdout.strip() != machine()


def test_where_a_socket_still_connects_to() -> None:
    """The address of a peer that does not answer is known as well; a socket that listens has its own alone."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        (address,) = tcp_addresses_of(listener.fileno())
        assert tcp_address_in(address + bytes(8)) == address == tcp_address_in(address)
        assert tcp_address_in(address[:-1]) == tcp_address_in(b"") == b""
        with socket.create_connection(listener.getsockname()) as first, socket.socket() as second:
            assert tcp_addresses_of(first.fileno())[1] == address
            second.setblocking(False)
            second.connect_ex(listener.getsockname())  # The kernel answers nobody while the queue is full.
            assert tcp_addresses_of(second.fileno())[1] == address
    assert tcp_addresses_of(listener.fileno()) == []
