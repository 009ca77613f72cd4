"""What a process that sets up beside the training of others shows its agent, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import pytest, torch
import elasticrt
from elasticrt.bootstrap import optimizer_heartbeat
from elasticrt.ipc.status_page import READY, StatusPage
from elasticrt.train.in_place import InPlace
from tests.fake_worker import Agent, under

page = StatusPage(fd := StatusPage.create())
with under(Agent(), pytest.MonkeyPatch(), page_fd=fd, beside=True):
    optimizer_heartbeat.begin()
    elasticrt.init()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    assert page.beats == 1 and page.beat_at_ns >= page.first_beat_at_ns > 0
    InPlace([model], bool, bool, bool).set_up_beside({"model": model})
    assert (page.beats, page.beat_at_ns, page.first_beat_at_ns, page.in_place) == (0, 0, 0, READY)
    optimizer.step()
    assert page.beats == 1 and page.beat_at_ns == page.first_beat_at_ns > 0
"""


def test_who_waits_to_be_let_in_has_made_no_step() -> None:
    """L5: what optimizers do in the rehearsal, or before the Loop, is no step of the run: no pause counts from it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert (done.returncode, done.stderr) == (0, "")
