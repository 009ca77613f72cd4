"""What a training process reports to its agent: each step on the status page, some in a message. Nothing here waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elasticrt.distributed import agent_client
from elasticrt.distributed.wrapping import ddp_layers
from elasticrt.errors import explain
from elasticrt.ipc.messages import Step

_REPORT_NS = 250_000_000
_READ_NS = 1_000_000_000
_SCALARS_MAX = 64
_NAME_MAX = 64
# About so often a wait is measured: on a GPU the timers wait for its work, which costs as much as a read scalar.
_MEASURE_NS = 2_000_000_000
# DDP's own choice: one step in so many.
_SAMPLE_MAX = 100
# The first iterations of a new reducer, which take longer than usual.
_WARM_UP = 4


class Reporter:
    """Reports every step on the page, and in messages the first of the process, then at most four a second.

    The user's numbers are kept as they came and read at most once a second, because reading a number from a GPU waits
    for all work that is queued there. How long this rank waits for the gradients of others is told by the timers of the
    DDP modules among the Loop's `objects`, which measure some of the steps.

    `samples` counts the samples of the data set that the run has trained on.
    """

    def __init__(self, objects: Iterable[object], samples: Callable[[], int]) -> None:
        self._samples = samples
        self._link = agent_client.agent_link()
        self._page = agent_client.status_page()
        self._resumed_from = 0
        self._first = True
        self._next_ns = 0
        self._untold: tuple[int, int, int] | None = None  # The last step, if it is not told: with epoch and time.
        # The user's numbers: as they came, and as they were read last.
        self._kept: dict[str, float | torch.Tensor] = {}
        self._scalars: dict[str, float] = {}
        self._scalars_at_ns = -_READ_NS
        # The modules with timers, and the iteration that each had measured at the last look.
        self._layers: list[Any] = list(ddp_layers(objects))
        self._measured: dict[int, int] = {}
        self._waits_at_ns = 0
        self._step, self._step_at_ns = 0, 0  # At that look.

    def keep(self, scalars: Mapping[str, float | torch.Tensor]) -> None:
        """Replace the user's numbers of these names. Raises TypeError for a value that is not one number."""
        for name, value in scalars.items():
            if not isinstance(value, (int, float, torch.Tensor)):
                what, expected = f"{name} is not a number", "a number or a tensor"
                raise TypeError(explain(what, "report", got=value, expected=expected))
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise TypeError(explain(f"{name} is not one number", "report", got=f"shape {tuple(value.shape)}"))
            self._kept[name[:_NAME_MAX]] = value.detach() if isinstance(value, torch.Tensor) else value
        while len(self._kept) > _SCALARS_MAX:
            self._kept.popitem()

    def begin(self, step: int) -> None:
        """This process has the state after `step`, and is about to draw the next batch."""
        agent_client.show_stacks()
        self._resumed_from = step
        self._first, self._next_ns = True, 0
        self._page.restored_at_ns = time.monotonic_ns()
        self._page.entered = step + 1

    def finished(self, step: int, epoch: int) -> None:
        """This process has finished `step`. `entered` is written last, because it announces the next step."""
        now_ns = time.monotonic_ns()
        self._page.samples = self._samples()
        self._page.finished(step, now_ns)
        self._page.entered = step + 1
        self._untold = (step, epoch, now_ns)
        if not self._link.linked or now_ns < self._next_ns:
            return
        self._next_ns = now_ns + _REPORT_NS
        if now_ns >= self._waits_at_ns:
            self._waits_at_ns = now_ns + _READ_NS
            self._read_waits()
        if self._kept and now_ns - self._scalars_at_ns >= _READ_NS:
            self._read_scalars(now_ns)
        self._tell(*self._untold)

    def end(self) -> None:
        """No step follows: the last one is told, with the user's numbers as they are."""
        if self._link.linked and self._untold is not None:
            self._read_scalars(time.monotonic_ns())
            self._tell(*self._untold)

    def _tell(self, step: int, epoch: int, at_ns: int) -> None:
        if self._link.post(Step(step, epoch, at_ns, self._resumed_from, self._first, dict(self._scalars))):
            self._first, self._untold = False, None

    def _read_scalars(self, now_ns: int) -> None:
        self._scalars_at_ns = now_ns
        self._scalars = {name: float(value) for name, value in self._kept.items()}

    def _read_waits(self) -> None:
        """Add what was measured since the last call to the page's totals."""
        page, waited_ns, new = self._page, 0, False
        steps, took_ns = page.step - self._step, page.step_at_ns - self._step_at_ns
        if self._step_at_ns and took_ns > 0:
            for layer in self._layers:
                rate = max(1, min(_SAMPLE_MAX, _MEASURE_NS * steps // took_ns))
                layer._set_ddp_runtime_logging_sample_rate(rate)
        self._step, self._step_at_ns = page.step, page.step_at_ns
        for number, layer in enumerate(self._layers):
            measured = layer._get_ddp_logging_data()
            iteration = measured.get("iteration", 0)
            new = new or iteration not in (self._measured.get(number), *range(_WARM_UP))
            self._measured[number] = iteration
            waited_ns += measured.get("backward_comm_time", 0) - measured.get("backward_compute_comm_overlap_time", 0)
        if new:
            page.waited_ns += max(0, waited_ns)
            page.waits += 1
