"""The toy training that all styles share: a small model, data that each process can compute, and a printed result."""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES = 256
STEP_S = float(os.environ.get("TOY_STEP_S", "0.02"))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 8, generator=generator)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(x, y)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def step(network: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """Make one step of training. It takes a moment, as a real step does. Returns the loss."""
    time.sleep(STEP_S)
    loss = nn.functional.mse_loss(network(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def save(path: str, **state: object) -> None:
    """Write a file beside `path`, then rename it: a process that is killed here leaves the old file whole."""
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


def result(network: nn.Module) -> None:
    """Print the loss on all data, and a norm of each weight tensor, so that two runs can be compared."""
    x, y = data().tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(network(x), y).item()
    norms = " ".join(f"{p.detach().double().norm():.6f}" for p in network.parameters())
    print(f"result: loss {loss:.6f} weights {norms}", flush=True)
