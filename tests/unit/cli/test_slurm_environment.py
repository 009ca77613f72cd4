"""What an agent takes from SLURM's environment, what it says, and what its workers do not see."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from elasticrt.cli.configure import configure
from elasticrt.cli.main import build_parser
from elasticrt.cli.report import directory_of
from elasticrt.cli.run import options_given
from elasticrt.cli.slurm import Slurm, alone, first_node
from elasticrt.errors import ConfigError
from elasticrt.ipc.env import inherited
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.store.protocol import ETCD_WAIT_S
from tests.unit.story.told import THREE_STEPS, write

BATCH = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "19",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURMD_NODENAME": "n1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_NODEID": "0",
}
"""The batch script of a job of three nodes."""

TASK = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURMD_NODENAME": "n2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
}
"""The second task of `srun` in that job."""

ELEMENT = {
    **TASK,
    "SLURM_ARRAY_JOB_ID": "17",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_JOB_NODELIST": "n2",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}
"""The task of an element of an array of single nodes."""

SHELL = {"SLURM_JOB_ID": "19", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3"}
"""The shell of `salloc` on a login node."""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def _configure(env: dict[str, str], *argv: str) -> tuple[Settings, RunSpec]:
    arguments = build_parser().parse_args(["run", *argv])
    return configure(options_given(arguments, env), arguments.script, arguments.arguments, env)


ETCD = ("--etcd", "http://127.0.0.1:1", "--nnodes", "1:4")


@pytest.mark.parametrize(
    ("env", "argv", "node", "run_id"),
    [
        (TASK, ETCD, "n2", "lab-19"),
        (ELEMENT, ETCD, "n2", "lab-17"),
        ({**TASK, "SLURM_ARRAY_JOB_ID": "17"}, ETCD, "n2", "lab-19"),  # An array of jobs of several nodes each.
        ({**TASK, "SLURM_STEP_ID": "2"}, ETCD, "n2", "lab-19.2"),
        ({**TASK, "SLURM_CLUSTER_NAME": "my lab!"}, ETCD, "n2", "my-lab--19"),
        ({**TASK, "SLURM_CLUSTER_NAME": ""}, ETCD, "n2", "slurm-19"),
        (TASK, (*ETCD, "--run-id", "mine", "--node", "x"), "x", "mine"),
        (ELEMENT, ETCD[:2], "n2", None),  # As in a search for parameters.
        (TASK, ("--standalone",), "n2", None),
        (BATCH, ETCD, "n1", None),
        ({**BATCH, "SLURM_STEP_ID": "4294967291"}, ETCD, "n1", None),  # SLURM's number of the batch script.
    ],
)
def test_node_and_run(env: dict[str, str], argv: tuple[str, ...], node: str, run_id: str | None) -> None:
    """The node's name is SLURM's; those who belong together by their step or array get one run id, others their own."""
    settings, _ = _configure(env, *argv, "train.py")
    assert settings.node == node
    assert (settings.options.node is not None) == ("--node" in argv)
    if run_id is None:
        assert re.fullmatch(r"[a-z]+-[a-z]+-[a-z2-9]{5}", settings.run_id)
    else:
        assert settings.run_id == run_id


@pytest.mark.parametrize(("env", "name"), [(TASK, "lab-19"), (ELEMENT, "lab-17"), (BATCH, "newest")])
def test_views_name_the_run_as_its_agents_do(
    env: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a task of the step or the array the run is that of its agents, where there is one; else it is the newest."""
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    arguments = build_parser().parse_args(["report"])
    for made in ("newest", "lab-17", "lab-19"):
        write(tmp_path / "elasticrt_runs" / made, THREE_STEPS)
        os.utime(tmp_path / "elasticrt_runs" / made / "events-a.jsonl", (0, 2**31 if made == "newest" else 0))
        if made == "newest":
            assert directory_of(arguments).name == "newest"
    assert directory_of(arguments).name == name


@pytest.mark.parametrize("env", [{}, {"SLURM_CONF": "/etc/slurm.conf", "SLURM_PROCID": "3"}])
def test_outside_of_a_job_nothing_is_taken(env: dict[str, str]) -> None:
    """Without a job's number no variable of SLURM's counts."""
    assert Slurm.from_env(env) is None
    assert not _configure(env, "train.py")[0].run_id.startswith(("lab", "slurm"))


def test_the_first_node_serves_etcd_when_that_is_accepted() -> None:
    """Without an etcd all agents of a step agree on one at its first node, at a port of the job's, and wait for it."""
    env = {**TASK, "SLURM_STEP_NODELIST": "node-that-is-not-here[1-3]"}
    settings, _ = _configure(env, "--insecure-etcd", "--nnodes", "1:3", "train.py")
    assert [str(address) for address in settings.etcd] == ["http://node-that-is-not-here1:10019"]
    assert settings.serve is None
    assert (settings.options.etcd, settings.etcd_wait_s) == ((), ETCD_WAIT_S)
    name = socket.gethostname()
    own = {**TASK, "SLURM_STEP_NODELIST": f"{name},n2"}
    settings, _ = _configure(own, "--insecure-etcd", "--nnodes", "1:3", "train.py")
    assert (settings.etcd, str(settings.serve)) == ((), f"http://{name}:10019")


@pytest.mark.parametrize(
    ("env", "words"),
    [(TASK, "--insecure-etcd n1 serves one"), (ELEMENT, "an element of array 17")],
)
def test_agents_that_could_never_meet_are_refused(env: dict[str, str], words: str) -> None:
    """Without an etcd each of them would train alone, on the same checkpoints: better not at all."""
    with pytest.raises(ConfigError, match=words):
        _configure(env, "--nnodes", "1:3", "train.py")


@pytest.mark.parametrize("argv", [(), ETCD[:2], ("--nnodes", "1")])
def test_agents_of_one_step_that_would_each_train_alone_are_refused(argv: tuple[str, ...]) -> None:
    """`srun` on three nodes, and a run of one node each: who means that says --standalone, or gives each a name."""
    with pytest.raises(ConfigError, match="--nnodes 1:3, or --standalone"):
        _configure(TASK, *argv, "train.py")
    assert _configure(TASK, *argv, "--run-id", "mine", "train.py")[0].run_id == "mine"


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"])
def test_malformed_variables_are_named(name: str) -> None:
    """What is no number says which variable it is."""
    with pytest.raises(ConfigError, match=name):
        Slurm.from_env({**TASK, name: "n[1-3]"})


def test_two_agents_of_a_step_on_one_node_are_told() -> None:
    """One agent starts all workers of its node; a second one takes a seat of its own, or stands by."""
    many = {**TASK, "SLURM_STEP_NUM_TASKS": "6"}
    (note,) = _configure(many, *ETCD, "train.py")[0].options.notes
    assert note.startswith("srun has started 6 agents on 3 nodes: one on each is enough")
    assert not _configure(TASK, *ETCD, "train.py")[0].options.notes


ARGV = ["run", "-m", "train", "--name", "a b"]
SRUN = "start one agent per node: srun --nodes=3 --ntasks=3 --kill-on-bad-exit=0 --wait=0 elasticrt run"


@pytest.mark.parametrize(
    ("env", "max_nodes", "words"),
    [
        (BATCH, 4, f"1 of 3 nodes here; {SRUN} -m train --name 'a b'"),
        (BATCH, 1, f"1 of 3 nodes here; {SRUN} --nnodes=1:3 -m train --name 'a b'"),
        (SHELL, 4, f"1 of 3 nodes here; {SRUN} -m train --name 'a b'"),
        (TASK, 4, f"1 of 3 nodes here; {SRUN} -m train --name 'a b'"),
        (TASK, 1, ""),  # Each task is a run of its own, and meant to be.
        (ELEMENT, 4, ""),
        ({}, 4, ""),
        ({**BATCH, "ELASTICRT_GENERATION": "2"}, 4, ""),  # Started by a worker.
    ],
)
def test_what_is_said_to_an_agent_that_stays_alone(env: dict[str, str], max_nodes: int, words: str) -> None:
    """In a job of several nodes: the very command that starts an agent on each; elsewhere nothing."""
    assert alone(Slurm.from_env(env), max_nodes, ARGV) == words


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1"),
        ("gpu[07-09,12],login", "gpu07"),
        ("a-b,n[1-3]", "a-b"),
        ("rack[0-1]n[2,5-7]", "rack0n2"),
        ("n[3]x,y", "n3x"),
        ("", ""),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    """The first name of a node list as SLURM abbreviates it."""
    assert first_node(nodes) == first


def test_workers_do_not_see_the_agents_place() -> None:
    """What SLURM says of its task would be taken for the worker's rank; what it says of the job stays."""
    seen = inherited({**TASK, "SLURM_CPUS_PER_TASK": "4", "RANK": "7", "ELASTICRT_ETCD": "x"})
    hidden = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS")
    assert not set(hidden) & set(seen)
    assert {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CPUS_PER_TASK", "SLURMD_NODENAME", "RANK"} <= set(seen)
