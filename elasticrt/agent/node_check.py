"""Checks in the background, by a command, whether this node's hardware may train.

A node that fails the check stays a member, but gets no seat and starts no worker; the others train without it. The
check runs at the start if the user has given a command, and after a failure that blames one of the node's GPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable

from elasticrt.clock import Clock
from elasticrt.ipc import leash
from elasticrt.ipc.proc import gpus

COOL_DOWN_S = 10.0
"""From a failure to the first check: a driver takes some seconds to reset a GPU. The time doubles with each failed
check."""
COOL_DOWN_S_MAX = 600.0
CHECK_S_MAX = 120.0
"""A command that runs longer than this counts as failed, and is killed."""
KILLED_S_MAX = 0.1
"""How long the agent waits for the end of a killed command. Its loop stands still meanwhile."""
LOOK_S, GLANCE_S = 0.2, 0.002
"""The interval of looks at a running command, and how long each look waits for its end."""

NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure",
    "--format=csv,noheader",
)

_LOST = re.compile(r"is lost|fallen off the bus|Unknown Error|ERR!", re.IGNORECASE)
"""The words of nvidia-smi for a GPU that does not answer. If another GPU answers, its exit code is 0 all the same."""


class NodeCheck:
    """The check of one node.

    Args:
        command: the user's command, which ends with code 0 on a node that may train. Empty: nvidia-smi, and only after
            a failure that blames a GPU.
        say: prints a line for people.
        clock: the agent's clock.
    """

    def __init__(self, command: tuple[str, ...], say: Callable[[str], None], clock: Clock) -> None:
        self._command = command
        self._say = say
        self._clock = clock
        # When to start the next check. None: the node is fit.
        self._due: float | None = clock.monotonic() if command else None
        self._wait_s = COOL_DOWN_S
        self._asking: subprocess.Popen[str] | None = None
        self._asked_at = 0.0

    @property
    def is_fit(self) -> bool:
        """Whether workers may start here."""
        return self._due is None

    def alarm(self) -> float | None:
        """When `look` has something to do, in seconds of the monotonic clock; None: never."""
        return self._clock.monotonic() + LOOK_S if self._asking is not None else self._due

    def doubt(self, reason: str) -> None:
        """Let no worker start until the node is checked again, because a GPU has failed for this `reason`."""
        if self.is_fit:
            self._say(f"no worker starts on this node until its GPUs pass the check: {reason}")
            self._due = self._clock.monotonic() + self._wait_s

    def look(self, now: float) -> None:
        """Start the check if that is due at `now`, or take note of its result."""
        found = None
        if self._asking is not None:
            found = self._answer(self._asking, now)
        elif self._due is not None and now >= self._due:
            found = self._ask(now)
        if found is None:
            return
        self.close()
        if not found:
            self._due, self._wait_s = None, COOL_DOWN_S
            return
        self._due = now + self._wait_s
        self._say(f"this node is not fit to train: {found}; checked again in {self._wait_s:g} s")
        self._wait_s = min(2 * self._wait_s, COOL_DOWN_S_MAX)

    def close(self) -> None:
        """Kill the check if it runs."""
        if self._asking is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._asking.pid, signal.SIGKILL)
            # A command that hangs in the driver cannot be killed before the driver returns. It is left behind.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._asking.wait(KILLED_S_MAX)
            assert self._asking.stdout is not None
            self._asking.stdout.close()
        self._asking = None

    def _ask(self, now: float) -> str | None:
        """Start the command. Returns None, or "" (the node is fit) if there is no command to ask."""
        command = self._command or NVIDIA_SMI
        if not self._command and shutil.which(command[0]) is None:
            self._say("this node's GPUs cannot be checked without nvidia-smi. --node-check names another command")
            return ""
        self._asked_at = now
        self._asking = subprocess.Popen(
            leash.command_of(list(command), signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        return None

    def _answer(self, asking: subprocess.Popen[str], now: float) -> str | None:
        """Why the node is not fit; "" if it is fit; None while the command runs."""
        try:
            output, _ = asking.communicate(timeout=GLANCE_S)
        except subprocess.TimeoutExpired:
            return f"no answer in {CHECK_S_MAX:g} s" if now - self._asked_at > CHECK_S_MAX else None
        shown = 0 if self._command else gpus()
        return refusal(asking.returncode, output, shown)


def refusal(code: int, output: str, gpus: int) -> str:
    """Why a node is not fit, from the exit `code` and the `output` of its check; "" if it is fit.

    `gpus`: the number of GPUs that nvidia-smi has to list; 0 for a command of the user, whose output is not read.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if code:
        return f"exit code {code}" + (f": {lines[-1][:200]}" if lines else "")
    lost = next((line for line in lines if gpus and _LOST.search(line)), "")
    if lost:
        return lost[:200]
    if len(lines) < gpus:
        return f"{len(lines)} of {gpus} GPUs answer"
    # A line of nvidia-smi has the GPU's number, uncorrected errors since its reset, whether rows wait to be remapped,
    # and whether remapping has failed. Any number but 0 and any "Yes" after the first field is bad.
    bad = [line for line in lines if gpus and re.search(r", *([1-9]\d*|Yes) *(,|$)", line)]
    return f"errors in the memory of GPU {bad[0].partition(',')[0]}, which has to be reset" if bad else ""
