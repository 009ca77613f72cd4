"""Hugging Face accelerate: its state is found in the environment; save_state and load_state."""

import os
import shutil

import accelerate
import torch
import toy
from torch.utils.data import DataLoader

accelerator = accelerate.Accelerator(cpu=True)
assert accelerator.num_processes == int(os.environ["WORLD_SIZE"])
assert accelerator.process_index == int(os.environ["RANK"])
model = toy.model()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.05), DataLoader(toy.data(), batch_size=16)
)
saved = [int(name.partition("-")[2]) for name in os.listdir() if name.startswith("accelerate-") and "new" not in name]
first = max(saved, default=0)
if first:
    accelerator.load_state(f"accelerate-{first}")
for epoch in range(first, toy.EPOCHS):
    for x, y in loader:
        loss = toy.loss(model, x, y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.save_state("accelerate-new")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.rename("accelerate-new", f"accelerate-{epoch + 1}")
        shutil.rmtree(f"accelerate-{epoch - 1}", ignore_errors=True)
        print(f"epoch {epoch}", flush=True)
    accelerator.wait_for_everyone()
if accelerator.is_main_process:
    toy.result(model)
