"""Finds the etcd where the agents of a run meet, this machine's address on the way there, and the line to join."""

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
from elasticrt.store.embedded import Served, find_or_start, runtime_directory
from elasticrt.store.etcd_server import connect
from elasticrt.store.protocol import Address, Store, StoreUnavailable
from elasticrt.text import shell

log = logging.getLogger(__name__)

CONNECT_S = 1.5
"""For the first contact only, where a wrong name is likely. Enough for any network that is fit for training."""

ELSEWHERE = ("192.0.2.1", 9)
"""An address that no machine has (RFC 5737): the way there is the default route."""


@dataclass(frozen=True)
class Meeting:
    """An open store, and how it is reached.

    Attributes:
        store: the store, which has answered once.
        endpoints: where it listens.
        served: the embedded etcd; None for an external one.
        address: the address at which other nodes reach this machine.
    """

    store: Store
    endpoints: tuple[Address, ...]
    served: Served | None
    address: str

    @property
    def place(self) -> str:
        """Where agents of this machine find the store; the same when a fresh one has taken its place."""
        return ",".join(map(str, self.endpoints)) if self.served is None else str(runtime_directory())


def meet(settings: Settings, told_to_leave: Callable[[], bool]) -> Meeting:
    """Find the etcd of `settings`, or start an embedded one, and wait for its first answer.

    `told_to_leave`: whether a signal has made waiting pointless. Raises StoreError, ConfigError.
    """
    served = None
    endpoints = settings.etcd
    if not endpoints:
        served = find_or_start(settings.run_id, listen=settings.serve)
        endpoints = (served.address,)
    elif settings.options.etcd and settings.options.etcd_wait_s is None:  # Else it may start later.
        check_listening(endpoints)
    from elasticrt.store.etcd import EtcdStore  # grpc takes 0.1 s to load: the server is starting meanwhile.

    store = EtcdStore(endpoints, settings.credentials)
    try:
        driver = StoreDriver(store, lambda _: None, time, told_to_leave=told_to_leave)  # No watch is open yet.
        address = driver.run(ride_out(lambda: _first_answer(settings, endpoints), settings.etcd_wait_s, log.warning))
    except BaseException as error:
        store.close()
        if settings.etcd and isinstance(error, StoreError) and not told_to_leave():
            check_listening(endpoints)  # Says why, where nothing listens.
        raise
    return Meeting(store, endpoints, served, address)


def _first_answer(settings: Settings, endpoints: tuple[Address, ...]) -> Conversation[str]:
    """Read from etcd; returns the address at which others reach this machine. Raises StoreUnavailable."""
    # A connection alone proves nothing: etcd members that start together listen before they have a majority.
    yield Read(Keys(settings.run_id).spec)
    return settings.address if settings.address is not None else address_towards(settings.serve or endpoints[0])


def check_listening(endpoints: tuple[Address, ...]) -> None:
    """Raises StoreError if nothing listens at any endpoint: a name or port is wrong, or etcd does not run."""
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
    """This machine's address on the way to the etcd at `endpoint`, as others see it. Raises StoreUnavailable."""
    if is_loopback(endpoint):
        return "127.0.0.1"
    try:
        address = _route(endpoint.host, endpoint.port)
    except OSError as error:
        raise StoreUnavailable(
            explain(
                "no way to etcd",
                str(endpoint),
                got=error,
                expected="an address that this machine can reach",
                remedy="Check the name, or give this node's own address with --local-addr",
            )
        ) from error
    # On the machine of etcd its host name may resolve to 127.0.1.1, where no other machine reaches it.
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
        probe.connect(where)  # Sends nothing: it only asks the kernel for the route.
        return str(probe.getsockname()[0])


def how_to_join(settings: Settings, spec: RunSpec, meeting: Meeting) -> list[str]:
    """The lines that tell people how to add nodes. Pure but for the addresses of this machine.

    `settings`: this node's; `spec`: the run's; `meeting`: its etcd.
    """
    nodes = ("--nnodes", f"{spec.min_nodes}:{spec.max_nodes}")
    run = ("--run-id", settings.run_id, *nodes, *settings.shared_options, *settings.command.argv)
    if meeting.served is None or settings.serve is not None:
        carries = ["this machine now carries the run: it ends when this machine does"] if meeting.served else []
        endpoints = meeting.endpoints if settings.serve is None else (settings.serve,)
        where = "this" if all(map(is_loopback, endpoints)) else "any"
        return [*carries, f"join from {where} machine: {_line(*_etcd(endpoints), *run)}"]
    outward = Address("http", outward_address() or "ADDRESS", DEFAULT_PORT)
    etcd = shell(("elasticrt", "etcd", "--listen", f"{outward.host}:{outward.port}", "--insecure-etcd"))
    return [
        f"join from this machine: {_line(*run)}",
        f"with other machines: start anew at an etcd that they reach: {etcd}, then {_line(*_etcd((outward,)), *run)}",
    ]


def _line(*words: str) -> str:
    return shell(("elasticrt", "run", *words))


def _etcd(endpoints: tuple[Address, ...]) -> tuple[str, ...]:
    """The options for this etcd. A node that joins without TLS has to accept that, as this node has."""
    open_to_all = any(each.scheme == "http" and not is_loopback(each) for each in endpoints)
    return ("--etcd", ",".join(map(str, endpoints)), *(["--insecure-etcd"] if open_to_all else []))
