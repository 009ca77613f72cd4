"""What a script makes of a Loop's modules, and may have forgotten to give to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from elasticrt.errors import ConfigError
from elasticrt.train.loop import Loop
from elasticrt.train.not_given import not_given


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, as libraries have them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The other's."""
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The other's."""
        return {"slow": 1, "fast": self.inner.state_dict()}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """The other's."""
        self.inner.step()


class Sam(torch.optim.Optimizer):
    """One that saves its own state only, as the usual SAM."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner


class Bare(torch.optim.Optimizer):
    """One that torch has not set up, around nothing."""

    def __init__(self) -> None:
        self.param_groups = []

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class Forgetful:
    """A class of the script around an optimizer and a schedule that saves neither."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Not the optimizer's."""
        return {"best": 0.0}


class Whole(Forgetful):
    """One that saves both."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.schedule = [lr_scheduler.StepLR(optimizer, 1)]

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"optimizer": self.optimizer.state_dict(), "schedule": [each.state_dict() for each in self.schedule]}


def _alone(made: torch.optim.Optimizer) -> list[object]:
    return [made]


def _with_a_scheduler(made: torch.optim.Optimizer) -> list[object]:
    return [made, lr_scheduler.StepLR(made, 1)]


def _with_a_chain(made: torch.optim.Optimizer) -> list[object]:
    first = lr_scheduler.SequentialLR(made, [lr_scheduler.StepLR(made, 1), lr_scheduler.ConstantLR(made)], [3])
    return [made, lr_scheduler.ChainedScheduler([first, lr_scheduler.ExponentialLR(made, 0.9)])]


def _with_a_plateau(made: torch.optim.Optimizer) -> list[object]:
    return [made, lr_scheduler.ReduceLROnPlateau(made)]


def _in_another(made: torch.optim.Optimizer) -> list[object]:
    return [Wrapped(made)]


def _in_a_class_of_the_script(made: torch.optim.Optimizer) -> list[object]:
    return [Whole(made)]


@pytest.mark.parametrize(
    "make", [_alone, _with_a_scheduler, _with_a_chain, _with_a_plateau, _in_another, _in_a_class_of_the_script]
)
def test_what_was_forgotten_is_found(make: Callable[[torch.optim.Optimizer], list[object]]) -> None:
    """All that was given, with what is inside of it, is known; of anything less a newcomer would have another state."""
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    made = make(torch.optim.SGD(model.parameters(), lr=0.1))
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    assert not not_given([model, *made], [])
    assert "an optimizer of its parameters" in not_given([model], [])
    if len(made) > 1:
        assert "a scheduler of its optimizer" in not_given([model, made[0]], [])
    assert elsewhere.param_groups


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("around", [Sam, Forgetful])
def test_what_a_given_object_does_not_save_counts_as_forgotten(around: Callable[..., object], *, trained: bool) -> None:
    """L5: momentum of an optimizer in another one that saves its own state only: a newcomer would begin without it."""
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if trained:
        model(torch.ones(1, 1)).sum().backward()
        inner.step()
    before = {parameter: dict(state) for parameter, state in inner.state.items()}
    holder = around(inner)
    assert "an optimizer of its parameters" in not_given([model, holder], [])
    assert not not_given([model, holder, inner], [])
    assert dict(inner.state) == before, "the mark is gone"


def test_an_optimizer_that_torch_has_not_set_up_is_watched_by_its_inner_one(tmp_path: Path) -> None:
    """L5: wrappers that leave `super().__init__` out have no hooks; one around nothing is refused in words."""
    model = nn.Linear(1, 1)
    wrapped = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    loop = Loop(tmp_path, model=model, optimizer=wrapped)
    for _ in loop.steps(2):
        with loop.step():
            model(torch.ones(1, 1)).sum().backward()
            wrapped.step()
    assert loop.steps_done == 2 and loop._undo.has_stepped
    with pytest.raises(ConfigError, match=r"an optimizer that torch has not set up .*super\(\).__init__"):
        next(Loop(tmp_path / "other", model=model, optimizer=Bare()).steps(1))


def test_what_the_script_has_let_go_of_does_not_count() -> None:
    """An optimizer that only a cycle holds is not in use any more."""
    model = nn.Linear(1, 1)
    forgotten = torch.optim.SGD(model.parameters(), lr=0.1)
    forgotten.me = forgotten  # type: ignore[attr-defined]
    del forgotten
    kept = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not not_given([model, kept], [])


def test_a_module_that_was_forgotten_is_found() -> None:
    """Its reducer would stay in the group that was left."""

    class Layer(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    layer = Layer()
    assert not not_given([layer], [layer])
    assert "a DDP module" in not_given([], [])
