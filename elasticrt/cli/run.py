"""`elasticrt run`: one agent, on one node, of one run."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt.cli.options import Options, choice, positive_seconds, seconds, whole, workers
from elasticrt.errors import ConfigError, explain
from elasticrt.store.address import check_security, parse_endpoints
from elasticrt.store.protocol import Address, Credentials

if TYPE_CHECKING:
    from elasticrt.agent.group import Command
    from elasticrt.agent.settings import Settings
    from elasticrt.spec import RunSpec

DEFAULT_RUN_DIR = "elasticrt_runs"
C10D_PORT = 29400
"""torchrun's default port of `--rdzv-endpoint`."""

_ADJECTIVES = (
    "amber brisk calm clear deep eager fair gentle keen lively mellow nimble quiet rapid steady sunny swift warm"
)
_ANIMALS = "badger crane dolphin falcon fox gecko heron ibex jay koala lark marten newt otter panda raven seal wren"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a training script on this node, as part of an elastic run",
        description="Start this node's agent. Every option also reads ELASTICRT_<NAME>.",
        allow_abbrev=False,
    )
    options = declare(parser)
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the training script (with -m: a module)")
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments, passed on as they are"
    )
    parser.set_defaults(func=lambda arguments: main(arguments, options))


def declare(parser: argparse.ArgumentParser) -> Options:
    """All options but the script, for `run` and for commands that pass them on."""
    options = Options(parser)
    add, flag = options.add, options.flag
    add("--min-nodes", parse=whole(1, 100_000), value="N", text="train with at least so many nodes (default: 1)")
    add("--max-nodes", parse=whole(1, 100_000), value="N", text="and at most so many (default: the minimum)")
    add("--nnodes", value="MIN:MAX", text="both in one, as torchrun has it")
    add("--workers-per-node", parse=workers, value="K", text="worker processes per node; auto: GPUs, else 1")
    add("--nproc-per-node", parse=workers, value="K", text="the same, as torchrun has it")
    add("--run-id", "--rdzv-id", value="ID", text="the run's name; without one, a new one is made up and printed")
    declare_etcd(options)
    flag("--standalone", text="a run of this node only, with a name of its own")
    add("--node", value="NAME", text="this node's name (default: the host name)")
    add("--local-addr", value="ADDRESS", text="the address at which the other nodes reach this one")
    add("--max-restarts", parse=whole(0, 10**6), value="N", text="restarts in all (default: 3 without new commits)")
    add(
        "--join", parse=choice("now", "budget", "failure"), default="budget", value="WHEN", text="when newcomers get in"
    )
    add("--join-timeout", parse=positive_seconds, default=600.0, value="T", text="wait so long for the minimum")
    add("--lease-ttl", parse=positive_seconds, default=5.0, value="T", text="a silent node is gone after so long")
    add("--settle", parse=seconds, default=0.5, value="T", text="quiet time before the first generation")
    add("--stop-timeout", "--shutdown-timeout", parse=seconds, default=10.0, value="T", text="from SIGTERM to SIGKILL")
    add("--drain-timeout", parse=seconds, default=15.0, value="T", text="from SIGTERM to leaving without a handover")
    add("--hang-timeout", parse=seconds, default=600.0, value="T", text="no step for so long is a failure; 0: never")
    add("--run-dir", "--log-dir", value="DIR", text=f"logs and events (default: {DEFAULT_RUN_DIR}/<run id>)")
    add("--start-method", parse=choice("fork", "spawn"), default="fork", value="HOW", text="fork: from a warm process")
    add("--preload", default="", value="MODULES", text="modules to import in the warm process, with commas")
    add("--role", default="default", value="NAME", text="ROLE_NAME of the workers")
    flag("--module", "-m", text="SCRIPT is a module, as with python -m")
    flag("--no-python", text="SCRIPT is a program, not Python")
    flag("--again", text="run once more although this run id has succeeded")
    flag("--fresh", text="do not resume from the checkpoint directory")
    add("--etcd-linger", parse=seconds, default=30.0, value="T", text=argparse.SUPPRESS)
    add("--events-fd", parse=whole(3, 1 << 20), default=-1, value="FD", text=argparse.SUPPRESS)
    return options


def declare_etcd(options: Options) -> None:
    """Where etcd is and how to authenticate, for every command that talks to a run."""
    add = options.add
    add("--etcd", value="ENDPOINTS", text="etcd, e.g. https://a:2379,https://b:2379; without it, one on this machine")
    add("--rdzv-backend", value="WORD", text="c10d: serve etcd at --rdzv-endpoint; elasticrt or etcd-v3: it is an etcd")
    add("--rdzv-endpoint", value="HOST:PORT", text="as torchrun has it")
    options.flag("--insecure-etcd", text="accept an etcd on another machine without TLS")
    add("--etcd-ca-file", value="FILE", text="certificate authority of etcd")
    add("--etcd-cert-file", value="FILE", text="this client's certificate")
    add("--etcd-key-file", value="FILE", text="and its key")
    add("--etcd-user", value="NAME", text="user name, with --etcd-password-file")
    add("--etcd-password-file", value="FILE", text="a file that holds the password")


def main(arguments: argparse.Namespace, options: Options) -> int:
    """Run the agent; its exit code."""
    values = options.read(arguments, os.environ)
    settings, spec = configure(values, arguments.script, arguments.arguments, os.environ)
    from elasticrt.agent.agent import Agent

    if values["fresh"]:
        os.environ["ELASTICRT_FRESH"] = "1"
    return Agent(settings, spec).run()


def configure(
    values: Mapping[str, Any], script: str | None, arguments: list[str], env: Mapping[str, str]
) -> tuple[Settings, RunSpec]:
    """Everything the agent needs, checked. Raises ConfigError before anything has been started or asked."""
    from elasticrt.agent.settings import Settings
    from elasticrt.spec import RunSpec, check_name

    least, most = _nodes(values)
    command = _command(values, script, arguments)
    etcd, serve = where_etcd_is(values)
    check_security(etcd, values["insecure_etcd"])
    run_id = _run_id(values)
    node = values["node"] or _host_name()
    run_dir = Path(values["run_dir"] or Path(DEFAULT_RUN_DIR) / run_id).absolute()
    spec = RunSpec(
        min_nodes=least,
        max_nodes=most,
        command=(command.kind, *command.argv),
        max_restarts=3 if values["max_restarts"] is None else values["max_restarts"],
        restarts_reset=values["max_restarts"] is None,
        join_timeout_s=values["join_timeout"],
        lease_ttl_s=max(1.0, values["lease_ttl"]),
        join=values["join"],
        settle_quiet_s=values["settle"],
        settle_max_s=max(3.0, values["settle"]),
    )
    settings = Settings(
        run_id=run_id,
        node=check_name(node, "--node"),
        node_given=values["node"] is not None,
        address=values["local_addr"],
        workers=count_workers(values["nproc_per_node"] or values["workers_per_node"] or "auto", env),
        command=command,
        start_method="exec" if values["start_method"] == "spawn" or command.kind == "program" else "fork",
        preload=tuple(filter(None, values["preload"].split(","))),
        etcd=etcd,
        credentials=read_credentials(values),
        serve=serve,
        again=values["again"],
        run_dir=run_dir,
        max_restarts=spec.max_restarts,
        stop_timeout_s=values["stop_timeout"],
        etcd_linger_s=values["etcd_linger"],
        drain_timeout_s=values["drain_timeout"],
        hang_timeout_s=values["hang_timeout"],
        role=values["role"],
        events_fd=values["events_fd"],
    )
    return settings, spec


def count_workers(wanted: int | str, env: Mapping[str, str]) -> int:
    """Workers on this node. Devices are counted without importing torch: by what the driver shows."""
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu":
        return os.cpu_count() or 1
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    else:
        devices = len([entry for entry in Path("/dev").glob("nvidia[0-9]*") if entry.name[6:].isdigit()])
    if wanted == "gpu" and not devices:
        raise ConfigError(
            explain(
                "no GPU is visible", "--workers-per-node gpu", expected="at least one", remedy="Use auto or a number"
            )
        )
    return devices or 1


def _nodes(values: Mapping[str, Any]) -> tuple[int, int]:
    from elasticrt.spec import check_nodes, parse_nodes

    if values["nnodes"] is not None:
        if values["min_nodes"] is not None or values["max_nodes"] is not None:
            raise ConfigError(
                "--nnodes and --min-nodes/--max-nodes say the same thing twice (--nnodes). Use one of them"
            )
        return parse_nodes(values["nnodes"], "--nnodes")
    least = values["min_nodes"] if values["min_nodes"] is not None else 1
    most = values["max_nodes"] if values["max_nodes"] is not None else least
    check_nodes(least, most, "--min-nodes, --max-nodes")
    return least, most


def _command(values: Mapping[str, Any], script: str | None, arguments: list[str]) -> Command:
    from elasticrt.agent.group import Command

    if values["module"] and values["no_python"]:
        raise ConfigError("a module is Python, so --no-python does not go with it (-m, --no-python). Use one of them")
    if script is None:
        raise ConfigError("nothing to run (elasticrt run). Name a script: elasticrt run [options] train.py [args]")
    argv = (script, *arguments)
    if values["module"]:
        return Command(argv=argv, kind="module")
    if values["no_python"]:
        return Command(argv=argv, kind="program")
    path = Path(script)
    if not path.exists():
        raise ConfigError(
            explain(
                "no such script",
                script,
                got=f"no file at {path.absolute()}",
                expected="a Python file",
                remedy="Check the path",
            )
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(
            explain("not a script", script, got="a directory", expected="a Python file", remedy="Name the file")
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(
            explain("a script that cannot be read", script, expected="read permission", remedy=f"chmod +r {script}")
        )
    return Command(argv=argv, kind="script")


def where_etcd_is(values: Mapping[str, Any]) -> tuple[tuple[Address, ...], Address | None]:
    """Endpoints to use, or the address to serve an embedded etcd at (both empty: on loopback, by the run id).

    Raises ConfigError.
    """
    backend, endpoint = values["rdzv_backend"], values["rdzv_endpoint"]
    if backend not in (None, "", "static", "c10d", "elasticrt", "etcd-v3"):
        raise ConfigError(
            explain(
                "a rendezvous backend that elasticrt does not have",
                "--rdzv-backend",
                got=backend,
                expected="c10d, elasticrt or etcd-v3",
                remedy="Agents meet in etcd v3: use --etcd ENDPOINTS",
            )
        )
    if values.get("standalone"):
        return (), None
    if values["etcd"]:
        return parse_endpoints(values["etcd"]), None
    if not endpoint:
        return (), None
    if backend in ("elasticrt", "etcd-v3"):
        return parse_endpoints(endpoint), None
    text = endpoint if ":" in endpoint.rpartition("]")[2] else f"{endpoint}:{C10D_PORT}"
    host, _, port = text.rpartition(":")
    if host in ("localhost", "127.0.0.1") and port == "0":
        return (), None
    (address,) = parse_endpoints(text)[:1]
    return ((), address) if _is_ours(address.host) else ((address,), None)


def _is_ours(host: str) -> bool:
    """Whether this machine owns the address: then a socket can be bound to it."""
    try:
        for family, kind, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.bind(where)
                return True
    except OSError:
        return False
    return False


def _run_id(values: Mapping[str, Any]) -> str:
    from elasticrt.spec import check_name

    if values["run_id"] is not None and not values["standalone"]:
        return check_name(values["run_id"], "--run-id")
    adjectives, animals = _ADJECTIVES.split(), _ANIMALS.split()
    return f"{secrets.choice(adjectives)}-{secrets.choice(animals)}-{secrets.randbelow(90) + 10}"


def _host_name() -> str:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return name.lstrip(".")[:100] or "node"


def read_credentials(values: Mapping[str, Any]) -> Credentials:
    """How to authenticate to etcd. Raises ConfigError for files that cannot be read."""
    for name in ("etcd_ca_file", "etcd_cert_file", "etcd_key_file", "etcd_password_file"):
        path = values[name]
        if path is not None and not os.access(path, os.R_OK):
            raise ConfigError(
                explain(
                    "a file that cannot be read", f"--{name.replace('_', '-')}", got=path, expected="a readable file"
                )
            )
    return Credentials(
        ca_file=values["etcd_ca_file"],
        cert_file=values["etcd_cert_file"],
        key_file=values["etcd_key_file"],
        user=values["etcd_user"],
        password_file=values["etcd_password_file"],
    )
