"""`elasticrt etcd`: a server in the foreground."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from elasticrt.cli.main import main
from elasticrt.store import embedded
from elasticrt.store.address import parse_endpoints
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.etcd_server import resolve_listen_address
from elasticrt.store.protocol import Address, Put, Txn
from tests.servers import free_port, refused_to_others


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A running command and the lines it has printed when the server was ready."""
    insecure = ["--insecure-etcd"] if "--listen" in arguments else []
    command = [sys.executable, "-m", "elasticrt", "etcd", *arguments, *insecure]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().rstrip()]
            while not lines[-1].startswith(("it is unauthenticated", "only you")) and process.poll() is None:
                lines.append(process.stdout.readline().rstrip())
            yield process, lines
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_serve(number: signal.Signals, code: int) -> None:
    """It serves, says how to join and that nobody is authenticated, and ends with the exit code of its signal."""
    address = Address("http", "127.0.0.1", free_port())
    with served("--listen", f"127.0.0.1:{address.port}") as (process, lines):
        assert f"serves at {address}" in lines[0]
        assert lines[1] == f"join with: elasticrt run --etcd {address} ..."
        assert "unauthenticated" in lines[2]
        store = EtcdStore((address,))
        assert store.commit(Txn((), (Put("/a", b""),))).succeeded
        store.close()
        process.send_signal(number)
        assert process.wait(20) == code


def test_serve_this_user_alone() -> None:
    """SEC10: without --listen no port is open, and nobody else can use the socket."""
    with served() as (process, lines):
        (address,) = parse_endpoints(lines[0].rpartition(" ")[2])
        assert lines[1] == f"join with: elasticrt run --etcd {address} ..."
        store = EtcdStore((address,))
        assert store.commit(Txn((), (Put("/a", b""),))).succeeded
        store.close()
        (etcd,) = psutil.Process(process.pid).children()
        assert not [c for c in etcd.net_connections("inet") if c.status == "LISTEN"]
        refused_to_others(address)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143


def test_killed_command_takes_its_server_along() -> None:
    """A SIGKILL of the command leaves no etcd behind, so the port is free again; the next start removes its files."""
    port = free_port()
    with served("--listen", f"127.0.0.1:{port}") as (process, _):
        (etcd,) = psutil.Process(process.pid).children()
        process.kill()
        process.wait(20)
        etcd.wait(20)
    resolve_listen_address(Address("http", "127.0.0.1", port), "--listen")
    (left,) = Path(os.environ["TMPDIR"]).glob("elasticrt-etcd-*")
    with served() as (process, _):
        assert not left.exists()
        (used,) = Path(os.environ["TMPDIR"]).glob("elasticrt-etcd-*")
        with embedded.new_data_directory() as other:
            assert other.exists()
            assert used.exists(), "a living one's files stay"
        assert not other.exists()
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "127.0.0.1:2379"], "--insecure-etcd"),
        (["--listen", "a..b:2379"], "(--listen)"),
        (["--listen", "no.such.invalid:2379", "--insecure-etcd"], "--listen"),
        (["--listen", "127.0.0.1"], "HOST:PORT"),
        (["--listen", "http://127.0.0.1:1"], "not a host name or address (--listen)"),
        (["--listen", "127.0.0.1:0"], "HOST:PORT with a port from 1 to 65535"),
        (["--listen", "127.0.0.1:1,127.0.0.1:2"], "not a host name or address (--listen)"),
        (["--listen", "192.0.2.1:2379", "--insecure-etcd"], "not an address of this machine"),
        (["--listen", "127.0.0.1:2379", "--cert-file", "/nonexistent"], "--key-file"),
        (["--listen", "127.0.0.1:2379", "--cert-file", "/no", "--key-file", "/no"], "--cert-file"),
        (["--listen", "127.0.0.1:2379", "--client-ca-file", "/etc/passwd"], "--cert-file"),
        (["--listen", "127.0.0.1:2379", "--cert-file", "/etc/passwd", "--key-file", "/etc/passwd"], "--cert-file"),
    ],
)
def test_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake in the options is one line and exit code 2, before anything starts."""
    assert main(["etcd", *arguments]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
