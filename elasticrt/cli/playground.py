"""`elasticrt simulate`: a run of several nodes on this machine, with faults on request."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticrt.cli import run
from elasticrt.cli.configure import configure as configure_run
from elasticrt.cli.configure import count_workers
from elasticrt.cli.options import add_command
from elasticrt.errors import ConfigError
from elasticrt.option_values import parsed, whole
from elasticrt.playground.fault_plan import GRAMMAR, Fault, parse_fault
from elasticrt.run_options import RunOptions

if TYPE_CHECKING:
    from elasticrt.playground.local_cluster import Simulation

# All of them are real processes of one machine, each with its workers.
NODES_MAX = 256


_OURS = frozenset({
    "nnodes", "min_nodes", "max_nodes", "nproc_per_node", "run_id", "log_dir", "node", "node_rank", "standalone",
    "events_fd", "health",
})  # fmt: skip
"""Options that simulate sets for each agent, refuses, or uses itself. All others are passed on as they are."""


EXAMPLE = """\
example:
  elasticrt simulate --nodes 3 --fault "step 50: kill node 2" --fault "20s: add node" examples/mnist_ddp.py --epochs 3
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    text = "play a run of several nodes on this machine, and kill some of them"
    more = (
        "Each node is a real agent process, which gets the options of `elasticrt run`. The screen shows what happens\n"
        "to all of them."
    )
    epilog = f"A FAULT is {GRAMMAR}\n\n{EXAMPLE}"
    parser = add_command(subparsers, "simulate", main, text, *run.KINDS, more=more, epilog=epilog)
    number = parsed(whole(1, NODES_MAX), "--nodes", parser.prog)
    parser.add_argument("--nodes", metavar="N", type=number, default=2, help="start so many nodes (default: 2)")
    parser.add_argument("--fault", metavar="FAULT", action="append", default=[], help="may be given several times")
    run.declare_script(parser)


def main(arguments: argparse.Namespace) -> int:
    """Play the run. Returns 0 only if the run succeeded. Raises ConfigError before anything starts."""
    # Imported late: every command makes the parser.
    from elasticrt.playground.local_cluster import Screen, play

    return play(configure(arguments, os.environ), Screen(sys.stdout, os.environ))


def configure(arguments: argparse.Namespace, env: Mapping[str, str]) -> Simulation:
    """What to play, checked as `elasticrt run` would check it. Raises ConfigError."""
    from elasticrt.playground.local_cluster import Simulation

    for name in ("node", "node_rank", "standalone"):
        # Only options are refused. A variable such as ELASTICRT_NODE does no harm: each agent's command line overrules
        # it.
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"simulate names its nodes itself: node-0, node-1, ... (--{name.replace('_', '-')}). Leave it out"
            )
    faults = tuple(parse_fault(text) for text in arguments.fault)
    nodes = arguments.nodes
    options = run.options_given(arguments, env, nnodes=(1, nodes + _added(faults)))
    settings, spec = configure_run(options, arguments.script, arguments.arguments, env)
    if nodes + _added(faults) < spec.min_nodes:
        raise ConfigError(
            "the run would wait for nodes that never come",
            "--nodes",
            got=nodes,
            expected=f"at least the minimum of {spec.min_nodes}, with those that faults add",
            remedy="Start more nodes or lower the minimum (--min-nodes)",
        )
    # Agents read the environment by themselves, so only words of the command line are passed on.
    words = ["--run-id", settings.run_id, "--nnodes", f"{spec.min_nodes}:{spec.max_nodes}"]
    words += ["--nproc-per-node", str(count_workers(options.nproc_per_node or 1, env))]
    words += run.words_given(arguments, {}, without=_OURS)
    if options.log_dir != RunOptions.log_dir:
        words += ["--log-dir", str(Path(options.log_dir).absolute())]
    # Several agents cannot share one port, so each takes a free one.
    if options.health is not None:
        words += ["--health-port", "0"]
    return Simulation(nodes, (*words, arguments.script, *arguments.arguments), faults)


def _added(faults: Sequence[Fault]) -> int:
    return sum(fault.what == "add node" for fault in faults)
