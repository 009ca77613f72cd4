"""A worker of the GPU table: DDP on its device, beside a frozen state as large as told.

    python -m tests.gpu.train DIRECTORY BACKEND DEVICE STATE_MB

It notes the end of each step in DIRECTORY/marks/PID: time, generation, rank, world size, step, the sum of the weights
and a sample of the frozen state; and in DIRECTORY/entered/PID how long its Loop took to begin. Frozen parameters are in
every checkpoint and in what a newcomer gets, and cost the steps nothing: so what is measured is what the runtime does
with a state of that size.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elasticrt

DIRECTORY, BACKEND, DEVICE, STATE_MB = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
PIECE_BYTES = 64 * 1000 * 1000
NAP_S = 0.005


class Net(nn.Module):
    """A small trained part, and a large frozen one in pieces."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.trained = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        sizes = [PIECE_BYTES // 4] * int(STATE_MB * 1e6 // PIECE_BYTES)
        sizes += [size] if (size := int(STATE_MB * 1e6 % PIECE_BYTES) // 4) else []
        frozen = [nn.Parameter(torch.full((size,), value, dtype=torch.float32), requires_grad=False) for size in sizes]
        self.frozen = nn.ParameterList(frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The trained part alone."""
        out: torch.Tensor = self.trained(x)
        return out

    def sample(self) -> float:
        """Of each frozen piece the first and the last number, summed up."""
        return sum(float(each[0]) + float(each[-1]) for each in self.frozen)


def main() -> None:
    """Train until somebody ends it."""
    marks = os.open(DIRECTORY / "marks" / str(os.getpid()), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    beside = os.environ.get("ELASTICRT_BESIDE") == "1"
    ctx = elasticrt.init(backend=BACKEND)
    device = ctx.device if DEVICE == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(960, 16)
    data = TensorDataset(inputs, (inputs[:, :1] * 2 + inputs[:, 1:2]).tanh())
    sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=24)
    loader = DataLoader(data, batch_sampler=sampler)
    net = Net(-1.0 if beside else 0.5).to(device)  # A newcomer has what it can only get from the others.
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.trained.parameters(), 1e-3, fused=True)
    # Powers of two change no digit. A fused optimizer applies the scale itself, which is the hardest case to undo.
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=20)
    directory = DIRECTORY / "checkpoints"
    state = {"model": model, "optimizer": optimizer, "scaler": scaler}
    loop = elasticrt.Loop(directory, sampler=sampler, every="1000000 steps", memory=0, **state)
    epochs = loop.epochs(1_000_000)
    began = time.monotonic()
    first = next(epochs)  # It restores; a newcomer waits to be let in.
    (DIRECTORY / "entered" / str(os.getpid())).write_text(repr(time.monotonic() - began))
    for _ in itertools.chain([first], epochs):
        for x, y in loop.batches(loader):
            with loop.step():
                loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                weights = sum(float(each.sum()) for each in net.trained.parameters())
                place = f"{ctx.generation} {ctx.rank} {ctx.world_size} {loop.steps_done + 1}"
                os.write(marks, f"{time.monotonic():.6f} {place} {weights!r} {net.sample()!r}\n".encode())
            time.sleep(NAP_S)


if __name__ == "__main__":
    main()
