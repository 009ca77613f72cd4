"""A name server of the test's own, and a way to run a process that asks it: only root may do that."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

A_RECORD = 1
NO_SUCH_NAME = 3
RESOLV_CONF = Path("/etc/resolv.conf")


def missing() -> str:
    """Why there can be no name server here; "" when there can."""
    if os.geteuid() != 0:
        return "a name server of our own needs root (port 53, a mount namespace)"
    if shutil.which("unshare") is None:
        return "a resolv.conf of its own for a process needs unshare (util-linux)"
    return "" if RESOLV_CONF.exists() else f"there is no {RESOLV_CONF} to put another in the place of"


class NameServer:
    """Answers every question for an IPv4 address alike. Use it as a context manager.

    Attributes:
        answer: an address; "" for "no such name"; None to say nothing at all. May be changed at any time.
    """

    def __init__(self, directory: Path) -> None:
        self.answer: str | None = "127.0.0.1"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((f"127.{50 + secrets.randbelow(150)}.{secrets.randbelow(255)}.53", 53))
        self._thread = threading.Thread(target=self._serve, name="name-server", daemon=True)
        self._resolv_conf = directory / "resolv.conf"
        address = self._socket.getsockname()[0]
        self._resolv_conf.write_text(f"nameserver {address}\noptions timeout:1 attempts:1\n")

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` as a process that asks this server. The pid stays the same."""
        mount = f'mount --bind "$0" {RESOLV_CONF} && exec "$@"'
        return ["unshare", "--mount", "--propagation", "slave", "sh", "-c", mount, str(self._resolv_conf), *command]

    def __enter__(self) -> NameServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self._socket.getsockname())
        self._thread.join(10)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, client = self._socket.recvfrom(4096)
            if not question:
                return
            if self.answer is not None and len(question) > 12:
                self._socket.sendto(_reply(question, self.answer), client)


def _reply(question: bytes, address: str) -> bytes:
    """RFC 1035: the question again, and one address that is valid for no time, if an IPv4 address was asked for."""
    end = question.index(b"\0", 12) + 5
    (kind,) = struct.unpack("!H", question[end - 4 : end - 2])
    answers = b""
    if address and kind == A_RECORD:
        answers = b"\xc0\x0c" + struct.pack("!HHIH", A_RECORD, 1, 0, 4) + socket.inet_aton(address)
    flags = 0x8180 | (0 if address else NO_SUCH_NAME)
    head = question[:2] + struct.pack("!HHHHH", flags, 1, 1 if answers else 0, 0, 0)
    return head + question[12:end] + answers
