"""The options of `elasticrt run`: what they become, and what each mistake says."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from elasticrt.cli.configure import configure, count_workers
from elasticrt.cli.main import build_parser, main
from elasticrt.cli.run import options_given
from elasticrt.errors import ConfigError
from elasticrt.run_options import RunOptions
from elasticrt.settings import Command, Settings
from elasticrt.spec import RunSpec


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()


def _configure(*argv: str, env: dict[str, str] | None = None) -> tuple[Settings, RunSpec]:
    arguments = build_parser().parse_args(["run", *argv])
    return configure(options_given(arguments, env or {}), arguments.script, arguments.arguments, env or {})


def test_defaults() -> None:
    """One node at least and at most, workers by devices, three restarts without progress, a name of its own."""
    settings, spec = _configure("train.py")
    assert (spec.min_nodes, spec.max_nodes, spec.max_restarts, spec.restarts_reset) == (1, 1, 3, True)
    assert (settings.workers, settings.etcd, settings.start_method) == (1, (), "fork")
    assert settings.run_id.count("-") == 2


def test_what_all_nodes_agree_on_comes_from_the_option_of_that_name() -> None:
    """S3: an option that is also a field of the spec needs no other line; a field without one is named here."""
    assert RunSpec.model_fields.keys() - vars(RunOptions()).keys() == {"protocol", "command", "restarts_reset"}
    _, spec = _configure("--role", "trainer", "--lease-ttl", "9s", "--join", "failure", "train.py")
    assert (spec.role, spec.lease_ttl_s, spec.join) == ("trainer", 9.0, "failure")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--nnodes", "1:4"], {"min_nodes": 1, "max_nodes": 4}),
        (["--nnodes=2"], {"min_nodes": 2, "max_nodes": 2}),
        (["--min-nodes", "1", "--max-nodes", "4"], {"min_nodes": 1, "max_nodes": 4}),
        (["--min-nodes", "3"], {"min_nodes": 3, "max_nodes": 3}),
        (["--max_nodes", "3"], {"min_nodes": 1, "max_nodes": 3}),
        (["--max_restarts", "7"], {"max_restarts": 7, "restarts_reset": False}),
        (["--max-restarts", "7"], {"max_restarts": 7, "restarts_reset": False}),
        (["--join-timeout", "2m"], {"join_timeout_s": 120.0}),
    ],
)
def test_spellings(argv: list[str], expected: dict[str, object]) -> None:
    """Our spelling, torchrun's, and underscores mean the same."""
    _, spec = _configure(*argv, "train.py")
    assert {name: getattr(spec, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("variables", "meant"),
    [
        (["ELASTICRT_MAX_NODE"], ["ELASTICRT_MAX_NODES"]),
        (["PET_NPROC_PER_NODES"], ["PET_NPROC_PER_NODE"]),
        (["ELASTICRT_MAX_NODE", "ELASTICRT_GENERATION"], []),
        (["ELASTICRT_PORT_2379_TCP_ADDR", "ELASTICRT_SERVICE_HOST", "ELASTICRT_ETCD_BIN"], []),
        (["ELASTICRT_TEST_RUN"], []),
    ],
    ids=["ours", "torchrun's", "in a worker", "of a Kubernetes Service", "the script's own"],
)
def test_misspelt_variables(variables: list[str], meant: list[str]) -> None:
    """A variable that no option reads gets a note if it is nearly the name of one that is read."""
    settings, _ = _configure("train.py", env=dict.fromkeys(variables, "3"))
    notes = [f"no option reads the variable {variables[0]}: is {name} meant?" for name in meant]
    assert list(settings.options.notes) == notes


def test_everything_after_the_script_is_the_scripts() -> None:
    """Arguments that look like our options reach the script untouched."""
    settings, _ = _configure("--nproc-per-node", "2", "train.py", "--nnodes", "9", "-m", "key=v", "+k=v", "--", "x")
    assert settings.command.argv == ("train.py", "--nnodes", "9", "-m", "key=v", "+k=v", "--", "x")
    assert settings.workers == 2


def test_environment_and_command_line() -> None:
    """Every option reads ELASTICRT_<NAME>; the command line wins; a worker's own variables are not options."""
    env = {"ELASTICRT_NNODES": "1:5", "ELASTICRT_RUN_ID": "from-env", "ELASTICRT_NODE": "n7"}
    settings, spec = _configure("--run-id", "given", "train.py", env=env)
    assert (spec.max_nodes, settings.run_id, settings.node) == (5, "given", "n7")
    inside, _ = _configure("train.py", env={**env, "ELASTICRT_GENERATION": "3"})
    assert inside.node != "n7"


@pytest.mark.parametrize(
    ("argv", "env", "expected"),
    [
        (["--nnodes", "2:3"], {"ELASTICRT_MIN_NODES": "1"}, (2, 3)),
        (["--max-nodes", "5"], {"ELASTICRT_NNODES": "2:3"}, (1, 5)),
        (["--max-nodes", "5"], {"PET_NNODES": "2"}, (1, 5)),
        (["--max-nodes", "5"], {"ELASTICRT_NNODES": "2:3", "ELASTICRT_MIN_NODES": "4"}, (4, 5)),
        ([], {"ELASTICRT_MIN_NODES": "2", "ELASTICRT_MAX_NODES": "3"}, (2, 3)),
        (["--nnodes", "2:3", "--max-nodes", "5"], {}, None),
        (["--nnodes", "2:3", "--min-nodes", "2"], {}, None),
        ([], {"ELASTICRT_NNODES": "2:3", "ELASTICRT_MAX_NODES": "5"}, None),
    ],
)
def test_two_ways_to_say_how_many(argv: list[str], env: dict[str, str], expected: tuple[int, int] | None) -> None:
    """A way on the command line overrules the variables of the other; both in one place are refused."""
    if expected is None:
        with pytest.raises(ConfigError, match="say the same thing twice"):
            _configure(*argv, "train.py", env=env)
        return
    _, spec = _configure(*argv, "train.py", env=env)
    assert (spec.min_nodes, spec.max_nodes) == expected


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ([], {}),
        ([], {"ELASTICRT_LOG_DIR": "ours", "PET_LOG_DIR": "theirs"}),
        ([], {"PET_LOG_DIR": "theirs"}),
        ([], {"ELASTICRT_LOG_DIR": ""}),
        ([], {"ELASTICRT_LOG_DIR": "/dev/null"}),
        (["--log-dir", "/dev/null"], {"ELASTICRT_LOG_DIR": "ours"}),
        (["--log-dir", "typed"], {"PET_LOG_DIR": "theirs"}),
    ],
)
@pytest.mark.parametrize("command", ["status", "report", "runs"])
def test_views_look_where_runs_write(
    command: str, argv: list[str], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same options and variables a view finds what `run` has written, also where no output is kept."""
    for name in ("ELASTICRT_LOG_DIR", "PET_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    settings, _ = _configure(*argv, "train.py", env=env)
    assert Path(build_parser().parse_args([command, *argv]).log_dir).absolute() == settings.run_dir.parent


NO_ADDRESSES_OF_OURS = ("192.0.2.1", "no.such.host.invalid", "", "a..b", "caf\udce9", "[::", "10.0.0.256", "a" * 64)
"""Another machine's, a name that nobody has, and what can't be either."""

NOBODYS = ("0.0.0.0", "0", "[::]", "224.0.0.1")
"""Addresses that a socket can be bound to, and at which no other node comes to this one."""


@pytest.mark.parametrize(
    ("argv", "served", "etcd"),
    [
        (["--etcd", "http://127.0.0.1:1,127.0.0.1:2"], None, ["http://127.0.0.1:1", "http://127.0.0.1:2"]),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], None, []),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29411"], None, []),
        (["--rdzv-endpoint", "localhost", "--rdzv-conf", "is_host=0"], None, []),
        (["--rdzv-endpoint", "10.0.0.1", "--rdzv-conf", "is_host=1"], "http://10.0.0.1:29400", []),
        (["--etcd", "unix:/run/me/etcd:0"], None, ["unix:/run/me/etcd:0"]),
        (["--rdzv-backend", "etcd-v3", "--rdzv-endpoint", "127.0.0.1:5"], None, ["http://127.0.0.1:5"]),
        (["--standalone"], None, []),
    ],
)
def test_where_etcd_is(argv: list[str], served: str | None, etcd: list[str]) -> None:
    """Endpoints are used, an address of this machine is served, nothing means this machine's own."""
    settings, _ = _configure(*argv, "train.py")
    assert (str(settings.serve) if settings.serve else None) == served
    assert [str(address) for address in settings.etcd] == etcd


@pytest.mark.parametrize(
    ("argv", "again"),
    [
        (["--rdzv-endpoint", "localhost:29400"], True),
        (["--master-addr", "127.0.0.1"], True),
        (["--rdzv-endpoint", "localhost:29400", "--rdzv-id", "digits"], False),
        (["--run-id", "digits"], False),
    ],
)
def test_a_run_that_is_named_after_its_endpoint_trains_again(argv: list[str], again: bool) -> None:
    """The same command of torchrun a second time is another training; only a run id means the run of before."""
    settings, _ = _configure("--nnodes", "1:2", *argv, "train.py")
    assert settings.options.again == again


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nnodes", "0", "train.py"], "--nnodes"),
        (["--min-nodes", "3", "--max-nodes", "2", "train.py"], "--min-nodes, --max-nodes"),
        (["--min-nodes", "0", "train.py"], "--min-nodes"),
        (["--run-id", "", "train.py"], "got ''"),
        (
            ["--log-dir", "/proc/x", "train.py"],
            "the log directory cannot be used (--log-dir): got /proc: No such file or directory",
        ),
        (["--log-dir", "train.py/x", "train.py"], "--log-dir"),
        (["--log-dir", "x" * 300, "train.py"], "the log directory cannot be used (--log-dir)"),
        (["--nnodes", "1:2", "--max-nodes", "4", "train.py"], "say the same thing twice"),
        (["--nnodes", "-1", "train.py"], "nnodes"),
        (["--nnodes", "2:1", "train.py"], "(--nnodes): got 2:1; expected MIN <= MAX, as in 1:4"),
        (["--nnodes", "a:b", "train.py"], "--nnodes"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes"),
        (["--nnodes", "", "train.py"], "--nnodes"),
        (["--nnodes", "1e3", "train.py"], "--nnodes"),
        (["--nnodes", "1000000000", "train.py"], "--nnodes"),
        (["--standalone", "--nnodes", "2:4", "train.py"], "--standalone"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node"),
        (["--nproc-per-node", "-1", "train.py"], "nproc-per-node"),
        (["--nproc-per-node", "foo", "train.py"], "--nproc-per-node"),
        (["--lease-ttl", "0", "train.py"], "--lease-ttl"),
        (["--lease-ttl", "0.5s", "train.py"], "--lease-ttl"),
        (["--lease-ttl", "2h", "train.py"], "--lease-ttl"),
        (["--lease-ttl", "nan", "train.py"], "--lease-ttl"),
        (["--join-timeout", "-5", "train.py"], "join-timeout"),
        (["--join-timeout", "5 minutes", "train.py"], "--join-timeout"),
        (["--join-timeout", "1000000000h", "train.py"], "--join-timeout"),
        (["--run-id", "", "train.py"], "--run-id"),
        (["--run-id", "../x", "train.py"], "--run-id"),
        (["--run-id", "a/b", "train.py"], "--run-id"),
        (["--run-id", "x" * 300, "train.py"], "--run-id"),
        (["--run-id", "j\u043eb", "train.py"], "--run-id"),
        (["--run-id", "job\n", "train.py"], "--run-id"),
        (["--node", "..", "train.py"], "--node"),
        (["--etcd", "", "train.py"], "--etcd"),
        (["--etcd", "http://", "train.py"], "etcd"),
        (["--etcd", "ftp://a:1", "train.py"], "etcd"),
        (["--etcd", "127.0.0.1:0", "train.py"], "etcd"),
        (["--etcd", "127.0.0.1:70000", "train.py"], "etcd"),
        (["--etcd", "127.0.0.1:1,,127.0.0.1:2", "train.py"], "etcd"),
        (["--etcd", "http://etcd.example:2379", "train.py"], "--insecure-etcd"),
        *((["--local-addr", host, "train.py"], "--local-addr") for host in NO_ADDRESSES_OF_OURS),
        *((["--local-addr", host, "train.py"], "--local-addr") for host in NOBODYS),
        *((["--health-port", f"{host}:1", "train.py"], "--health-port") for host in NO_ADDRESSES_OF_OURS[2:]),
        *((["--etcd", f"{host}:1", "train.py"], "--etcd") for host in NO_ADDRESSES_OF_OURS[2:]),
        *((["--rdzv-endpoint", f"{host}:1", "train.py"], "(--rdzv-endpoint)") for host in NO_ADDRESSES_OF_OURS[2:]),
        (["--etcd-ca-file", "missing.pem", "train.py"], "missing.pem"),
        (["--rdzv-backend", "etcd-v2", "train.py"], "--rdzv-backend"),
        (["--node-check", "foo'", "train.py"], "--node-check"),
        (["--node-check", "missing-program --fast", "train.py"], "not a program (--node-check missing-program)"),
        (["--join", "later", "train.py"], "--join"),
        ([], "script"),
        ([""], "script"),
        (["missing.py"], "missing.py"),
        (["folder"], "folder"),
        (["-m", "missing.part"], "no such module (missing.part)"),
        (["-m", ".train"], "no such module (.train)"),
        (["-m", "--no-python", "train.py"], "--no-python"),
        (["--nnode", "3", "train.py"], "--nnodes"),
        (["--nonsense", "train.py"], "--nonsense"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """FAULTS section 4: one line that names the option, exit code 2, no traceback, nothing started."""
    assert main(["run", *argv]) == 2
    assert words in _whole(capsys)


def _whole(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr, which says what is wrong, where, what was expected, and one remedy."""
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.fullmatch(r"elasticrt: error: .+ \(.+\): (got .+; )?expected .+\. [A-Z`].+", line), line
    return line


def test_a_password_in_a_url_is_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """C12: user info in an endpoint is refused, and the message does not show it."""
    assert main(["run", "--etcd", "https://me:hunter2@etcd.example:2379", "train.py"]) == 2
    assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "visible", "expected"),
    [(3, None, 3), ("auto", "0,1", 2), (None, "0,1", 2), (None, "", 1), ("gpu", "0", 1), (None, "-1", 1)],
)
def test_workers_are_counted_by_what_is_visible(wanted: int | str | None, visible: str | None, expected: int) -> None:
    """The number of visible GPUs, else 1 where nothing is said; a number is itself."""
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_workers(wanted, env) == expected


def test_gpu_without_any_is_refused() -> None:
    """--nproc-per-node gpu on a machine without one says so."""
    with pytest.raises(ConfigError, match="no GPU"):
        count_workers("gpu", {"CUDA_VISIBLE_DEVICES": ""})


def test_a_name_that_means_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """N13: where the machine's own name is 127.0.1.1, other nodes can't come to it; one node alone has no others."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
    with pytest.raises(
        ConfigError, match=r"at which only this machine can be reached \(--local-addr\): got alpha, which is 127.0.1.1"
    ):
        _configure("--local-addr", "alpha", "--nnodes", "2", "train.py")
    assert _configure("--local-addr", "alpha", "train.py")[0].address == "127.0.1.1"
    assert _configure("--local-addr", "127.0.1.1", "--nnodes", "2", "train.py")[0].address == "127.0.1.1"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["rn", "train.py"], "Did you mean `elasticrt run`?"),
        (["stat", "--run-id", "x"], "Did you mean `elasticrt status`?"),
        (["train.py"], "Did you mean `elasticrt run train.py`?"),
        (["--nnodes", "2", "train.py"], "Write elasticrt COMMAND [options]"),
        (["ledger", "chek", "."], "Did you mean `elasticrt ledger check`?"),
        (["run", "--nproc", "2", "train.py"], "Did you mean --nproc-per-node?"),
        (["run", "--nproc=2", "train.py"], "Did you mean --nproc-per-node?"),
        (["run", "--lease_tll", "3", "train.py"], "Did you mean --lease-ttl?"),
        (["run", "--nodes", "3", "train.py"], "Did you mean --nnodes?"),
        (["run", "--settle", "3", "train.py"], "See `elasticrt run --help`"),
        (["simulate"], "nothing to run (SCRIPT)"),
        (["run", "--nproc-per-node", "two", "train.py"], "See `elasticrt run --help`"),
        (["status", "--run-id", "x", "--etcd", "ftp://a"], "--etcd"),
        (["status"], "no run was named (RUN)"),
        (["drain", "n1"], "no run was named (RUN)"),
        (["stop"], "no run was named (RUN)"),
        (["resize", "2:8"], "no run was named (RUN)"),
        (["resize", "2-8", "--run-id", "x"], "(MIN:MAX): got 2-8; expected a number of nodes, or MIN:MAX"),
        (["resize", "8:2", "--run-id", "x"], "(MIN:MAX): got 8:2"),
        (["resize", "-1:2", "x"], "(MIN:MAX): got -1:2"),
        (["run", "--nnodes", "-1:2", "train.py"], "(--nnodes): got -1:2"),
        (["etcd", "--listen", "2379"], "(--listen): got 2379; expected HOST:PORT"),
        (["ledger", "check"], "DIR"),
        (["etcd", "--listen", "foo:bar"], "expected HOST:PORT with a port from 1 to 65535"),
        (["dashboard", "--listen", "foo"], "(--listen): got foo; expected [HOST:]PORT with a port from 0 to 65535"),
        (["logs", "calm-fox", "x"], "(RANK): got x; expected a whole number from 0"),
        (["run", "--nnodes", "2:2", "--standalone", "train.py"], "(--standalone): got a minimum of 2 nodes"),
        (["run", "--min-nodes", "3", "--max-nodes", "2", "train.py"], "(--min-nodes, --max-nodes): got 3 and 2;"),
        (["etcd", "--cert-file", "x"], "Give the missing one"),
        (["run", "--rdzv-conf", "a=b", "train.py"], "(--rdzv-conf a): got b; expected one of join_timeout, timeout"),
    ],
)
def test_a_commands_likeliest_mistakes(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """FAULTS section 4: a slip of the finger is one line that says what was meant or wanted, exit code 2."""
    assert main(argv) == 2
    assert words in _whole(capsys)


def test_local_rank_in_arguments() -> None:
    """`${local_rank}` stands for the worker's local rank, as under torchrun; everything else stays as it is."""
    command = Command(("train.py", "--rank=${local_rank}", "${oc.env:HOME}", "$local_rank", "$$"))
    assert command.of_worker(3) == ["train.py", "--rank=3", "${oc.env:HOME}", "$local_rank", "$$"]


def test_options_behind_the_script_are_its_own_and_said_to_be() -> None:
    """Who writes --nproc-per-node behind the script gets one worker, and is told why."""
    settings, _ = _configure("train.py", "--nproc_per_node=2", "--epochs", "3")
    assert settings.command.argv == ("train.py", "--nproc_per_node=2", "--epochs", "3")
    (note,) = settings.options.notes
    assert note.startswith(
        "--nproc_per_node=2 comes after SCRIPT, so elasticrt does not read it. Options go before SCRIPT"
    )


@pytest.mark.parametrize(
    "words", [[], ["simulate"], ["etcd"], ["status"], ["drain"], ["resize"], ["ledger", "check"], ["run"]]
)
def test_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each command shows itself in use."""
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    shown = capsys.readouterr().out
    assert not words or "example" in shown.replace("\n", " ")
    assert not words or f"elasticrt {' '.join(words)} " in shown.partition("example")[2]
