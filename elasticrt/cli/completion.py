"""`elasticrt completion`: what a shell needs to complete commands and options, made from the parser itself."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from elasticrt.cli.options import add_command
from elasticrt.errors import EXIT_OK
from elasticrt.ipc.std_streams import write

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  elasticrt completion bash > ~/.local/share/bash-completion/completions/elasticrt
  elasticrt completion zsh > "${fpath[1]}/_elasticrt"
  elasticrt completion fish > ~/.config/fish/completions/elasticrt.fish
"""

_FILES = frozenset({"script", "--checkpoint", "--html", "--log-dir", "--data-dir"})
"""Besides those whose value is a FILE."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    text = "print what a shell needs to complete commands and options"
    parser = add_command(subparsers, "completion", show, text, epilog=EXAMPLES)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def show(arguments: argparse.Namespace) -> int:
    """Print it."""
    import shtab

    from elasticrt.cli.main import build_parser

    parser = build_parser()
    for each in _parsers(parser):
        for action in each._actions:
            if action.metavar == "FILE" or _FILES & {action.dest, *action.option_strings}:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    write(sys.stdout, shtab.complete(parser, arguments.shell))
    return EXIT_OK


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """This one, and those of its commands."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    below = [_parsers(each) for action in nested for each in action.choices.values()]
    return [parser, *(each for some in below for each in some)]
