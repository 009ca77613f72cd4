"""What a Loop can be given to save."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

from elasticrt.checkpoint import stateful
from elasticrt.errors import ConfigError

OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
REFUSED = [
    ("loader", DataLoader([1, 2]), "Give Loop(sampler=...) an ElasticBatchSampler"),
    ("best", 0.5, "state_dict() and load_state_dict()"),
    # Its constructor needs a process group, which does not matter here.
    ("optimizer", object.__new__(ZeroRedundancyOptimizer), "Use the optimizer that it wraps"),
    (stateful.OURS, OPTIMIZER, "Use another one"),
]


@pytest.mark.parametrize(("name", "given", "remedy"), REFUSED)
def test_what_cannot_be_saved_is_refused_with_a_remedy(name, given, remedy):
    """An object that no checkpoint can hold is refused before the training, and the message says what to give."""
    with pytest.raises((ConfigError, TypeError)) as refused:
        stateful.checked({"model": torch.nn.Linear(1, 1), name: given})
    assert name in str(refused.value)
    assert remedy in str(refused.value)


def test_what_is_saved():
    """Modules, optimizers and schedulers are taken as they are, a wrapped module without its wrapper."""
    model = torch.nn.Linear(1, 1)
    scheduler = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
    objects = {"model": torch.compile(model), "optimizer": OPTIMIZER, "scheduler": scheduler}
    assert stateful.checked(objects) == {**objects, "model": model}
