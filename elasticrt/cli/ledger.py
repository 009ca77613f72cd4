"""`elasticrt ledger check`: whether each sample counts exactly once, from what the workers have written down."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from elasticrt.contract.ledger import SUFFIX, Book, Verdict, check, read
from elasticrt.errors import EXIT_OK, EXIT_WORKERS, ConfigError, explain

EPILOG = """\
exit codes:
  0   along the history that counts, each sample of each epoch was trained exactly once
  1   samples were lost or repeated, or a part of the ledger is missing; the lines say which
  2   there is no ledger, or a file in it is damaged (a last line that a killed process left half is none)
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("ledger", help="check which samples were trained", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    checking = commands.add_parser(
        "check",
        help="prove that each sample counts exactly once",
        description="Check a ledger that `elasticrt run --ledger DIR`, or Loop(ledger=DIR), has written. Nodes without "
        "a shared directory each have a part of it: copy all files into one directory first.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    checking.add_argument("directory", metavar="DIR", help="where the ledger is")
    checking.set_defaults(func=main)


def main(arguments: argparse.Namespace) -> int:
    """Print the verdict; 0 when each sample counts exactly once, else 1. Raises ConfigError for what is no ledger."""
    directory = Path(arguments.directory)
    try:
        verdict = check(books(directory))
    except (OSError, ValueError) as error:
        raise ConfigError(
            explain(
                "not a ledger that can be checked",
                str(directory),
                expected=f"a directory with files *{SUFFIX}, each whole",
                remedy=f"What is wrong: {error}",
            )
        ) from None
    print("\n".join(describe(verdict)))
    return EXIT_WORKERS if verdict.problems else EXIT_OK


def books(directory: Path) -> list[Book]:
    """What the files in a directory say. Raises OSError, and ValueError for a damaged one."""
    found = [read(path.name, path.read_bytes()) for path in sorted(directory.iterdir()) if path.name.endswith(SUFFIX)]
    return [book for book in found if book is not None]


def describe(verdict: Verdict) -> list[str]:
    """The lines to print. Pure."""
    lines = [str(epoch) for epoch in verdict.epochs]
    lines.append(
        f"steps 1 to {verdict.steps:,} count; {verdict.starts} starts; {verdict.redone:,} steps were superseded"
    )
    lines += [f"WRONG: {problem}" for problem in verdict.problems]
    lines.append("each sample counts exactly once" if not verdict.problems else "NOT each sample counts exactly once")
    return lines
