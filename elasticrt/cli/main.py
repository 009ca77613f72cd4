"""`elasticrt`: the commands, and the one place where an error becomes a line of text and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from elasticrt import __version__
from elasticrt.contract.streams import write
from elasticrt.errors import EXIT_BUG, ConfigError, ElasticError
from elasticrt.text import plain

DESCRIPTION = "Keeps a PyTorch DDP job training while nodes come, go and die."


class Parser(argparse.ArgumentParser):
    """An argument parser whose mistakes are ours: one line, a suggestion, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        unknown = message.rpartition("unrecognized arguments: ")[2].split(" ")[0]
        known = [
            option for parser in self._with_commands() for action in parser._actions for option in action.option_strings
        ]
        near = get_close_matches(unknown, known, n=1)
        hint = f". Did you mean {near[0]}?" if near else f". See `{self.prog} --help`"
        raise ConfigError(f"{message} ({self.prog}){hint}")

    def _with_commands(self) -> list[argparse.ArgumentParser]:
        """This parser and those of its commands: argparse reports a command's unknown options at the top."""
        nested = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return [self, *(parser for action in nested for parser in action.choices.values())]


class _Formatter(logging.Formatter):
    """Lines of a log that give no orders to a terminal: they may quote what workers and other programs say."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return plain(super().format(record))


def build_parser() -> Parser:
    """All commands."""
    from elasticrt.cli import control, etcd, launch, ledger, run, simulate

    parser = Parser(prog="elasticrt", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"elasticrt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (run, launch, simulate, etcd, control, ledger):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    if os.getpid() == 1:  # Of a container.
        from elasticrt.agent import first

        first.step_aside()
    debug = "ELASTICRT_DEBUG" in os.environ
    handler = logging.StreamHandler()
    handler.setFormatter(
        _Formatter("elasticrt: %(levelname)s: %(message)s" if not debug else "%(asctime)s %(name)s %(message)s")
    )
    level = logging.DEBUG if debug else os.environ.get("LOGLEVEL", "WARNING").upper()
    logging.basicConfig(level=level, handlers=[handler])
    try:
        arguments = build_parser().parse_args(argv)
        code: int = arguments.func(arguments)
    except ElasticError as error:
        write(sys.stderr, f"{traceback.format_exc() if debug else ''}elasticrt: error: {plain(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:  # noqa: BLE001  The last line of defence: a bug of ours is shown whole, with its own exit code.
        bug = "elasticrt: this is a bug in elasticrt, not in your script; please report it"
        write(sys.stderr, f"{traceback.format_exc()}{bug}\n")
        return EXIT_BUG
    finally:
        write(sys.stdout, "")  # What `--help` has left in its buffer.
    return code
