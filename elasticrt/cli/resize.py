"""`elasticrt resize`: change how many nodes a live run may have. Its leader lets nodes in, or has them stand by."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from elasticrt.cli.live_run import live_run, options_given
from elasticrt.errors import EXIT_OK, StoreError
from elasticrt.ipc.std_streams import write
from elasticrt.ipc.wording import counted
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.records import Member
from elasticrt.run_options import EtcdOptions
from elasticrt.store.protocol import KeyValue

TRIES = 20
"""The spec changes only by another `resize`, or a new start of the run: so many in a row are an error."""


def main(arguments: argparse.Namespace) -> int:
    """Change the bounds. Raises ConfigError, StoreError."""
    options = options_given(arguments, EtcdOptions())
    least, most = arguments.nodes
    with live_run(arguments, options) as run:
        for _ in range(TRIES):
            (record, seen), members, where = run.spec(), run.members(), f"run {run.keys.run_id}"
            if not members:
                raise run.without_nodes()
            changed = record.spec.model_copy(update={"min_nodes": least, "max_nodes": most})
            new = record.model_copy(update={"spec": changed, "resized": True})
            if changed == record.spec or run.store.commit(transactions.resize(run.keys, new, seen)).succeeded:
                text = f"{where} may have {least} to {counted(most, 'node')}; it has {len(members)}"
                write(sys.stdout, text + _consequence(least - len(members), members.values()) + "\n")
                return EXIT_OK
        raise StoreError("the run's options keep changing", where, remedy="Try again")


def _consequence(missing: int, members: Iterable[tuple[Member, KeyValue]]) -> str:
    """What follows for a run of these members, which lacks so many nodes."""
    if missing <= 0:
        return ""
    if any(member.ready and member.has_state for member, _ in members):
        return f": it saves, and waits for {counted(missing, 'more node')}"
    return ": it trains on, as its workers could only be ended; from the next change on it waits with fewer"
