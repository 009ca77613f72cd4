"""The fault grammar of `elasticrt simulate`: what happens to the run, and when. Pure.

A fault is written as `WHEN: WHAT`: `--fault "step 50: kill node 2" --fault "12s: add node"`. Nodes count from 0, as in
their names (`node-0`). Workers are named by their global rank. Seconds count from the start of the simulation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from elasticrt.errors import ConfigError

GRAMMAR = """\
WHEN: WHAT, where
  WHEN is  step N         once the training has finished step N (without Loop: within 5 s)
           Ns             N seconds after the start (12s, 1.5s)
  WHAT is  kill node K    SIGKILL to its agent; its workers go with it
           drain node K   SIGTERM to its agent: it hands over and leaves
           kill worker R  SIGKILL to the worker with global rank R
           add node       one more node joins"""

# No sign, no leading zero, no exponent, no underscore, ASCII digits only: int() and float() would accept all of these.
_FAULT = re.compile(
    r" *(?:step +(?P<step>[1-9][0-9]{0,9})|(?P<after_s>(?:0|[1-9][0-9]{0,4})(?:\.[0-9]{1,6})?)s) *: *"
    r"(?:(?P<what>(?:kill|drain) +node|kill +worker) +(?P<number>0|[1-9][0-9]{0,3})|(?P<add>add +node)) *"
)


@dataclass(frozen=True)
class Fault:
    """One fault."""

    text: str  # The words in which it was written.
    what: str  # "kill node", "drain node", "kill worker" or "add node".
    number: int = 0  # The node's number, or the worker's global rank; 0 for "add node".
    # The fault is due once the training has finished this step; None if it waits for a time.
    step: int | None = None
    # The fault is due this many seconds after the start of the simulation; None if it waits for a step.
    after_s: float | None = None

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Whether the fault is due when `step` is finished (0: none), `elapsed_s` seconds after the start."""
        return step >= self.step if self.step is not None else elapsed_s >= (self.after_s or 0.0)


def parse_fault(text: str) -> Fault:
    """The fault in one `--fault` option. Raises ConfigError, with the grammar as the remedy, for anything else."""
    found = _FAULT.fullmatch(text)
    if found is None:
        what, remedy = "not a fault that simulate knows", f"Write it as {GRAMMAR}"
        raise ConfigError(what, "--fault", got=text, expected="WHEN: WHAT", remedy=remedy)
    step = int(found["step"]) if found["step"] else None
    after_s = float(found["after_s"]) if found["after_s"] else None
    what = " ".join((found["what"] or found["add"]).split())
    return Fault(text, what, int(found["number"] or 0), step, after_s)
