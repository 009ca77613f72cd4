"""A worker whose DataLoader has processes of its own: it ends at once, whatever became of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, torch, elasticrt
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Bad(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, place):
        if place == 40 and not Path("once").exists():
            Path("once").touch()
            if os.environ["HOW"] == "raises":
                raise ValueError("a bad sample")
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), float(place))

ctx, data = elasticrt.init(), Bad()
sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=8, shuffle=False)
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loop = elasticrt.Loop("ckpt", sampler=sampler, model=model, optimizer=optimizer)
for _ in loop.epochs(1):
    for x in loop.batches(DataLoader(data, batch_sampler=sampler, num_workers=2)):
        with loop.step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
print("trained", loop.steps_done, flush=True)
"""


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_loader_process_that_fails_ends_its_worker(tmp_path: Path, how: str) -> None:
    """W01, W11: the worker ends with the loader's error, is started again, and trains to the end."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "elasticrt", "run", "--hang-timeout", "0", "train.py"]
    environment = {**os.environ, "HOW": how, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "trained 8" in done.stdout
    assert "generation 2: rank 0" in done.stderr


def test_an_error_of_the_script_is_the_only_one(tmp_path: Path) -> None:
    """Loader processes that outlive the loop are killed at the end, and nothing is said of that."""
    script = SCRIPT.replace("num_workers=2)", "num_workers=2, persistent_workers=True)")
    script = script.replace("for x in loop.batches(DataLoader", "loader = DataLoader").replace(
        "persistent_workers=True)):", "persistent_workers=True)\n    for x in loop.batches(loader):"
    )
    (tmp_path / "train.py").write_text(script.replace("model(x)", "1 / (loop.steps_done != 3); model(x)"))
    command = [sys.executable, "-m", "elasticrt", "run", "--max-restarts", "0", "train.py"]
    environment = {**os.environ, "HOW": "raises", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert "ZeroDivisionError" in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "is killed by signal" not in done.stderr
