"""What the agent says of its worker parent: one line and one event each time."""

from __future__ import annotations

import json
import logging
import os

import pytest

from elasticrt.agent.events import EventLog
from elasticrt.agent.warm import note
from elasticrt.contract.messages import Learnt, Warm

MIB = 2**20


@pytest.mark.parametrize(
    ("event", "name", "lines"),
    [
        (
            Warm(7, "fork", "", 2.5, 300 * MIB, 90 * MIB),
            "parent_warm",
            ["worker parent is warm after 2.50 s (fork); 300 MiB, 90 of it shared"],
        ),
        (
            Warm(7, "exec", "it keeps 1 thread(s) running", 2.5, 300 * MIB, 90 * MIB),
            "parent_warm",
            ["worker parent is warm after 2.50 s (exec: it keeps 1 thread(s) running); 300 MiB, 90 of it shared"],
        ),
        (
            Learnt(7, [], {}, "", 0.0, 300 * MIB, 290 * MIB),
            "parent_learnt",
            ["worker parent has learnt nothing in 0.00 s; 300 MiB, 290 of it shared"],
        ),
        (
            Learnt(7, ["scipy", "scipy.stats", "einops"], {"PIL": "prints"}, "why", 1.25, 300 * MIB, 290 * MIB),
            "parent_learnt",
            [
                "worker parent has learnt 3 modules of einops, scipy in 1.25 s; not PIL: it prints; "
                "300 MiB, 290 of it shared",
                "from now on every worker is a fresh interpreter: why",
            ],
        ),
    ],
)
def test_what_is_said_of_the_parent(caplog, event, name, lines):
    """Method, reason, what was learnt and what not, and the memory that it costs."""
    reader, writer = os.pipe()
    with caplog.at_level(logging.INFO, logger="elasticrt.agent.warm"):
        note(event, EventLog("n", None, writer))
    os.close(writer)
    with os.fdopen(reader) as file:
        (record,) = [json.loads(line) for line in file]
    assert caplog.messages == lines
    assert record["event"] == name
    assert (record["rss_bytes"], record["shared_bytes"]) == (event.rss_bytes, event.shared_bytes)
