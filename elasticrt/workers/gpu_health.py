"""Whether this node may start workers: what is known of its GPUs, and for how long it stays away after a failure. Pure.

A GPU that has failed is looked at before a worker starts there again: at once one would fail the same way, and take the
run along each time. Looking is done elsewhere (`agent.gpu_gate`); here is what the findings mean.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass

COOL_DOWN_S = 60.0
COOL_DOWN_S_MAX = 3600.0
"""How long a node stays away after its first failure of a GPU; twice as long after each more, up to the second."""

FORGOTTEN_S = 24 * 3600.0
"""Failures that are older count no more."""

FIELDS = ("index", "name", "retired_pages.pending", "remapped_rows.pending", "remapped_rows.failure")
"""What `nvidia-smi --query-gpu` is asked for."""

FEW_FIELDS = FIELDS[:2]
"""What a driver knows that does not know all of these."""

EXIT_UNKNOWN_FIELD = 2
_LOST = re.compile(
    r"is lost|fallen off the bus|Unknown Error|unable to determine the device handle|\bERR!", re.IGNORECASE
)
_MEANING = {
    "retired_pages.pending": "pages of its memory wait to be retired: it needs a reset",
    "remapped_rows.pending": "rows of its memory wait to be remapped: it needs a reset",
    "remapped_rows.failure": "rows of its memory could not be remapped: it is to be replaced",
}


def problem_of(code: int, out: str, fields: Sequence[str] = FIELDS) -> str:
    """What is wrong with the GPUs by `nvidia-smi --format=csv,noheader`, "" for nothing.

    Args:
        code: its exit code.
        out: what it has printed, both streams.
        fields: what it was asked for.
    """
    if code or _LOST.search(out):
        lines = [line.strip() for line in out.splitlines() if line.strip()]
        told = next((line for line in lines if _LOST.search(line)), lines[0] if lines else "it says nothing")
        return f"nvidia-smi ends with exit code {code}: {told[:200]}" if code else f"nvidia-smi says: {told[:200]}"
    rows = [[word.strip() for word in row] for row in csv.reader(out.splitlines()) if row]
    if not rows:
        return "nvidia-smi shows no GPU"
    for row in rows:
        found = dict(zip(fields, row, strict=False))
        bad = next((text for name, text in _MEANING.items() if found.get(name, "").lower() in ("yes", "1")), "")
        if bad:
            return f"GPU {found['index']} ({found['name']}): {bad}"
    return ""


@dataclass(frozen=True)
class Look:
    """What a look has found. `at`: when it began, in seconds of the monotonic clock; `problem`: "" for none."""

    at: float
    problem: str = ""


@dataclass(frozen=True)
class Verdict:
    """Whether workers may start. `look_at`: when to look (again), None: no need; `reason`: why they may not."""

    admitted: bool
    look_at: float | None
    reason: str = ""


def admit(look: Look | None, failures: Sequence[tuple[float, str]], now: float) -> Verdict:
    """Whether this node may start workers now.

    Args:
        look: the newest look, None before the first.
        failures: when workers failed of a suspect GPU, and of what, in order.
        now: the monotonic clock, in seconds.
    """
    recent = [each for each in failures if now - each[0] < FORGOTTEN_S]
    cool_down_s = min(COOL_DOWN_S * 2.0 ** max(0, len(recent) - 1), COOL_DOWN_S_MAX)
    if recent:
        at, cause = recent[-1]
        if now < at + cool_down_s:
            return Verdict(False, at + cool_down_s, f"{cause}; no worker starts here for {cool_down_s:g} s")
        if look is None or look.at < at + cool_down_s:
            return Verdict(False, now, f"{cause}; the GPUs are looked at first")
    elif look is None:
        return Verdict(False, now, "the GPUs are looked at first")
    if look.problem:
        again_at = look.at + cool_down_s
        return Verdict(False, max(now, again_at), f"{look.problem}; looked at again every {cool_down_s:g} s")
    return Verdict(True, None)
