"""`elasticrt etcd`: serve an etcd in the foreground, for runs on several machines that have none."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

from elasticrt.errors import EXIT_OK, EXIT_TERMINATED, ConfigError, StoreError, explain
from elasticrt.store import server
from elasticrt.store.address import is_loopback, parse_endpoints
from elasticrt.store.protocol import Address

_TLS_OPTIONS = ("cert_file", "key_file", "client_ca_file")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "etcd",
        help="serve an etcd on this machine, for runs on several machines",
        description="Serve a single etcd in the foreground until SIGINT or SIGTERM. A production cluster has its own "
        "of three members; this one is for trying things and for clusters without one.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", required=True, help="an address of this machine, 0.0.0.0 for all"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="keep the data there (default: removed at the end)")
    parser.add_argument("--cert-file", metavar="FILE", help="serve with TLS: the certificate")
    parser.add_argument("--key-file", metavar="FILE", help="its private key")
    parser.add_argument("--client-ca-file", metavar="FILE", help="demand certificates of this authority from clients")
    parser.set_defaults(func=main)


def main(arguments: argparse.Namespace) -> int:
    """Serve. Exit code 0 after SIGINT, 143 after SIGTERM. Raises ConfigError, StoreError."""
    address = parse_listen(arguments.listen, tls=check_tls(arguments))
    ip = server.resolve(address.host)
    if server.port_is_taken(ip, address.port):
        raise ConfigError(explain("the port is in use", "--listen", got=arguments.listen, remedy="Choose another"))
    binary = server.find_binary()
    if arguments.data_dir is None:
        with tempfile.TemporaryDirectory(prefix="elasticrt-etcd-") as own:
            return serve(binary, Path(own), ip, address, arguments)
    directory = Path(arguments.data_dir).absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(explain("the data directory can't be made", "--data-dir", got=str(error))) from error
    return serve(binary, directory, ip, address, arguments)


def parse_listen(text: str, *, tls: bool) -> Address:
    """`HOST:PORT`. Raises ConfigError."""
    try:
        addresses = parse_endpoints(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("(--etcd)", "(--listen)")) from error
    if "://" in text or len(addresses) != 1 or not text.endswith(f":{addresses[0].port}"):
        raise ConfigError(explain("a bad address to serve at", "--listen", got=text, expected="HOST:PORT"))
    return Address("https" if tls else "http", addresses[0].host, addresses[0].port)


def check_tls(arguments: argparse.Namespace) -> bool:
    """Whether TLS is asked for, whole and readable. Raises ConfigError."""
    if (arguments.cert_file is None) != (arguments.key_file is None):
        raise ConfigError(explain("half a certificate", "elasticrt etcd", expected="--cert-file with --key-file"))
    if arguments.client_ca_file is not None and arguments.cert_file is None:
        raise ConfigError(
            explain("no certificate to serve with", "--client-ca-file", expected="--cert-file, --key-file")
        )
    for name in _TLS_OPTIONS:
        path = getattr(arguments, name)
        if path is not None and not (Path(path).is_file() and os.access(path, os.R_OK)):
            raise ConfigError(explain("an unreadable file", "--" + name.replace("_", "-"), got=path))
    return arguments.cert_file is not None


def serve(binary: Path, directory: Path, ip: str, address: Address, arguments: argparse.Namespace) -> int:
    """Start it, say how to join, and wait for a signal or its end."""
    log = directory / "etcd.log"
    options = []
    for flag, name in zip(("--cert-file", "--key-file", "--trusted-ca-file"), _TLS_OPTIONS, strict=True):
        path = getattr(arguments, name)
        options += [flag, str(Path(path).absolute())] if path is not None else []
    options += ["--client-cert-auth"] if arguments.client_ca_file is not None else []
    where = server.url(ip, address.port).replace("http://", f"{address.scheme}://")
    # With a directory of its own the identity lasts as long as the data; without one every server is another.
    token = "elasticrt" if arguments.data_dir is not None else uuid4().hex
    command = server.command(binary, directory / "member", where, token, tuple(options))
    try:
        etcd = server.launch(command, log)
    except OSError as error:
        raise StoreError(explain("etcd did not start", str(binary), got=str(error))) from error
    received: list[int] = []

    def end(number: int, _: object) -> None:
        # The first signal asks etcd to end, which ends the wait below; the second insists.
        received.append(number)
        etcd.send_signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ready = server.await_ready(etcd, server.own_address(ip), address.port, tls=address.scheme == "https")
        if ready:
            print("\n".join(how_to_join(address, arguments, server.version_of(binary))), flush=True)
            etcd.wait()
    finally:
        server.stop(etcd)
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        return EXIT_OK if received[0] == signal.SIGINT else EXIT_TERMINATED
    what = "etcd ended by itself" if ready else "etcd did not start"
    raise StoreError(explain(what, str(binary), got=server.last_lines(log) or "no sign of life"))


def how_to_join(address: Address, arguments: argparse.Namespace, version: tuple[int, ...]) -> list[str]:
    """What to print once it serves."""
    everywhere = address.host in ("0.0.0.0", "::")  # noqa: S104  Compared, not bound.
    reached = Address(address.scheme, socket.gethostname() if everywhere else address.host, address.port)
    options = ""
    if address.scheme == "https":
        options += " --etcd-ca-file CA"
        options += " --etcd-cert-file CERT --etcd-key-file KEY" if arguments.client_ca_file is not None else ""
    elif not is_loopback(reached):
        options += " --insecure-etcd"
    lines = [
        f"etcd {'.'.join(map(str, version))} serves at {reached}",
        f"join with: elasticrt run --etcd {reached}{options} ...",
    ]
    if arguments.client_ca_file is None:
        lines.append("it is unauthenticated: anyone who reaches this port can read and change the run")
    if arguments.data_dir is not None and version in server.UNSAFE_VERSIONS:
        lines.append("this version of etcd can lose its last writes in a crash: use 3.4.23 or newer, or 3.5.3 or newer")
    return lines
