"""Lightning's Trainer: it finds torchelastic's environment, and goes on from its own last checkpoint."""

import os

import lightning
import torch
import toy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = toy.model()

    def training_step(self, batch, _index):
        return toy.loss(self.model, *batch)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            print(f"epoch {self.current_epoch}", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=toy.EPOCHS,
    callbacks=[ModelCheckpoint("lightning-ckpt", save_last=True, save_on_train_epoch_end=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
assert isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)
last = "lightning-ckpt/last.ckpt"
module = Module()
trainer.fit(module, DataLoader(toy.data(), batch_size=16), ckpt_path=last if os.path.exists(last) else None)
if trainer.global_rank == 0:
    toy.result(module)
