"""What agents report on their events descriptor: one JSON object per line, checked when it is read. Pure.

`at` is CLOCK_MONOTONIC in seconds, comparable between the processes of one machine, which is all a simulation has.
The simulation adds two events of its own, so that everything it tells goes one way: `agent_exited` and `fault`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NUMBER = (int, float)

FIELDS: Mapping[str, Mapping[str, Any]] = {
    "agent_started": {"pid": int, "run_id": str, "etcd": str, "run_dir": str},
    "registered": {},
    "generation": {
        "number": int,
        "nodes": list,
        "world_size": int,
        "cause": str,
        "resume_step": int,
        "restarts": int,
    },
    "workers_started": {"generation": int, "pids": list, "ranks": list},
    "first_step": {
        "generation": int,
        "step": int,
        "resumed_from": int,
        "pause_s": (int, float, type(None)),
        "redone": (int, type(None)),
    },
    "step": {"generation": int, "step": int, "epoch": int, "scalars": dict},
    "worker_ended": {"generation": int, "rank": int, "pid": int, "code": int},
    "failure": {"text": str},
    "committed": {"step": int},
    "member_lost": {"lost": str, "how": str},
    "result": {"status": str, "code": int, "reason": str},
    "agent_stopped": {"code": int},
    "agent_exited": {"code": int},
    "fault": {"text": str, "done": str},
}
"""The events and the types of their fields, besides `event`, `node` and `at`, which all of them have."""


def read_event(line: str | bytes) -> dict[str, Any] | None:
    """One line as an event; None for an event that this version does not know.

    Raises ValueError saying what is wrong with the line.
    """
    try:
        event = json.loads(line)
    except ValueError as error:
        raise ValueError(f"an event that is not JSON: {line[:80]!r} ({error})") from None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise ValueError(f"an event without a name: {line[:80]!r}")  # noqa: TRY004  Every bad line is one kind of error.
    if event["event"] not in FIELDS:
        return None
    for name, kind in {"node": str, "at": NUMBER, **FIELDS[event["event"]]}.items():
        value = event.get(name)
        # True is an int to isinstance, and never what a count means.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"event {event['event']!r}, field {name!r}: got {value!r}")  # noqa: TRY004  As above.
    return event
