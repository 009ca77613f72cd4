"""`elasticrt run`: one agent, on one node, of one run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticrt.cli.configure import ORDER, configure
from elasticrt.cli.options import (
    add_command,
    check_refused,
    complete_files,
    declare_refused,
    given,
    misspelt,
    read,
    words,
)
from elasticrt.cli.slurm import Slurm, alone
from elasticrt.cli.torchrun_flags import TorchrunFlags, conf_options
from elasticrt.errors import ConfigError
from elasticrt.ipc.std_streams import hurry
from elasticrt.option_values import options_of
from elasticrt.run_options import RunOptions

EXAMPLES = """\
examples:
  elasticrt run --nproc-per-node 2 train.py --epochs 10       two workers on this machine
  elasticrt run --min-nodes 1 --max-nodes 4 train.py          prints the line that brings more nodes
  elasticrt run --etcd http://10.0.0.5:2379 --insecure-etcd --run-id digits --nnodes 1:4 train.py    on every machine

"""

KINDS = (RunOptions, TorchrunFlags)

OWN = frozenset(name for kind in KINDS for name, option in options_of(kind).items() if option.own)
"""Options that the line for another node does not repeat: that node gets its own, or the line says the same in other
words."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    text = "run a training script on this node, as part of an elastic run"
    more = "Every option also reads ELASTICRT_<NAME>, and torchrun's PET_<NAME>."
    declare_script(add_command(subparsers, "run", main, text, *KINDS, more=more, epilog=EXAMPLES + ORDER))


def declare_script(parser: argparse.ArgumentParser) -> None:
    """Add the script with its arguments, and torchrun's flags that are refused."""
    declare_refused(parser)
    text = "the training script (with -m: a module)"
    complete_files(parser.add_argument("script", metavar="SCRIPT", nargs="?", help=text))
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments, passed on as they are"
    )


def options_given(
    arguments: argparse.Namespace, env: Mapping[str, str], *, nnodes: tuple[int, int] = RunOptions.nnodes
) -> RunOptions:
    """The options, with torchrun's flags translated. Raises ConfigError.

    Args:
        arguments: what was typed.
        env: the variables.
        nnodes: the limits on the number of nodes if none are given.
    """
    check_refused(env)
    flags = read(TorchrunFlags(), arguments, env)
    options = read(replace(conf_options(flags.rdzv_conf or {}), nnodes=nnodes), arguments, env)
    options = flags.translated(_counted(options, arguments, env))
    return replace(options, notes=(*options.notes, *misspelt(KINDS, env)))


def _counted(options: RunOptions, arguments: argparse.Namespace, env: Mapping[str, str]) -> RunOptions:
    """`options` with `nnodes` in place of --min-nodes and --max-nodes if these are given.

    --nnodes on the command line overrules the variables of the other two, and the other way round. Raises ConfigError
    if both are given in the same place.
    """
    ways = {"nnodes", "min_nodes", "max_nodes"}
    # The command line first; the variables only if it says nothing about the number of nodes.
    used = ways & given(RunOptions, arguments, {}).keys() or ways & given(RunOptions, arguments, env).keys()
    if "nnodes" in used and len(used) > 1:
        what, expected = "options that say the same thing twice", "--nnodes alone, or --min-nodes and --max-nodes"
        raise ConfigError(what, "--nnodes, --min-nodes, --max-nodes", expected=expected, remedy="Leave one of them out")
    if not used or "nnodes" in used:
        return options
    least = options.min_nodes or 1
    most = options.max_nodes or least
    if least > most:
        what, got, remedy = "a minimum above the maximum", f"{least} and {most}", "Lower the one or raise the other"
        raise ConfigError(what, "--min-nodes, --max-nodes", got=got, expected="MIN <= MAX", remedy=remedy)
    return replace(options, nnodes=(least, most), min_nodes=None, max_nodes=None)


def words_given(arguments: argparse.Namespace, env: Mapping[str, str], *, without: frozenset[str]) -> tuple[str, ...]:
    """The options of `run` that were given, as words of a command line. Fields in `without` are left out."""
    return tuple(word for kind in KINDS for word in words(kind, arguments, env, without=without))


def main(arguments: argparse.Namespace) -> int:
    """Run the agent. Returns its exit code."""
    options = options_given(arguments, os.environ)
    settings, spec = configure(options, arguments.script, arguments.arguments, os.environ)
    settings = replace(
        settings,
        alone=alone(Slurm.from_env(os.environ), spec.max_nodes, sys.argv[1:]),
        shared_options=words_given(arguments, os.environ, without=OWN),
    )
    # Imported late: pydantic and gRPC take longer than all checks.
    from elasticrt.agent.resource_limits import allow_files, check_processes

    allow_files(settings.workers, spec.max_nodes)
    check_processes(settings.workers, serves=not (options.etcd or options.meet_at))
    from elasticrt.agent.agent import Agent

    # After the checks, whose errors may wait for a reader: from here on a reader must not delay the training.
    hurry()
    return Agent(settings, spec).run()
