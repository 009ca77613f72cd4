"""What the agent says of its worker parent: one line and one event."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from elasticrt.event_log import EventLog
from elasticrt.ipc.messages import Warm
from elasticrt.workers.fork_server import write_parent_warm


@pytest.mark.parametrize(("method", "reason"), [("fork", ""), ("exec", "it keeps 1 thread(s) running")])
def test_what_is_said_of_the_parent(caplog, method, reason):
    """Method and reason."""
    reader, writer = os.pipe()
    with caplog.at_level(logging.INFO, logger="elasticrt.workers.fork_server"):
        write_parent_warm(Warm(method, reason, 2.5), EventLog("n", None, writer))
    os.close(writer)
    with os.fdopen(reader) as file:
        (record,) = [json.loads(line) for line in file]
    assert caplog.messages == [f"worker parent is warm after 2.50 s ({method}{': ' * bool(reason)}{reason})"]
    assert (record["event"], record["method"], record["reason"]) == ("parent_warm", method, reason)


def test_an_agent_that_ends_while_its_parent_warms_up():
    """The parent cannot say that it is warm: it ends, without a word."""
    script = (
        "from elasticrt.bootstrap.fork_server_main import ForkServer\n"
        "from elasticrt.ipc.channel import Channel\n"
        "from elasticrt.ipc.messages import Warm\n"
        "channel, agent = Channel.pair()\n"
        "agent.close()\n"
        "print(ForkServer(channel).serve(Warm('fork', '', 1.0)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("None\n", "")
