"""Where the agents of a run meet: which etcd, at which address of ours, and how others are told to come."""

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
from elasticrt.rendezvous.requests import Conversation, Notice, Read
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.store.address import DEFAULT_PORT, is_loopback
from elasticrt.store.embedded import Served, find_or_start
from elasticrt.store.etcd_server import connect
from elasticrt.store.protocol import Address, Store, StoreUnavailable
from elasticrt.text import shell

log = logging.getLogger(__name__)

CONNECT_S = 1.5
"""Enough for any network that training makes sense on; only for the first contact, where a wrong name is likely."""

ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737), behind every default route."""


@dataclass(frozen=True)
class Meeting:
    """An open store, and how it is reached.

    Attributes:
        store: it has answered once.
        endpoints: where it listens.
        served: what serves it; None for an etcd that is not ours.
        address: of this machine, where other nodes reach it.
    """

    store: Store
    endpoints: tuple[Address, ...]
    served: Served | None
    address: str


def meet(settings: Settings, told_to_leave: Callable[[], bool]) -> Meeting:
    """Find the etcd of `settings`, or start this machine's own, and get its first answer.

    `told_to_leave`: whether waiting has become pointless. Raises StoreError, ConfigError.
    """
    served = None
    endpoints = settings.etcd
    if not endpoints:
        served = find_or_start(settings.run_id, listen=settings.serve)
        endpoints = (served.address,)
    elif settings.etcd_runs:
        check_listening(endpoints)
    from elasticrt.store.etcd import EtcdStore  # grpc takes 0.1 s to load: the server is starting meanwhile.

    store = EtcdStore(endpoints, settings.credentials)
    try:
        driver = StoreDriver(store, _unheard, time, told_to_leave=told_to_leave)
        address = driver.run(ride_out(lambda: _first_answer(settings, endpoints), settings.etcd_wait_s, log.warning))
    except BaseException as error:
        store.close()
        if settings.etcd and isinstance(error, StoreError) and not told_to_leave():
            check_listening(endpoints)  # Says why, where nothing listens.
        raise
    return Meeting(store, endpoints, served, address)


def _first_answer(settings: Settings, endpoints: tuple[Address, ...]) -> Conversation[str]:
    """See that etcd works, and where others reach this machine. Raises StoreUnavailable."""
    # A connection alone proves nothing: members that start together listen before they have a majority.
    yield Read(Keys(settings.run_id).spec)
    return settings.address if settings.address is not None else address_towards(settings.serve or endpoints[0])


def _unheard(notice: Notice) -> None:
    """Nothing is followed yet."""


def check_listening(endpoints: tuple[Address, ...]) -> None:
    """Raises StoreError at once when nothing listens at any endpoint: a name or port is wrong, or etcd does not run."""
    troubles = []
    for endpoint in endpoints:
        try:
            connect(endpoint, CONNECT_S).close()
        except OSError as error:
            troubles.append(f"{endpoint}: {error.strerror or error}")
        else:
            return
    raise StoreError(
        explain(
            "etcd cannot be reached",
            "--etcd",
            got="; ".join(troubles),
            expected="a running etcd (version 3)",
            remedy="Check that it runs and that its name and port are right; `elasticrt etcd` starts one",
        )
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
                got=str(error),
                expected="an address that this machine can reach",
                remedy="Check the name, or give this node's own address with --local-addr",
            )
        ) from error
    # Where etcd is on this machine, and its name is 127.0.1.1 here, others come to another address of ours.
    return outward_address() or address if is_loopback(Address("http", address, 0)) else address


def outward_address() -> str:
    """This machine's address on the way to others; "" when there is none."""
    try:
        return _route(*ELSEWHERE)
    except OSError:
        return ""


def _route(host: str, port: int) -> str:
    """The address of ours that a packet would come from. Raises OSError."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # Sends nothing: it only asks the kernel for the route.
        return str(probe.getsockname()[0])


def how_to_join(settings: Settings, spec: RunSpec, meeting: Meeting) -> list[str]:
    """The lines that tell people how to bring more nodes. Pure but for the addresses of this machine.

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
    """The words for this etcd. Who joins there without TLS has to accept that, as this node has."""
    open_to_all = any(each.scheme == "http" and not is_loopback(each) for each in endpoints)
    return ("--etcd", ",".join(map(str, endpoints)), *(["--insecure-etcd"] if open_to_all else []))
