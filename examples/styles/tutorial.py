"""Trains as the DDP tutorials do: a Trainer, the arguments `total_epochs save_every`, a snapshot at a relative path.

elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/tutorial.py 20 2
"""

import argparse
import os

import torch
import toy
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    def __init__(self, model, loader, optimizer, save_every, snapshot):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.model, self.loader, self.optimizer = model, loader, optimizer
        self.save_every, self.snapshot, self.epochs_run = save_every, snapshot, 0
        if os.path.exists(snapshot):
            state = torch.load(snapshot, weights_only=True)
            self.model.load_state_dict(state["MODEL_STATE"])
            self.epochs_run = state["EPOCHS_RUN"]
        self.model = DistributedDataParallel(self.model)

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for x, y in self.loader:
            toy.step(self.model, self.optimizer, x, y)

    def train(self, total_epochs):
        for epoch in range(self.epochs_run, total_epochs):
            self.run_epoch(epoch)
            if self.global_rank == 0:
                print(f"epoch {epoch}", flush=True)
                if (epoch + 1) % self.save_every == 0:
                    toy.save(self.snapshot, MODEL_STATE=self.model.module.state_dict(), EPOCHS_RUN=epoch + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    args = parser.parse_args()
    init_process_group("gloo")
    model, dataset = toy.model(), toy.data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset, batch_size=16, shuffle=False, sampler=DistributedSampler(dataset))
    trainer = Trainer(model, loader, optimizer, args.save_every, "snapshot.pt")
    trainer.train(args.total_epochs)
    if trainer.global_rank == 0:
        toy.result(trainer.model.module)
    destroy_process_group()
