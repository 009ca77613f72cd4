"""Has the barrier of the YOLO tutorials: on each node one process caches the data, before the others read the cache.

elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/zero_first.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
import toy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, CHECKPOINT = 20, "zero_first.pt"
LOCAL_RANK = int(os.getenv("LOCAL_RANK", "-1"))
RANK = int(os.getenv("RANK", "-1"))


@contextlib.contextmanager
def zero_first(local_rank):
    if local_rank not in (-1, 0):
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def cached(path):
    """The dataset, from this node's cache. A process that finds no cache makes it."""
    if not os.path.exists(path):
        toy.save(path, tensors=list(toy.data().tensors))
        print(f"node {os.environ.get('ELASTICRT_NODE')}: local rank {LOCAL_RANK} makes the cache", flush=True)
    return TensorDataset(*torch.load(path, weights_only=True)["tensors"])


dist.init_process_group("gloo")
with zero_first(LOCAL_RANK):
    dataset = cached(f"zero_first-{os.environ.get('ELASTICRT_NODE', 'node')}.cache")
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = DistributedDataParallel(toy.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT, weights_only=True)
    model.module.load_state_dict(state["model"])
    first = state["epoch"]

for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        toy.step(model, optimizer, x, y)
    if RANK in (-1, 0):
        toy.save(CHECKPOINT, model=model.module.state_dict(), epoch=epoch + 1)
        print(f"epoch {epoch}", flush=True)
if RANK in (-1, 0):
    toy.result(model.module)
dist.destroy_process_group()
