"""From mp.spawn, where the script makes a world of its own at an address that it knows, to elasticrt.spawn."""

import os
import time

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elasticrt


def ddp_setup(rank: int, world_size: int):
    init_process_group("gloo", rank=rank, world_size=world_size)


class Trainer:
    def __init__(self, model, loader, optimizer, rank: int, save_every: int):
        self.loader, self.optimizer, self.rank, self.save_every = loader, optimizer, rank, save_every
        self.model = DistributedDataParallel(model)
        self.first = 0
        if os.path.exists("checkpoint.pt"):
            state = torch.load("checkpoint.pt", weights_only=True)
            self.model.module.load_state_dict(state["model"])
            self.first = state["first"]

    def run_batch(self, source, targets):
        loss = nn.functional.mse_loss(self.model(source), targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        # A step takes a moment, so that there is time to kill the process.
        time.sleep(0.02)

    def save_checkpoint(self, epoch: int):
        state = {"model": self.model.module.state_dict(), "first": epoch + 1}
        torch.save(state, "checkpoint.new")
        os.replace("checkpoint.new", "checkpoint.pt")

    def train(self, epochs: int):
        for epoch in range(self.first, epochs):
            self.loader.sampler.set_epoch(epoch)
            for source, targets in self.loader:
                self.run_batch(source, targets)
            if self.rank == 0:
                print(f"epoch {epoch}", flush=True)
                if (epoch + 1) % self.save_every == 0:
                    self.save_checkpoint(epoch)


def main(rank: int, world_size: int, save_every: int, epochs: int):
    ddp_setup(rank, world_size)
    torch.manual_seed(1)
    x = torch.randn(256, 8)
    dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    trainer = Trainer(model, loader, optimizer, rank, save_every)
    trainer.train(epochs)
    if rank == 0:
        print(f"result: {[p.double().norm().item() for p in model.parameters()]}", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count() or 2
    elasticrt.spawn(main, args=(world_size, 1, 20), nprocs=world_size)
