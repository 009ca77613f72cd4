"""When a worker parent learns: after some quiet, never for ever, and what it makes of a trial's end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

DRIVER = """\
import importlib.machinery, json, os, select, sys, time
from elasticrt.worker import learn

learner = learn.Learner("", lambda: None)
origins = {name: importlib.machinery.PathFinder.find_spec(name).origin for name in sys.argv[1].split(",")}
now = 1000.0
learner.teller.send(json.dumps(origins).encode())
told = []

def turn(*, training=True):
    report = learner.turn(now, training=training)
    if report is not None:
        told.append(report)

def trial_ends():
    while learner._trial is not None:
        assert select.select(learner.filenos(), [], [], 30)[0]
        turn()

def until_told():
    for _ in range(200):
        turn()
        trial_ends()
        if told:
            return

exec(sys.argv[2])
"""
"""Time is `now`; a fresh interpreter, because it is forked."""


def drive(tmp_path, names: str, program: str) -> dict[str, object]:
    """What the program prints, as JSON."""
    command = [sys.executable, "-c", DRIVER, names, program]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_only_after_quiet(tmp_path):
    """Nothing happens before the quiet time is over; a disturbance begins it anew; without workers it never is."""
    (tmp_path / "einops.py").write_text("")
    program = (
        "turn(); seen = [learner.due_in_s(now), learner._trial is None]\n"
        "now += 1.9; turn(); seen += [learner._trial is None]; learner.disturbed(now)\n"
        "now += 1.9; turn(); seen += [round(learner.due_in_s(now), 1), learner._trial is None]\n"
        "now += 0.2; turn(training=False); seen += [learner._trial is None]\n"
        "turn(); seen += [learner._trial is None]; learner.disturbed(now); seen += [learner._trial is None]\n"
        "now += 2; until_told(); seen += [told[0].modules, learner.due_in_s(now)]\n"
        "print(json.dumps(seen))"
    )
    expected = [2.0, True, True, 0.1, True, True, False, True, ["einops"], None]
    assert drive(tmp_path, "einops", program) == expected


@pytest.mark.parametrize(
    ("body", "program", "why"),
    [
        (
            "import time; time.sleep(300)",
            "turn(); now += 2; turn(); pid = learner._trial.pid\n"
            "while b'einops' not in learner._trial.lines: turn()\n"
            "now += 59; turn(); assert learner._trial; now += 2; turn(); assert not learner._trial\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9\nuntil_told()\n",
            "takes more than 60 s to import",
        ),
        (
            "import os, time; os.kill(os.getpid(), 9)",
            "turn(); now += 2; until_told()\n",
            "ends the process that imports it",
        ),
    ],
)
def test_trials_that_end_badly(tmp_path, body, program, why):
    """A module that hangs or kills the process is left out with the reason; the next is learnt."""
    (tmp_path / "einops.py").write_text(body)
    (tmp_path / "safetensors.py").write_text("")
    program += "print(json.dumps([told[0].modules, told[0].left_out]))"
    assert drive(tmp_path, "einops,safetensors", program) == [["safetensors"], {"einops": why}]


def test_not_for_ever(tmp_path):
    """After so many modules that failed, the rest is left alone."""
    names = [f"torchbad{n}" for n in range(6)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("raise ValueError('bad')")
    program = (
        "learn.TRIALS_MAX = 4\nturn(); now += 2; until_told()\n"
        "print(json.dumps([told[0].modules, list(told[0].left_out.values())]))"
    )
    reasons = ["cannot be imported: ValueError: bad"] * 4 + ["not tried any more after 4 trials"] * 2
    assert drive(tmp_path, ",".join(names), program) == [[], reasons]
