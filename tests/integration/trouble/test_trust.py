"""Logins and certificates of etcd while a run is on: what can be renewed is, without a restart; the rest is said."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import kill
from tests.integration.store.test_credentials import certificates, etcdctl, guarded
from tests.integration.trouble.stepping import Stepping
from tests.servers import EtcdServer, wheel_binary

__all__ = ["certificates", "guarded"]  # Fixtures: a server that demands a login; authorities and certificates.

ROOT = ("--user", "root:root")


def _run(tmp_path: Path, etcd: EtcdServer, *options: str) -> Stepping:
    return Stepping(tmp_path, "--nnodes", "2", "--lease-ttl", "2", "--etcd", str(etcd.address), *options)


def _login(tmp_path: Path, user: str, password: str) -> tuple[str, ...]:
    (tmp_path / "password").write_text(password)
    return "--etcd-user", user, "--etcd-password-file", str(tmp_path / "password")


def _started(run: Stepping) -> dict[str, dict[int, int]]:
    run.start_many(["n0", "n1"])
    run.wait_for_commits(1)
    return run.pids()


def _goes_on(run: Stepping, before: dict[str, dict[int, int]]) -> None:
    run.wait_for_silence(3.0)  # Longer than a lease and than a login of `guarded`.
    run.wait_for_commits(len(run.events("committed")) + 2)
    assert run.pids() == before
    run.finish()
    assert set(run.ended().values()) == {0}, run.story()
    assert run.started() == [1]


@pytest.mark.slow
def test_a_password_changes(tmp_path: Path, guarded: EtcdServer) -> None:
    """E09: logins expire all the time, and the password changes in etcd and in its file: no restart."""
    with _run(tmp_path, guarded, *_login(tmp_path, "job", "secret")) as run:
        run.run_id = "mine"
        before = _started(run)
        _login(tmp_path, "job", "new")
        command = [str(wheel_binary().with_name("etcdctl")), "--endpoints", str(guarded.address), *ROOT]
        command += ["user", "passwd", "job", "--interactive=false"]
        subprocess.run(command, input="new\n", text=True, check=True, capture_output=True, timeout=30)
        _goes_on(run, before)


@pytest.mark.slow
def test_authentication_is_switched_on(tmp_path: Path, etcd: EtcdServer) -> None:
    """E09: a run that has a login, at an etcd that had asked for none, goes on when etcd begins to."""
    with _run(tmp_path, etcd, *_login(tmp_path, "root", "root")) as run:
        before = _started(run)
        _switch_on(etcd)
        _goes_on(run, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("login", "words"),
    [
        pytest.param(True, "permission denied", id="role-revoked"),
        pytest.param(False, "Check --etcd-user and --etcd-password-file", id="no-login"),
    ],
)
def test_a_right_is_taken_away(tmp_path: Path, etcd: EtcdServer, guarded: EtcdServer, login: bool, words: str) -> None:
    """E09, L7: a run that may not write any more, or has no login where one is needed now, is told so and trains on.

    Once it has its right again it commits again, without a restart.
    """
    server, options = (guarded, _login(tmp_path, "job", "secret")) if login else (etcd, ())
    with _run(tmp_path, server, *options) as run:
        run.run_id = "mine"
        before = _started(run)
        if login:
            etcdctl(server.address, *ROOT, "user", "revoke-role", "job", "mine")
        else:
            _switch_on(server)
        run.wait("it is told", lambda: any(words in missed["reason"] for missed in run.events("unsaved")))
        run.wait_for_silence(3.0)
        run.wait_for_steps(5, generation=1)
        assert run.pids() == before
        if login:
            etcdctl(server.address, *ROOT, "user", "grant-role", "job", "mine")
        else:
            etcdctl(server.address, *ROOT, "auth", "disable")
        _goes_on(run, before)


@pytest.mark.slow
def test_a_node_dies_while_a_right_is_taken_away(tmp_path: Path, guarded: EtcdServer) -> None:
    """E09, L7: who may not write any more waits as for an etcd that is away, and goes on when it may again.

    `status` with that login tells what the run's directory tells, and why etcd does not.
    """
    login = _login(tmp_path, "job", "secret")
    with Stepping(tmp_path, "--nnodes", "1:2", "--lease-ttl", "2", "--etcd", str(guarded.address), *login) as run:
        run.run_id = "mine"
        _started(run)
        etcdctl(guarded.address, *ROOT, "user", "revoke-role", "job", "mine")
        kill(run.agents["n1"].pid)
        run.wait_for_silence(3.0)
        assert run.agents["n0"].process.poll() is None, run.story()
        command = [sys.executable, "-m", "elasticrt", "status", str(run.run_dir), *login]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (told.returncode, "permission denied" in told.stderr) == (4, True), told
        assert told.stdout.startswith("run mine: "), told
        etcdctl(guarded.address, *ROOT, "user", "grant-role", "job", "mine")
        run.wait_for_steps(5, generation=2)
        run.finish()
        assert run.ended()["n0"] == 0, run.story()


def _switch_on(etcd: EtcdServer) -> None:
    etcdctl(etcd.address, "user", "add", "root:root")
    etcdctl(etcd.address, "user", "grant-role", "root", "root")
    etcdctl(etcd.address, "auth", "enable")


def _server(tmp_path: Path, files: Path, name: str) -> EtcdServer:
    """An etcd with TLS that demands certificates; its own is read from `files` anew with every connection."""
    options = ("--cert-file", f"{files}/{name}.pem", "--key-file", f"{files}/{name}.key")
    options += ("--trusted-ca-file", f"{files}/ca.pem", "--client-cert-auth")
    return EtcdServer(wheel_binary(), tmp_path / "etcd-tls", scheme="https", options=options)


def _files(files: Path, authority: str, name: str) -> tuple[str, ...]:
    return (
        *("--etcd-ca-file", f"{files}/{authority}.pem"),
        *("--etcd-cert-file", f"{files}/{name}.pem", "--etcd-key-file", f"{files}/{name}.key"),
    )


def _sign(files: Path, name: str, host: str, days: int) -> None:
    """A certificate for `host` by the first authority, valid from now for so many days."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (files / "extensions").write_text(f"subjectAltName={host}\nextendedKeyUsage=serverAuth,clientAuth\n")
    sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
    for command in (
        ("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"),
        (*sign, "-out", f"{name}.pem", "-days", str(days), "-extfile", "extensions"),
    ):
        subprocess.run(["openssl", *command], cwd=files, check=True, capture_output=True, timeout=60)


@pytest.mark.slow
def test_certificates_are_renewed(tmp_path: Path, certificates: Path) -> None:
    """E10: the server's and the clients' certificates are replaced, and connections break: no restart."""
    files = tmp_path / "files"
    shutil.copytree(certificates, files)
    with _server(tmp_path, files, "server") as etcd, _run(tmp_path, etcd, *_files(files, "ca", "client")) as run:
        before = _started(run)
        for name in ("server", "client"):
            _sign(files, name, "IP:127.0.0.1", 2)
        etcd.stop()
        etcd.restart()
        _goes_on(run, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "authority", "client", "words"),
    [
        pytest.param("expired", "ca", "client", "certificate has expired", id="server-expired"),
        pytest.param("elsewhere", "ca", "client", "not valid for|verification check failed", id="other-host"),
        pytest.param("server", "other", "client", "unable to get local issuer|self.signed", id="other-authority"),
        pytest.param("server", "ca", "foreign", "(?i)certificate", id="client-of-another-authority"),
        pytest.param("server", "ca", "expired", "(?i)certificate", id="client-expired"),
    ],
)
def test_a_certificate_that_does_not_fit(
    tmp_path: Path, certificates: Path, *, server: str, authority: str, client: str, words: str
) -> None:
    """E10: expired, for another host, by another authority: code 4, the reason, the files, and no waiting."""
    files = tmp_path / "files"
    shutil.copytree(certificates, files)
    _sign(files, "expired", "IP:127.0.0.1", -1)
    _sign(files, "elsewhere", "DNS:somewhere.example", 2)
    with _server(tmp_path, files, server) as etcd:
        command = [sys.executable, "-m", "elasticrt", "run", "--etcd", str(etcd.address), "--log-dir", str(tmp_path)]
        command += [*_files(files, authority, client), "--no-python", "true"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert done.returncode == 4, done.stderr
    message = done.stderr.strip().splitlines()[-1]
    assert re.search(words, message), done.stderr
    assert "--etcd-ca-file" in message
    assert "Traceback" not in done.stderr
