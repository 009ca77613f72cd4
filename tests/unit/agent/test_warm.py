"""What the agent says of its worker parent: one line and one event each time."""

from __future__ import annotations

import json
import logging
import os

import pytest

from elasticrt.agent.events import EventLog
from elasticrt.agent.warm import note
from elasticrt.contract.messages import Warm

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
    ],
)
def test_what_is_said_of_the_parent(caplog, event, name, lines):
    """Method, reason, and the memory that it costs."""
    reader, writer = os.pipe()
    with caplog.at_level(logging.INFO, logger="elasticrt.agent.warm"):
        note(event, EventLog("n", None, writer))
    os.close(writer)
    with os.fdopen(reader) as file:
        (record,) = [json.loads(line) for line in file]
    assert caplog.messages == lines
    assert record["event"] == name
    assert (record["rss_bytes"], record["shared_bytes"]) == (event.rss_bytes, event.shared_bytes)
