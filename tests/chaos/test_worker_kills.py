"""Workers that die, again and again: every restart succeeds at its first attempt."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tests.bench.kills import SCRIPT, Attempts
from tests.cluster import Cluster


@pytest.mark.slow
def test_thirty_kills_need_thirty_one_groups(tmp_path: Path) -> None:
    """W02: a worker kills itself 30 times; 31 groups start, and each one's first all-reduce succeeds."""
    records = tmp_path / "records"
    records.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--nproc-per-node", "2", "--max-restarts", "50"]
    with Cluster(tmp_path, f"thirty-{secrets.token_hex(4)}", options, [str(script), str(records), "30"]) as cluster:
        cluster.start("n0")
        assert cluster.ended() == {"n0": 0}
    assert Attempts.read(records).succeeded == (True,) * 31
    found = [json.loads(path.read_text()) for path in records.glob("well-*.json")]
    assert sorted((entry["count"], entry["rank"]) for entry in found) == [(n, r) for n in range(31) for r in range(2)]
    assert {entry["total"] for entry in found} == {3.0}
    assert len({entry["generation"] for entry in found}) == 31
    assert len(cluster.events("generation")) == 31
