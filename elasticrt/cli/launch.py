"""`elasticrt launch`: `elasticrt run` for scripts that were written for `torch.distributed.launch`.

Such a script learns its local rank from an argument. torch 2 appends `--local-rank`, torch 1 appended `--local_rank`,
and argparse takes these for two options, so the one that the script's source names is appended.
"""

from __future__ import annotations

import argparse
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrt.cli import run
from elasticrt.cli.configure import ORDER
from elasticrt.cli.options import add_command, read
from elasticrt.errors import ConfigError
from elasticrt.option_values import option

LOCAL_RANK = "${local_rank}"
"""The agent replaces this in a worker's arguments by its local rank, as torchrun does."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What `launch` has besides the options of `run`."""

    use_env: bool = option("--use-env", False, "append nothing: the script reads LOCAL_RANK")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    text = "run a script written for torch.distributed.launch (--local_rank)"
    more = "As `elasticrt run`, but each worker gets its local rank as its first argument."
    epilog = f"example:\n  elasticrt launch --nproc-per-node 2 train.py --epochs 10\n\n{ORDER}"
    kinds = (*run.KINDS, LaunchOptions)
    run.declare_script(add_command(subparsers, "launch", main, text, *kinds, more=more, epilog=epilog))


def main(arguments: argparse.Namespace) -> int:
    """Run the agent; its exit code."""
    if not read(LaunchOptions(), arguments, os.environ).use_env:
        if run.options_given(arguments, os.environ).no_python:
            raise ConfigError(
                "a program that is not Python gets no argument of ours (--no-python). Add --use-env; read LOCAL_RANK"
            )
        source = ""
        with suppress(OSError):  # A module, or a file that `run` will complain about.
            source = Path(arguments.script or "").read_text(errors="replace")
        arguments.arguments = [f"{argument_of(source)}={LOCAL_RANK}", *arguments.arguments]
    return run.main(arguments)


def argument_of(source: str) -> str:
    """The argument that a script with this source asks for; torch's own where it does not say. Pure."""
    underscore, dash = (re.search(rf"""["']--{name}["']""", source) for name in ("local_rank", "local-rank"))
    return "--local_rank" if underscore and not dash else "--local-rank"
