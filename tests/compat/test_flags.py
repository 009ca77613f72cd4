"""torchrun's flags: all of them in the table, each with its meaning, none without effect.

Leaving a flag out changes what is looked at; its other ways of being given (underscores, `=`, PET_*) change nothing.
What the settings do in workers and agents is seen in tests/integration/agent/test_environment_of_workers.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from elasticrt.cli.configure import configure
from elasticrt.cli.main import build_parser, main
from elasticrt.cli.run import options_given
from elasticrt.cli.torchrun_flags import REFUSED, conf_options
from elasticrt.errors import ConfigError
from elasticrt.option_values import OUT, streams
from elasticrt.run_options import RunOptions
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.workers.environment import worker_environment
from tests.compat import flags as page
from tests.compat.flags import TAKEN


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def _configure(*argv: str, env: dict[str, str] | None = None) -> tuple[Settings, RunSpec]:
    arguments = build_parser().parse_args(["run", *argv])
    return configure(options_given(arguments, env or {}), arguments.script, arguments.arguments, env or {})


def _setting(name: str) -> Callable[[Settings, RunSpec], Any]:
    return lambda settings, _: attrgetter(name)(settings)


def _agreed(name: str) -> Callable[[Settings, RunSpec], Any]:
    return lambda _, spec: attrgetter(name)(spec)


@dataclass(frozen=True)
class Case:
    """A flag with a value ("" for none), what it changes and to what, and what else is on the command line."""

    flag: str
    value: str
    look: Callable[[Settings, RunSpec], Any]
    expected: Any
    others: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)


def _shown(settings: Settings, _: RunSpec) -> list[frozenset[str]]:
    return [settings.options.hidden.of(local_rank) for local_rank in range(settings.workers)]


TWO = ("--nproc-per-node", "2")
HERE = "10.0.0.9:29411"
OURS = ("--rdzv-conf", "is_host=1")
CASES = [
    Case("--nnodes", "2:5", lambda _, spec: (spec.min_nodes, spec.max_nodes), (2, 5)),
    Case("--nproc-per-node", "3", _setting("workers"), 3),
    Case(
        "--rdzv-backend",
        "etcd-v3",
        lambda settings, _: (settings.serve is None, len(settings.etcd)),
        (True, 1),
        ("--rdzv-endpoint", HERE, *OURS, "--insecure-etcd"),
    ),
    Case("--rdzv-endpoint", HERE, lambda settings, _: str(settings.serve), f"http://{HERE}", OURS),
    Case("--rdzv-id", "calm-fox", _setting("run_id"), "calm-fox"),
    Case("--rdzv-conf", "join_timeout=7,last_call_timeout=3", _agreed("join_timeout_s"), 7.0),
    Case("--standalone", "", _setting("serve"), None, ("--rdzv-endpoint", HERE, *OURS)),
    Case("--max-restarts", "7", lambda _, spec: (spec.max_restarts, spec.restarts_reset), (7, False)),
    Case(
        "--monitor-interval", "5", lambda settings, _: ["--monitor" in note for note in settings.options.notes], [True]
    ),
    Case("--start-method", "spawn", _setting("start_method"), "exec"),
    Case("--role", "trainer", lambda settings, spec: (settings.options.role, spec.role), ("trainer", "trainer")),
    Case("--module", "", _setting("command.kind"), "module"),
    Case("--no-python", "", _setting("command.kind"), "program"),
    Case("--log-dir", "/logs", _setting("run_dir"), Path("/logs/calm-fox"), ("--rdzv-id", "calm-fox")),
    Case("--redirects", "1:1", _shown, [frozenset(), frozenset({OUT})], TWO),
    Case("--tee", "3", _setting("options.prefix"), "[${role_name}${local_rank}]:", TWO),
    Case("--local-ranks-filter", "0,12", _setting("options.local_ranks_filter"), frozenset({0, 12})),
    Case("--node-rank", "2", _setting("options.node_rank"), 2),
    Case(
        "--master-addr",
        "10.0.0.9",
        lambda settings, _: str(settings.serve),
        "http://10.0.0.9:29500",
        ("--nnodes", "2", *OURS),
    ),
    Case(
        "--master-port",
        "29412",
        lambda settings, _: (settings.serve, settings.run_id),
        (None, "127.0.0.1-29412"),
        ("--nnodes", "2"),
    ),
    Case("--local-addr", "127.0.0.7", _setting("address"), "127.0.0.7"),
    Case(
        "--signals-to-handle",
        "SIGTERM,SIGUSR1",
        lambda settings, _: [number.name for number in settings.options.signals],
        ["SIGTERM", "SIGUSR1"],
    ),
    Case("--shutdown-timeout", "42", lambda s, _: (s.stop_timeout_s, s.restart_grace_s), (42.0, 42.0)),
    Case("--virtual-local-rank", "", _setting("gpus"), ("4", "6"), TWO, {"CUDA_VISIBLE_DEVICES": "4, 6"}),
]


def _spellings(case: Case) -> list[tuple[list[str], dict[str, str]]]:
    """All ways of giving a flag: words and variables."""
    names = {case.flag, "--" + case.flag[2:].replace("-", "_")}
    if case.value:
        ways = [([name, case.value], {}) for name in names] + [([f"{name}={case.value}"], {}) for name in names]
    else:
        ways = [([name], {}) for name in names]
    ways.append(([], {"PET_" + case.flag[2:].replace("-", "_").upper(): case.value or "1"}))
    return ways


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.flag)
def test_leaving_it_out_changes_something(case: Case) -> None:
    """However the flag is given, it has its meaning; without it there is another value."""
    without = case.look(*_configure(*case.others, "train.py", env=case.env))
    assert without != case.expected
    for words, variables in _spellings(case):
        script = "env" if case.flag == "--no-python" else "train.py"  # A program has to be one.
        given = case.look(*_configure(*case.others, *words, script, env={**case.env, **variables}))
        assert given == case.expected, (words, variables)


def test_the_table_has_all_flags_of_this_torch() -> None:
    """torchrun's own parser, walked: each flag is in the table, taken or refused, and has a case."""
    from torch.distributed.run import get_args_parser

    theirs = set()
    for action in get_args_parser()._actions:
        long = [name for name in action.option_strings if name.startswith("--") and "_" not in name]
        if long and long != ["--help"]:
            theirs.add(max(long, key=len))
    assert {*TAKEN, *REFUSED} == theirs
    assert {case.flag for case in CASES} == set(TAKEN)


def test_every_spelling_of_torchrun_is_known() -> None:
    """Dashes, underscores and the letters -m, -r, -t: all of torchrun's spellings are ours too."""
    from torch.distributed.run import get_args_parser

    known = set(build_parser()._commands()["run"]._option_string_actions)
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert theirs - known == set()


def test_what_is_refused_says_why_and_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused flag: one line with the reason and the replacement, exit code 2."""
    for flag in REFUSED:
        assert main(["run", flag, "x", "train.py"]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert flag in line
        assert "Use " in line


def test_what_is_refused_is_refused_as_a_variable() -> None:
    """PET_<NAME> of a refused flag is refused as well, unless it says what is so anyway."""
    with pytest.raises(ConfigError, match=r"PET_EVENT_LOG_HANDLER.* Use "):
        _configure("train.py", env={"PET_EVENT_LOG_HANDLER": "console"})
    _configure("train.py", env={"PET_EVENT_LOG_HANDLER": "null", "PET_RUN_PATH": "0"})


def test_the_command_line_wins_over_ours_and_theirs() -> None:
    """The command line, then ELASTICRT_<NAME>, then PET_<NAME>; each overrules its variables."""
    env = {"ELASTICRT_RUN_ID": "ours", "PET_RDZV_ID": "theirs", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "4"}
    assert _configure("--rdzv-id", "given", "train.py", env=env)[0].run_id == "given"
    settings, spec = _configure("--nnodes", "1", "--nproc-per-node", "2", "train.py", env=env)
    assert (settings.run_id, settings.workers, spec.max_nodes) == ("ours", 2, 1)
    assert _configure("train.py", env=env)[1].max_nodes == 4
    on, off = ({"PET_STANDALONE": word, "PET_RDZV_ENDPOINT": HERE, "PET_RDZV_CONF": OURS[1]} for word in "10")
    assert _configure("train.py", env=on)[0].serve is None
    assert _configure("train.py", env=off)[0].serve is not None


def test_kubeflows_variables_are_a_whole_launch() -> None:
    """C-K8s: PET_* as kubeflow sets them: nodes, workers, where to meet, a place, and a name that all nodes share."""
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "23456"}
    settings, spec = _configure("train.py", env={**env, "PET_MASTER_ADDR": "localhost", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert (spec.min_nodes, spec.max_nodes, settings.workers, settings.options.node_rank) == (2, 2, 2, 1)
    assert (settings.serve, settings.run_id) == (None, "localhost-23456")


def test_one_node_leaves_the_port_to_the_script() -> None:
    """A script may use --master-port for a group of its own, as tcp://: with one node nothing of ours listens there."""
    settings, _ = _configure("--master-addr", "localhost", "--master-port", "29413", "train.py")
    assert (settings.serve, settings.etcd) == (None, ())
    assert any("29413" in note for note in settings.options.notes)


@pytest.mark.parametrize(
    ("conf", "expected"),
    [
        ({"timeout": "900"}, {"join_timeout_s": 900.0}),
        ({"timeout": "900", "join_timeout": "5"}, {"join_timeout_s": 5.0}),
        ({"last_call_timeout": "1"}, {"settle_quiet_s": 1.0, "settle_max_s": 1.0}),
        ({"keep_alive_interval": "2"}, {"lease_ttl_s": 6.0}),
        ({"keep_alive_interval": "1", "keep_alive_max_attempt": "2"}, {"lease_ttl_s": 2.0}),
        ({"is_host": "0", "store_type": "tcp"}, {"serves": False}),
        ({}, {}),
    ],
)
def test_what_rdzv_conf_means(conf: dict[str, str], expected: dict[str, Any]) -> None:
    """torchrun's keys that mean something here are our own options."""
    assert conf_options(conf) == RunOptions(**expected)


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"read_timeout": "60"}, "read_timeout"),
        ({"heartbeat_timeout": "5"}, "--lease-ttl"),
        ({"cacert": "x"}, "--etcd-ca-file"),
        ({"no_such_key": "1"}, "no_such_key"),
        ({"join_timeout": "soon"}, "a duration from 0.001s to 1000h"),
        ({"join_timeout": "-1"}, "a duration from 0.001s to 1000h"),
        ({"keep_alive_max_attempt": "0"}, "whole number"),
        (
            {"keep_alive_interval": "0.1", "keep_alive_max_attempt": "2"},
            "got 0.2 s; expected keep_alive_interval times",
        ),
        ({"is_host": "perhaps"}, "1 or 0"),
        ({"store_type": "file"}, "tcp"),
    ],
)
def test_what_rdzv_conf_cannot_mean(conf: dict[str, str], words: str) -> None:
    """Keys without a counterpart are refused by name, with what to use in their place; so are bad values."""
    with pytest.raises(ConfigError, match=words):
        conf_options(conf)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--redirects", "4", "train.py"], "--redirects"),
        (["-t", "0:5", "train.py"], "--tee"),
        (["-r", "a:1", "train.py"], "--redirects"),
        (["--local-ranks-filter", "0,x", "train.py"], "--local-ranks-filter"),
        (["--signals-to-handle", "SIGNOPE", "train.py"], "SIGNOPE"),
        (["--signals-to-handle", "SIGKILL", "train.py"], "SIGKILL"),
        (["--monitor-interval", "often", "train.py"], "--monitor-interval"),
        (["--start-method", "thread", "train.py"], "--start-method"),
        (["--rdzv-conf", "join_timeout", "train.py"], "--rdzv-conf"),
        (["--rdzv-conf", "timeout=1,timeout=2", "train.py"], "timeout"),
        (["--master-port", "0", "train.py"], "--master-port"),
        (["--node-rank", "first", "train.py"], "--node-rank"),
        (["--nproc-per-node", "xpu", "train.py"], "--nproc-per-node"),
        (["--rdzv-backend", "etcd", "--rdzv-endpoint", "h:1", "train.py"], "--etcd"),
    ],
)
def test_a_bad_value_is_one_line_and_code_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """C01: a value that makes no sense is refused by the flag's name, exit code 2, before anything is started."""
    assert main(["run", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("elasticrt: error: ")
    assert words in line


def test_without_a_place_for_logs_there_are_none() -> None:
    """--log-dir /dev/null: workers' output is not kept, and the run's directory is where it always is."""
    settings, _ = _configure("--log-dir", "/dev/null", "--rdzv-id", "x", "train.py")
    assert settings.run_dir == Path("elasticrt_runs/x").absolute()


def test_the_shutdown_timeout_of_torch() -> None:
    """TORCH_ELASTIC_SHUTDOWN_TIMEOUT counts as --shutdown-timeout, and the flag wins."""
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert _configure("train.py", env=env)[0].restart_grace_s == 7.0
    assert _configure("--shutdown-timeout", "3", "train.py", env=env)[0].stop_timeout_s == 3.0


def test_a_prefix_from_the_environment() -> None:
    """TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE is the console's prefix."""
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}> "}
    assert _configure("-t", "3", "train.py", env=env)[0].options.prefix == "<${rank}> "


def test_the_page_is_of_this_table() -> None:
    """FLAGS.md has a row for each flag, and all tests that it names exist: `python -m tests.compat.flags` renews it."""
    rows = {line.split("|")[1].strip(" `"): line for line in page.PAGE.read_text().splitlines() if line[:4] == "| `-"}
    assert list(rows) == [*TAKEN, *REFUSED]
    for flag, row in rows.items():
        assert page.meaning(flag) in row
    assert {name for names in page.SHOWN.values() for name in names if not page.exists(name)} == set()
    assert set(page.SHOWN) | set(page.DIFFERS) <= set(rows)


@pytest.mark.parametrize(
    ("words", "visible", "expected"),
    [
        (["--nproc-per-node", "auto"], "0,1,2", 3),
        (["--nproc-per-node", "auto"], "", len(os.sched_getaffinity(0))),
        (["--nproc-per-node", "cpu"], "0,1,2", len(os.sched_getaffinity(0))),
        ([], "", 1),
    ],
)
def test_workers_of_this_node(words: list[str], visible: str, expected: int) -> None:
    """torchrun's auto is the GPUs, else the CPUs; without the flag it is the GPUs, else one."""
    assert _configure(*words, "train.py", env={"CUDA_VISIBLE_DEVICES": visible})[0].workers == expected


def test_too_few_gpus_are_refused() -> None:
    """--virtual-local-rank needs a GPU for each worker."""
    with pytest.raises(ConfigError, match="--virtual-local-rank"):
        _configure(*TWO, "--virtual-local-rank", "train.py", env={"CUDA_VISIBLE_DEVICES": "3"})


def test_what_the_user_has_set_stays() -> None:
    """Threads and NCCL's error handling have torchrun's defaults, and are the user's where they are set."""
    names = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "THP_MEM_ALLOC_ENABLE")
    assert [worker_environment({}, 2, fresh=False).get(name) for name in names] == ["1", "1", "1"]
    assert [worker_environment({}, 1, fresh=False).get(name) for name in names] == [None, "1", "1"]
    assert worker_environment(dict.fromkeys(names, "0"), 2, fresh=False) == dict.fromkeys(names, "0")


def test_streams_by_local_rank() -> None:
    """A mapping names local ranks of any number, and leaves all others alone."""
    given = streams("0:3,12:2")
    assert [sorted(given.of(local_rank)) for local_rank in (0, 1, 12)] == [["err", "out"], [], ["err"]]
    assert sorted(streams("1").of(7)) == ["out"]
