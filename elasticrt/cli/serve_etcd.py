"""`elasticrt etcd`: serves an etcd in the foreground, for several runs, or for machines that have none."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elasticrt.cli.options import add_command, read
from elasticrt.errors import EXIT_OK, EXIT_TERMINATED, ConfigError, StoreError
from elasticrt.ipc.std_streams import write
from elasticrt.option_values import host_and_port, option
from elasticrt.store import embedded, etcd_server
from elasticrt.store.address import is_loopback
from elasticrt.store.etcd_server import EtcdProcess
from elasticrt.store.protocol import Address
from elasticrt.text import shell


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `elasticrt etcd`."""

    listen: tuple[str, int] | None = option(
        "--listen HOST:PORT", None, "an address of this machine, 0.0.0.0 for all",
        host_and_port("--listen", least=1), default="a socket that only you can use",
    )  # fmt: skip
    cert_file: str | None = option("--cert-file FILE", None, "serve with TLS: the certificate", os.path.abspath)
    key_file: str | None = option("--key-file FILE", None, "its private key", os.path.abspath)
    client_ca_file: str | None = option(
        "--client-ca-file FILE", None, "demand certificates of this authority from clients", os.path.abspath
    )
    insecure_etcd: bool = option(
        "--insecure-etcd", False, "accept that anyone who can connect to the port can read and change the runs"
    )

    @property
    def tls(self) -> dict[str, str]:
        """The files of TLS that were given, by etcd's flags for them."""
        files = {
            "--cert-file": self.cert_file,
            "--key-file": self.key_file,
            "--trusted-ca-file": self.client_ca_file,
        }
        return {flag: path for flag, path in files.items() if path is not None}


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    text = "serve an etcd on this machine, for several runs or several machines"
    more = (
        "It is a single server, in the foreground until SIGINT or SIGTERM; then its data is removed. A production\n"
        "cluster has its own of three members; this one is for trying things and for clusters without one."
    )
    epilog = "example: elasticrt etcd --listen 10.0.0.5:2379 --insecure-etcd"
    add_command(subparsers, "etcd", main, text, ServeOptions, more=more, epilog=epilog)


def main(arguments: argparse.Namespace) -> int:
    """Serve. Exit code 0 after SIGINT, 143 after SIGTERM. Raises ConfigError, StoreError."""
    options = read(ServeOptions(), arguments, os.environ)
    check_tls(options)
    given = listen = None
    if options.listen is not None:
        if options.client_ca_file is None and not options.insecure_etcd:
            raise ConfigError(
                "an etcd without authentication",
                "--listen",
                expected="--client-ca-file, or no --listen: a socket that only you can use",
                remedy="Anyone who can connect to the port, every user of this machine too, could read and change the "
                "runs; --insecure-etcd accepts that",
            )
        given = Address("https" if options.tls else "http", *options.listen)
        listen = etcd_server.resolve_listen_address(given, "--listen")
    binary = etcd_server.find_binary()
    with embedded.new_data_directory() as directory:
        listen = listen or etcd_server.socket_in(directory)
        return serve(binary, directory, listen, given or listen, options)


def check_tls(options: ServeOptions) -> None:
    """Raise ConfigError for TLS files that are not all given, or cannot be used."""
    if not options.tls:
        return
    where = "--cert-file, --key-file, --client-ca-file"
    if options.cert_file is None or options.key_file is None or options.listen is None:
        expected, remedy = "--listen, --cert-file and --key-file together", "Give the missing one, or none of them"
        raise ConfigError("incomplete TLS options", where, expected=expected, remedy=remedy)
    # Loaded late, because it takes a while and few need it.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    etcd_server.check_pem_files(context, where, options.client_ca_file, options.cert_file, options.key_file)


def serve(binary: Path, directory: Path, listen: Address, given: Address, options: ServeOptions) -> int:
    """Start etcd at `listen`, print how to join at `given`, and wait for a signal or etcd's end; the exit code."""
    flags = [word for pair in options.tls.items() for word in pair]
    flags += ["--client-cert-auth"] if options.client_ca_file is not None else []
    etcd = EtcdProcess(binary, directory, listen, tuple(flags))
    signals = etcd_server.catch_signals()
    try:
        etcd.start()
        write(sys.stdout, "\n".join(how_to_join(given, options)) + "\n")
        # After SIGCHLD etcd may only have been stopped or continued.
        while (number := signals.get()) == signal.SIGCHLD and etcd.is_running():
            pass
    finally:
        etcd.stop()
    if number != signal.SIGCHLD:
        return EXIT_OK if number == signal.SIGINT else EXIT_TERMINATED
    got = etcd.why_it_ended() or "no reason given"
    raise StoreError("etcd ended by itself", str(binary), got=got, remedy=etcd_server.REMEDY)


def how_to_join(address: Address, options: ServeOptions) -> list[str]:
    """The lines to print once etcd serves at `address`."""
    everywhere = address.host in ("0.0.0.0", "::")  # noqa: S104  Compared, not bound.
    # A wildcard is no address to join at.
    reached = replace(address, host=socket.gethostname()) if everywhere else address
    words = ""
    if address.scheme == "https":
        words += " --etcd-ca-file CA"
        words += " --etcd-cert-file CERT --etcd-key-file KEY" if options.client_ca_file is not None else ""
    elif not is_loopback(reached):
        words += " --insecure-etcd"
    lines = [
        f"etcd serves at {reached}",
        f"join with: elasticrt run --etcd {shell((str(reached),))}{words} ...",
    ]
    if address.scheme == "unix":
        lines.append("only you can use it, and only on this machine; --listen serves other machines")
    elif options.client_ca_file is None:
        lines.append("it is unauthenticated: anyone who reaches this port can read and change the run")
    return lines
