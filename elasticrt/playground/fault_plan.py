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
NUMBER_MAX = 9_999  # Nodes and ranks: no machine starts more processes than that.


@dataclass(frozen=True)
class PlannedFault:
    """Due once the training has finished this global step."""

    number: int


@dataclass(frozen=True)
class After:
    """Due this many seconds after the start of the simulation."""

    seconds: float


@dataclass(frozen=True)
class KillNode:
    """SIGKILL to the agent of node `node` (counted from 0)."""

    node: int


@dataclass(frozen=True)
class DrainNode:
    """SIGTERM to the agent of node `node`."""

    node: int


@dataclass(frozen=True)
class PauseNode:
    """SIGSTOP to node `node`'s agent and workers, SIGCONT `for_s` seconds later."""

    node: int
    for_s: float


@dataclass(frozen=True)
class KillWorker:
    """SIGKILL to the worker with this global rank."""

    rank: int


@dataclass(frozen=True)
class AddNode:
    """Start one more agent."""


Trigger = PlannedFault | After
Action = KillNode | DrainNode | PauseNode | KillWorker | AddNode


@dataclass(frozen=True)
class Fault:
    """One fault: when, what, and the words it was written in."""

    trigger: Trigger
    action: Action
    text: str


# No sign, no leading zero, no exponent, no underscore, ASCII digits only: what int() would be generous about.
_WHOLE = r"(0|[1-9][0-9]{0,9})"
_SECONDS = r"((?:0|[1-9][0-9]{0,9})(?:\.[0-9]{1,6})?)s"


def _of(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace(" ", "[ ]+"), re.ASCII)


_AT_STEP = _of(f"step {_WHOLE}")
_AFTER = _of(_SECONDS)
_KILL_NODE = _of(f"kill node {_WHOLE}")
_DRAIN_NODE = _of(f"drain node {_WHOLE}")
_PAUSE_NODE = _of(f"pause node {_WHOLE} for {_SECONDS}")
_KILL_WORKER = _of(f"kill worker {_WHOLE}")
_ADD_NODE = _of("add node")


def node_name(number: int) -> str:
    """The name of the node that a fault calls `node K`."""
    return f"node-{number}"


def parse_fault(text: str) -> Fault:
    """One `--fault` option. Raises ConfigError, with the grammar as the remedy, for anything else."""
    when, colon, what = text.partition(":")
    trigger = _trigger(when.strip(" "), text)
    action = _action(what.strip(" "), text)
    if not colon or trigger is None or action is None:
        raise _refuse("this is no fault that simulate knows", text)
    return Fault(trigger, action, text)


def due(faults: Iterable[Fault], step: int, elapsed_s: float) -> tuple[tuple[Fault, ...], tuple[Fault, ...]]:
    """Split the faults still open into (now, later), both in the order they were given.

    `step` is the highest global step finished so far (0: none), `elapsed_s` the seconds since the start.
    """
    now: list[Fault] = []
    later: list[Fault] = []
    for fault in faults:
        match fault.trigger:
            case PlannedFault(number):
                is_due = step >= number
            case After(seconds):
                is_due = elapsed_s >= seconds
        (now if is_due else later).append(fault)
    return tuple(now), tuple(later)


def _trigger(when: str, text: str) -> Trigger | None:
    if found := _AT_STEP.fullmatch(when):
        return PlannedFault(_whole(found[1], text, 1, STEP_MAX))
    if found := _AFTER.fullmatch(when):
        return After(_seconds(found[1], text, zero=True))
    return None


def _action(what: str, text: str) -> Action | None:
    if found := _KILL_NODE.fullmatch(what):
        return KillNode(_whole(found[1], text, 0, NUMBER_MAX))
    if found := _DRAIN_NODE.fullmatch(what):
        return DrainNode(_whole(found[1], text, 0, NUMBER_MAX))
    if found := _PAUSE_NODE.fullmatch(what):
        return PauseNode(_whole(found[1], text, 0, NUMBER_MAX), _seconds(found[2], text, zero=False))
    if found := _KILL_WORKER.fullmatch(what):
        return KillWorker(_whole(found[1], text, 0, NUMBER_MAX))
    return AddNode() if _ADD_NODE.fullmatch(what) else None


def _whole(digits: str, text: str, low: int, high: int) -> int:
    number = int(digits)
    if not low <= number <= high:
        raise _refuse(f"the number {number} is outside {low} to {high}", text)
    return number


def _seconds(digits: str, text: str, *, zero: bool) -> float:
    seconds = float(digits)
    if seconds > SECONDS_MAX or (seconds == 0 and not zero):
        raise _refuse(f"{digits} s is outside {'0' if zero else 'more than 0'} to {SECONDS_MAX:.0f}", text)
    return seconds


def _refuse(what: str, text: str) -> ConfigError:
    return ConfigError(
        explain(what, "--fault", got=text, expected="WHEN: WHAT", remedy=f"Write it as {GRAMMAR}"),
    )
