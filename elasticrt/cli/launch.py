"""`elasticrt launch`: `elasticrt run` for scripts that were written for `torch.distributed.launch`.

Such a script learns its local rank from an argument. torch 2 appends `--local-rank`, torch 1 appended `--local_rank`,
and argparse takes these for two options, so the one that the script itself asks for is appended.
"""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrt.cli import run
from elasticrt.cli.configure import ORDER
from elasticrt.cli.options import read
from elasticrt.errors import ConfigError
from elasticrt.option_values import option

LOCAL_RANK = "${local_rank}"
"""What stands for its local rank in a worker's arguments, as under torchrun."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What `launch` has besides the options of `run`. The script's arguments show what it did."""

    use_env: bool = option("--use-env", False, "append nothing: the script reads LOCAL_RANK")


_UNDERSCORE = re.compile(r"""["']--local_rank["']""")
_DASH = re.compile(r"""["']--local-rank["']""")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "launch",
        help="run a script written for torch.distributed.launch (--local_rank)",
        description="As `elasticrt run`, but each worker gets its local rank as its first argument.",
        epilog=f"example:\n  elasticrt launch --nproc-per-node 2 train.py --epochs 10\n\n{ORDER}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.declare_all(parser, LaunchOptions)
    parser.set_defaults(func=main)


def main(arguments: argparse.Namespace) -> int:
    """Run the agent; its exit code."""
    if not read(LaunchOptions(), arguments, os.environ).use_env:
        if run.options_given(arguments, os.environ).no_python:
            raise ConfigError(
                "a program that is not Python gets no argument of ours (--no-python). Add --use-env; read LOCAL_RANK"
            )
        arguments.arguments = [f"{argument_of(_source(arguments.script))}={LOCAL_RANK}", *arguments.arguments]
    return run.main(arguments)


def argument_of(source: str) -> str:
    """The argument that a script with this source asks for; torch's own where it does not say. Pure."""
    return "--local_rank" if _UNDERSCORE.search(source) and not _DASH.search(source) else "--local-rank"


def _source(script: str | None) -> str:
    """What the script says; "" for a module and for what cannot be read, which `run` will complain about."""
    path = Path(script or "")
    try:
        return path.read_text(errors="replace") if path.is_file() else ""
    except OSError:
        return ""
