"""What the agent says of its worker parent: one line and one event."""

from __future__ import annotations

import json
import logging
import os

import pytest

from elasticrt.agent.events import EventLog
from elasticrt.agent.warm import note
from elasticrt.contract.messages import Warm


@pytest.mark.parametrize(("method", "reason"), [("fork", ""), ("exec", "it keeps 1 thread(s) running")])
def test_what_is_said_of_the_parent(caplog, method, reason):
    """Method and reason."""
    reader, writer = os.pipe()
    with caplog.at_level(logging.INFO, logger="elasticrt.agent.warm"):
        note(Warm(7, method, reason, 2.5), EventLog("n", None, writer))
    os.close(writer)
    with os.fdopen(reader) as file:
        (record,) = [json.loads(line) for line in file]
    assert caplog.messages == [f"worker parent is warm after 2.50 s ({method}{': ' * bool(reason)}{reason})"]
    assert (record["event"], record["method"], record["reason"]) == ("parent_warm", method, reason)
