"""`elasticrt drain`, `stop` and `resize`: change a live run from outside.

They write one wish into etcd: into a node's key that it shall save the present step and leave, into the spec how many
nodes may take part. The run's own agents do the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from elasticrt.cli.control import LeaveOptions
from elasticrt.cli.live_run import LiveRun, live_run, options_given
from elasticrt.errors import EXIT_CHECKPOINT, EXIT_OK, ConfigError, RendezvousTimeoutError, StoreError
from elasticrt.ipc.env import Commit
from elasticrt.ipc.std_streams import write
from elasticrt.ipc.time_bounds import LOOK_AGAIN_S
from elasticrt.ipc.wording import counted, which_steps_are_saved
from elasticrt.rendezvous import transactions
from elasticrt.rendezvous.records import Generation, HandoverRecord, Member, Result
from elasticrt.run_options import EtcdOptions
from elasticrt.store.protocol import KeyValue, Txn
from elasticrt.story.run_dir import has_events, read

ASKED_AT_ONCE = 64
"""Nodes that one transaction asks to leave; etcd takes 128 operations."""

RESIZE_TRIES = 20
"""The spec changes only by another `resize`, or a new start of the run: so many in a row are an error."""


def drain(arguments: argparse.Namespace) -> int:
    """Have one node leave, and wait for that. Raises ConfigError, RendezvousTimeoutError, StoreError."""
    options = options_given(arguments, LeaveOptions())
    name = arguments.name
    with live_run(arguments, options) as run:
        members = run.members()
        if not members:
            raise run.without_nodes()
        if name not in members:
            expected = f"one of {', '.join(members)}"
            raise ConfigError("no such node", f"run {run.keys.run_id}", got=name, expected=expected)
        life = members[name][0].incarnation
        # A node that has left may come back, as another member.
        _leave(run, lambda member: (member.node, member.incarnation) == (name, life), options.timeout_s)
        rest, least = len(run.members()), run.spec()[0].spec.min_nodes
        short = f": {counted(rest, 'node')} left of at least {least}, the run waits for more" if rest < least else ""
        write(sys.stdout, f"{name} has left run {run.keys.run_id}{short if rest else ', as the last node'}\n")
    return EXIT_OK


def stop(arguments: argparse.Namespace) -> int:
    """Have all nodes leave, and wait for that. Raises ConfigError, RendezvousTimeoutError, StoreError."""
    options = options_given(arguments, LeaveOptions())
    with live_run(arguments, options) as run:
        run_id, attempt, members = run.keys.run_id, run.spec()[0].attempt, run.members()
        if not members:
            raise run.without_nodes()
        write(sys.stdout, f"run {run_id}: {counted(len(members), 'node')} told to save and leave\n")
        _leave(run, lambda _: True, options.timeout_s)
        result, saved = run.record(run.keys.result(attempt), Result), run.record(run.keys.checkpoint, Commit)
        handover = run.record(run.keys.handover, HandoverRecord) if result is None else None
        reached = saved.reached if saved is not None else 0
        last = left_after(handover, run.directory) if handover is not None and handover.save else 0
        ended = f"{result.status}: {result.reason}" if result is not None else "stopped"
        steps = f"; {which_steps_are_saved(reached, last)}" if reached or last else ""
        write(sys.stdout, f"run {run_id} {ended}{steps}\n")
    return EXIT_CHECKPOINT if last > reached else EXIT_OK


def left_after(handover: HandoverRecord, directory: Path) -> int:
    """The last step before a leave for `handover`: the agreed one, unless the run's events say that it has hung."""
    story = read(directory) if has_events(directory) else None
    if story is None or story.chapter is None or story.chapter.number != handover.generation:
        return handover.step
    return story.newest if story.newest == handover.step - 1 else handover.step


def resize(arguments: argparse.Namespace) -> int:
    """Change the bounds. Raises ConfigError, StoreError."""
    options = options_given(arguments, EtcdOptions())
    least, most = arguments.nodes
    with live_run(arguments, options) as run:
        for _ in range(RESIZE_TRIES):
            (record, seen), members, where = run.spec(), run.members(), f"run {run.keys.run_id}"
            if not members:
                raise run.without_nodes()
            changed = record.spec.model_copy(update={"min_nodes": least, "max_nodes": most})
            new = record.model_copy(update={"spec": changed, "resized": True})
            if changed == record.spec or run.store.commit(transactions.resize(run.keys, new, seen)).succeeded:
                generation = run.record(run.keys.generation, Generation)
                text = (
                    f"{where} may have {least} to {counted(most, 'node')}; it has {_here(members.values(), generation)}"
                )
                write(sys.stdout, text + _consequence(least - len(members), members.values()) + "\n")
                return EXIT_OK
        raise StoreError("the run's options keep changing", where, remedy="Try again")


def _leave(run: LiveRun, leaves: Callable[[Member], bool], timeout_s: float) -> None:
    """Ask the members for which `leaves` is true to drain, also those that come meanwhile; wait until they have left.

    Those that are asked together hand over together. Raises RendezvousTimeoutError after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while left := {name: found for name, found in run.members().items() if leaves(found[0])}:
        if time.monotonic() >= deadline:
            raise RendezvousTimeoutError(
                "nodes are still there",
                f"run {run.keys.run_id}",
                got=f"{', '.join(left)} after {timeout_s:g} s",
                expected="all of them to save and leave",
                remedy="They go on trying: look again with `elasticrt status`, or end their agents by SIGTERM",
            )
        asked = [
            transactions.drain(run.keys, value, member.model_copy(update={"draining": True}))
            for member, value in left.values()
            if not member.draining
        ][:ASKED_AT_ONCE]
        if not asked:
            time.sleep(LOOK_AGAIN_S)
            continue
        compares = tuple(compare for each in asked for compare in each.compares)
        operations = tuple(operation for each in asked for operation in each.operations)
        run.store.commit(Txn(compares, operations, why=f"{counted(len(asked), 'node')} are asked to drain"))


def _here(members: Collection[tuple[Member, KeyValue]], generation: Generation | None) -> str:
    """The number of these members, and how many of them the current `generation` has, if those are fewer."""
    number = generation.number if generation is not None else 0
    seated = sum(member.generation == number for member, _ in members)
    return f"{len(members)}{f', {seated} of them in generation {number}' if number and seated < len(members) else ''}"


def _consequence(missing: int, members: Iterable[tuple[Member, KeyValue]]) -> str:
    """What follows for a run of these members, which lacks so many nodes."""
    if missing <= 0:
        return ""
    if any(member.ready and member.has_state for member, _ in members):
        return f": it saves, and waits for {counted(missing, 'more node')}"
    return ": it trains on, as its workers could only be ended; from the next change on it waits with fewer"
