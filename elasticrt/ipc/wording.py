"""Words for people, shared by agents, workers and reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from signal import Signals

ANEW = "start again"
"""The cause of a generation that begins a run again. Its leader does not know whether the agents of the generation
before were killed or have left."""

UNAGREED = ", and no new generation can be agreed: "
"""Between a failure and the reason why nothing follows from it."""


def counted(number: int, noun: str) -> str:
    """`1 node`, `3 nodes`, `1,240 steps`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(items: Iterable[object], most: int = 5) -> str:
    """`a, b, c, d, e and 3 more`: the first `most` items, and the number of the others."""
    words = [str(each) for each in items]
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def slow_node(node: str, own_s: float, others_s: float) -> str:
    """`b is slow: its own work takes 40 ms of a step, that of the others 10 ms, and they wait for it`. Seconds."""
    times = f"{own_s * 1e3:.0f} ms of a step, that of the others {others_s * 1e3:.0f} ms"
    return f"{node} is slow: its own work takes {times}, and they wait for it"


def how_to_go_on(run_id: str, saved: str = "") -> str:
    """How to go on with a run that has ended before its script did. `saved` says in words what is saved."""
    return "; ".join(filter(None, (saved, f"to go on: the same command, with --run-id {run_id}")))


def which_steps_are_saved(reached: int, left_after: int = 0) -> str:
    """Up to which step a run is saved, and which of its steps are not.

    Args:
        reached: the step of the newest checkpoint; 0 without one.
        left_after: the step after which the workers left and were to save; 0: they were not.
    """
    saved = f"step {reached:,} is saved" if reached else "no step is saved"
    if left_after <= reached:
        return saved
    lost = f"step {left_after:,} is" if left_after == reached + 1 else f"steps {reached + 1:,} to {left_after:,} are"
    return f"{saved}, {lost} not"


def signal_name(number: int) -> str:
    """The name of signal `number`, such as SIGSEGV; "signal 42" for a number without a name."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
