r"""A Hydra application. Its output goes to Hydra's own directory, or to the run's, which all ranks share.

elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/hydra_app.py lr=0.05 +note=hello
elasticrt run --nnodes 2 --nproc-per-node 2 examples/styles/hydra_app.py \
    'hydra.run.dir=${oc.env:ELASTICRT_RUN_DIR}/hydra'
"""

import os
from dataclasses import dataclass

import hydra
import torch
import torch.distributed as dist
import toy
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


@dataclass
class Config:
    lr: float = 0.01
    epochs: int = 20
    checkpoint: str = "hydra_app.pt"


ConfigStore.instance().store(name="config", node=Config)


@hydra.main(version_base=None, config_name="config")
def main(config: DictConfig) -> None:
    dist.init_process_group("gloo")
    output = HydraConfig.get().runtime.output_dir
    print(f"rank {dist.get_rank()} writes to {os.path.relpath(output)}", flush=True)
    dataset = toy.data()
    sampler = DistributedSampler(dataset)
    model = DistributedDataParallel(toy.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    first = 0
    if os.path.exists(config.checkpoint):
        state = torch.load(config.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["epoch"]
    for epoch in range(first, config.epochs):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, batch_size=16, sampler=sampler):
            toy.step(model, optimizer, x, y)
        if dist.get_rank() == 0:
            toy.save(config.checkpoint, model=model.module.state_dict(), epoch=epoch + 1)
            print(f"epoch {epoch}", flush=True)
    if dist.get_rank() == 0:
        toy.result(model.module)
    # No destroy_process_group() here: in torch 2.13 it can hang if the model is a local variable that is freed then.


if __name__ == "__main__":
    main()
