"""From a command line with nodes, GPUs and ranks (`before.py -n NODES -g GPUS -nr RANK`) to one without."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticrt


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
    elasticrt.spawn(train, nprocs=args.gpus, args=(args,), min_nodes=args.nodes, max_nodes=args.nodes)


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
    elasticrt.init()
    torch.manual_seed(0)
    model = ConvNet()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model = nn.parallel.DistributedDataParallel(model)
    dataset = digits()
    sampler = elasticrt.ElasticBatchSampler(dataset, 64)
    loader = DataLoader(dataset, batch_sampler=sampler)
    loop = elasticrt.Loop("ckpt", sampler=sampler, every="1 epoch", model=model, optimizer=optimizer)
    for epoch in loop.epochs(args.epochs):
        for images, labels in loop.batches(loader):
            with loop.step():
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
