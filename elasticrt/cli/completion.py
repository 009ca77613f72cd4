"""`elasticrt completion`: what a shell needs to complete commands and options, made from the parser itself."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

from elasticrt.cli.options import add_command
from elasticrt.errors import EXIT_OK
from elasticrt.ipc.std_streams import write
from elasticrt.option_values import options_of
from elasticrt.run_options import RunOptions

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

    parser, words = build_parser(), _words()
    for each in _parsers(parser):
        for action in each._actions:
            action.choices = next((words[name] for name in action.option_strings if name in words), action.choices)
            if action.metavar == "FILE" or _FILES & {action.dest, *action.option_strings}:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    write(sys.stdout, shtab.complete(parser, arguments.shell))
    return EXIT_OK


def _words() -> dict[str, tuple[str, ...]]:
    """The options whose value is one of some words, with these words: the types of their fields say so."""
    types, options = get_type_hints(RunOptions), options_of(RunOptions)
    return {
        name: get_args(types[field])
        for field, option in options.items()
        if get_origin(types[field]) is Literal
        for name in option.names
    }


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """This one, and those of its commands."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    below = [_parsers(each) for action in nested for each in action.choices.values()]
    return [parser, *(each for some in below for each in some)]
