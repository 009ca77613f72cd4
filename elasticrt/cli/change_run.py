"""`elasticrt drain`, `stop` and `resize`: change a live run from outside.

Each writes one wish into etcd, and the run's own agents do the rest. `drain` and `stop` write into nodes' member keys
that these shall save the present step and leave, and also into the spec, for nodes that come or come back later;
`resize` writes into the spec how many nodes may take part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from elasticrt.cli.control import LeaveOptions
from elasticrt.cli.live_run import LiveRun, live_run
from elasticrt.cli.options import options_given
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
"""How many nodes one transaction asks to leave. etcd takes 128 operations in one."""


def drain(arguments: argparse.Namespace) -> int:
    """Have one node leave, wait until it has left, and say what becomes of the run.

    Raises ConfigError, RendezvousTimeoutError, StoreError.
    """
    options = options_given(arguments, LeaveOptions())
    name = arguments.name
    with live_run(arguments, options) as run:
        members, before = run.members(), run.record(run.keys.generation, Generation)
        if not members:
            raise run.without_nodes()
        if name not in members:
            expected = f"one of {', '.join(members)}"
            raise ConfigError("no such node", f"run {run.keys.run_id}", got=name, expected=expected)
        life = members[name][0].incarnation
        # A node that has left may come back as another member, so the member is identified by its incarnation as well.
        _leave(run, lambda member: (member.node, member.incarnation) == (name, life), options.timeout_s)
        rest, spec, after = len(run.members()), run.spec()[0], run.record(run.keys.generation, Generation)
        trained = [each for each, (member, _) in members.items() if before and member.generation == before.number]
        handed = before and after and after.number > before.number and after.in_place
        ended, steps, lost = _saved(run, spec.attempt)
        # If no trained state is left in a living node, only what was saved counts, and the text must say what that is.
        text, alone = f"{name} has left run {run.keys.run_id}", not rest or (trained == [name] and not handed)
        if not rest:
            text += f", as the last node: the run has {ended}"
        elif rest < spec.spec.min_nodes:
            text += f": {counted(rest, 'node')} left of at least {spec.spec.min_nodes}, the run waits for more"
        elif alone:
            text += f": no other node trained, and {counted(rest, 'node')} can go on"
        write(sys.stdout, text + (steps if alone else "") + "\n")
    return EXIT_CHECKPOINT if alone and lost else EXIT_OK


def stop(arguments: argparse.Namespace) -> int:
    """Have all nodes leave, and wait until they have. Raises ConfigError, RendezvousTimeoutError, StoreError."""
    options = options_given(arguments, LeaveOptions())
    with live_run(arguments, options) as run:
        run_id, attempt, members = run.keys.run_id, run.spec()[0].attempt, run.members()
        if not members:
            raise run.without_nodes()
        told = f"run {run_id}: {counted(len(members), 'node')} told to save and leave\n"
        _leave(run, lambda _: True, options.timeout_s, told, stops=True)
        ended, steps, lost = _saved(run, attempt)
        write(sys.stdout, f"run {run_id} {ended}{steps}\n")
    return EXIT_CHECKPOINT if lost else EXIT_OK


def _saved(run: LiveRun, attempt: int) -> tuple[str, str, bool]:
    """How a run has ended whose trained nodes have left, which of its steps are saved, and whether some are lost."""
    result, saved = run.record(run.keys.result(attempt), Result), run.record(run.keys.checkpoint, Commit)
    if result is not None:
        ended, last = f"{result.status}: {result.reason}", 0
    else:
        ended, last = "stopped", left_after(run.record(run.keys.handover, HandoverRecord), run.directory)
    reached = saved.reached if saved is not None else 0
    return ended, f"; {which_steps_are_saved(reached, last)}" if reached or last else "", last > reached


def left_after(handover: HandoverRecord | None, directory: Path) -> int:
    """The last step before the nodes left.

    That is the step of a `handover` that saves, unless the run's events say that it hung in that step; without such a
    handover, the newest step in the events.
    """
    story = read(directory) if has_events(directory) else None
    newest = story.steps.newest if story is not None else 0
    if handover is None or not handover.save:
        return newest
    # A handover is for the step in which the workers are. If that one hung, the newest step is the one before.
    same = story is not None and story.generations.newest.number == handover.generation
    return newest if same and newest == handover.step - 1 else handover.step


def resize(arguments: argparse.Namespace) -> int:
    """Change the limits on the number of nodes. Raises ConfigError, StoreError."""
    options = options_given(arguments, EtcdOptions())
    least, most = arguments.nodes
    with live_run(arguments, options) as run:
        (record, seen), members, where = run.spec(), run.members(), f"run {run.keys.run_id}"
        if not members:
            raise run.without_nodes()
        changed = record.spec.model_copy(update={"min_nodes": least, "max_nodes": most})
        new = record.model_copy(update={"spec": changed, "resized": True})
        if changed != record.spec and not run.store.commit(transactions.change_spec(run.keys, new, seen)).succeeded:
            # Another `resize` or a new start of the run has changed the spec since it was read.
            raise StoreError("the run's options have just changed", where, remedy="Try again")
        text = f"{where} may have {least} to {counted(most, 'node')}; it has {len(members)}"
        write(sys.stdout, text + _consequence(least - len(members), len(members) - most, members.values()) + "\n")
    return EXIT_OK


def _leave(
    run: LiveRun, leaves: Callable[[Member], bool], timeout_s: float, told: str = "", *, stops: bool = False
) -> None:
    """Ask members to drain, also those that come meanwhile, and wait until they have left.

    Members that are asked in one transaction hand over together.

    Args:
        run: the run.
        leaves: which members.
        timeout_s: after so many seconds RendezvousTimeoutError is raised.
        told: a text to write when etcd has taken the first request.
        stops: whether the whole run stops. The spec says that, or who leaves, so that nobody who is cut off now goes on
            with the run later.
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
        spec, seen = run.spec()
        new = spec.model_copy(update={"stopped": True}) if stops else spec
        for member, _ in () if stops else left.values():
            new = new.telling(member.agent)
        if new != spec:
            asked.append(transactions.change_spec(run.keys, new, seen))
        if not asked:
            time.sleep(LOOK_AGAIN_S)
            continue
        compares = tuple(compare for each in asked for compare in each.compares)
        operations = tuple(operation for each in asked for operation in each.operations)
        if not run.store.commit(
            Txn(compares, operations, why=f"asked to drain: {counted(len(left), 'node')}")
        ).succeeded:
            time.sleep(LOOK_AGAIN_S)
            continue
        write(sys.stdout, told)
        told = ""


def _consequence(missing: int, surplus: int, members: Iterable[tuple[Member, KeyValue]]) -> str:
    """What follows for a run with these `members` that lacks `missing` nodes, or has a `surplus`."""
    if missing <= 0:
        return f": {counted(surplus, 'node')} will stand by" if surplus > 0 else ""
    if any(member.ready and member.has_state for member, _ in members):
        return f": it saves, and waits for {counted(missing, 'more node')}"
    return ": it trains on, as a wait would end its workers; the minimum counts from the next change on"
