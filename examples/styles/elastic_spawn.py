"""Uses elasticrt.spawn: like mp.spawn, but failed workers are started again, and return values come back.

python examples/styles/elastic_spawn.py                                     # one node
ELASTICRT_RUN_ID=job python examples/styles/elastic_spawn.py --nodes 2      # once on each of two
"""

import argparse
import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import elasticrt

EPOCHS, CHECKPOINT = 20, "elastic_spawn.pt"


def train(i: int, lr: float) -> float:
    dist.init_process_group("gloo")
    dataset = toy.data()
    sampler = DistributedSampler(dataset)
    model = DistributedDataParallel(toy.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    first, loss = 0, 0.0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["epoch"]
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=16, sampler=sampler):
            loss = toy.step(model, optimizer, x, y)
        if dist.get_rank() == 0:
            toy.save(CHECKPOINT, model=model.module.state_dict(), epoch=epoch + 1)
            print(f"epoch {epoch}", flush=True)
    if dist.get_rank() == 0:
        toy.result(model.module)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    args = parser.parse_args()
    losses = elasticrt.spawn(train, args=(0.05,), nprocs=2, min_nodes=args.nodes, max_nodes=args.nodes)
    print("last losses by rank:", {rank: round(loss, 4) for rank, loss in losses.items()}, flush=True)
