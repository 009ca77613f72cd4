"""A short form of torch's flight recorder, for the status page and for other agents. Pure.

Torch records the newest collectives of each process, with NCCL and gloo: TORCH_FR_BUFFER_SIZE of them, by default
2,000; 0 turns the recorder off. Its JSON (version 2.10 in torch 2.13) has an entry for each collective: its group, its
number in the group, its operation and sizes, and whether it is over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from elasticrt.text import cut

# How many process groups a text has, and the longest name and description in it.
GROUPS_MAX = 4
WHAT_MAX_BYTES = 60
FLIGHTS_BYTES = 512
"""The longest text of one rank."""


@dataclass(frozen=True)
class Flight:
    """The state of one rank in one process group.

    Attributes:
        group: "default_pg", or what torch calls the group.
        begun: the number of the newest collective that the rank has begun there.
        awaits: the number of the oldest collective that is not over; 0 if all are.
        what: this collective, or the newest one if all are over: "all_reduce of [12]".
    """

    group: str
    begun: int
    awaits: int
    what: str


def shortened(trace: str | bytes) -> str:
    """The flights in torch's `trace`, as JSON of at most FLIGHTS_BYTES bytes; "" if there are none."""
    try:
        entries = [each for each in json.loads(trace)["entries"] if not each["is_p2p"]]
        newest = sorted(entries, key=lambda each: each["record_id"], reverse=True)
        groups: dict[str, list[dict[str, Any]]] = {}
        for each in newest:
            mine = groups.setdefault(_group(each), [])
            # Another id is an older group of the same name.
            if not mine or mine[0]["pg_id"] == each["pg_id"]:
                mine.append(each)
        rows = [_row(name, mine) for name, mine in list(groups.items())[:GROUPS_MAX]]
    # Another version of torch writes other JSON.
    except (ValueError, KeyError, TypeError, IndexError):
        return ""
    while rows and len(json.dumps(rows)) > FLIGHTS_BYTES:
        rows.pop()
    return json.dumps(rows) if rows else ""


def read(text: str) -> tuple[Flight, ...]:
    """The flights in a text that `shortened` made; none in any other text."""
    try:
        rows = [(str(group), int(begun), int(awaits), str(what)) for group, begun, awaits, what in json.loads(text)]
    except (ValueError, TypeError):
        return ()
    return tuple(Flight(*row) for row in rows)


def _group(entry: dict[str, Any]) -> str:
    name, words = entry["process_group"]
    return cut(words if words == "default_pg" else f"{words} {name}", WHAT_MAX_BYTES)


def _row(name: str, newest: list[dict[str, Any]]) -> list[str | int]:
    waits = [each for each in newest if not each["retired"] and each["state"] != "completed"]
    shown = waits[-1] if waits else newest[0]
    sizes = " and ".join(str(size) for size in shown["input_sizes"])
    what = shown["profiling_name"].partition(":")[2] + (f" of {sizes}" if sizes else "")
    begun, awaits = newest[0]["collective_seq_id"], shown["collective_seq_id"] if waits else 0
    return [name, int(begun), int(awaits), cut(what, WHAT_MAX_BYTES)]
