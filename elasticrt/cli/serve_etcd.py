"""`elasticrt etcd`: serve an etcd in the foreground, for several runs or machines that have none."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from elasticrt.cli.options import declare, read
from elasticrt.errors import EXIT_OK, EXIT_TERMINATED, ConfigError, StoreError, explain
from elasticrt.ipc.file_modes import make_directory
from elasticrt.ipc.std_streams import write
from elasticrt.option_values import option
from elasticrt.store import embedded, etcd_server
from elasticrt.store.address import SOCKET_PATH_MAX_BYTES, is_loopback, parse_endpoints
from elasticrt.store.etcd_server import EtcdProcess
from elasticrt.store.protocol import Address
from elasticrt.text import shell


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What is also read from a variable."""

    insecure_etcd: bool = option(
        "--insecure-etcd", False, "accept that whoever reaches the port can read and change the runs"
    )


_TLS_OPTIONS = ("cert_file", "key_file", "client_ca_file")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "etcd",
        help="serve an etcd on this machine, for several runs or several machines",
        description="Serve a single etcd in the foreground until SIGINT or SIGTERM. A production cluster has its own "
        "of three members; this one is for trying things and for clusters without one.",
        epilog="example: elasticrt etcd --listen 10.0.0.5:2379 --insecure-etcd",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="an address of this machine, 0.0.0.0 for all (default: a socket that only you can use)",
    )
    parser.add_argument("--data-dir", metavar="DIR", help="keep the data there (default: removed at the end)")
    parser.add_argument("--cert-file", metavar="FILE", help="serve with TLS: the certificate")
    parser.add_argument("--key-file", metavar="FILE", help="its private key")
    parser.add_argument("--client-ca-file", metavar="FILE", help="demand certificates of this authority from clients")
    declare(parser, ServeOptions)
    parser.set_defaults(func=main)


def main(arguments: argparse.Namespace) -> int:
    """Serve. Exit code 0 after SIGINT, 143 after SIGTERM. Raises ConfigError, StoreError."""
    tls = check_tls(arguments)
    given = None if arguments.listen is None else parse_listen(arguments.listen, tls=tls)
    insecure = read(ServeOptions(), arguments, os.environ).insecure_etcd
    if given is not None and arguments.client_ca_file is None and not insecure:
        raise ConfigError(
            explain(
                "an etcd that authenticates nobody",
                "--listen",
                got=arguments.listen,
                expected="--client-ca-file, or no --listen: a socket that only you can use",
                remedy="Whoever reaches the port, each user of this machine too, could read and change the runs; "
                "--insecure-etcd accepts that",
            )
        )
    listen = None if given is None else etcd_server.claim(given, "--listen")
    binary = etcd_server.find_binary()
    directory = embedded.make_data() if arguments.data_dir is None else Path(arguments.data_dir).absolute()
    try:
        with _held(directory):
            if listen is None:
                given = listen = _socket_in(directory)
            assert given is not None, "with listen"
            return serve(binary, directory, listen, given, arguments)
    finally:
        if arguments.data_dir is None:
            embedded.remove_data(directory)


@contextmanager
def _held(directory: Path) -> Iterator[None]:
    """Make the directory, and keep others from serving out of it as well. Raises ConfigError."""
    try:
        make_directory(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)
        lock = (directory / "lock").open("wb")
    except OSError as error:
        raise ConfigError(explain("the data directory can't be made or used", "--data-dir", got=str(error))) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what, got = "the data directory can't be had alone", f"{directory}: {error.strerror}"
            remedy = "Choose another, or end who has it"
            raise ConfigError(explain(what, "--data-dir", got=got, remedy=remedy)) from error
        yield


def _socket_in(directory: Path) -> Address:
    """The address of a socket in it that only this user can use. Raises ConfigError."""
    address = etcd_server.socket_in(directory)
    problem = embedded.what_is_unsafe(directory)
    if problem:
        expected = "a directory of this user alone (mode 0700)"
        raise ConfigError(explain("others could use a socket in there", "--data-dir", got=problem, expected=expected))
    if len(os.fsencode(address.host)) > SOCKET_PATH_MAX_BYTES:
        expected = f"at most {SOCKET_PATH_MAX_BYTES} bytes"
        raise ConfigError(explain("a path too long for a socket", "--data-dir", got=address.host, expected=expected))
    return address


def parse_listen(text: str, *, tls: bool) -> Address:
    """`HOST:PORT`. Raises ConfigError."""
    try:
        (address,) = parse_endpoints(text)
    except (ConfigError, ValueError) as error:
        raise _bad_listen(text) from error
    if "://" in text or not text.endswith(f":{address.port}"):
        raise _bad_listen(text)
    return replace(address, scheme="https" if tls else "http")


def _bad_listen(text: str) -> ConfigError:
    return ConfigError(
        explain("a bad address to serve at", "--listen", got=text, expected="HOST:PORT, such as 0.0.0.0:2379")
    )


def check_tls(arguments: argparse.Namespace) -> bool:
    """Whether TLS is asked for, whole and readable. Raises ConfigError."""
    if (arguments.cert_file is None) != (arguments.key_file is None):
        raise ConfigError(explain("half a certificate", "elasticrt etcd", expected="--cert-file with --key-file"))
    if arguments.client_ca_file is not None and arguments.cert_file is None:
        raise ConfigError(
            explain("no certificate to serve with", "--client-ca-file", expected="--cert-file, --key-file")
        )
    if arguments.cert_file is None:
        return False
    import ssl  # It takes a while to load, and few need it.

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(arguments.cert_file, arguments.key_file)
        if arguments.client_ca_file is not None:
            context.load_verify_locations(arguments.client_ca_file)
    except OSError as error:
        where, expected = "--cert-file, --key-file, --client-ca-file", "PEM files, the key that of the certificate"
        raise ConfigError(explain("unusable certificates", where, got=str(error), expected=expected)) from error
    if arguments.listen is None:
        raise ConfigError(explain("no port to serve with TLS at", "--cert-file", expected="--listen HOST:PORT as well"))
    return True


def serve(binary: Path, directory: Path, listen: Address, given: Address, arguments: argparse.Namespace) -> int:
    """Start it, say how to join at the address that was given, and wait for a signal or its end."""
    options = []
    for flag, name in zip(("--cert-file", "--key-file", "--trusted-ca-file"), _TLS_OPTIONS, strict=True):
        path = getattr(arguments, name)
        options += [flag, str(Path(path).absolute())] if path is not None else []
    options += ["--client-cert-auth"] if arguments.client_ca_file is not None else []
    # With a directory of its own the identity lasts as long as the data; without one every server is another.
    token = "elasticrt" if arguments.data_dir is not None else uuid4().hex
    etcd = EtcdProcess(binary, directory, listen, token, tuple(options))
    signals = etcd_server.caught_signals()
    try:
        etcd.start()
        write(sys.stdout, "\n".join(how_to_join(given, arguments, etcd_server.version_of(binary))) + "\n")
        while (number := signals.get()) == signal.SIGCHLD and etcd.runs():
            pass  # Another child's end: that of `etcd --version`.
    finally:
        etcd.stop()
    if number != signal.SIGCHLD:
        return EXIT_OK if number == signal.SIGINT else EXIT_TERMINATED
    got, remedy = etcd.why_it_ended()
    raise StoreError(explain("etcd ended by itself", str(binary), got=got or "no reason told", remedy=remedy))


def how_to_join(address: Address, arguments: argparse.Namespace, version: tuple[int, ...]) -> list[str]:
    """What to print once it serves."""
    everywhere = address.host in ("0.0.0.0", "::")  # noqa: S104  Compared, not bound.
    reached = replace(address, host=socket.gethostname()) if everywhere else address
    options = ""
    if address.scheme == "https":
        options += " --etcd-ca-file CA"
        options += " --etcd-cert-file CERT --etcd-key-file KEY" if arguments.client_ca_file is not None else ""
    elif not is_loopback(reached):
        options += " --insecure-etcd"
    lines = [
        f"etcd {'.'.join(map(str, version))} serves at {reached}",
        f"join with: elasticrt run --etcd {shell((str(reached),))}{options} ...",
    ]
    if address.scheme == "unix":
        lines.append("only you can use it, and only on this machine; --listen serves other machines")
    elif arguments.client_ca_file is None:
        lines.append("it is unauthenticated: anyone who reaches this port can read and change the run")
    if arguments.data_dir is not None and version in etcd_server.UNSAFE_VERSIONS:
        lines.append("this version of etcd can lose its last writes in a crash: use 3.4.23 or newer, or 3.5.3 or newer")
    return lines
