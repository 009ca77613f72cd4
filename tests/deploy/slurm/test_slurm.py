"""The scripts of deploy/slurm, as they are, under a real SLURM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.slurm.lab import ALLOC, ARRAY, Lab, variables
from tests.deploy.slurm.training import Training
from tests.servers import EtcdServer

pytestmark = pytest.mark.timeout(300)

Note = Callable[[str], None]


def pause(step: dict) -> str:
    """What a change of the membership has cost, for the record."""
    return f"next step after {step['pause_s']:.2f} s, {step['redone']} steps done again"


@pytest.mark.slow
def test_array(etcd: EtcdServer, lab: Lab, tmp_path: Path, note: Note) -> None:
    """K04: an array loses, replaces, gains and gives up nodes one at a time, and the others train on."""
    training = Training(lab, tmp_path)
    env = variables(ELASTICRT_ETCD=str(etcd.address))
    job = lab.submit(ARRAY, "train.py", options=("--array=0-1",), cwd=tmp_path, **env)
    note("two elements submitted")
    training.together("n1", "n2", timeout_s=150)
    note("both train")
    run = f"lab-{job}"
    assert training.runs() == [run]
    training.ready()

    more = lab.submit(ARRAY, "train.py", options=("--array=0",), cwd=tmp_path, ELASTICRT_RUN_ID=run, **env)
    note("growth: a second array of one element submitted for the same run")
    grown = training.together("n1", "n2", "n3", timeout_s=150)
    note(f"it has joined; {pause(grown)}")
    assert grown["redone"] == 0
    training.ready()

    number = training.number()
    os.kill(training.agent("n2"), signal.SIGKILL)
    note("kill -9 of the agent on n2")
    note(f"the others train on; {pause(training.together('n1', 'n3', after=number))}")
    back = training.together("n1", "n2", "n3", after=number, timeout_s=150)
    element = lab.jobs(job)[f"{job}_1"]
    note(f"its element has requeued itself and is back; {pause(back)}")
    assert (element["Restarts"], back["redone"]) == ("1", 0)
    training.ready()

    number = training.number()
    lab.run("scancel", more)
    note(f"scancel {more}, the second array")
    left = training.together("n1", "n2", after=number)
    note(f"n3 has handed over and left; {pause(left)}")
    assert training.started(training.number())["kind"] == "drain"
    assert left["redone"] == 0
    training.wait("n3 has ended", lambda: training.stopped("n3") == [143])
    lab.wait_for_state(more, "CANCELLED")

    training.finish()
    lab.wait_for_state(job, "COMPLETED")
    note("the run has succeeded, both elements are COMPLETED")
    assert training.events("result")[-1]["code"] == 0
    # Nobody but the two that were told to or were killed has ended, and no worker has failed by itself.
    assert not training.events("failure")


@pytest.mark.slow
def test_alloc(etcd: EtcdServer, lab: Lab, tmp_path: Path, note: Note) -> None:
    """K04: an allocation goes on with fewer nodes, is requeued without losing a step, and drains when cancelled."""
    training = Training(lab, tmp_path)
    env = variables(ELASTICRT_ETCD=str(etcd.address))
    job = lab.submit(ALLOC, "train.py", options=("--nodes=3",), cwd=tmp_path, **env)
    note("a job of three nodes submitted")
    training.together("n1", "n2", "n3", timeout_s=150)
    note("all train")
    training.ready()

    number = training.number()
    lab.run("scontrol", "update", "nodename=n3", "state=down", "reason=test")
    note("n3 set down")
    note(f"the others train on; {pause(training.together('n1', 'n2', after=number))}")
    assert lab.states(job) == {job: "RUNNING"}
    assert lab.jobs(job)[job]["NodeList"] == "n[1-2]"
    lab.run("scontrol", "update", "nodename=n3", "state=resume", check=False)  # It may have come back by itself.
    training.ready()

    number = training.number()
    lab.run("scontrol", "requeue", job)
    note("scontrol requeue, as the script does it before the time limit")
    again = training.together("n1", "n2", "n3", after=number, timeout_s=150)
    back_at = training.events("agent_started")[3]["at"]
    first = next(event for event in training.events("generation") if event["at"] > back_at)
    note(f"all train again; resumed from step {first['resume_step']}, the last one that was done")
    assert lab.jobs(job)[job]["Restarts"] == "1"
    before = [
        event["step"] for name in ("committed", "step") for event in training.events(name) if event["at"] < back_at
    ]
    assert first["resume_step"] == max(before)
    assert again["redone"] is None, "a new agent does not know which step was the last"

    ended = len(training.events("agent_stopped"))
    lab.run("scancel", job)
    note("scancel of the job")
    lab.wait_for_state(job, "CANCELLED")
    training.wait("all have ended", lambda: len(training.events("agent_stopped")) == ended + 3)
    assert training.stopped("n1", "n2", "n3") == [143] * 3
    note("all have saved their last step and left")
    last = max(event["step"] for event in training.events("step"))
    assert max(event["step"] for event in training.events("committed")) >= last


def test_one_agent_in_a_job_of_two_nodes(lab: Lab, tmp_path: Path, note: Note) -> None:
    """K04: it says how to start the others; cancelled, it and its own etcd live until the last step is saved."""
    training = Training(lab, tmp_path)
    command = ("sbatch", "--parsable", "--nodes=2", "--output=job.out", "--wrap", "exec elasticrt run train.py")
    job = lab.run(*command, cwd=tmp_path, **variables())
    note("elasticrt run in the batch script of a job of two nodes, without srun")
    line = "1 of 2 nodes here; start one agent per node: srun --nodes=2 --ntasks=2 --kill-on-bad-exit=0 --wait=0 "
    training.wait("the hint", lambda: line + "elasticrt run --nnodes=1:2 train.py" in training.story())
    note("it has said how to start the other one")
    training.together("n1", timeout_s=150)
    training.ready()
    lab.run("scancel", job)
    training.wait("it has ended", lambda: bool(training.events("agent_stopped")))
    note("scancel: it has saved its last step and left")
    assert training.stopped("n1") == [143]
    last = max(event["step"] for event in training.events("step"))
    assert max(event["step"] for event in training.events("committed")) >= last


@pytest.mark.slow
def test_the_time_limit(etcd: EtcdServer, lab: Lab, tmp_path: Path, note: Note) -> None:
    """K04: before the limit the last node saves its step and goes back to the queue, and goes on from there."""
    training = Training(lab, tmp_path)
    options = ("--array=0", "--time=2", "--signal=B:USR1@80")
    env = variables(ELASTICRT_ETCD=str(etcd.address))
    job = lab.submit(ARRAY, "train.py", options=options, cwd=tmp_path, **env)
    note("an element with a limit of two minutes, to be told 80 seconds before")
    training.together("n1", timeout_s=150)
    lab.wait_until("it is told", lambda: lab.jobs(job)[f"{job}_0"]["Restarts"] == "1", 150)
    training.wait("it has left", lambda: training.stopped("n1") == [143])
    saved = max(event["step"] for event in training.events("committed"))
    note(f"it was told, has saved step {saved} and is back in the queue")
    training.wait("it goes on", lambda: training.events("generation")[-1]["resume_step"] == saved, 150)
    note(f"it goes on from step {saved}")
    training.finish()
    lab.wait_for_state(job, "COMPLETED")
    assert not any(event["redone"] for event in training.events("first_step"))
