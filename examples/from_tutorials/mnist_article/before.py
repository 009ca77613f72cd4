"""From a command line with nodes, GPUs and ranks (`before.py -n NODES -g GPUS -nr RANK`) to one without."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", default=1, type=int)
    parser.add_argument("-g", "--gpus", default=1, type=int, help="number of gpus per node")
    parser.add_argument("-nr", "--nr", default=0, type=int, help="ranking within the nodes")
    parser.add_argument("--epochs", default=20, type=int)
    args = parser.parse_args()
    args.world_size = args.gpus * args.nodes
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "8888"
    mp.spawn(train, nprocs=args.gpus, args=(args,))


class ConvNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(1, 8, kernel_size=5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(2 * 2 * 8, num_classes)

    def forward(self, x):
        return self.fc(self.layer(x).flatten(1))


def digits():
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(10, (256,), generator=generator)
    shapes = torch.randn(10, 1, 8, 8, generator=generator)
    return TensorDataset(shapes[labels] + 0.5 * torch.randn(256, 1, 8, 8, generator=generator), labels)


def train(gpu, args):
    rank = args.nr * args.gpus + gpu
    dist.init_process_group("gloo", init_method="env://", world_size=args.world_size, rank=rank)
    torch.manual_seed(0)
    model = ConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model = nn.parallel.DistributedDataParallel(model)
    dataset = digits()
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, num_replicas=args.world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(args.epochs):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # A step takes a moment, so that there is time to kill the process.
            time.sleep(0.02)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}", flush=True)
    if dist.get_rank() == 0:
        print(f"result: {[p.double().norm().item() for p in model.parameters()]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
