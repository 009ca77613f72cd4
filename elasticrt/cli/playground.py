"""`elasticrt simulate`: a run of several nodes on this machine, with faults on request."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

from elasticrt.cli import run
from elasticrt.cli.options import Options, whole
from elasticrt.errors import ConfigError, explain
from elasticrt.playground.fault_plan import GRAMMAR, Fault, parse_fault
from elasticrt.playground.local_cluster import Simulation, play
from elasticrt.playground.screen import Screen

NODES_MAX = 256  # Real processes of one machine, each with its workers.

STORE_END_S = 10.0  # Stopping etcd takes a fraction of a second.

_OURS = frozenset({
    "min_nodes", "max_nodes", "nnodes", "nproc_per_node", "run_id", "run_dir", "log_dir", "node",
    "node_rank", "standalone", "events_fd", "health_port", "nodes",
})  # fmt: skip
"""Options that simulate states for each agent, refuses, or has for itself; all others are passed on as they are."""


EXAMPLE = """\
example:
  elasticrt simulate --nodes 3 --fault "step 50: kill node 2" --fault "20s: add node" examples/mnist_ddp.py --epochs 3
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="play a run of several nodes on this machine, and kill some of them",
        description="Start one agent for each node on this machine, as real processes, and show what happens to them. "
        "The options of `elasticrt run` are passed on to every agent.",
        epilog=f"A FAULT is {GRAMMAR}\n\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    options = declare(parser)
    parser.set_defaults(func=lambda arguments: main(arguments, options))


def declare(parser: argparse.ArgumentParser) -> Options:
    """Add all options and the script."""
    options = run.declare(parser)
    options.add("--nodes", parse=whole(1, NODES_MAX), default=2, value="N", text="start so many nodes")
    parser.add_argument("--fault", metavar="FAULT", action="append", default=[], help="may be given several times")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the training script (with -m: a module)")
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments, passed on as they are"
    )
    return options


def main(arguments: argparse.Namespace, options: Options) -> int:
    """Play it; the exit code is 0 only if the run succeeded. Raises ConfigError before anything has been started."""
    values = options.read(arguments, os.environ)
    if values["health_port"] is not None:  # One port cannot be several agents': each takes a free one.
        os.environ["ELASTICRT_HEALTH_PORT"] = "0"
    simulation = configure(arguments, values, options)
    try:
        return play(simulation, Screen(sys.stdout, os.environ))
    finally:
        if values["etcd"] is None:
            end_embedded_store(simulation.run_id)


def end_embedded_store(run_id: str) -> None:
    """End the etcd that the agents have started for themselves, if it has not ended yet, and wait for its end.

    For a run without a result it would wait for agents that come again. Nobody does: the run was this simulation's.
    """
    from elasticrt.store import embedded

    served = embedded.find(run_id)
    if served is None:
        return
    try:
        pidfd = os.pidfd_open(served.keeper_pid)
    except ProcessLookupError:
        return  # It has ended since.
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGINT)
        select.select([pidfd], [], [], STORE_END_S)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def configure(arguments: argparse.Namespace, values: dict[str, Any], options: Options) -> Simulation:
    """What to play, checked as `elasticrt run` would check it."""
    for name in ("node", "node_rank", "standalone"):
        # A variable such as ELASTICRT_NODE may be there for a later `run`; each agent's command line overrules it.
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"simulate names its nodes itself: node-0, node-1, ... (--{name.replace('_', '-')}). Leave it out"
            )
    faults = tuple(parse_fault(text) for text in arguments.fault)
    if values["nnodes"] is None:
        if values["min_nodes"] is None:
            values["min_nodes"] = 1
        if values["max_nodes"] is None:
            values["max_nodes"] = max(values["min_nodes"], values["nodes"] + _added(faults))
    settings, spec = run.configure(values, arguments.script, arguments.arguments, os.environ)
    if values["nodes"] + _added(faults) < spec.min_nodes:
        raise ConfigError(
            explain(
                "the run would wait for nodes that never come",
                "--nodes",
                got=values["nodes"],
                expected=f"at least the minimum of {spec.min_nodes}, with those that faults add",
                remedy="Start more nodes or lower --min-nodes",
            )
        )
    workers = values["nproc_per_node"] or 1
    return Simulation(
        run_id=settings.run_id,
        nodes=values["nodes"],
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        workers_per_node=run.count_workers(workers, os.environ, cpus=values["nproc_per_node"] == "auto"),
        command=(arguments.script, *arguments.arguments),
        options=tuple(options.words(arguments, {}, without=_OURS)),  # Agents read the environment by themselves.
        faults=faults,
        run_dir=str(settings.run_dir) if values["run_dir"] or values["log_dir"] else None,
    )


def _added(faults: Sequence[Fault]) -> int:
    return sum(fault.what == "add node" for fault in faults)
