"""From nn.DataParallel, where one process splits each batch over its GPUs, to DistributedDataParallel."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 20

torch.manual_seed(1)
x = torch.randn(256, 8)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=64)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(EPOCHS):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # A step takes a moment, so that there is time to kill the process.
        time.sleep(0.02)
    print(f"epoch {epoch}", flush=True)
print(f"result: {[p.double().norm().item() for p in model.parameters()]}", flush=True)
