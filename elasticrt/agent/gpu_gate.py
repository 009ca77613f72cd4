"""The gate before this node's workers: its GPUs are looked at first, and again after one has failed.

`nvidia-smi` is asked, and a command of the user's own where one is given, both in a thread and within a time: on a GPU
that has fallen off the bus they may never end. What the findings mean is decided in `workers.gpu_health`.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticrt.clock import Clock
from elasticrt.workers.gpu_failures import gpu_cause
from elasticrt.workers.gpu_health import EXIT_UNKNOWN_FIELD, FEW_FIELDS, FIELDS, Look, admit, problem_of

if TYPE_CHECKING:
    from elasticrt.workers.worker_io import WorkerEnded

log = logging.getLogger(__name__)

SMI_S_MAX = 30.0
COMMAND_S_MAX = 300.0
"""How long `nvidia-smi`, and the user's command, may take. They take a second on a healthy node."""

SAID_BYTES_MAX = 200


@dataclass(frozen=True)
class Looked:
    """A look is over; its findings."""

    look: Look


class GpuGate:
    """Used by the agent's thread only.

    Args:
        gpus: whether workers here use GPUs; without that, and without a command, the gate is always open.
        command: the user's own, "" for none.
        put: takes `Looked`, from another thread.
        say: tells people.
        clock: the monotonic clock.
    """

    def __init__(
        self, *, gpus: bool, command: str, put: Callable[[Looked], None], say: Callable[[str], None], clock: Clock
    ) -> None:
        self._gpus, self._command = gpus, command
        self._put = put
        self._say = say
        self._clock = clock
        self._look: Look | None = None
        self._failures: list[tuple[float, str]] = []
        self._looking = False
        self._verdict = admit(None, (), 0.0)
        self._said = ""

    @property
    def used(self) -> bool:
        """Whether there is anything to look at."""
        return self._gpus or bool(self._command)

    @property
    def open(self) -> bool:
        """Whether workers may start."""
        return not self.used or self._verdict.admitted

    def wake_at(self) -> list[float]:
        """When to look again."""
        at = self._verdict.look_at
        return [] if not self.used or self._looking or at is None else [at]

    def pass_on(self, now: float) -> None:
        """Decide anew, and look if that is due."""
        if not self.used:
            return
        self._verdict = admit(self._look, self._failures, now)
        at, reason = self._verdict.look_at, self._verdict.reason
        if reason != self._said and (self._failures or (self._look is not None and self._look.problem)):
            self._say(reason or "the GPUs are found healthy: workers start here again")
            self._said = reason
        if at is not None and now >= at and not self._looking:
            self._looking = True
            threading.Thread(target=self._ask, args=(now,), name="elasticrt-gpu-look", daemon=True).start()

    def ended(self, event: WorkerEnded, now: float) -> None:
        """A worker has ended: close the gate if a GPU may be why."""
        if not self.used or event.failure is None or event.failure.collateral:
            return
        cause = gpu_cause(event.failure.text, event.code)
        if cause is not None and cause.suspect:
            self._failures.append((now, cause.name))
            self.pass_on(now)

    def looked(self, event: Looked, now: float) -> None:
        """A look is over."""
        self._looking = False
        self._look = event.look
        self.pass_on(now)

    def _ask(self, at: float) -> None:
        try:
            problem = (found_by_smi(os.environ) if self._gpus else "") or found_by(self._command)
        except Exception as error:  # noqa: BLE001  In a thread: whatever it is, the node must not wait for ever.
            problem = f"the GPUs cannot be looked at: {error}"
        self._put(Looked(Look(at, problem)))


def found_by_smi(env: Mapping[str, str]) -> str:
    """What `nvidia-smi` says is wrong with the GPUs that workers see, "" for nothing. Without it nothing is known."""
    visible = env.get("CUDA_VISIBLE_DEVICES", "").strip()
    plain = all(word.strip().isdecimal() or word.strip().startswith("GPU-") for word in visible.split(","))
    chosen = [f"--id={visible}"] if visible and plain else []  # It knows no parts of GPUs (MIG-...).
    for fields in (FIELDS, FEW_FIELDS):
        command = ["nvidia-smi", *chosen, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=SMI_S_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            return f"nvidia-smi has not answered in {SMI_S_MAX:g} s"
        except OSError as error:
            log.warning("the GPUs are not looked at: nvidia-smi: %s", error)
            return ""
        if done.returncode != EXIT_UNKNOWN_FIELD:
            break
    return problem_of(done.returncode, done.stdout + done.stderr, fields)


def found_by(command: str) -> str:
    """What the user's command finds wrong: nothing if it ends with 0."""
    if not command:
        return ""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the health check has not ended in {COMMAND_S_MAX:g} s"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    said = f": {lines[-1][:SAID_BYTES_MAX]}" if lines else ""
    return f"the health check ends with exit code {done.returncode}{said}" if done.returncode else ""
