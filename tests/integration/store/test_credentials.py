"""Logins, permissions and certificates, on real servers (E09, E10; FAULTS.md section 4, TLS files and etcd)."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticrt.cli import doctor_looks
from elasticrt.cli.doctor import DoctorOptions
from elasticrt.cli.doctor_looks import looked
from elasticrt.errors import ConfigError
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Credentials, Put, StoreBlocked, StoreRefused, StoreUnavailable, Txn
from tests.contract.conftest import Inbox
from tests.servers import EtcdServer, etcd_server, wait_until, wheel_binary

Connect = Callable[..., EtcdStore]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes clients, and closes them."""
    stores = []

    def connect(address: Address, credentials: Credentials | None = None) -> EtcdStore:
        stores.append(EtcdStore((address,), credentials, timeout_s=10.0))
        return stores[-1]

    yield connect
    for store in stores:
        store.close()


def etcdctl(address: Address, *arguments: str) -> None:
    """The administrator."""
    command = [wheel_binary().with_name("etcdctl"), "--endpoints", f"127.0.0.1:{address.port}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def guarded() -> Iterator[EtcdServer]:
    """A server that demands a login; the user `job`, password `secret`, may read and write below /elasticrt/mine/."""
    # A login that is not used for two seconds expires.
    with etcd_server(options=("--auth-token-ttl", "2")) as server:
        run = ("--user", "root:root")
        etcdctl(server.address, "user", "add", "root:root")
        etcdctl(server.address, "user", "grant-role", "root", "root")
        etcdctl(server.address, "role", "add", "mine")
        etcdctl(server.address, "role", "grant-permission", "mine", "readwrite", "/elasticrt/mine/", "--prefix")
        etcdctl(server.address, "user", "add", "job:secret")
        etcdctl(server.address, "user", "grant-role", "job", "mine")
        etcdctl(server.address, "auth", "enable")
        etcdctl(server.address, *run, "get", "x")
        yield server


def login(tmp_path: Path, password: str = "secret\n", user: str = "job") -> Credentials:
    """User and password file."""
    path = tmp_path / "password"
    path.write_text(password)
    return Credentials(user=user, password_file=str(path))


def put(store: EtcdStore, key: str) -> int:
    """Write one key; the new revision."""
    return store.commit(Txn((), (Put(key, b""),))).revision


def test_login(guarded: EtcdServer, connect: Connect, tmp_path: Path) -> None:
    """With a login everything works within the permitted prefix, and nothing outside (C2)."""
    store, inbox = connect(guarded.address, login(tmp_path)), Inbox()
    revision = store.read("/elasticrt/mine/").revision
    store.watch("/elasticrt/mine/", inbox, from_revision=revision + 1)
    put(store, "/elasticrt/mine/a")
    assert inbox.wait(1)[0].key == "/elasticrt/mine/a"
    lease = store.grant(60)
    assert store.keep_alive(lease.lease_id) > 0
    store.revoke(lease.lease_id)
    for forbidden in (lambda: put(store, "/elasticrt/mine2/a"), lambda: store.read("/elasticrt/")):
        with pytest.raises(StoreRefused, match=r"permission denied.*needs readwrite permission"):
            forbidden()
    outside = Inbox()
    store.watch("/elasticrt/", outside, from_revision=revision + 1)
    wait_until(lambda: outside.resyncs, "the forbidden watch was told")
    assert outside.resyncs[0].startswith("cancelled: ")
    assert "permission denied" in outside.resyncs[0]


@pytest.mark.parametrize(("user", "password"), [("job", "wrong"), ("nobody", "secret")])
def test_wrong_login(guarded: EtcdServer, connect: Connect, tmp_path: Path, user: str, password: str) -> None:
    """A wrong user or password is refused with the options to check, and the password is not in the message (C12)."""
    with pytest.raises(StoreRefused, match="--etcd-user") as caught:
        connect(guarded.address, login(tmp_path, password, user)).read("/elasticrt/mine/")
    assert password not in str(caught.value)


def test_login_missing(guarded: EtcdServer, connect: Connect) -> None:
    """Without a login the server's demand for one is passed on."""
    with pytest.raises(StoreRefused, match=r"user name is empty.*--etcd-user"):
        connect(guarded.address).read("/elasticrt/mine/")


def test_what_doctor_says_of_a_login(guarded: EtcdServer, tmp_path: Path) -> None:
    """Without one, and where a run may not write, the check fails with the reason; below its own run it goes through.

    Where no run is named, a prefix that no run needs is no failure.
    """
    login(tmp_path)
    job = {"etcd_user": "job", "etcd_password_file": str(tmp_path / "password")}
    for run_id, user, level, words in (
        ("mine", {}, "fail", "--etcd-user"),
        (None, {}, "fail", "--etcd-user"),
        ("other", job, "fail", "permission denied"),
        ("mine", job, "warn", "writes in"),
        (None, job, "warn", "no readwrite permission on /elasticrt/doctor/"),
    ):
        ((_, finding),) = looked(
            "etcd", doctor_looks.etcd, DoctorOptions(etcd=(guarded.address,), run_id=run_id, **user)
        )
        assert (finding.level, words in finding.what) == (level, True), finding


def test_what_doctor_says_of_a_full_etcd() -> None:
    """The alarm is named, with the remedy; nothing is tried."""
    with etcd_server(options=("--quota-backend-bytes", "262144")) as server:
        store = EtcdStore((server.address,))
        wait_until(lambda: _is_full(store), "etcd, which looks at its size every 100 ms, takes nothing more")
        store.close()
        ((_, finding),) = looked("etcd", doctor_looks.etcd, DoctorOptions(etcd=(server.address,)))
    assert (finding.level, "NOSPACE" in finding.what, "defragment" in finding.remedy) == ("fail", True, True)


def _is_full(store: EtcdStore) -> bool:
    """Whether etcd refuses 16 KiB more."""
    try:
        store.commit(Txn((), (Put(f"/{secrets.token_hex(8)}", bytes(16384)),)))
    except StoreBlocked:
        return True
    return False


def test_login_expires(guarded: EtcdServer, connect: Connect, tmp_path: Path) -> None:
    """After a restart, which forgets all logins, reads, writes and watches go on with a new one (E09)."""
    store, inbox = connect(guarded.address, login(tmp_path)), Inbox()
    revision = put(store, "/elasticrt/mine/a")
    store.watch("/elasticrt/mine/", inbox, from_revision=revision + 1)
    put(store, "/elasticrt/mine/b")
    inbox.wait(1)
    guarded.stop()
    guarded.restart()
    wait_until(lambda: _written(store, "/elasticrt/mine/c"), "the store works again")
    wait_until(lambda: inbox.events[-1].key == "/elasticrt/mine/c", "the watch goes on")
    assert not inbox.resyncs


def _written(store: EtcdStore, key: str) -> bool:
    try:
        put(store, key)
    except StoreUnavailable:
        return False
    return True


def test_password_changes(guarded: EtcdServer, connect: Connect, tmp_path: Path) -> None:
    """A changed password is read from its file at the next login; until the file has it, etcd counts as away, and the
    reason is clear (E09)."""
    store = connect(guarded.address, login(tmp_path))
    put(store, "/elasticrt/mine/a")
    command = [wheel_binary().with_name("etcdctl"), "--endpoints", f"127.0.0.1:{guarded.port}", "--user", "root:root"]
    subprocess.run(
        [*command, "user", "passwd", "job", "--interactive=false"], input="new\n", text=True, check=True, timeout=30
    )
    with pytest.raises(StoreUnavailable, match=r"invalid user ID or password.*--etcd-password-file"):
        put(store, "/elasticrt/mine/b")
    login(tmp_path, "new")
    assert put(store, "/elasticrt/mine/b") > 0


def test_login_where_none_is_needed(connect: Connect, tmp_path: Path) -> None:
    """A server without authentication serves a client that has a login, and demands it once it is switched on (E09)."""
    with etcd_server() as server:
        store = connect(server.address, login(tmp_path, "root", "root"))
        put(store, "/a")
        etcdctl(server.address, "user", "add", "root:root")
        etcdctl(server.address, "user", "grant-role", "root", "root")
        etcdctl(server.address, "auth", "enable")
        put(store, "/b")
        assert len(store.read("/").keys) == 2


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities; a server's certificate of the first, and a client's of each."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificates, is not installed")
    directory = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, authority in (("server", "ca"), ("client", "ca"), ("foreign", "other")):
        (directory / "extensions").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key"),
            *("-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "extensions"),
        )
    return directory


@pytest.fixture(scope="module")
def encrypted(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server that demands certificates."""
    options = (
        *("--cert-file", f"{certificates}/server.pem", "--key-file", f"{certificates}/server.key"),
        *("--trusted-ca-file", f"{certificates}/ca.pem", "--client-cert-auth"),
    )
    directory = tmp_path_factory.mktemp("encrypted") / "etcd"
    with EtcdServer(wheel_binary(), directory, scheme="https", options=options) as server:
        yield server.address


def files(certificates: Path, authority: str, name: str | None) -> Credentials:
    """Paths of an authority and of a client's certificate and key."""
    return Credentials(
        ca_file=f"{certificates}/{authority}.pem",
        cert_file=f"{certificates}/{name}.pem" if name else None,
        key_file=f"{certificates}/{name}.key" if name else None,
    )


def test_certificates(certificates: Path, encrypted: Address, connect: Connect) -> None:
    """With the right certificates everything works over TLS, watches too."""
    store, inbox = connect(encrypted, files(certificates, "ca", "client")), Inbox()
    store.watch("/", inbox, from_revision=put(store, "/a"))
    assert inbox.wait(1)[0].key == "/a"


@pytest.mark.parametrize(
    ("authority", "name", "words"),
    [
        ("ca", None, "CERTIFICATE"),
        ("ca", "foreign", "CERTIFICATE"),
        ("other", "client", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_wrong_certificates(
    encrypted: Address, certificates: Path, connect: Connect, *, authority: str, name: str | None, words: str
) -> None:
    """A missing or foreign certificate, or an unknown authority, is refused with the options to check (E10)."""
    with pytest.raises(StoreRefused, match=f"{words}.*--etcd-ca-file"):
        connect(encrypted, files(certificates, authority, name)).read("/")


def test_certificates_are_renewed(certificates: Path, encrypted: Address, connect: Connect, tmp_path: Path) -> None:
    """Certificate files that are replaced are read again, so that a rotation heals a client without a restart (E10)."""
    for kind in ("pem", "key"):
        shutil.copy(certificates / f"foreign.{kind}", tmp_path / f"client.{kind}")
    shutil.copy(certificates / "ca.pem", tmp_path)
    store = connect(encrypted, files(tmp_path, "ca", "client"))
    with pytest.raises(StoreRefused):
        store.read("/")
    for kind in ("pem", "key"):
        shutil.copy(certificates / f"client.{kind}", tmp_path / f"client.{kind}")
    assert store.read("/").revision > 0


def test_a_certificate_that_has_expired_meanwhile(certificates: Path, tmp_path: Path) -> None:
    """Once etcd has answered, one that cannot be trusted is away: it is waited for until its certificate, or ours, is
    renewed, and files that are just being replaced are looked for again (E10)."""
    for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key"):
        shutil.copy(certificates / name, tmp_path)
    options = ("--cert-file", f"{tmp_path}/server.pem", "--key-file", f"{tmp_path}/server.key")
    with EtcdServer(wheel_binary(), tmp_path / "etcd", scheme="https", options=options) as server:
        store = EtcdStore((server.address,), files(tmp_path, "ca", "client"), timeout_s=0.5)
        try:
            assert store.read("/").revision > 0
            server.stop()
            for kind in ("pem", "key"):
                shutil.copy(certificates / f"foreign.{kind}", tmp_path / f"server.{kind}")
            server.restart()
            with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                store.read("/")
            (tmp_path / "client.pem").unlink()
            with pytest.raises(StoreUnavailable, match=r"client\.pem"):
                store.read("/")
            server.stop()
            for name in ("client.pem", "server.pem", "server.key"):
                shutil.copy(certificates / name, tmp_path)
            server.restart()
            assert store.read("/").revision > 0
        finally:
            store.close()


def test_plain_text_to_tls(encrypted: Address, connect: Connect) -> None:
    """A client without TLS at a port with TLS is told what to write."""
    store = EtcdStore((Address("http", encrypted.host, encrypted.port),), timeout_s=0.5)
    try:
        with pytest.raises(StoreUnavailable, match="needs https://"):
            store.read("/")
    finally:
        store.close()


def test_tls_to_plain_text() -> None:
    """A client with TLS at an etcd without is told what to write."""
    with etcd_server() as server:
        store = EtcdStore((Address("https", server.address.host, server.address.port),), timeout_s=0.5)
        try:
            with pytest.raises(StoreUnavailable, match="needs http://"):
                store.read("/")
        finally:
            store.close()


@pytest.mark.parametrize(("ca", "certificate", "key"), [("ca", "client", "foreign"), ("client.csr", None, None)])
def test_unusable_certificates(certificates: Path, ca: str, certificate: str | None, key: str | None) -> None:
    """A key of another certificate, or a file that holds no certificate, is refused before a connection is made."""
    paths = [
        f"{certificates}/{name}" if name else None
        for name in (certificate and f"{certificate}.pem", key and f"{key}.key")
    ]
    authority = f"{certificates}/{ca if ca.endswith('csr') else f'{ca}.pem'}"
    with pytest.raises(ConfigError, match=r"unusable certificates \(--etcd-ca-file"):
        EtcdStore(
            (Address("https", "127.0.0.1", 1),), Credentials(ca_file=authority, cert_file=paths[0], key_file=paths[1])
        )


@pytest.mark.parametrize(
    ("scheme", "credentials", "words"),
    [
        ("https", Credentials(ca_file="/nonexistent"), "unreadable.*/nonexistent"),
        ("https", Credentials(cert_file="/a"), "a client certificate without its key"),
        ("http", Credentials(ca_file="/etc/passwd"), "without TLS"),
        ("http", Credentials(user="u"), "a user without a password file"),
        ("http", Credentials(user="u", password_file="/nonexistent"), "unreadable.*/nonexistent"),
    ],
)
def test_unusable_credentials(scheme: str, credentials: Credentials, words: str) -> None:
    """Credentials that can't work are refused before any connection is made."""
    with pytest.raises(ConfigError, match=words):
        EtcdStore((Address(scheme, "127.0.0.1", 1),), credentials)  # type: ignore[arg-type]  # The table is text.
