"""Answers `GET /live`, `/ready` and `/metrics` over HTTP, for schedulers, Prometheus and people with curl.

The server's thread only reads what the agent last noted (`agent.health_state`). It neither waits for the agent nor asks
etcd, so it answers while both are stuck, and it cannot delay the agent. It serves no secrets and takes no orders. A
client that is slow, or sends too much, is disconnected.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Container, Iterable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt import events
from elasticrt.agent import health_state
from elasticrt.agent.health_state import HealthState
from elasticrt.errors import ConfigError
from elasticrt.ipc.proc import listening, text_of
from elasticrt.ipc.request_server import Client, RequestServer
from elasticrt.ipc.selector_thread import SelectorThread
from elasticrt.store.protocol import bracketed

if TYPE_CHECKING:
    from elasticrt.agent.metrics import Metrics

log = logging.getLogger(__name__)

INSTALL = "metrics need prometheus-client on this node: pip install 'elasticrt[metrics]'"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_S = 2.0
"""The limit of a request, from the connection to the end of the answer."""

REQUEST_MAX_BYTES = 8192
CLIENTS_MAX = 64

LIVE, READY, METRICS = "/live", "/ready", "/metrics"


class HealthServer:
    """The server of one agent's health port. It answers from its construction until `close`.

    Args:
        host: the address, or a name of this machine, at which to listen.
        port: the port; 0 for any free one.
        state: the agent's first state.

    Attributes:
        state: the agent's newest state. The agent replaces it each time its loop goes round.
        url: where the server answers.

    Raises ConfigError when the address or the port cannot be had.
    """

    def __init__(self, host: str, port: int, state: HealthState) -> None:
        self.state = state
        self._names = own_names(host)
        listener = _listen(host, port)
        self.url = f"http://{bracketed(host)}:{listener.getsockname()[1]}"
        self._metrics: Metrics | None = None
        self._no_metrics = INSTALL
        # Without prometheus-client, the answer to /metrics says what to install.
        with contextlib.suppress(ImportError):
            from elasticrt.agent.metrics import Metrics

            self._metrics = Metrics()
        self._thread = SelectorThread("elasticrt-health")
        self._server = RequestServer(
            self._thread,
            listener,
            self._on_request,
            ends=b"\r\n\r\n",
            bytes_max=REQUEST_MAX_BYTES,
            request_s=REQUEST_S,
            clients_max=CLIENTS_MAX,
        )
        self._server.start()

    def fold(self, record: events.Record) -> None:
        """Pass an event to the metrics, on the thread that answers. Any thread may call this."""
        if self._metrics is not None:
            self._thread.call(partial(self._of_metrics, lambda metrics: metrics.fold(record)))

    def close(self) -> None:
        """Stop answering. From now on the port refuses connections."""
        self._server.close()
        self._thread.close()

    def _on_request(self, client: Client, request: bytes) -> None:
        """Answer one HTTP request."""
        line, *fields_of_request = request.decode("ascii", errors="replace").split("\r\n")
        method, target, *_ = [*line.split(" "), "", ""]
        question, now = target.partition("?")[0], time.monotonic()
        said, text, kind = dict[str, Any](), b"", "application/json"
        # Before any answer: a web page must not read the metrics through its visitor's browser.
        if is_foreign(fields_of_request, self._names):
            status, said = HTTPStatus.FORBIDDEN, {"hosts": "an address, or a name of this machine"}
        elif question not in (LIVE, METRICS, READY):
            status, said = HTTPStatus.NOT_FOUND, {"questions": [LIVE, METRICS, READY]}
        elif method not in ("GET", "HEAD"):
            status, said = HTTPStatus.METHOD_NOT_ALLOWED, {"methods": ["GET", "HEAD"]}
        elif question == METRICS:
            found, kind = self._of_metrics(lambda metrics: metrics.text(self.state, now)), CONTENT_TYPE
            status = HTTPStatus.OK if found else HTTPStatus.NOT_IMPLEMENTED
            text = found or f"{self._no_metrics}\n".encode()
        else:
            finding = health_state.live(self.state, now) if question == LIVE else health_state.ready(self.state, now)
            status = HTTPStatus.OK if finding.ok else HTTPStatus.SERVICE_UNAVAILABLE
            said = health_state.body(self.state, finding)
        text = text or json.dumps(said).encode() + b"\n"
        # The answer to HEAD has the length of the body, and no body.
        content = b"" if method == "HEAD" else text
        fields = {"Content-Type": kind, "Content-Length": len(text), "Cache-Control": "no-store"}
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items())]
        self._server.answer(client, "\r\n".join([*lines, "Connection: close", "", ""]).encode() + content)

    def _of_metrics(self, act: Callable[[Metrics], bytes | None]) -> bytes | None:
        """What `act` returns for the metrics; None without metrics. An error ends the metrics, and nothing else."""
        try:
            return act(self._metrics) if self._metrics is not None else None
        # Any error: the health port must go on answering /live and /ready, whatever happens to the metrics.
        except Exception as error:
            log.exception("there are no metrics from now on")
            self._metrics, self._no_metrics = None, f"metrics have failed: {error!r}"
            return None


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. It does not share its port: another agent there would answer for this one."""
    try:
        # Raises UnicodeError for a text that is no host name at all, before there is a socket.
        host.encode("idna")
        return listening(host, port, CLIENTS_MAX)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "the health port cannot be used",
            "--health-port",
            got=f"{host}:{port}: {getattr(error, 'strerror', error)}",
            expected="a free port and an address of this machine",
            remedy="Choose another one (0: any free port)",
        ) from error


def own_names(host: str) -> set[str]:
    """The names by which clients may ask this machine: those that it knows without DNS, which may hang.

    `host`: the address or the name at which it listens.
    """
    hosts, resolv = (text_of(Path(path)) for path in ("/etc/hosts", "/etc/resolv.conf"))
    return {"", "localhost", host.lower(), *names_of(socket.gethostname(), hosts, resolv)}


def names_of(hostname: str, hosts: str, resolv: str) -> set[str]:
    """The names of the machine `hostname`: its own, those in /etc/hosts, and those in the search domains. Pure.

    The administrator of the machine has written /etc/hosts, so its names are safe. A web page can only have a name in a
    search domain if its DNS server answers for that domain, and then the short name leads to the page as well.

    `hosts` and `resolv`: the texts of /etc/hosts and /etc/resolv.conf.
    """
    own = hostname.lower()
    names, domains = {own}, list[str]()
    for fields in (line.partition("#")[0].lower().split() for line in hosts.splitlines()):
        names.update(fields[1:] if own in fields[1:] else ())
    for fields in (line.lower().split() for line in resolv.splitlines()):
        domains = fields[1:] if fields[:1] in (["search"], ["domain"]) else domains
    return names | {f"{own}.{domain.strip('.')}" for domain in domains}


def is_foreign(fields: Iterable[str], names: Container[str]) -> bool:
    """Whether the header `fields` of a request name another host than this machine. Pure.

    By DNS rebinding a web page can make a browser ask this port, but the browser then sends the host name of the page.
    An IP address cannot be rebound, and a client that sends no host is no browser.

    `names`: the names of this machine.
    """
    for field in fields:
        name, _, value = field.partition(":")
        host = re.sub(r":\d*$", "", value.strip()).lower().rstrip(".")
        if name.strip().lower() == "host" and host not in names:
            try:
                ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
            except ValueError:
                return True
    return False
