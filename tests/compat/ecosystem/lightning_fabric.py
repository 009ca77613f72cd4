"""Lightning Fabric: its own loop around a model of ours."""

import os

import lightning
import torch
import toy
from torch.utils.data import DataLoader

fabric = lightning.Fabric(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
)
fabric.launch()
model = toy.model()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
loader = fabric.setup_dataloaders(DataLoader(toy.data(), batch_size=16))
state = {"model": model, "optimizer": optimizer, "epoch": 0}
if os.path.exists("fabric.ckpt"):
    fabric.load("fabric.ckpt", state)
for epoch in range(state["epoch"], toy.EPOCHS):
    for x, y in loader:
        loss = toy.loss(model, x, y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    state["epoch"] = epoch + 1
    fabric.save("fabric.new", state)
    if fabric.is_global_zero:
        os.replace("fabric.new", "fabric.ckpt")
        print(f"epoch {epoch}", flush=True)
    fabric.barrier()
if fabric.is_global_zero:
    toy.result(model)
