"""Workers that do not take part in their generation are named, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import Cluster

SCRIPT = """
import os, pathlib, socket, time

if os.environ["RANK"] == "0":
    connection = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
while not pathlib.Path("end").exists():
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_they_train_apart(tmp_path: Path) -> None:
    """A worker without a connection to its generation's store a minute after its start is reported, others are not."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with Cluster(tmp_path, "apart", ["--nnodes", "2", "--nproc-per-node", "1"], ["script.py"]) as cluster:
        for name in ("a", "b"):
            cluster.start(name)
        cluster.wait("somebody trains apart", lambda: bool(cluster.events("apart")), 120.0)
        (tmp_path / "end").touch()
        assert set(cluster.ended().values()) == {0}
        assert [event["ranks"] for event in cluster.events("apart")] == [[1]]
