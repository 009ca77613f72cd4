"""Finds the etcd of a run, this machine's address on the route to it, and the commands for other nodes to join."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticrt.agent.store_driver import StoreDriver
from elasticrt.errors import StoreError, explain
from elasticrt.rendezvous.outage import ride_out
from elasticrt.rendezvous.records import Keys
from elasticrt.rendezvous.requests import Conversation, Read
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.store.address import DEFAULT_PORT, is_loopback
from elasticrt.store.embedded import EmbeddedServer, find_or_start, runtime_directory
from elasticrt.store.etcd_server import connect
from elasticrt.store.protocol import Address, Store, StoreUnavailable
from elasticrt.text import shell

log = logging.getLogger(__name__)

CONNECT_S = 1.5
"""The limit of a first connection, for which a wrong name is likely. It is enough for any network that is fit for
training."""

ELSEWHERE = ("192.0.2.1", 9)
"""An address that no machine has (RFC 5737, with the port "discard"): the route to it is the default route."""


@dataclass(frozen=True)
class OpenStore:
    """An open store, and how it is reached.

    Attributes:
        store: the store, which has answered once.
        endpoints: the addresses at which it listens.
        served: the embedded etcd of this machine; None for an external one.
        address: the address at which other nodes reach this machine.
    """

    store: Store
    endpoints: tuple[Address, ...]
    served: EmbeddedServer | None
    address: str

    @property
    def place(self) -> str:
        """Where agents of this machine find the store. A fresh embedded etcd in its place has the same text."""
        return ",".join(map(str, self.endpoints)) if self.served is None else str(runtime_directory())


def open_store(settings: Settings, told_to_leave: Callable[[], bool]) -> OpenStore:
    """Find the etcd of `settings`, or start an embedded one, and wait for its first answer.

    `told_to_leave`: returns whether a signal has made waiting pointless. Raises StoreError, ConfigError.
    """
    served = None
    endpoints = settings.etcd
    if not endpoints:
        served = find_or_start(settings.run_id, listen=settings.serve)
        endpoints = (served.address,)
    # With --etcd-wait the user expects that etcd may start later. Otherwise a wrong name is reported at once.
    elif settings.options.etcd and settings.options.etcd_wait_s is None:
        check_listening(endpoints)
    # Imported this late, because grpc takes 0.1 s to load, and the embedded server starts meanwhile.
    from elasticrt.store.etcd import EtcdStore

    store = EtcdStore(endpoints, settings.credentials)
    try:
        # This driver opens no watch, so nothing is delivered.
        driver = StoreDriver(store, lambda _: None, time, told_to_leave=told_to_leave)
        address = driver.run(ride_out(lambda: _first_answer(settings, endpoints), settings.etcd_wait_s, log.warning))
    except BaseException as error:
        store.close()
        if settings.etcd and isinstance(error, StoreError) and not told_to_leave():
            # If nothing listens, this raises an error that says so in place of the timeout.
            check_listening(endpoints)
        raise
    return OpenStore(store, endpoints, served, address)


def _first_answer(settings: Settings, endpoints: tuple[Address, ...]) -> Conversation[str]:
    """Read from etcd. Returns the address at which others reach this machine. Raises StoreUnavailable."""
    # A connection alone proves nothing: members of an etcd cluster that start together listen before they have a
    # quorum.
    yield Read(Keys(settings.run_id).spec)
    return settings.address if settings.address is not None else address_towards(settings.serve or endpoints[0])


def check_listening(endpoints: tuple[Address, ...]) -> None:
    """Raise StoreError if nothing listens at any of the endpoints: a name or port is wrong, or etcd does not run."""
    troubles = []
    for endpoint in endpoints:
        try:
            connect(endpoint, CONNECT_S).close()
        except OSError as error:
            troubles.append(f"{endpoint}: {error.strerror or error}")
        else:
            return
    raise StoreError(
        "etcd cannot be reached",
        "--etcd",
        got="; ".join(troubles),
        expected="a running etcd (version 3)",
        remedy="Check that it runs and that its name and port are right; `elasticrt etcd` starts one",
    )


def address_towards(endpoint: Address) -> str:
    """This machine's address on the route to the etcd at `endpoint`, as others see it. Raises StoreUnavailable."""
    if is_loopback(endpoint):
        return "127.0.0.1"
    try:
        address = _route(endpoint.host, endpoint.port)
    except OSError as error:
        raise StoreUnavailable(
            explain(
                "no route to etcd's host",
                str(endpoint),
                got=error,
                expected="an address that this machine can reach",
                remedy="Check the name, or give this node's own address with --local-addr",
            )
        ) from error
    # On etcd's own machine, its host name may resolve to 127.0.1.1, an address at which no other machine reaches this
    # one.
    return outward_address() or address if is_loopback(Address("http", address, 0)) else address


def outward_address() -> str:
    """This machine's address on its default route; "" without one."""
    try:
        return _route(*ELSEWHERE)
    except OSError:
        return ""


def _route(host: str, port: int) -> str:
    """The source address of packets to `host`. Raises OSError."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # `connect` of a datagram socket sends nothing: it only asks the kernel for the route.
        probe.connect(where)
        return str(probe.getsockname()[0])


def how_to_join(settings: Settings, spec: RunSpec, store: OpenStore) -> list[str]:
    """The lines that tell people how to add nodes. Pure, except that it asks for this machine's address.

    Args:
        settings: this node's settings.
        spec: the options on which all nodes of the run agree.
        store: the run's etcd.
    """
    nodes = ("--nnodes", f"{spec.min_nodes}:{spec.max_nodes}")
    run = ("--run-id", settings.run_id, *nodes, *settings.shared_options, *settings.command.argv)
    if store.served is None or settings.serve is not None:
        carries = ["the run's etcd is on this machine: the run ends if this machine does"] if store.served else []
        endpoints = store.endpoints if settings.serve is None else (settings.serve,)
        where = "this" if all(map(is_loopback, endpoints)) else "any"
        return [*carries, f"join from {where} machine: {_line(*_etcd(endpoints), *run)}"]
    outward = Address("http", outward_address() or "ADDRESS", DEFAULT_PORT)
    etcd = shell(("elasticrt", "etcd", "--listen", f"{outward.host}:{outward.port}", "--insecure-etcd"))
    return [
        f"join from this machine: {_line(*run)}",
        "to add other machines, start again with an etcd that they reach: "
        f"{etcd}, then {_line(*_etcd((outward,)), *run)}",
    ]


def _line(*words: str) -> str:
    return shell(("elasticrt", "run", *words))


def _etcd(endpoints: tuple[Address, ...]) -> tuple[str, ...]:
    """The options that name this etcd. A node that joins without TLS has to accept that, as this node has."""
    open_to_all = any(each.scheme == "http" and not is_loopback(each) for each in endpoints)
    return ("--etcd", ",".join(map(str, endpoints)), *(["--insecure-etcd"] if open_to_all else []))
