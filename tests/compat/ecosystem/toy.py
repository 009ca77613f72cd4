"""A small model on data that everybody can compute, as in examples/styles."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

EPOCHS = 16
STEP_S = 0.02


def data() -> TensorDataset:
    """128 samples of 8 numbers, and what to make of them."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(128, 8, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def model() -> nn.Module:
    """The same in every process."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of a batch; it takes a moment, as real ones do."""
    time.sleep(STEP_S)
    return nn.functional.mse_loss(network(x), y)


def result(network: nn.Module) -> None:
    """Something that two runs can be compared by."""
    print(f"result: {[p.double().norm().item() for p in network.parameters()]}", flush=True)
