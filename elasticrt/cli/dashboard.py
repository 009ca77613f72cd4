"""`elasticrt dashboard`: a page that shows the runs of this machine while they go on, from their directories.

The page is read-only. On loopback, the default, all users of this machine can reach it; at other addresses it needs a
token.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from contextlib import suppress
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from elasticrt.agent.health_server import is_foreign, own_names
from elasticrt.cli.report import PAGE
from elasticrt.errors import EXIT_OK, ConfigError
from elasticrt.ipc.std_streams import write
from elasticrt.store.address import is_loopback
from elasticrt.store.protocol import Address, bracketed
from elasticrt.story import run_dir
from elasticrt.story.board import board
from elasticrt.text import json_text

# How long a browser may take to send its request.
REQUEST_S = 10.0
TELL_EVERY_S = 1.0
"""An open page gets an update at least so often: the ages on it grow, and a write notices a closed connection."""

# Nothing may be loaded from elsewhere, framed, cached or named as a referrer: the address may contain the token.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve(host: str, port: int, log_dir: str) -> int:
    """Show the runs below `log_dir` at an address. Raises ConfigError if the address cannot be used."""
    try:
        server = Server(host, port, log_dir)
    except OSError as error:
        what, got = "the page cannot be served", f"{host}:{port}: {error.strerror or error}"
        expected, remedy = "a free port of an address of this machine", "Leave it out, and a free port is chosen"
        raise ConfigError(what, "--listen", got=got, expected=expected, remedy=remedy) from None
    with server:
        write(sys.stdout, f"{server.url}\n")
        if not any(run_dir.newest(log_dir)):
            write(sys.stdout, f"no runs in {log_dir} yet; --log-dir names another place\n")
        server.serve_forever()
    return EXIT_OK


class Server(ThreadingHTTPServer):
    """Serves the runs below `log_dir`. Raises OSError.

    Args:
        host: the address to listen at.
        port: the port; 0: any free one.
        log_dir: where runs have their directories.

    Attributes:
        url: leads to the page, with the token if one is needed.
    """

    # A page that stays open keeps its stream, and must not keep this process.
    daemon_threads = True

    def __init__(self, host: str, port: int, log_dir: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.log_dir = log_dir
        self.names = own_names(host)
        self.token = "" if is_loopback(Address("http", host, port)) else secrets.token_urlsafe(24)
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104  Compared, not bound.
        self.url = f"http://{bracketed(host)}:{self.server_address[1]}/" + (
            f"?token={self.token}" if self.token else ""
        )


class Handler(BaseHTTPRequestHandler):
    """Answers requests: `/` is the page, `/runs` the names of runs, `/updates?run=NAME` a stream about one run."""

    server: Server
    timeout = REQUEST_S
    # The header `Server` names no version, neither ours nor Python's.
    server_version, sys_version = "elasticrt", ""

    def handle(self) -> None:
        """Answer requests until the browser has closed the connection."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:
        """Answer a GET request."""
        path, _, asked = self.path.partition("?")
        query = {name: values[-1] for name, values in parse_qs(asked).items()}
        server = self.server
        # A page of another site may make the browser ask for a name that it lets point to this machine (DNS rebinding).
        if is_foreign([f"{name}: {value}" for name, value in self.headers.items()], server.names):
            self._refuse(HTTPStatus.FORBIDDEN, "ask by an address, or a name of this machine")
        elif server.token and not compare_digest(query.get("token", "").encode(), server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "use the whole address that `elasticrt dashboard` has printed")
        elif path == "/":
            self._answer("text/html; charset=utf-8", PAGE.read_bytes())
        elif path == "/runs":
            names = [directory.name for directory in run_dir.newest(server.log_dir)]
            self._answer("application/json", json.dumps(names).encode())
        elif path == "/updates":
            self._updates(query.get("run", ""))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page")

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer("text/plain; charset=utf-8", why.encode(), status)

    def _answer(self, kind: str, content: bytes | None, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content or b"")

    def _updates(self, name: str) -> None:
        """Send the state of a run, and each change of it, until the page is closed."""
        directory = next((each for each in run_dir.newest(self.server.log_dir) if each.name == name), None)
        if directory is None:
            self._refuse(HTTPStatus.NOT_FOUND, "no such run")
            return
        self._answer("text/event-stream", None)
        told_at = 0.0
        for story, lines, _ in run_dir.follow(directory, lambda _: False):
            if story.lives.all and (lines or time.monotonic() - told_at >= TELL_EVERY_S):
                told_at = time.monotonic()
                self.wfile.write(b"data: " + json_text(board(story, time.time())).encode() + b"\n\n")
                self.wfile.flush()

    def log_message(self, format: str, *_: Any) -> None:  # noqa: A002  Its name is http.server's.
        """Log no requests."""
