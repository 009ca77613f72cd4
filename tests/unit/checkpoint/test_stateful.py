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
    (stateful.LOOP_KEY, OPTIMIZER, "Use another one"),
    ("evry", "5 min", "Did you mean every?"),
    ("scheduler", None, "Leave it out"),
    ("model", torch.nn.Linear, "Make an object of it"),
    ("best", 0.5, "Keep plain values in loop.vars"),
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


class Precise(torch.optim.SGD):
    """It keeps 32 bits of parameters that have 16."""

    def step(self, closure=None):
        """One step."""
        for parameter in self.param_groups[0]["params"]:
            exact = self.state[parameter].setdefault("exact", parameter.detach().float())
            exact.sub_(parameter.grad.float(), alpha=0.001)
            parameter.data.copy_(exact)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_what_an_optimizer_keeps_has_the_type_that_it_had(kind):
    """Torch gives it that of the parameters, and ranks would part. Not where the model is trained in another one."""
    model = torch.nn.Linear(2, 2).bfloat16()
    objects = {"model": model, "optimizer": Precise(model.parameters(), lr=0.1)}
    model(torch.ones(1, 2).bfloat16()).sum().backward()
    objects["optimizer"].step()
    other = torch.nn.Linear(2, 2).to(kind)
    others = {"model": other, "optimizer": Precise(other.parameters(), lr=0.1)}
    for each in objects["optimizer"].state.values():
        each["exact"] += 1e-4  # More than bfloat16 can show.
    stateful.put_back(others, stateful.collect(objects), "here", shared=True)
    exact, there = ([each["exact"] for each in given["optimizer"].state.values()] for given in (objects, others))
    assert [each.dtype for each in there] == [torch.float32] * 2
    assert all(map(torch.equal, exact, there))


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which shares its groups and its state with that one."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups, self.state = base.param_groups, base.state


@pytest.mark.parametrize("names", [("outer", "inner"), ("inner", "outer")])
def test_optimizers_that_share_their_groups_still_do(names):
    """A scheduler of the outer one then still sets the learning rate of the inner one, in whatever order they load."""
    inner = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    both = {"outer": Around(inner), "inner": inner}
    objects = {name: both[name] for name in names}
    stateful.put_back(objects, {name: each.state_dict() for name, each in objects.items()}, "here")
    both["outer"].param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert both["outer"].state is inner.state
