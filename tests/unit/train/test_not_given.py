"""What a script makes of a Loop's modules, and may have forgotten to give to it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from elasticrt.train.not_given import not_given


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, as libraries have them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The other's."""
        return self.inner.param_groups


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
    return [SimpleNamespace(optimizer=made, schedule=[lr_scheduler.StepLR(made, 1)])]


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
