"""Scripts without a Loop that die after equally many steps in each life: those with a new snapshot get further."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.cluster import Cluster

SCRIPT = """
import os, signal, sys
import torch

kind, directory = sys.argv[1], sys.argv[2]
snapshot, lives = os.path.join(directory, "snapshot.pt"), os.path.join(directory, "lives")
with open(lives, "a") as file:
    file.write("x")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
done = 0
if kind == "weights" or (kind in ("resumes", "no step") and os.path.exists(snapshot)):
    done = torch.load(snapshot)["done"]
if kind == "cache":
    torch.save({"done": 0}, snapshot)
    torch.load(snapshot)
if kind == "no step":
    torch.save({"done": done}, snapshot)
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    done += 1
if kind == "resumes":
    torch.save({"done": done}, snapshot + ".new")
    os.replace(snapshot + ".new", snapshot)
if done < 18:
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Arguments: what it does with snapshots, and the directory they are in. Done after 18 steps; a life makes 3."""


@pytest.mark.parametrize(
    ("kind", "lives", "code"),
    [
        ("resumes", 6, 0),
        ("starts over", 4, 1),
        ("no step", 4, 1),  # From a new snapshot each time.
        ("weights", 4, 1),  # The same in each life.
        ("cache", 4, 1),  # Written and read by each life for itself.
    ],
)
def test_a_new_snapshot_in_each_life_is_progress(tmp_path: Path, kind: str, lives: int, code: int) -> None:
    """S13: who goes on from its own newest snapshot reaches the end; who starts over ends after three restarts."""
    if kind == "weights":
        import torch

        torch.save({"done": 0}, tmp_path / "snapshot.pt")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [str(script), kind, str(tmp_path)]
    with Cluster(tmp_path, f"snapshots-{secrets.token_hex(4)}", ["--nproc-per-node", "1"], command) as cluster:
        cluster.start("n0")
        assert cluster.ended() == {"n0": code}
    assert len((tmp_path / "lives").read_text()) == lives
