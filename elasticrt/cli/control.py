"""The parsers of `elasticrt status`, `drain`, `stop` and `resize`, which look at a live run from outside and change it.

The commands themselves are in modules that are loaded late, because those load pydantic.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from elasticrt.cli.options import add_command, declare_run
from elasticrt.cli.torchrun_flags import MeetingFlags
from elasticrt.option_values import duration, option, parse_nodes, parsed
from elasticrt.run_options import EtcdOptions


@dataclass(frozen=True, kw_only=True)
class LeaveOptions(EtcdOptions):
    """The options of `drain` and `stop`."""

    timeout_s: float = option("--timeout T", 120.0, "how long to wait until the nodes have left", duration(0.001))


STATUS = """\
examples:
  elasticrt status                            of the newest run
  elasticrt status calm-fox-k7m2p --watch
  elasticrt status calm-fox-k7m2p --etcd https://10.0.0.5:2379 --etcd-ca-file ca.pem
"""
STOP = """\
examples:
  elasticrt stop                                           the only live run of this machine
  elasticrt stop calm-fox-k7m2p                            its agents, or its directory, are on this machine
  elasticrt stop digits --etcd http://10.0.0.5:2379 --insecure-etcd
"""
DRAIN = """\
examples:
  elasticrt drain node-3                      of the only live run of this machine
  elasticrt drain node-3 calm-fox-k7m2p
"""
RESIZE = """\
examples:
  elasticrt resize 1:8                        the only live run of this machine
  elasticrt resize 1:8 calm-fox-k7m2p
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Register the commands."""
    flags, only = (EtcdOptions, MeetingFlags), "the only live run on this machine"
    text = "show a run: its nodes, generation, newest checkpoint, goodput"
    status = add_command(subparsers, "status", main, text, *flags, epilog=STATUS)
    declare_run(status, "the newest live run on this machine, else the newest")
    status.add_argument("--json", action="store_true", help="print an object of JSON, from the run's directory alone")
    status.add_argument("--watch", action="store_true", help="look again every 2 s until the run has ended")
    text = "end a whole run in order: all nodes save the present step and leave; the same --run-id goes on after it"
    declare_run(add_command(subparsers, "stop", main, text, LeaveOptions, MeetingFlags, epilog=STOP), only)
    text = "make a node hand over and leave; no step is lost"
    drain = add_command(subparsers, "drain", main, text, LeaveOptions, MeetingFlags, epilog=DRAIN)
    drain.add_argument("name", metavar="NODE", help="the node's name, as `elasticrt status` shows it")
    declare_run(drain, only)
    text = "change how many nodes a live run may have"
    resize = add_command(subparsers, "resize", main, text, *flags, epilog=RESIZE)
    nodes = parsed(parse_nodes, "MIN:MAX", resize.prog)
    resize.add_argument("nodes", metavar="MIN:MAX", type=nodes, help="nodes, e.g. 1:8; one number for both")
    declare_run(resize, only)


def main(arguments: argparse.Namespace) -> int:
    """Carry out the command. Returns its exit code."""
    from elasticrt.cli import change_run, status

    commands = {"status": status.main, "stop": change_run.stop, "drain": change_run.drain, "resize": change_run.resize}
    return commands[arguments.command](arguments)
