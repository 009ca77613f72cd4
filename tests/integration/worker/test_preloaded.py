"""What a restart does not pay for any more: everything up to the first step is there before the fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PLAIN = Path(__file__).parents[2] / "bench" / "plain_ddp.py"

ONE_STEP = """
    import os, runpy, sys, time
    before = set(sys.modules)
    def end(seconds):
        if seconds == 0.5:  # The pause after a step.
            raise SystemExit
    os.makedirs("marks", exist_ok=True)
    sys.argv = ["{script}", ".", "1", "0.5"]
    import time
    time.sleep = end
    try:
        runpy.run_path("{script}", run_name="__main__")
    except SystemExit:
        pass
    import torch
    print(os.environ["RANK"], torch.distributed.is_initialized())
    print(sorted(set(sys.modules) - before))
    """

FIRST_TIMES = """
    import sys
    before = set(sys.modules)
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    data = TensorDataset(torch.randn(16, 4))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    for (x,) in DataLoader(data, batch_size=4, sampler=sampler, num_workers=1): pass
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        optimizer = kind(model.parameters(), lr=0.1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1), torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=9, cycle_momentum=False)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), torch.zeros(4, dtype=torch.long))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); optimizer.zero_grad(); schedulers[0].step()
    torch.amp.GradScaler("cpu", enabled=False)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "x.pt")
    torch.load("x.pt", weights_only=True)
    print(sorted(set(sys.modules) - before))
    """


def test_the_first_step_imports_nothing(warm, tmp_path):
    """A plain DDP script meets its group, wraps its model, steps and saves without importing one module."""
    result = warm.run(ONE_STEP.format(script=PLAIN), tmp_path, workers=2)
    assert result.out == {0: "0 True\n[]\n", 1: "1 True\n[]\n"}, result.err
    assert (tmp_path / "snapshot.pt").exists()


def test_first_times_import_nothing(warm, tmp_path):
    """Nor do the first use of a DataLoader with workers, of optimizers, schedulers, autocast, clipping and loading."""
    assert warm.run(FIRST_TIMES, tmp_path).out[0] == "[]\n"


FIRST_GROUP = """
    import importlib.metadata, os
    asked = []
    entry_points = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda **words: asked.append(words) or entry_points(**words)
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print(asked)
    """


def test_the_first_group_searches_no_installed_packages(warm, tmp_path):
    """Which backend gloo is (torch 2.15: an entry point of some package) is known before the fork."""
    assert warm.run(FIRST_GROUP, tmp_path).out[0] == "[]\n"


WATCHED = """
import os, sys

class Watched(dict):
    # Notes whose keys are asked for.
    read = set()
    def __getitem__(self, key):
        self.read.add(os.fsdecode(key))
        return super().__getitem__(key)
    def __iter__(self):
        self.read.add("all of the environment")
        return super().__iter__()

watched = os.environ._data = os.environb._data = Watched(os.environ._data)
from elasticrt.bootstrap import preload
print(preload.warm_up([], "")[0])
own = "RANK WORLD_SIZE MASTER_ TORCHELASTIC_ TORCH_NCCL_ LOCAL_ GROUP_ ROLE_ GLOO_ ELASTICRT_ all".split()
print([name for name in watched.read if name.startswith(tuple(own))])
print("HOME" in watched.read)
before = set(sys.modules)
from elasticrt.bootstrap import run_script as boot
import elasticrt.train.loop
print(set(sys.modules) - before)
"""


def test_nothing_preloaded_depends_on_the_rank():
    """What is imported for all workers at once reads no variable meanwhile that each worker has for itself.

    What runs in a worker before the script, and what the training library consists of, is there as well.
    """
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout == "\n[]\nTrue\nset()\n"


NOISY = """
import atexit, sys

class Noisy:
    def __del__(self):
        print("taken apart", file=sys.stderr)

noisy = Noisy()
atexit.register(print, "hook", file=sys.stderr)
"""


def test_what_is_preloaded_is_not_taken_apart(tmp_path: Path) -> None:
    """The warm process runs exit hooks and ends: torch 2.15's libraries would complain of what a fork leaves there."""
    (tmp_path / "noisy.py").write_text(NOISY)
    (tmp_path / "script.py").write_text("import noisy\n")
    command = [sys.executable, "-m", "elasticrt", "run", "--preload", "noisy", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0
    assert "hook" in done.stderr
    assert "taken apart" not in done.stderr
    assert "leaked" not in done.stderr
