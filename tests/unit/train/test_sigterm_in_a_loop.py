"""A SIGTERM that is held back while a Loop runs is obeyed where the loop ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import pytest
from elasticrt import Loop
from tests.fake_worker import Agent, under

def train():
    loop = Loop(sys.argv[1])
    for step in loop.steps(3):
        with loop.step():
            pass
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            {end}

with pytest.MonkeyPatch.context() as patch, under(Agent(), patch):
    train()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", -signal.SIGTERM),
        ("break", -signal.SIGTERM),
        ("return", -signal.SIGTERM),
        ("raise ValueError", 1),
    ],
)
def test_a_signal_is_obeyed_where_the_loop_ends(tmp_path: Path, end: str, code: int) -> None:
    """At the end of the steps, after `break` and after `return`; an exception is reported instead."""
    command = [sys.executable, "-c", SCRIPT.format(end=end), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr
    assert ("ValueError" in done.stderr) == (code == 1)
