"""Calls mp.spawn in the script: each node's agent has one worker, which starts the node's processes itself.

    elasticrt run --nnodes 2 --nproc-per-node 1 examples/styles/mp_spawn.py --gpus 2

The processes meet at MASTER_ADDR and MASTER_PORT, as they would under torchrun. When one dies, mp.spawn raises, the
worker fails, and all nodes start again.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, CHECKPOINT = 20, "mp_spawn.pt"


def train(gpu: int, gpus: int, node: int, nodes: int) -> None:
    rank, world_size = node * gpus + gpu, nodes * gpus
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dataset = toy.data()
    sampler = DistributedSampler(dataset, world_size, rank)
    model = DistributedDataParallel(toy.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["epoch"]
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=16, sampler=sampler):
            toy.step(model, optimizer, x, y)
        if rank == 0:
            toy.save(CHECKPOINT, model=model.module.state_dict(), epoch=epoch + 1)
            print(f"epoch {epoch}", flush=True)
    if rank == 0:
        toy.result(model.module)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2, help="processes on each node")
    args = parser.parse_args()
    node, nodes = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29531")
    mp.spawn(train, args=(args.gpus, node, nodes), nprocs=args.gpus)
