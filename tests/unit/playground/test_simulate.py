"""The command line of `elasticrt simulate`: what it refuses, and what it asks of each agent."""

from __future__ import annotations

import sys

import pytest

from elasticrt.cli import playground
from elasticrt.cli.main import build_parser
from elasticrt.errors import ConfigError


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    """A script to name, and none of our variables in the environment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    for name in ("ELASTICRT_NNODES", "ELASTICRT_LOG_DIR", "ELASTICRT_NODE"):
        monkeypatch.delenv(name, raising=False)


def configured(*words, env=()):
    """The simulation that these words describe."""
    return playground.configure(build_parser().parse_args(["simulate", *words]), dict(env))


@pytest.mark.parametrize("size", ["--nnodes 2:3", "--min-nodes 2 --max-nodes 3"])
def test_each_agent_gets_its_name_the_size_and_the_options_of_the_run(tmp_path, size):
    """Options of `run` are passed on as given, the script's own arguments stay behind the script."""
    words = f"--nodes 3 {size} --nproc-per-node 2 --run-id calm-fox --log-dir runs --lease-ttl 3s --join now"
    simulation = configured(*words.split(), "--no-python", "env", "--lr", "-1", "--nodes", "9")
    assert simulation.nodes == 3
    assert simulation.agent_command("node-2", 7) == [
        *(sys.executable, "-m", "elasticrt", "run"),
        *("--node", "node-2", "--events-fd", "7"),
        *("--run-id", "calm-fox", "--nnodes", "2:3", "--nproc-per-node", "2"),
        *("--join", "now", "--lease-ttl", "3s", "--no-python", "--log-dir", str(tmp_path / "runs")),
        *("env", "--lr", "-1", "--nodes", "9"),
    ]


def test_an_agent_command_is_one_that_run_accepts():
    """What simulate makes of its options is a command line that `elasticrt run` itself reads."""
    command = configured("--nodes", "2", "--stop-timeout=1s", "train.py", "-x").agent_command("node-0", 7)
    arguments = build_parser().parse_args(command[3:])
    assert (arguments.node, arguments.events_fd, arguments.script, arguments.arguments) == (
        "node-0",
        "7",
        "train.py",
        ["-x"],
    )


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["train.py"], (2, 1, 2)),
        (["--nodes", "4", "train.py"], (4, 1, 4)),
        (["--nodes", "2", "--fault", "1s: add node", "--fault", "2s: add node", "train.py"], (2, 1, 4)),
        (["--nodes", "3", "--nnodes", "1:2", "train.py"], (3, 1, 2)),
        (["--nodes", "1", "--nnodes", "1:4", "train.py"], (1, 1, 4)),
        (["--nodes", "1", "--nnodes", "2", "--fault", "1s: add node", "train.py"], (1, 2, 2)),
    ],
)
def test_the_size_of_the_run(words, size):
    """Without a minimum one node suffices; without a maximum there is room for all nodes that will ever start."""
    simulation = configured(*words)
    nodes, least, most = size
    assert (simulation.nodes, simulation.words[2:4]) == (nodes, ("--nnodes", f"{least}:{most}"))


def test_faults_and_a_name_for_the_run():
    """Faults are read in order; a run without a name gets one, the same for all its agents."""
    simulation = configured("--fault", "step 5: kill node 1", "--fault", "2s: add node", "train.py")
    assert [(fault.what, fault.number) for fault in simulation.faults] == [("kill node", 1), ("add node", 0)]
    assert simulation.words[0] == "--run-id"
    assert simulation.words[1]


def test_a_node_name_in_the_environment_does_not_disturb():
    """It is meant for `run`."""
    assert configured("train.py", env={"ELASTICRT_NODE": "mine"}).nodes == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to run"),
        (["--nodes", "0", "train.py"], "(--nodes): got 0"),
        (["--nodes", "two", "train.py"], "(--nodes): got two"),
        (["--nodes", "257", "train.py"], "(--nodes): got 257"),
        (["nowhere.py"], "no such script (nowhere.py)"),
        (["--node", "mine", "train.py"], "simulate names its nodes itself"),
        (["--standalone", "train.py"], "simulate names its nodes itself"),
        (["--nodes", "2", "--nnodes", "3", "train.py"], "nodes that never come (--nodes): got 2"),
        (["--fault", "soon: add node", "train.py"], "(--fault): got soon: add node"),
        (["--run-id", "../x", "train.py"], "(--run-id)"),
        (["--lease-ttl", "never", "train.py"], "(--lease-ttl): got never"),
        (["--lease-ttl", "0.5s", "train.py"], "(--lease-ttl): got 0.5s; expected a duration from 1s to 1h"),
        (["--etcd", "", "train.py"], "(--etcd): got ''"),
    ],
)
def test_mistakes_are_told_before_anything_starts(words, message):
    """A mistake is a ConfigError that names the option and what was given."""
    with pytest.raises(ConfigError) as caught:
        configured(*words)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
