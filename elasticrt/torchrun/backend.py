"""elasticrt's rendezvous as a plug-in for torchrun: torchrun brings the agents and workers, elasticrt the agreement.

    torchrun --rdzv-backend elasticrt --rdzv-endpoint HOST:PORT --rdzv-id RUN --nnodes 1:3 train.py

The endpoint is an etcd (version 3), or several separated by commas. README.md in this folder says what changes for
torchrun. A run is over for all nodes when one of them shuts its rendezvous down (all workers succeeded, or its restarts
are spent), as with torchrun's own back ends. Unlike there, a run id can be used again once the run has no members.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # Public.
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elasticrt import errors
from elasticrt.agent.store_discovery import address_towards
from elasticrt.errors import ConfigError, ElasticError, StoreError
from elasticrt.option_values import as_name, check_name
from elasticrt.spec import RunSpec
from elasticrt.store.address import check_security, parse_endpoints
from elasticrt.store.etcd_server import resolve_for_others
from elasticrt.store.protocol import Credentials
from elasticrt.torchrun.participant import Participant, Turn

log = logging.getLogger(__name__)

NAME = "elasticrt"
CONNECT_S = 1.0
"""Seconds to wait for a connection to the generation's store, for each try."""
LOOK_S = 0.5
"""Seconds of one wait on the generation's store. Between two waits a newer generation is noticed."""

SERVERS_KEPT = 2
"""How many generations' stores are kept: that of the current one, and that of the last, whose workers may still be
ending."""

RESTARTS = 10**6
"""No limit of our own: torchrun counts restarts itself, on every node."""

CREDENTIALS = ("ca_file", "cert_file", "key_file", "user", "password_file")
OPTIONS = {
    # Lease of a node in seconds; a silent node is out after so long.
    "ttl": "5",
    # Seconds to wait for the minimum of nodes.
    "join_timeout": "600",
    # Seconds without a newcomer before the first generation, which waits for 3 s at most, or for this time if it is
    # longer.
    "settle": "0.5",
    # When newcomers get in: now, or failure (together with the next failure or departure).
    "join": "now",
    # Seconds that an operation on the generation's store may take.
    "read_timeout": "60",
    # 1 accepts plain http to an etcd on another machine.
    "insecure": "0",
    **dict.fromkeys(CREDENTIALS),
}
"""The options of `--rdzv-conf key=value,...`, and their defaults."""

IGNORED = {"timeout", "rank"}
"""Options that torchrun's launcher adds by itself."""


def create() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point of the group `torchrun.handlers`. Returns what makes a handler from torchrun's parameters."""
    return ElasticrtHandler


class ElasticrtHandler(RendezvousHandler):
    """torchrun's side of the rendezvous (see the module). The first `next_rendezvous` connects.

    Raises ValueError for unusable `parameters`.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        options = _options(parameters)
        self._run_id = check_name(parameters.run_id, "--rdzv-id")
        self._addresses = parse_endpoints(parameters.endpoint)
        check_security(self._addresses, bool(parameters.get_as_bool("insecure", False)))
        self._local_address = parameters.local_addr
        self._join_timeout_s = float(options["join_timeout"])
        self._read_timeout = timedelta(seconds=float(options["read_timeout"]))
        self._credentials = Credentials(**{name: options[name] for name in CREDENTIALS})
        self._spec = RunSpec(
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            command=("torchrun",),
            max_restarts=RESTARTS,
            restarts_reset=False,
            join_timeout_s=self._join_timeout_s,
            lease_ttl_s=max(1.0, float(options["ttl"])),
            join=options["join"],
            settle_quiet_s=float(options["settle"]),
            settle_max_s=max(3.0, float(options["settle"])),
        )
        self._participant: Participant | None = None
        self._closed = False
        self._last_generation = 0
        self._servers: list[TCPStore] = []

    def get_backend(self) -> str:
        """See the base class."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Always true: workers use the store of their generation, which the agent with group rank 0 serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next generation. Returns when all its agents have come to its store.

        `rank` and `world_size` count agents. torchrun calls this again when the workers of the last generation have
        been stopped. If that generation still is the current one, its workers failed here, and the other nodes are
        told.
        """
        if self._closed:
            raise RendezvousClosedError(f"run {self._run_id} has been closed here")
        try:
            participant = self._participant or self._open()
            while True:
                turn = participant.take_turn(after=self._last_generation)
                if turn is None:
                    raise RendezvousClosedError(f"run {self._run_id} is over: {participant.end_reason}")
                self._last_generation = turn.generation.number
                store = self._gather(turn, participant)
                if store is not None:
                    break
        except errors.RendezvousTimeoutError as error:
            raise RendezvousTimeoutError(str(error)) from error
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        except ElasticError as error:
            raise RendezvousStateError(str(error)) from error
        record = turn.generation
        log.info("generation %d (%s): node %d of %d", record.number, record.cause, turn.seat.index, record.nodes)
        where = RendezvousStoreInfo(record.master_address, record.master_port)
        return RendezvousInfo(store, turn.seat.index, record.nodes, where)

    def is_closed(self) -> bool:
        """See the base class."""
        return self._closed or (self._participant is not None and bool(self._participant.end_reason))

    def set_closed(self) -> None:
        """End the run for all nodes."""
        self._leave(run_too=True)

    def num_nodes_waiting(self) -> int:
        """1 if this node's workers must stop because the others have agreed on a newer generation; else 0.

        torchrun's agent then stops its workers and calls `next_rendezvous`, which costs no restart. This happens for a
        newcomer, and also for a lost node, which torchrun's own back ends do not report.
        """
        return int(self._participant is not None and self._participant.must_stop(after=self._last_generation))

    def get_run_id(self) -> str:
        """See the base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the run and leave it."""
        self._leave(run_too=True)
        return True

    def _open(self) -> Participant:
        from elasticrt.store.etcd import EtcdStore

        participant = Participant(
            EtcdStore(self._addresses, self._credentials),
            self._run_id,
            self._spec,
            node=f"{as_name(socket.gethostname())}-{secrets.token_hex(4)}",
            address=resolve_for_others(self._local_address, "--local-addr")
            if self._local_address
            else address_towards(self._addresses[0]),
        )
        self._participant = participant
        # After a signal torchrun does not shut the rendezvous down. The run then goes on without this node.
        atexit.register(self._leave, run_too=False)
        participant.open(self._join_timeout_s)
        return participant

    def _leave(self, *, run_too: bool) -> None:
        self._closed = True
        participant, self._participant = self._participant, None
        if participant is not None:
            participant.close(run_too=run_too)
            atexit.unregister(self._leave)

    def _gather(self, turn: Turn, participant: Participant) -> PrefixStore | None:
        """The generation's store, when all its agents have come to it; None if a newer generation has replaced it.

        All waits are short, because a node may be lost while the others gather.
        """
        try:
            store = self._connect(turn, participant)
            if store is None:
                return None
            # The last agent to come tells all others.
            if store.add("here", 1) == turn.generation.nodes:
                store.set("all", "here")
            while not participant.must_stop(after=self._last_generation) and not participant.end_reason:
                # Some agents have not come yet.
                with suppress(DistStoreError):
                    store.wait(["all"], timedelta(seconds=LOOK_S))
                    return store
        except DistError as error:
            log.info("the store of generation %d is gone: %s", self._last_generation, error)
        return None

    def _connect(self, turn: Turn, participant: Participant) -> PrefixStore | None:
        """The generation's store, served here (group rank 0) or connected to; None if it cannot be had."""
        record = turn.generation
        common: dict[str, Any] = {"host_name": record.master_address, "port": record.master_port}
        common |= {"world_size": record.nodes, "wait_for_workers": False}
        # The nonce keeps workers of another generation, or of an earlier run with the same id, out of this store.
        prefix = f"{self._run_id}/{record.number}/{record.nonce}"
        if turn.seat.index == 0:
            if turn.listen is None:
                # The generation was published with a port that this node no longer holds.
                return None
            # The store closes the socket that it is given, so the socket is detached. The last generation's workers may
            # still be ending, so their store stays.
            common |= {"master_listen_fd": turn.listen.detach(), "timeout": self._read_timeout}
            self._servers = [*self._servers[1 - SERVERS_KEPT :], TCPStore(is_master=True, **common)]
            return PrefixStore(prefix, self._servers[-1])
        deadline = time.monotonic() + self._join_timeout_s
        while (
            time.monotonic() < deadline
            and not participant.must_stop(after=self._last_generation)
            and not participant.end_reason
        ):
            try:
                # A bound port accepts connections from the start. A port that refuses has lost its agent.
                socket.create_connection((record.master_address, record.master_port), CONNECT_S).close()
                store = TCPStore(is_master=False, timeout=timedelta(seconds=2 * CONNECT_S), **common)
            except ConnectionRefusedError:
                return None
            except (OSError, DistError) as error:
                log.debug("generation %d has no store yet: %s", record.number, error)
            else:
                store.set_timeout(self._read_timeout)
                return PrefixStore(prefix, store)
        return None


def _options(parameters: RendezvousParameters) -> dict[str, Any]:
    unknown = ", ".join(sorted(set(parameters.config) - set(OPTIONS) - IGNORED))
    if unknown:
        what, expected = "options that this back end does not have", ", ".join(sorted(OPTIONS))
        raise ConfigError(what, "--rdzv-conf", got=unknown, expected=expected)
    join = parameters.get("join", "now")
    if join not in ("now", "failure"):
        raise ConfigError("unknown value", "--rdzv-conf join", got=join, expected="now, failure")
    return {name: parameters.get(name, default) for name, default in OPTIONS.items()}
