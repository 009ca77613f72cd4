"""`elasticrt run`: one agent, on one node, of one run."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt.cli import output_options
from elasticrt.cli.etcd_options import (
    declare_etcd,
    declare_meeting,
    etcd_runs,
    etcd_wait_s,
    own_address,
    read_credentials,
    where_etcd_is,
)
from elasticrt.cli.options import (
    Options,
    choice,
    count,
    positive_seconds,
    seconds,
    signals,
    start_method,
    whole,
    workers,
)
from elasticrt.cli.slurm import Slurm, alone, placed
from elasticrt.cli.torchrun_flags import FLAGS, in_our_words
from elasticrt.errors import ConfigError, explain
from elasticrt.store.address import check_host, check_security

if TYPE_CHECKING:
    from elasticrt.settings import Command, Settings
    from elasticrt.spec import RunSpec

OWN = frozenset({
    "node", "node_rank", "local_addr", "health_port", "health_host", "again", "monitor_interval",
    # The line that brings another node says these in its own way: the run, how many nodes, where they meet, the script.
    "run_id", "standalone", "nnodes", "min_nodes", "max_nodes", "etcd", "insecure_etcd", "rdzv_backend",
    "rdzv_endpoint", "master_addr", "master_port", "use_env", "local_rank_argument",
    "etcd_linger", "events_fd",
})  # fmt: skip
"""Options that another node of the run is not told: they are this node's own. All others are repeated."""

_ADJECTIVES = (
    "amber brisk calm clear deep eager fair gentle keen lively mellow nimble quiet rapid steady sunny swift warm"
)
_ANIMALS = "badger crane dolphin falcon fox gecko heron ibex jay koala lark marten newt otter panda raven seal wren"


EXAMPLES = """\
examples:
  elasticrt run --nproc-per-node 2 train.py --epochs 10       two workers on this machine
  elasticrt run --min-nodes 1 --max-nodes 4 train.py          prints the line that brings more nodes
  elasticrt run --etcd http://10.0.0.5:2379 --insecure-etcd --run-id digits --nnodes 1:4 train.py    on every machine

"""
BEFORE_THE_SCRIPT = frozenset({
    "--nproc-per-node", "--nnodes", "--min-nodes", "--max-nodes", "--run-id", "--rdzv-id",
    "--etcd", "--rdzv-endpoint", "--rdzv-backend", "--max-restarts",
})  # fmt: skip
"""Few scripts have these as options of their own. Who writes them behind the script is told where they go."""

ORDER = "Options go before SCRIPT; what follows it is the script's."


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "run",
        help="run a training script on this node, as part of an elastic run",
        description="Start this node's agent. Every option also reads ELASTICRT_<NAME>, and torchrun's PET_<NAME>.",
        epilog=EXAMPLES + ORDER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    _declare_nodes(options)
    _declare_workers(options)
    output_options.declare(options)
    options.section("etcd")
    declare_etcd(options)
    declare_meeting(options)
    options.add("--etcd-linger", parse=seconds, default=30.0, value="T", text=argparse.SUPPRESS)
    options.add("--events-fd", parse=whole(3, 1 << 20), default=-1, value="FD", text=argparse.SUPPRESS)
    for refused in (each for each in FLAGS if not each.option):
        options.refuse(refused.name, refused.meaning)
    return options


def _declare_nodes(options: Options) -> None:
    add, flag = options.add, options.flag
    options.section("nodes")
    add("--min-nodes", parse=whole(1, 100_000), value="N", text="train with at least so many nodes (default: 1)")
    add("--max-nodes", parse=whole(1, 100_000), value="N", text="and at most so many (default: the minimum)")
    add("--nnodes", value="MIN:MAX", text="both in one, as torchrun has it", rivals=("min_nodes", "max_nodes"))
    add("--run-id", "--rdzv-id", value="ID", text="the run's name; without one, a new one is made up and printed")
    flag("--standalone", text="a run of this node only, with a name of its own")
    add("--node", value="NAME", text="this node's name (default: the host name)")
    add(
        "--node-rank",
        parse=whole(0, 100_000),
        value="N",
        text="where this node would like to sit",
    )
    add("--local-addr", value="ADDRESS", text="the address at which the other nodes reach this one")
    add("--max-restarts", parse=whole(0, 10**6), value="N", text="restarts in all (default: 3 without new commits)")
    add(
        "--join", parse=choice("now", "budget", "failure"), default="budget", value="WHEN", text="when newcomers get in"
    )
    add("--join-timeout", parse=positive_seconds, value="T", text="wait so long for the minimum (default: 600)")
    add("--lease-ttl", parse=positive_seconds, value="T", text="a silent node is gone after so long (default: 5)")
    add("--settle", parse=seconds, value="T", text="quiet time before the first generation (default: 0.5)")
    add("--drain-timeout", parse=seconds, default=15.0, value="T", text="from SIGTERM to leaving without a handover")
    add("--signals-to-handle", parse=signals, value="NAMES", text="what makes the node leave (default: the usual four)")
    add("--health-port", parse=whole(0, 65535), value="PORT", text="answer GET /live and /ready there; 0: a free one")
    add("--health-host", default="127.0.0.1", value="ADDRESS", text="at this address of this machine; 0.0.0.0: all")
    flag("--again", text="run once more although this run id has succeeded")


def _declare_workers(options: Options) -> None:
    add, flag = options.add, options.flag
    options.section("workers")
    add("--nproc-per-node", parse=workers, value="K", text="worker processes per node; auto: GPUs, else CPUs")
    add("--start-method", parse=start_method, default="fork", value="HOW", text="fork from a warm process, or spawn")
    add("--preload", default="", value="MODULES", text="modules to import in the warm process, with commas")
    add("--role", default="default", value="NAME", text="ROLE_NAME of the workers")
    flag("--as-srun", text="give workers SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS ... as srun gives its tasks")
    flag("--module", "-m", text="SCRIPT is a module, as with python -m")
    flag("--no-python", text="SCRIPT is a program, not Python")
    flag("--virtual-local-rank", text="LOCAL_RANK is 0 and one GPU is visible, for each worker")
    add(
        "--stop-timeout",
        "--shutdown-timeout",
        parse=seconds,
        value="T",
        text="from SIGTERM to SIGKILL (default: 10 when this node leaves; for a restart workers are killed at once)",
        also=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    add("--hang-timeout", parse=seconds, default=600.0, value="T", text="no step for so long is a failure; 0: never")
    add("--monitor-interval", parse=count, value="T", text="of no use here: nothing is polled")
    flag("--fresh", text="do not resume from the checkpoint directory")
    add("--ledger", value="DIR", text="write down which samples each step trained (elasticrt ledger check DIR)")


def main(arguments: argparse.Namespace, options: Options) -> int:
    """Run the agent; its exit code."""
    values = options.read(arguments, os.environ)
    settings, spec = configure(values, arguments.script, arguments.arguments, os.environ)
    settings = replace(
        settings,
        alone=alone(Slurm.from_env(os.environ), spec.max_nodes, sys.argv[1:]),
        shared_options=tuple(options.words(arguments, os.environ, without=OWN)),
    )
    from elasticrt.agent.agent import Agent

    if settings.fresh:
        os.environ["ELASTICRT_FRESH"] = "1"
    if values["ledger"]:
        os.environ["ELASTICRT_LEDGER"] = str(Path(values["ledger"]).absolute())
    return Agent(settings, spec).run()


def configure(
    values: Mapping[str, Any], script: str | None, arguments: list[str], env: Mapping[str, str]
) -> tuple[Settings, RunSpec]:
    """Everything the agent needs, checked. Raises ConfigError before anything has been started or asked."""
    from elasticrt.settings import SIGNALS, Settings
    from elasticrt.spec import RunSpec, check_name

    least, most = _nodes(values)
    misplaced = [word for word in arguments if word.partition("=")[0].replace("_", "-") in BEFORE_THE_SCRIPT]
    command = _command(values, script, arguments)
    slurm = Slurm.from_env(env)
    values, notes = in_our_words(values, most)
    values = placed(values, slurm, most)
    etcd, serve = where_etcd_is(values)
    check_security(etcd, values["insecure_etcd"])
    run_id = _run_id(values)
    node = values["node"] or (slurm.node if slurm else "") or _host_name()
    workers_here = count_workers(values["nproc_per_node"] or "auto", env, cpus=values["nproc_per_node"] == "auto")
    spec = RunSpec(
        min_nodes=least,
        max_nodes=most,
        command=(command.kind, *command.argv),
        max_restarts=3 if values["max_restarts"] is None else values["max_restarts"],
        restarts_reset=values["max_restarts"] is None,
        join_timeout_s=values["join_timeout"],
        lease_ttl_s=max(1.0, values["lease_ttl"]),
        join=values["join"],
        settle_quiet_s=min(60.0, values["settle"]),
        settle_max_s=values["settle_max"],
        role=values["role"],
    )
    settings = Settings(
        run_id=run_id,
        node=check_name(node, "--node"),
        node_given=values["node"] is not None,
        address=own_address(values["local_addr"], most),
        workers=workers_here,
        command=command,
        start_method="exec" if values["start_method"] == "spawn" or command.kind == "program" else "fork",
        preload=tuple(filter(None, values["preload"].split(","))),
        etcd=etcd,
        credentials=read_credentials(values),
        serve=serve,
        again=values["again"],
        run_dir=output_options.run_dir(values, run_id),
        logs=output_options.log_options(values, workers_here, env),
        notes=(*notes, *(f"{word} stands behind the script and is left to it. {ORDER}" for word in misplaced)),
        max_restarts=spec.max_restarts,
        stop_timeout_s=10.0 if values["stop_timeout"] is None else values["stop_timeout"],
        restart_grace_s=values["stop_timeout"] or 0.0,
        signals=values["signals_to_handle"] or SIGNALS,
        node_rank=values["node_rank"],
        gpus=own_gpus(workers_here, env) if values["virtual_local_rank"] else (),
        etcd_linger_s=values["etcd_linger"],
        etcd_runs=etcd_runs(values),
        etcd_wait_s=etcd_wait_s(values),
        drain_timeout_s=values["drain_timeout"],
        hang_timeout_s=values["hang_timeout"],
        health_port=values["health_port"],
        health_host=check_host(values["health_host"], "--health-host"),
        role=values["role"],
        as_srun=values["as_srun"],
        fresh=values["fresh"],
        events_fd=values["events_fd"],
    )
    return settings, spec


def count_workers(wanted: int | str, env: Mapping[str, str], *, cpus: bool = False) -> int:
    """Workers on this node. GPUs are counted without importing torch: by what the driver shows.

    Without any, "auto" means one worker, or with `cpus` one for each CPU, as under torchrun.
    """
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu":
        return len(os.sched_getaffinity(0))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    else:
        devices = len([entry for entry in Path("/dev").glob("nvidia[0-9]*") if entry.name[6:].isdigit()])
    if wanted == "gpu" and not devices:
        raise ConfigError(
            explain("no GPU is visible", "--nproc-per-node gpu", expected="at least one", remedy="Use auto or a number")
        )
    return devices or (len(os.sched_getaffinity(0)) if cpus else 1)


def own_gpus(workers: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """A GPU for each worker, in the words of CUDA_VISIBLE_DEVICES. Raises ConfigError when there are too few."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(workers)] if visible is None else visible.split(",")
    if len(names) < workers:
        raise ConfigError(
            explain(
                "more workers than visible GPUs",
                "--virtual-local-rank",
                got=f"{workers} workers, CUDA_VISIBLE_DEVICES={visible}",
                expected="a GPU for each",
                remedy="Start fewer workers",
            )
        )
    return tuple(name.strip() for name in names[:workers])


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
    from elasticrt.settings import Command

    if values["module"] and values["no_python"]:
        raise ConfigError("a module is Python, so --no-python does not go with it (-m, --no-python). Use one of them")
    if script is None:
        expected, remedy = "a training script behind the options", "Example: train.py --epochs 10"
        raise ConfigError(explain("nothing to run", "SCRIPT", expected=expected, remedy=remedy))
    argv = (script, *arguments)
    if values["module"]:
        return Command(argv=argv, kind="module")
    if values["no_python"]:
        if shutil.which(script) is None:
            there = Path(script).is_file()
            got = "a file without execute permission" if there else "nothing of that name"
            remedy = f"chmod +x {script}" if there else "Check the path"
            raise ConfigError(explain("not a program", script, got=got, expected="one that can be run", remedy=remedy))
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


def _run_id(values: Mapping[str, Any]) -> str:
    from elasticrt.spec import check_name

    if values["run_id"] is not None and not values["standalone"]:
        return check_name(values["run_id"], "--run-id")
    adjectives, animals = _ADJECTIVES.split(), _ANIMALS.split()
    # Whoever draws the name of another run on this machine would join it.
    rest = "".join(secrets.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(5))
    return f"{secrets.choice(adjectives)}-{secrets.choice(animals)}-{rest}"


def _host_name() -> str:
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return name.lstrip(".")[:100] or "node"
