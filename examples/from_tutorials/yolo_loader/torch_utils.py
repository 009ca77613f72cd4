"""A helper that such projects keep in a file of their own."""

from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def torch_distributed_zero_first(local_rank):
    """Make all processes of a node wait for its first one."""
    if local_rank not in {-1, 0}:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()
