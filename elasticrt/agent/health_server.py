"""Answers `GET /live` and `GET /ready` over HTTP, for schedulers, load balancers and people with curl.

In a thread of its own that only reads what the agent last noted (`agent.health_state`): it neither waits for the agent
nor asks etcd, so that it answers while both are stuck, and it cannot hold the agent up. It serves no secrets and takes
no orders. A client that is slow, or says too much, is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable
from http import HTTPStatus

from elasticrt.agent import health_state
from elasticrt.agent.health_state import Finding, HealthState
from elasticrt.errors import ConfigError, explain

log = logging.getLogger(__name__)

REQUEST_S = 2.0
"""From the connection to the end of the answer."""

REQUEST_MAX_BYTES = 8192
CLIENTS_MAX = 64
CLOSE_S = 2.0

QUESTIONS: dict[str, Callable[[HealthState, float], Finding]] = {
    "/live": health_state.live,
    "/ready": health_state.ready,
}


class HealthServer:
    """Answers from when it is made until `close`.

    Attributes:
        noted: the newest vitals; the agent puts others in their place as often as it likes.
        url: where it answers.
    """

    def __init__(self, host: str, port: int, noted: HealthState) -> None:
        """Raises ConfigError when the address or the port cannot be had."""
        self.noted = noted
        self._clients = 0
        self._names = {"", "localhost", host.lower(), socket.gethostname().lower()}
        try:
            # Another agent's port must be refused, not shared: its answers would be taken for ours.
            host.encode("idna")  # UnicodeError for what is no name at all, before there is a socket.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=CLIENTS_MAX)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                explain(
                    "the health port cannot be had",
                    "--health-port",
                    got=f"{host}:{port}: {str(getattr(error, 'strerror', None) or error).partition(' (while ')[0]}",
                    expected="a free port and an address of this machine",
                    remedy="Choose another one (0: any free port)",
                )
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="elasticrt-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering: from now on the port refuses."""
        with contextlib.suppress(RuntimeError):  # The loop has been closed already.
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._socket.close()
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._client, sock=self._socket, limit=REQUEST_MAX_BYTES)
        await self._ending.wait()
        server.close()
        # Whoever is still being answered is cut off: this process is about to end.
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._clients >= CLIENTS_MAX:
            writer.transport.abort()
            return
        self._clients += 1
        try:
            await asyncio.wait_for(self._answer(reader, writer), REQUEST_S)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError) as error:
            log.debug("a question about health that was none: %r", error)
        finally:
            self._clients -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, *fields_of_request = (await reader.readuntil(b"\r\n\r\n")).decode("ascii", errors="replace").split("\r\n")
        if is_foreign(fields_of_request, self._names):
            status, text = HTTPStatus.FORBIDDEN, _text({"hosts": "an address, or a name of this machine"})
        else:
            status, text = answer(line, self.noted, time.monotonic())
        content = b"" if line.startswith("HEAD ") else text
        fields = {"Content-Type": "application/json", "Content-Length": len(text), "Cache-Control": "no-store"}
        lines = [f"HTTP/1.1 {status.value} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items())]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + content)
        await writer.drain()


def is_foreign(fields: Iterable[str], names: Container[str]) -> bool:
    """Whether a request means another host than this one, by its header. Pure.

    Pages of a browser can ask anybody's port if their own name leads there for a moment; but they ask it by that name.
    Addresses are nobody's names, and a client that gives no host is no browser.
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


def answer(request_line: str, noted: HealthState, now: float) -> tuple[HTTPStatus, bytes]:
    """Status and body for the first line of a request."""
    method, target, *_ = [*request_line.split(" "), "", ""]
    question = QUESTIONS.get(target.partition("?")[0])
    if question is None:
        return HTTPStatus.NOT_FOUND, _text({"questions": sorted(QUESTIONS)})
    if method not in ("GET", "HEAD"):
        return HTTPStatus.METHOD_NOT_ALLOWED, _text({"methods": ["GET", "HEAD"]})
    finding = question(noted, now)
    status = HTTPStatus.OK if finding.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return status, _text(health_state.body(noted, finding))


def _text(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
