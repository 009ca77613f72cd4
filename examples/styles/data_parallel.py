"""Uses nn.DataParallel: one process with all its GPUs. Saves the model without its wrapper.

elasticrt run examples/styles/data_parallel.py
"""

import os

import torch
import toy
from torch import nn
from torch.utils.data import DataLoader

import elasticrt

EPOCHS, CHECKPOINT = 20, "data_parallel.pt"

model = nn.DataParallel(toy.model())
assert elasticrt.is_parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
first = 0
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT, weights_only=True)
    elasticrt.unwrap(model).load_state_dict(state["model"])
    first = state["epoch"]

for epoch in range(first, EPOCHS):
    for x, y in DataLoader(toy.data(), batch_size=64):
        toy.step(model, optimizer, x, y)
    toy.save(CHECKPOINT, model=elasticrt.unwrap(model).state_dict(), epoch=epoch + 1)
    print(f"epoch {epoch}", flush=True)
toy.result(elasticrt.unwrap(model))
