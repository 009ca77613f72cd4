"""The line that brings another node: whatever this node was told, who pastes it is told the same."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from elasticrt.agent.store_discovery import OpenStore, how_to_join
from elasticrt.cli import run
from elasticrt.cli.configure import configure
from elasticrt.cli.main import build_parser
from elasticrt.option_values import options_of
from elasticrt.settings import Settings
from elasticrt.spec import RunSpec
from elasticrt.store.embedded import EmbeddedServer
from elasticrt.store.protocol import Address
from tests.memory_store import MemoryServer, MemoryStore

GIVEN = {
    "nproc_per_node": "2", "start_method": "spawn", "preload": "json,re", "role": "trainer",
    "as_srun": "1", "module": "1", "no_python": "1", "virtual_local_rank": "1",
    "stop_timeout": "7s", "hang_timeout": "9m",
    "max_restarts": "7", "join": "now", "join_timeout": "3m", "lease_ttl": "9", "drain_timeout": "8s",
    "signals_to_handle": "SIGTERM,SIGUSR1", "log_dir": "logs/$here", "redirects": "1", "tee": "0:3",
    "local_ranks_filter": "0,1",
    "etcd_ca_file": "ca.pem", "etcd_cert_file": "cert.pem", "etcd_key_file": "key.pem",
    "etcd_user": "ann", "etcd_password_file": "password", "etcd_wait": "5m",
    "rdzv_conf": "join_timeout=77,last_call_timeout=4,keep_alive_interval=3",
}  # fmt: skip
"""A value of each option that is repeated; none is the default."""

GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "ca.pem", "cert.pem", "key.pem", "password"):
        (tmp_path / name).write_text("")


def _agent(*argv: str, env: dict[str, str] | None = None) -> tuple[Settings, RunSpec]:
    """What `elasticrt run` makes of these words."""
    arguments, env = build_parser().parse_args(["run", *argv]), {**GPUS, **(env or {})}
    options = run.options_given(arguments, env)
    settings, spec = configure(options, arguments.script, arguments.arguments, env)
    return replace(settings, shared_options=run.words_given(arguments, env, without=run.OWN)), spec


def _here(settings: Settings) -> Settings:
    """Without what another node is told in other words: its line names the run."""
    options = replace(settings.options, run_id=settings.run_id)
    return replace(settings, options=options, shared_options=())


def _line(settings: Settings, spec: RunSpec) -> list[str]:
    """The words behind `elasticrt run` of the first line to paste."""
    here = Address("http", "127.0.0.1", 4242)
    served = None if settings.etcd else EmbeddedServer(here, 1, 1)
    meeting = OpenStore(MemoryStore(MemoryServer(lambda: 0.0)), settings.etcd or (here,), served, "127.0.0.1")
    line = next(line for line in how_to_join(settings, spec, meeting) if line.startswith("join from"))
    words = shlex.split(line.partition(" machine: ")[2])
    assert words[:2] == ["elasticrt", "run"]
    return words[2:]


def test_each_option_is_repeated_or_a_nodes_own() -> None:
    """An option that is new has to be said to be one or the other."""
    options = [option for kind in run.KINDS for option in options_of(kind).values()]
    assert {option.names[0][2:].replace("-", "_") for option in options if not option.own} == set(GIVEN)


@pytest.mark.parametrize("how", ["option", "ELASTICRT_"])
@pytest.mark.parametrize("name", GIVEN)
def test_who_pastes_it_gets_the_same_options(name: str, how: str) -> None:
    """A15: the pasted line, in an empty environment, makes the same agent of the same run, and repeats itself."""
    option, text = f"--{name.replace('_', '-')}", GIVEN[name]
    flag = name in {"as_srun", "module", "no_python", "virtual_local_rank"}
    script = "env" if name == "no_python" else "train.py"  # A program has to be one.
    argv = [] if how != "option" else [option] if flag else [f"{option}={text}"]
    env = {f"ELASTICRT_{name.upper()}": text} if how != "option" else {}
    size = ["--nnodes=1:3"] if how == "option" else ["--min-nodes=1", "--max-nodes=3"]
    settings, spec = _agent(*argv, *size, "--node=here", script, "--lr", "it's", "$HOME", env=env)
    assert settings.shared_options
    other, others = _agent("--node=here", *_line(settings, spec))
    assert (others, _here(other)) == (spec, _here(settings))
    assert other.shared_options == settings.shared_options


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        pytest.param(["--nproc-per-node", "2"], {}, ["--nproc-per-node", "2"], id="as it was given"),
        pytest.param([], {"PET_NPROC_PER_NODE": "2"}, ["--nproc-per-node", "2"], id="torchrun's variable"),
        pytest.param([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, ["--stop-timeout", "7"], id="another of torchrun's"),
        pytest.param(
            ["--node", "n", "--node-rank=3", "--local-addr=127.0.0.1", "--health-port=8471"], {}, [], id="own"
        ),
        pytest.param([], {"ELASTICRT_NODE": "n", "ELASTICRT_AS_SRUN": "0"}, [], id="own, and what was not asked for"),
    ],
)
def test_which_words(argv: list[str], env: dict[str, str], words: list[str]) -> None:
    """Options are repeated as they were given, also those from the environment; names and addresses are not."""
    settings, spec = _agent("--run-id=x", "--nnodes=1:3", *argv, "train.py", env=env)
    assert _line(settings, spec) == ["--run-id", "x", "--nnodes", "1:3", *words, "train.py"]


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (["--etcd=http://127.0.0.1:5"], {}, ["--etcd", "http://127.0.0.1:5"]),
        (["--etcd=http://a:5", "--insecure-etcd"], {}, ["--etcd", "http://a:5", "--insecure-etcd"]),
        ([], {"ELASTICRT_ETCD": "a:5", "ELASTICRT_INSECURE_ETCD": "1"}, ["--etcd", "http://a:5", "--insecure-etcd"]),
        (["--etcd=https://a:5"], {"ELASTICRT_INSECURE_ETCD": "1"}, ["--etcd", "https://a:5"]),
        (["--rdzv-endpoint=127.0.0.1:5"], {}, []),
        (["--rdzv-backend=etcd-v3", "--rdzv-endpoint=https://a"], {}, ["--etcd", "https://a:2379"]),
        (["--master-addr=127.0.0.1", "--master-port=7"], {}, []),
    ],
)
def test_where_it_leads(argv: list[str], env: dict[str, str], words: list[str]) -> None:
    """Etcd as this node knows it, and that it is accepted without TLS, however this node was told so.

    At an endpoint on loopback only this machine meets, by the run's id alone.
    """
    settings, spec = _agent("--run-id=x", "--nnodes=1:3", *argv, "train.py", env=env)
    line = _line(settings, spec)
    assert line == [*words, "--run-id", "x", "--nnodes", "1:3", "train.py"]
    assert list(map(str, _agent(*line)[0].etcd)) == words[1:2]


@pytest.mark.parametrize(("etcd", "whence"), [("unix:/run/etcd:0", "this"), ("127.0.0.1:5", "this"), ("a:5", "any")])
def test_from_where_it_can_be_reached(etcd: str, whence: str) -> None:
    """A socket or a port on loopback brings nodes of this machine only."""
    settings, spec = _agent("--nnodes=1:3", f"--etcd={etcd}", "--insecure-etcd", "train.py")
    meeting = OpenStore(MemoryStore(MemoryServer(lambda: 0.0)), settings.etcd, None, "127.0.0.1")
    (line,) = how_to_join(settings, spec, meeting)
    assert line.startswith(f"join from {whence} machine: elasticrt run --etcd ")


@pytest.mark.parametrize("kind", [["-m", "train"], ["--no-python", "env"]])
def test_what_kind_of_script(kind: list[str]) -> None:
    """A module stays a module, a program a program."""
    settings, spec = _agent("--nnodes=1:3", *kind, "-x")
    assert _agent(*_line(settings, spec))[1].command == spec.command
