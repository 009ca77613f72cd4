"""`elasticrt run`: one agent, on one node, of one run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticrt.cli.configure import ORDER, configure
from elasticrt.cli.options import check_refused, declare, declare_refused, given_on_line, is_given, read, words
from elasticrt.cli.slurm import Slurm, alone
from elasticrt.cli.torchrun_flags import TorchrunFlags
from elasticrt.errors import ConfigError
from elasticrt.option_values import options_of, parse_nodes
from elasticrt.run_options import RunOptions

EXAMPLES = """\
examples:
  elasticrt run --nproc-per-node 2 train.py --epochs 10       two workers on this machine
  elasticrt run --nnodes 1:4 train.py                         prints the line that brings more nodes
  elasticrt run --etcd http://10.0.0.5:2379 --insecure-etcd --run-id digits --nnodes 1:4 train.py    on every machine

"""

KINDS = (RunOptions, TorchrunFlags)

OWN = frozenset(name for kind in KINDS for name, option in options_of(kind).items() if option.own)
"""Options that another node of the run is not told, or is told in its line's own words. All others are repeated."""


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
    declare_all(parser)
    parser.set_defaults(func=main)


def declare_all(parser: argparse.ArgumentParser, *more: type) -> None:
    """The options of `run`, those of `more`, and the script."""
    declare(parser, *KINDS, *more)
    declare_refused(parser)
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the training script (with -m: a module)")
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
        nnodes: how many nodes train where nothing says so.
    """
    check_refused(env)
    flags = read(TorchrunFlags(), arguments, env)
    options = read(replace(flags.base(), nnodes=nnodes), arguments, env)
    return flags.translated(_with_nodes(options, arguments, env))


def _with_nodes(options: RunOptions, arguments: argparse.Namespace, env: Mapping[str, str]) -> RunOptions:
    """`options` with `nnodes` as --min-nodes and --max-nodes say. Raises ConfigError for both ways at once.

    A way on the command line overrules the variables of the other.
    """
    typed = given_on_line(RunOptions, arguments)
    apart = {name for name in ("min_nodes", "max_nodes") if getattr(options, name) is not None}
    both_in_one = is_given(RunOptions, "nnodes", arguments, env)
    if both_in_one and apart:
        both_in_one = "nnodes" in typed
        if both_in_one == bool(apart & typed):
            raise ConfigError(
                "--nnodes and --min-nodes/--max-nodes say the same thing twice (--nnodes). Use one of them"
            )
    if both_in_one or not apart:
        return options
    least = options.min_nodes or 1
    return replace(options, nnodes=parse_nodes(f"{least}:{options.max_nodes or least}", "--min-nodes, --max-nodes"))


def words_given(arguments: argparse.Namespace, env: Mapping[str, str], *, without: frozenset[str]) -> tuple[str, ...]:
    """The options of `run` that were given, as words of a command line; fields `without` are left out."""
    return tuple(word for kind in KINDS for word in words(kind, arguments, env, without=without))


def main(arguments: argparse.Namespace) -> int:
    """Run the agent; its exit code."""
    options = options_given(arguments, os.environ)
    settings, spec = configure(options, arguments.script, arguments.arguments, os.environ)
    settings = replace(
        settings,
        alone=alone(Slurm.from_env(os.environ), spec.max_nodes, sys.argv[1:]),
        shared_options=words_given(arguments, os.environ, without=OWN),
    )
    from elasticrt.agent.agent import Agent

    return Agent(settings, spec).run()
