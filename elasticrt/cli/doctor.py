"""`elasticrt doctor`: one line for each thing that may keep a run from working on this machine, with the remedy.

`doctor_looks` looks at the machine; `doctor_findings` judges what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrt.agent.last_line import LastLine, fits
from elasticrt.cli.options import add_command, read
from elasticrt.cli.torchrun_flags import MeetingFlags
from elasticrt.errors import EXIT_OK, EXIT_WORKERS
from elasticrt.ipc.std_streams import keep_last_line, write
from elasticrt.option_values import option
from elasticrt.run_options import EtcdOptions


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(EtcdOptions):
    """The options of `elasticrt doctor`."""

    local_addr: str | None = option("--local-addr ADDRESS", None, "this node's address, as for `run`")
    checkpoint: Path | None = option("--checkpoint DIR", None, "look at this checkpoint directory as well", Path)
    json: bool = option("--json", False, "a JSON object in each line")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the command."""
    text = "look for what would keep a run from working on this machine"
    more = "Each line says what was seen and, where something is wrong, the remedy."
    epilog = "example: elasticrt doctor --etcd https://10.0.0.5:2379 --checkpoint /shared/ckpt"
    add_command(subparsers, "doctor", main, text, DoctorOptions, MeetingFlags, more=more, epilog=epilog)


def main(arguments: argparse.Namespace) -> int:
    """Print the findings. Exit code 0 if no check fails, else 1. Raises ConfigError for unusable options."""
    options = read(MeetingFlags(), arguments, os.environ).placed(read(DoctorOptions(), arguments, os.environ))
    with _last_line() as show:
        show("loading")
        from elasticrt.cli import doctor_looks
        from elasticrt.cli.doctor_findings import line

        failed = False
        for title, look in doctor_looks.LOOKS.items():
            show(f"looking at: {title}")
            for name, finding in doctor_looks.looked(title, look, options):
                said = json.dumps({"check": name, **vars(finding)}) if options.json else line(name, finding)
                write(sys.stdout, said + "\n")
                failed = failed or finding.level == "fail"
    return EXIT_WORKERS if failed else EXIT_OK


@contextmanager
def _last_line() -> Iterator[Callable[[str], None]]:
    """A function that shows a text at the end of the terminal until the context ends.

    It does nothing without a terminal.
    """
    if not fits(sys.stderr, os.environ):
        yield lambda _: None
        return
    last = LastLine(sys.stderr)
    keep_last_line(last.aside)
    try:
        yield last.draw
    finally:
        keep_last_line(None)
        last.draw("")
