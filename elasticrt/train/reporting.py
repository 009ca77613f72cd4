"""What a training process tells its agent: each step on the status page, some in a message, nothing that waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elasticrt.distributed import agent_client
from elasticrt.distributed.wrapping import ddp_layers
from elasticrt.errors import explain
from elasticrt.ipc.messages import Step
from elasticrt.ipc.status_page import StatusPage

_REPORT_NS = 100_000_000
_READ_NS = 1_000_000_000
_SCALARS_MAX = 64
_WARM_UP = 4
"""So many iterations of a new reducer are not taken for what is usual."""

_NAME_MAX = 64


class Scalars:
    """The user's numbers of the present step, kept as they came and read at most once a second.

    Reading a number that lies on a GPU waits for all work queued there; therefore not at every step.
    """

    def __init__(self) -> None:
        self._kept: dict[str, float | torch.Tensor] = {}
        self._read: dict[str, float] = {}
        self._read_at_ns = -_READ_NS

    def keep(self, scalars: Mapping[str, float | torch.Tensor]) -> None:
        """Raises TypeError for what is no number."""
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise TypeError(explain(f"{name} is not one number", "report", got=f"shape {tuple(value.shape)}"))
                self._kept[name[:_NAME_MAX]] = value.detach()
            elif isinstance(value, (int, float)):
                self._kept[name[:_NAME_MAX]] = value
            else:
                raise TypeError(
                    explain(f"{name} is not a number", "report", got=value, expected="a number or a tensor")
                )
        while len(self._kept) > _SCALARS_MAX:
            self._kept.popitem()

    def values(self, now_ns: int) -> dict[str, float]:
        """Those of a second ago at the oldest."""
        if self._kept and now_ns - self._read_at_ns >= _READ_NS:
            self._read_at_ns = now_ns
            self._read = {name: float(value) for name, value in self._kept.items()}
        return self._read


class Waits:
    """How long this rank waits for the others' gradients, as DDP's own timers have it: of one step in many.

    Args:
        objects: the Loop's; modules that are in DDP are looked at.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self._layers: list[Any] = list(ddp_layers(objects))
        self._read: dict[int, int] = {}

    def read(self, page: StatusPage) -> None:
        """Add what was measured since the last time to the page's totals."""
        waited_ns, new = 0, False
        for number, layer in enumerate(self._layers):
            said = layer._get_ddp_logging_data()
            iteration = said.get("iteration", 0)
            new = new or iteration not in (self._read.get(number), *range(_WARM_UP))
            self._read[number] = iteration
            waited_ns += said.get("backward_comm_time", 0) - said.get("backward_compute_comm_overlap_time", 0)
        if new:
            page.waited_ns += max(0, waited_ns)
            page.waits += 1


class Reporter:
    """Steps on the page at once, and in messages: the first of the process, then at most ten a second.

    Args:
        objects: the Loop's.
        samples: how many of the data set the run has trained on.

    Attributes:
        scalars: the user's numbers.
    """

    def __init__(self, objects: Iterable[object] = (), samples: Callable[[], int] = int) -> None:
        self._samples = samples
        self._waits = Waits(objects)
        self._waits_at_ns = 0
        self._link = agent_client.agent_link()
        self._page = agent_client.status_page()
        self._resumed_from = 0
        self._first = True
        self._next_ns = 0
        self.scalars = Scalars()

    def begin(self, step: int) -> None:
        """This process has the state as of `step`, and is about to draw the next batch."""
        agent_client.show_stacks()
        if self._link is not None:
            self._link.listen()
        self._resumed_from = step
        self._first, self._next_ns = True, 0
        if self._page is not None:
            self._page.restored_at_ns = time.monotonic_ns()
            self._page.entered = step + 1

    def lost_state(self) -> None:
        """The state of this process is that of no step: the agent must not count on it."""
        if self._page is not None:
            self._page.restored_at_ns = 0

    def expect_steps(self, *, expected: bool) -> None:
        """Whether steps are to be expected from here on: a process that makes none while they are has a problem."""
        if self._page is not None:
            self._page.stepping = int(expected)

    def waited_for_data(self, since_ns: int) -> None:
        """The loader was waited for, since `since_ns` of the monotonic clock."""
        if self._page is not None:
            self._page.data_ns += time.monotonic_ns() - since_ns

    def saved(self, since_ns: int) -> None:
        """The training stood still for the state to be copied or saved, since `since_ns`."""
        if self._page is not None:
            self._page.save_ns += time.monotonic_ns() - since_ns

    def saves(self, since_ns: int) -> None:
        """A checkpoint was begun at `since_ns`."""
        if self._page is not None:
            self._page.saving_ns = since_ns

    def pauses(self, since_ns: int) -> None:
        """The script does something else than training from `since_ns` on."""
        if self._page is not None:
            self._page.pausing_ns = since_ns

    def paused(self) -> None:
        """It trains again."""
        if self._page is not None:
            since_ns, self._page.pausing_ns = self._page.pausing_ns, 0
            self._page.pause_ns += time.monotonic_ns() - since_ns

    def finished(self, step: int, epoch: int) -> None:
        """This process has finished `step`. The order on the page matters: `entered` announces the next step last."""
        if self._page is None and self._link is None:
            return
        now_ns = time.monotonic_ns()
        if self._page is not None:
            self._page.finished(step, now_ns)
            self._page.entered = step + 1
        if self._link is not None and now_ns >= self._next_ns:
            self._next_ns = now_ns + _REPORT_NS
            if self._page is not None and now_ns >= self._waits_at_ns:
                self._waits_at_ns = now_ns + _READ_NS
                self._waits.read(self._page)
                self._page.samples = self._samples()
            message = Step(step, epoch, now_ns, self._resumed_from, self._first, dict(self.scalars.values(now_ns)))
            if self._link.post(message):
                self._first = False
