"""The store beside other versions of protobuf than ours, in environments of their own."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.servers import EtcdServer

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import queue, sys
from google.protobuf import timestamp_pb2  # Another user of protobuf, loaded first.
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Compare, Put, Txn
store = EtcdStore((Address("http", "127.0.0.1", int(sys.argv[1])),), timeout_s=10)
lease = store.grant(60)
news = queue.Queue()
start = store.read("/").revision + 1
store.watch("/p/", news.put, from_revision=start)
guard = Compare("/p/a", "create", 0)
assert store.commit(Txn((guard,), (Put("/p/a", b"v", lease.lease_id),))).succeeded
assert news.get(timeout=20).events[0].value.lease == lease.lease_id
assert store.keep_alive(lease.lease_id) > 0
store.revoke(lease.lease_id)
assert news.get(timeout=20).events[0].value is None
assert len(store.read("/p/").keys) == 0
store.close()
import google.protobuf
print(google.protobuf.__version__)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["3.20.3", "4.25.8", "5.29.5"])
def test_old_protobuf(version: str, tmp_path: Path, etcd: EtcdServer) -> None:
    """Whichever protobuf the user's other packages decide on, the store loads and talks to etcd."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = ["etcd3>=0.12.0", "grpcio", "tenacity", f"protobuf=={version}"]
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True, check=False
    )
    if installed.returncode:
        pytest.skip(f"protobuf {version} can't be installed here: {installed.stderr.strip()[-300:]}")
    done = subprocess.run(
        [python, "-c", PROGRAM, str(etcd.port)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == version


def test_imported_client_is_left_alone(etcd: EtcdServer) -> None:
    """A user who has imported another etcd3 first keeps theirs; the store works beside it all the same."""
    # The only etcd3 that loads here is one on our stubs; what matters is that its modules are not replaced.
    program = (
        "import sys, types; from elasticrt.store import proto\n"
        "theirs = types.ModuleType('etcd3.etcdrpc'); theirs.__dict__.update(vars(proto))\n"
        "sys.modules['etcd3.etcdrpc'] = theirs; import etcd3\n" + PROGRAM + "assert etcd3.etcdrpc is theirs\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(etcd.port)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
