"""A small digits classifier whose loss over every global batch is written down, for `loss_curve.py`.

    elasticrt run ... curve_ddp.py DIRECTORY EPOCHS PAUSE_S [whole|unweighted|shifted]

`unweighted` and `shifted` are broken on purpose: gradients are averaged over ranks as if all slices were equal, and one
batch is skipped after every restart.
"""

import json
import os
import sys
import time

import torch
import torch.nn.functional as F  # noqa: N812  Everybody calls it so.
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817  Everybody calls it so.
from torch.utils.data import DataLoader, TensorDataset

import elasticrt

DIRECTORY, EPOCHS, PAUSE_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
BROKEN = sys.argv[4] if len(sys.argv) > 4 else "whole"


def main():
    """Train; each line of the record is one global batch as one process would have seen it."""
    ctx = elasticrt.init()
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=100)
    loader = DataLoader(data, batch_sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loop = elasticrt.Loop(
        f"{DIRECTORY}/ckpt", sampler=sampler, model=model, optimizer=optimizer, every="10 steps", memory=0.05
    )
    record = os.open(f"{DIRECTORY}/losses.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    first = True
    for _epoch in loop.epochs(EPOCHS):
        if first and BROKEN == "shifted" and ctx.generation > 1:
            sampler.advance()
        first = False
        for x, y in loop.batches(loader):
            if BROKEN == "unweighted":
                loop._weighting._factor = 1.0
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            weight = loop._share.weight / ctx.world_size
            total = ctx.sum(loss.item() * weight)
            if ctx.is_first:
                line = {"step": loop.steps + 1, "loss": total, "world": ctx.world_size, "generation": ctx.generation}
                os.write(record, (json.dumps(line) + "\n").encode())
            time.sleep(PAUSE_S)
    if ctx.is_first:
        weights = {name: value.flatten()[:64].tolist() for name, value in model.module.state_dict().items()}
        os.write(record, (json.dumps({"weights": weights}) + "\n").encode())


if __name__ == "__main__":
    main()
