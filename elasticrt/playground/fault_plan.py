"""The fault grammar of `elasticrt simulate`: what shall happen to the run, and when. Pure.

A fault is written as `WHEN: WHAT`, so that a command line reads like the story it makes:
`--fault "step 50: kill node 2" --fault "12s: add node"`. Nodes count from 0, as in their names (`node-0`); workers are
named by their global rank. Seconds count from the start of the simulation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from elasticrt.errors import ConfigError, explain

GRAMMAR = """\
WHEN: WHAT, where
  WHEN is  step N       once the training has finished step N
           Ns           N seconds after the start (12s, 1.5s)
  WHAT is  kill node K          SIGKILL to its agent; its workers go with it
           drain node K         SIGTERM to its agent: it hands over and leaves
           pause node K for Ns  SIGSTOP to its agent and workers, SIGCONT after N seconds
           kill worker R        SIGKILL to the worker with global rank R
           add node             one more node joins"""

STEP_MAX = 10**9
SECONDS_MAX = 86_400.0

# No sign, no leading zero, no exponent, no underscore, ASCII digits only: what int() would be generous about.
_WHOLE = "(?:0|[1-9][0-9]{0,9})"
_SECONDS = rf"{_WHOLE}(?:\.[0-9]{{1,6}})?"
_NODE = "(?:0|[1-9][0-9]{0,3})"  # No machine starts more processes than that.
_FAULT = re.compile(
    rf" *(?:step +(?P<step>{_WHOLE})|(?P<after_s>{_SECONDS})s) *: *"
    rf"(?:(?P<what>(?:kill|drain|pause) +node|kill +worker) +(?P<number>{_NODE})(?: +for +(?P<pause_s>{_SECONDS})s)?"
    r"|(?P<add>add +node)) *"
)


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        text: the words it was written in.
        what: "kill node", "drain node", "pause node", "kill worker" or "add node".
        number: of the node, or the worker's global rank; 0 for "add node".
        step: it is due once the training has finished this global step; None when it waits for a time.
        after_s: it is due so many seconds after the start of the simulation; None when it waits for a step.
        pause_s: how many seconds a pause lasts; 0 for anything else.
    """

    text: str
    what: str
    number: int = 0
    step: int | None = None
    after_s: float | None = None
    pause_s: float = 0.0

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Whether it is, `elapsed_s` after the start, when `step` is the highest global step finished (0: none)."""
        return step >= self.step if self.step is not None else elapsed_s >= (self.after_s or 0.0)


def parse_fault(text: str) -> Fault:
    """One `--fault` option. Raises ConfigError, with the grammar as the remedy, for anything else."""
    found = _FAULT.fullmatch(text)
    if found is not None:
        fault = Fault(
            text=text,
            what=" ".join((found["what"] or found["add"]).split()),
            number=int(found["number"] or 0),
            step=None if found["step"] is None else int(found["step"]),
            after_s=None if found["after_s"] is None else float(found["after_s"]),
            pause_s=float(found["pause_s"] or 0.0),
        )
        in_range = fault.step is None or 1 <= fault.step <= STEP_MAX
        in_range = in_range and max(fault.after_s or 0.0, fault.pause_s) <= SECONDS_MAX
        if in_range and (fault.what == "pause node") == (fault.pause_s > 0):
            return fault
    what, remedy = "this is no fault that simulate knows", f"Write it as {GRAMMAR}"
    raise ConfigError(explain(what, "--fault", got=text, expected="WHEN: WHAT", remedy=remedy))


def due(faults: Iterable[Fault], step: int, elapsed_s: float) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """Split the faults still open into (now, later), both in the order they were given; see `Fault.is_due`."""
    faults = tuple(faults)
    now = tuple(fault for fault in faults if fault.is_due(step, elapsed_s))
    return now, tuple(fault for fault in faults if fault not in now)


def node_name(number: int) -> str:
    """The name of the node that a fault calls `node K`."""
    return f"node-{number}"
