"""Reports the steps of a training process to its agent: each one on the status page, some in messages.

Only the report of the last step waits for the agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elasticrt.distributed import agent_client
from elasticrt.distributed.wrapping import ddp_layers
from elasticrt.errors import explain
from elasticrt.ipc.messages import Step

# The least time between two messages, and between two reads of the script's numbers.
_REPORT_NS = 250_000_000
_READ_NS = 1_000_000_000
# How many numbers of the script are kept, and how long their names may be.
_SCALARS_MAX = 64
_NAME_MAX = 64
# The time between two measurements of the waiting for other ranks, about. On a GPU, DDP's timers wait for the GPU's
# work, which costs as much as reading one of the script's numbers.
_MEASURE_NS = 2_000_000_000
# At least one step in so many is measured. This is the rate that DDP itself uses.
_SAMPLE_MAX = 100
# The first iterations of a new reducer take longer than usual, and do not count.
_WARM_UP = 4


class Reporter:
    """Reports every step on the status page. A message reports the first step of the process, then four a second.

    The script's numbers are kept as they came, and read at most once a second, because reading a number from a GPU
    waits for all work that is queued there. How long this rank waits for the gradients of other ranks is measured in
    some of the steps, by the timers of the DDP modules.

    Args:
        objects: the objects given to the Loop, the DDP modules among them.
        samples: counts the samples of the dataset that the run has trained.
    """

    def __init__(self, objects: Iterable[object], samples: Callable[[], int]) -> None:
        self._samples = samples
        self._link = agent_client.agent_link()
        self._page = agent_client.status_page()
        self._resumed_from = 0
        self._is_first_report = True
        self._next_report_ns = 0
        # The last step, its epoch and its end; None before, and once `end` has reported it.
        self._last_step: tuple[int, int, int] | None = None
        # The script's numbers: as they came, and as they were read last.
        self._given_scalars: dict[str, float | torch.Tensor] = {}
        self._scalars: dict[str, float] = {}
        self._scalars_at_ns = -_READ_NS
        # The DDP modules, and the iteration that each of them had measured at the last look at the timers.
        self._layers: list[Any] = list(ddp_layers(objects))
        self._measured: dict[int, int] = {}
        # When the next look is due.
        self._next_waits_ns = 0
        # The last step, and its end, at the last look.
        self._step, self._step_at_ns = 0, 0

    def keep_scalars(self, scalars: Mapping[str, float | torch.Tensor]) -> None:
        """Keep the script's numbers, by name, in place of earlier ones of these names.

        Raises TypeError for a value that is not one number.
        """
        for name, value in scalars.items():
            if not isinstance(value, (int, float, torch.Tensor)):
                what, expected = f"{name} is not a number", "a number or a tensor"
                raise TypeError(explain(what, "report", got=value, expected=expected))
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise TypeError(explain(f"{name} is not one number", "report", got=f"shape {tuple(value.shape)}"))
            self._given_scalars[name[:_NAME_MAX]] = value.detach() if isinstance(value, torch.Tensor) else value
        while len(self._given_scalars) > _SCALARS_MAX:
            self._given_scalars.popitem()

    def begin(self, step: int) -> None:
        """Report that this process has the state after `step`, and is about to draw the next batch."""
        agent_client.show_stacks()
        self._resumed_from = step
        self._is_first_report, self._next_report_ns = True, 0
        self._page.restored_at_ns = time.monotonic_ns()
        self._page.entered = step + 1

    def report_step(self, step: int, epoch: int) -> None:
        """Report that this process has finished `step`, which belongs to `epoch`."""
        now_ns = time.monotonic_ns()
        self._page.samples = self._samples()
        self._page.finished(step, now_ns)
        # Written last, because it announces that the next step has begun.
        self._page.entered = step + 1
        self._last_step = (step, epoch, now_ns)
        if not self._link.has_agent or now_ns < self._next_report_ns:
            return
        self._next_report_ns = now_ns + _REPORT_NS
        if now_ns >= self._next_waits_ns:
            self._next_waits_ns = now_ns + _READ_NS
            self._read_waits()
        if self._given_scalars and now_ns - self._scalars_at_ns >= _READ_NS:
            self._read_scalars(now_ns)
        # If the socket has no room, the report of a later step takes the place of this one.
        if self._link.try_send(self._message(*self._last_step)):
            self._is_first_report = False

    def end(self) -> None:
        """Report the last step in a message, with the script's present numbers, because no step follows.

        This waits for room in the socket. The step may have been reported before, with earlier numbers.
        """
        last, self._last_step = self._last_step, None
        if self._link.has_agent and last is not None:
            self._read_scalars(time.monotonic_ns())
            self._link.send(self._message(*last))

    def _message(self, step: int, epoch: int, at_ns: int) -> Step:
        return Step(step, epoch, at_ns, self._resumed_from, self._is_first_report, dict(self._scalars))

    def _read_scalars(self, now_ns: int) -> None:
        self._scalars_at_ns = now_ns
        self._scalars = {name: float(value) for name, value in self._given_scalars.items()}

    def _read_waits(self) -> None:
        """Add the waits that were measured since the last call to the totals on the status page."""
        page, waited_ns, new = self._page, 0, False
        steps, took_ns = page.step - self._step, page.step_at_ns - self._step_at_ns
        # Let DDP measure one step in as many as were made in about _MEASURE_NS.
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
            # The time that the exchange of gradients takes, without the part that overlaps with the backward.
            waited_ns += measured.get("backward_comm_time", 0) - measured.get("backward_compute_comm_overlap_time", 0)
        if new:
            page.waited_ns += max(0, waited_ns)
            page.waits += 1
