"""Where a run's agents meet: the options that say so, what they mean, and how to authenticate there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from elasticrt.cli.options import Options, pairs, seconds, whole
from elasticrt.errors import ConfigError, explain
from elasticrt.store.address import is_loopback, parse_endpoints
from elasticrt.store.etcd_server import resolve, resolve_for_others
from elasticrt.store.protocol import ETCD_WAIT_S, Address, Credentials
from elasticrt.text import plain

C10D_PORT = 29400
"""torchrun's default port of `--rdzv-endpoint`."""


def declare_etcd(options: Options) -> None:
    """Where etcd is and how to authenticate, for every command that talks to a run."""
    add = options.add
    add("--etcd", value="ENDPOINTS", text="etcd, e.g. https://a:2379,https://b:2379; without it, one on this machine")
    add("--rdzv-backend", value="WORD", text="c10d: serve etcd at --rdzv-endpoint; elasticrt or etcd-v3: it is an etcd")
    add("--rdzv-endpoint", value="HOST:PORT", text="as torchrun has it")
    options.flag("--insecure-etcd", text="accept an etcd on another machine without TLS")
    add("--etcd-ca-file", value="FILE", text="certificate authority of etcd")
    add("--etcd-cert-file", value="FILE", text="this client's certificate")
    add("--etcd-key-file", value="FILE", text="and its key")
    add("--etcd-user", value="NAME", text="user name, with --etcd-password-file")
    add("--etcd-password-file", value="FILE", text="a file that holds the password")


def declare_meeting(options: Options) -> None:
    """How agents meet that have no etcd yet, in the words of torchrun, for commands that start an agent."""
    add, told = options.add, ("etcd", "rdzv_endpoint", "standalone")
    add("--rdzv-conf", parse=pairs, value="KEY=VALUE,...", text="as torchrun has it, where that means something here")
    add("--master-addr", value="HOST", text="with --master-port: as --rdzv-endpoint", rivals=told)
    add("--master-port", parse=whole(1, 65535), value="PORT", text="the port of it (default: 29500)", rivals=told)
    add("--etcd-wait", parse=seconds, value="T", text="wait so long for etcd's first answer (default: 60, if it runs)")


def where_etcd_is(values: Mapping[str, Any]) -> tuple[tuple[Address, ...], Address | None]:
    """Endpoints to use, or the address to serve an embedded etcd at (both empty: on loopback, by the run id).

    Raises ConfigError.
    """
    backend, endpoint = values["rdzv_backend"], values["rdzv_endpoint"]
    if backend not in (None, "", "static", "c10d", "elasticrt", "etcd-v3"):
        raise ConfigError(
            explain(
                "a rendezvous backend that elasticrt does not have",
                "--rdzv-backend",
                got=backend,
                expected="c10d, elasticrt or etcd-v3",
                remedy="Agents meet in etcd v3: use --etcd ENDPOINTS",
            )
        )
    if values.get("standalone"):
        return (), None
    if values["etcd"]:
        return parse_endpoints(values["etcd"]), None
    if not endpoint:
        return (), None
    if backend in ("elasticrt", "etcd-v3"):
        return parse_endpoints(endpoint), None
    text = endpoint if ":" in endpoint.rpartition("]")[2] else f"{endpoint}:{C10D_PORT}"
    host, _, port = text.rpartition(":")
    if host in ("localhost", "127.0.0.1") and port == "0":
        return (), None
    (address,) = parse_endpoints(text)[:1]
    if is_loopback(address):  # Agents of this machine need no port for that, which its other users could use as well.
        return (), None
    host_here = values.get("is_host")
    return ((), address) if (_is_ours(address.host) if host_here is None else host_here) else ((address,), None)


def own_address(text: str | None, max_nodes: int) -> str | None:
    """The IP address that `--local-addr` gives, for other nodes to come to. Raises ConfigError."""
    if text is None:
        return None
    ip = resolve_for_others(text, "--local-addr")
    if max_nodes > 1 and is_loopback(Address("http", ip, 0)) and not is_loopback(Address("http", text, 0)):
        # /etc/hosts often gives a machine's own name 127.0.1.1. An address of loopback may be meant as it is.
        got, expected = f"{text}, which is {ip} here", "an address that the other nodes reach"
        raise ConfigError(explain("a name that means this machine alone", "--local-addr", got=got, expected=expected))
    return ip


def _is_ours(host: str) -> bool:
    """Whether this machine owns the address: then a socket can be bound to it."""
    try:
        resolve(host, "--rdzv-endpoint")
    except ConfigError:
        return False
    return True


def etcd_runs(values: Mapping[str, Any]) -> bool:
    """Whether an etcd is said to run already: named, and not by the endpoint that another agent is about to serve."""
    return bool(values["etcd"]) and values["etcd_wait"] is None


def etcd_wait_s(values: Mapping[str, Any]) -> float:
    """How long to wait for an answer of etcd: as told, or a while."""
    return ETCD_WAIT_S if values["etcd_wait"] is None else float(values["etcd_wait"])


def read_credentials(values: Mapping[str, Any]) -> Credentials:
    """How to authenticate to etcd. Raises ConfigError for files that cannot be read."""
    for name in ("etcd_ca_file", "etcd_cert_file", "etcd_key_file", "etcd_password_file"):
        path = values[name]
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(
                explain(
                    "a file that cannot be read", f"--{name.replace('_', '-')}", got=path, expected="a readable file"
                )
            )
    user = values["etcd_user"]
    if user is not None and plain(user) != user:
        raise ConfigError(explain("not a user's name", "--etcd-user", got=user, expected="text in UTF-8"))
    return Credentials(
        ca_file=values["etcd_ca_file"],
        cert_file=values["etcd_cert_file"],
        key_file=values["etcd_key_file"],
        user=user,
        password_file=values["etcd_password_file"],
    )
