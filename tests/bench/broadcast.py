"""A bare broadcast over loopback, beside which the sharing of a state is held.

python -m tests.bench.broadcast [--nodes 3] [--mb 400] [--reps 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.servers import free_port


def measure(nodes: int, mb: float, reps: int) -> list[float]:
    """Seconds until all ranks have so many megabytes from rank 0, once for each repetition."""
    with tempfile.TemporaryDirectory(prefix="ertb-") as name:
        mp.spawn(_rank, (nodes, free_port(), mb, reps, name), nodes)
        took = [list(map(float, path.read_text().split())) for path in Path(name).iterdir()]
    return [max(each) for each in zip(*took, strict=True)]


def _rank(rank: int, nodes: int, port: int, mb: float, *rest: Any) -> None:
    reps, directory = rest
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=nodes)
    tensor = torch.ones(int(mb * 1e6) // 4)
    took = []
    for _ in range(reps + 1):  # The first one only makes the connections.
        dist.barrier()
        began = time.monotonic()
        dist.broadcast(tensor, 0)
        took.append(time.monotonic() - began)
    Path(directory, str(rank)).write_text(" ".join(map(str, took[1:])))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print the median and all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--mb", type=float, default=400.0)
    parser.add_argument("--reps", type=int, default=5)
    arguments = parser.parse_args()
    took = measure(arguments.nodes, arguments.mb, arguments.reps)
    print(f"median {statistics.median(took):.3f} s of {', '.join(f'{each:.3f}' for each in took)}")


if __name__ == "__main__":
    main()
