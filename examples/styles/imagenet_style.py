"""Has the flags of the ImageNet example: the launcher starts a process per GPU, or --multiprocessing-distributed does.

    elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/imagenet_style.py -b 64 --dist-backend gloo
    elasticrt run --nnodes 2 --nproc-per-node 1 examples/styles/imagenet_style.py -b 64 --dist-backend gloo \
        --multiprocessing-distributed --gpus-per-node 2
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=20, type=int)
parser.add_argument("-b", "--batch-size", default=64, type=int, help="over all processes")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--resume", default="imagenet_style.pt")
parser.add_argument("--world-size", default=-1, type=int, help="nodes, with --multiprocessing-distributed")
parser.add_argument("--rank", default=-1, type=int, help="of this node, with --multiprocessing-distributed")
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="nccl")
parser.add_argument("--gpus-per-node", default=1, type=int)
parser.add_argument("--multiprocessing-distributed", action="store_true")


def main_worker(gpu: int, args: argparse.Namespace) -> None:
    if args.multiprocessing_distributed:
        args.rank = args.rank * args.gpus_per_node + gpu
    dist.init_process_group(args.dist_backend, args.dist_url, world_size=args.world_size, rank=args.rank)
    dataset = toy.data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size // args.world_size, sampler=sampler)
    model = DistributedDataParallel(toy.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    start_epoch = 0
    if os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, weights_only=True)
        start_epoch = checkpoint["epoch"]
        # Its names have the prefix "module.", as DDP's own state_dict gives them.
        model.load_state_dict(checkpoint["state_dict"])
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            toy.step(model, optimizer, x, y)
        if args.rank == 0:
            toy.save(args.resume, epoch=epoch + 1, state_dict=model.state_dict())
            print(f"epoch {epoch}", flush=True)
    if args.rank == 0:
        toy.result(model.module)
    dist.destroy_process_group()


def main() -> None:
    args = parser.parse_args()
    if args.multiprocessing_distributed:
        nodes = args.world_size if args.world_size > 0 else int(os.environ["GROUP_WORLD_SIZE"])
        args.rank = args.rank if args.rank >= 0 else int(os.environ["GROUP_RANK"])
        args.world_size = nodes * args.gpus_per_node
        mp.spawn(main_worker, nprocs=args.gpus_per_node, args=(args,))
        return
    args.world_size = int(os.environ["WORLD_SIZE"])
    args.rank = int(os.environ["RANK"])
    main_worker(int(os.environ["LOCAL_RANK"]), args)


if __name__ == "__main__":
    main()
