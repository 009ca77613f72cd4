"""Runs a training script unmodified, and records what its model was really fed.

    python recorder.py RECORDS_DIRECTORY SCRIPT [arguments of the script]

Nothing is asked of elasticrt's samplers or loop: a hook on every module's forward sees the batches, a hook on every
optimizer counts the steps, and a sample is known by a digest of its pixels. One file per generation and rank; a batch
is written before it is computed, so that a killed process has told all that it used.

`loop.step()` does nothing here: these are stories of scripts without the block, which are restarted. What goes on in
place is checked by `test_in_place.py`, with the ledger.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from elasticrt.train.loop import Loop

RECORDED = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "ELASTICRT_GENERATION",
    "ELASTICRT_NODE",
]


def main() -> None:
    """Install the hooks and become the script."""
    directory, script = Path(sys.argv[1]), sys.argv[2]
    generation, rank = int(os.environ["ELASTICRT_GENERATION"]), int(os.environ["RANK"])
    resume = json.loads(os.environ["ELASTICRT_COPY"] or os.environ["ELASTICRT_RESUME"] or "{}").get("step", 0)
    file = os.open(
        directory / f"{generation:04d}-{rank:02d}-{os.environ['ELASTICRT_NODE']}.jsonl",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    )
    steps_done = 0

    def write(**fields: object) -> None:
        line = {"generation": generation, "rank": rank, "at": time.monotonic(), **fields}
        os.write(file, json.dumps(line).encode() + b"\n")

    def before_forward(module: torch.nn.Module, inputs: tuple[object, ...]) -> None:
        batch = inputs[0] if inputs else None
        if type(module).__name__ == "Net" and module.training and isinstance(batch, torch.Tensor):
            ids = [hashlib.sha256(sample.contiguous().numpy().tobytes()).hexdigest()[:12] for sample in batch]
            write(kind="batch", step=resume + steps_done + 1, ids=ids)

    def after_step(_optimizer: object, _args: object, _kwargs: object) -> None:
        nonlocal steps_done
        steps_done += 1

    Loop.step = lambda _loop: contextlib.nullcontext()
    register_module_forward_pre_hook(before_forward)
    register_optimizer_step_post_hook(after_step)
    write(kind="start", pid=os.getpid(), resume=resume, env={name: os.environ.get(name) for name in RECORDED})
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent.absolute())
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
