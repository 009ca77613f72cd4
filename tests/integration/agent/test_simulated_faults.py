"""`elasticrt simulate`: its faults come, whether the script has a Loop or not. Real agents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLAIN = """
import time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(140):
    model(torch.randn(4, 2)).mean().backward()
    optimizer.step()
    time.sleep(0.05)
"""


def test_a_fault_after_a_step_of_a_script_without_a_loop(tmp_path: Path) -> None:
    """W01: its optimizer's steps count."""
    (tmp_path / "train.py").write_text(PLAIN)
    command = [sys.executable, "-m", "elasticrt", "simulate", "--nodes", "2", "--fault", "step 20: kill node 1"]
    done = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "!! step 20: kill node 1  (SIGKILL to pid" in done.stdout
    assert "node-1 lost (agent ended)" in done.stdout
