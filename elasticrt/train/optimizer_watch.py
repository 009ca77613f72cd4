"""What the script's optimizers have done in the present step, as their hooks see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from elasticrt.distributed import collectives


class OptimizerWatch:
    """Hooks on the optimizers of one Loop.

    Args:
        objects: the Loop's; the optimizers among them are watched.

    Attributes:
        stepped: an optimizer has stepped in the present batch.
        touched: one has begun to step in the present step: the state may be that of no step.
        communicates_late: steps of this script go on with collectives after an optimizer has stepped.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._optimizers = [each for each in objects if isinstance(each, torch.optim.Optimizer)]
        self._handles: list[RemovableHandle] = []
        self._collectives = 0  # Begun before the first optimizer of the step.
        self.stepped = False
        self.touched = False
        self.communicates_late = False

    @property
    def sees(self) -> bool:
        """Whether there is an optimizer to watch."""
        return bool(self._handles)

    def attach(self, before: Callable[..., None]) -> None:
        """Begin. `before` is called before an optimizer steps; what it raises keeps the optimizer from stepping."""
        # Only the hooks hold it: a Loop that is over is freed at once, and its loader's workers with it.
        self._handles = [each.register_step_pre_hook(before) for each in self._optimizers]
        self._handles += [each.register_step_post_hook(self._has_stepped) for each in self._optimizers]

    def detach(self) -> None:
        """End."""
        while self._handles:
            self._handles.pop().remove()

    def step_ends(self) -> None:
        """All of a step is done: note whether it had collectives after its optimizer."""
        if self.stepped and collectives.sequence_number() != self._collectives:
            self.communicates_late = True

    def _has_stepped(self, *_: Any) -> None:
        if not self.stepped:
            self._collectives = collectives.sequence_number()
        self.stepped = True
