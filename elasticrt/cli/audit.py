"""`elasticrt ledger check`: whether each sample counts exactly once, by what the workers have written down."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from elasticrt.audit.exactly_once import AuditResult, check
from elasticrt.cli.options import add_command
from elasticrt.errors import EXIT_OK, EXIT_WORKERS, ConfigError
from elasticrt.ipc.ledger_file import SUFFIX, LedgerFile, read
from elasticrt.ipc.std_streams import write
from elasticrt.ipc.wording import counted

EPILOG = """\
example: elasticrt ledger check ledger

exit codes:
  0   along the history that counts, each sample of each epoch was trained exactly once
  1   samples were lost or repeated, or a part of the ledger is missing; the lines say which
  2   there is no ledger, a file in it is damaged (a last line that a killed process left half is none), or the files
      don't tell which start of the training is the newest

A start of the training is known by its files. If you leave out those of the newest, what was before it is checked: see
that the last step that counts is the training's last.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("ledger", help="check which samples were trained", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    text = "prove by a ledger of Loop(ledger=DIR) that each sample counts exactly once"
    more = "Nodes without a shared directory each have a part of it: give all of them, each in a directory of its own."
    checking = add_command(commands, "check", main, text, more=more, epilog=EPILOG)
    checking.add_argument("directories", metavar="DIR", nargs="+", help="where the ledger, or a node's part of it, is")


def main(arguments: argparse.Namespace) -> int:
    """Print the verdict. Returns 0 if each sample counts exactly once, else 1.

    Raises ConfigError if there is no ledger.
    """
    try:
        verdict = check(books(*map(Path, arguments.directories)))
    except (OSError, ValueError) as error:
        got = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise ConfigError(
            "not a ledger that can be checked",
            ", ".join(arguments.directories),
            got=got,
            expected=f"directories with files *{SUFFIX}, each whole",
            remedy="Name the directory of Loop(ledger=DIR)",
        ) from None
    write(sys.stdout, "\n".join(describe(verdict)) + "\n")
    return EXIT_WORKERS if verdict.problems else EXIT_OK


def books(*directories: Path) -> list[LedgerFile]:
    """The ledger files in the directories, which are parts of one ledger.

    Raises OSError, and ValueError for a damaged file and for a directory without any file.
    """
    found: list[LedgerFile | None] = []
    for directory in directories:
        paths = sorted(each for each in directory.iterdir() if each.name.endswith(SUFFIX))
        if not paths:
            raise ValueError(f"no such file in {directory}")
        found += [read(str(path), path.read_bytes()) for path in paths]
    return [book for book in found if book is not None]


def describe(verdict: AuditResult) -> list[str]:
    """The lines to print. Pure."""
    lines = [str(epoch) for epoch in verdict.epochs]
    starts, redone = counted(verdict.starts, "start"), counted(verdict.redone, "step")
    lines.append(f"steps 1 to {verdict.steps:,} count; {starts}; {redone} superseded")
    if not verdict.ended:
        lines.append(
            f"the end of the loop is not recorded: this ledger proves nothing about steps after {verdict.steps:,}"
        )
    lines += [f"WRONG: {problem}" for problem in verdict.problems]
    upto = "" if verdict.ended else f", as far as step {verdict.steps:,}"
    lines.append(f"{'NOT ' if verdict.problems else ''}each sample counts exactly once{upto}")
    return lines
