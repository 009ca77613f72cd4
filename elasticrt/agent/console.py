"""What an agent says: events for machines, lines on stderr for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from elasticrt import events
from elasticrt.agent.edges import Edges
from elasticrt.agent.store_discovery import Meeting
from elasticrt.ipc.env import Commit
from elasticrt.ipc.std_streams import Unwritable, write
from elasticrt.ipc.wording import counted
from elasticrt.rendezvous.decision import Leave, Me, Publish
from elasticrt.rendezvous.records import Result
from elasticrt.rendezvous.view import View
from elasticrt.settings import Settings
from elasticrt.story.fold import Story
from elasticrt.story.report import summary
from elasticrt.text import plain, shell


class Console:
    """One agent's, of its `settings`, in the world of its `edges`.

    Lines are left out when somebody reads the events instead.

    Attributes:
        events: the node's event log.
        story: what this agent has written in it, folded.
    """

    def __init__(self, settings: Settings, edges: Edges) -> None:
        self._settings = settings
        self._how_to_join = edges.how_to_join
        self._unheard = False
        self._joined = False
        self._said = 0  # The newest generation that people know of.
        self.events = edges.event_log(settings.node, settings.run_dir, settings.options.events_fd)
        self.story = Story()
        self.events.follow(self.story.tell)

    @property
    def narrates(self) -> bool:
        """Whether people are told anything: not where somebody reads the events instead, or nobody reads our lines."""
        return self._settings.options.events_fd < 0 and not self._unheard

    def say(self, text: str) -> None:
        """Tell people `text`, each line with our name before it."""
        if not self.narrates:
            return
        try:
            self._unheard = not write(sys.stderr, "".join(f"elasticrt: {line}\n" for line in plain(text).splitlines()))
        except Unwritable as error:  # A full disk, or a terminal that is gone: the run does not end of that.
            self._unheard = True
            self.event(events.Unheard(problem=str(error)))

    def event(self, event: events.Event) -> None:
        """Tell machines of an `event`."""
        self.events.write(event)

    def joined(self, me: Me, meeting: Meeting) -> None:
        """This agent is a member, by the etcd of `meeting`; how others become one."""
        settings, etcd, name = self._settings, ",".join(map(str, meeting.endpoints)), me.record.node
        self.events.rename(name)
        self._joined = True
        started = events.AgentStarted(
            pid=os.getpid(),
            run_id=settings.run_id,
            etcd=etcd,
            run_dir=str(settings.run_dir),
            machine=_machine(),
            min_nodes=me.spec.min_nodes,
            max_nodes=me.spec.max_nodes,
            workers=settings.workers,
        )
        self.event(started)
        self.event(events.Registered(incarnation=me.record.incarnation, attempt=me.attempt))
        self.say(f"run {settings.run_id}, node {name}, etcd {etcd}, logs in {settings.run_dir}")
        if me.spec.max_nodes > 1:
            for line in self._how_to_join(settings, me.spec, meeting):
                self.say(line)

    def left_out_fresh(self, step: int) -> None:
        """The run goes on from `step`: `--fresh` is for a new one. A node may not throw away what others have done."""
        self.say(f"run {self._settings.run_id} goes on from step {step:,}: --fresh is for its first start only")
        self.say("to start from the beginning, give another --run-id")

    def nothing_to_do(self, result: Result) -> None:
        """The run has succeeded before, with this `result`."""
        self.say(f"run {self._settings.run_id} has succeeded already ({result.reason}); --again runs it once more")

    def published(self, decision: Publish, before: Mapping[str, str]) -> None:
        """A generation was published by `decision`; `before`: incarnations by node of the one that it replaces."""
        after = {seat.node: seat.incarnation for seat in decision.seats}
        if decision.draft.kind == "lost":
            for name in sorted(name for name in before if after.get(name) != before[name]):
                self.event(events.MemberLost(lost=name, how=decision.draft.cause))

    def generation(self, view: View, me: Me) -> None:
        """`view` may have another generation: say it once, as soon as this node (`me`) knows whether it has a seat."""
        if view.generation is None or view.number <= self._said or not view.roster_known:
            return
        self._said = view.number
        new, seat = view.generation.record, view.seat_of(me.record.node, me.record.incarnation)
        if new.attempt != me.attempt:  # Of the attempt before this one: nobody stands by there.
            return
        if seat is None and view.complete:
            alive = {each.record.incarnation for each in view.members.values()}
            if alive.isdisjoint(each.incarnation for each in view.seats.values()):
                return  # It ended before this node came; the next one is on its way.
        here = "standing by" if seat is None else _ranks(seat.rank_offset, seat.workers)
        size = f"{counted(new.nodes, 'node')}, {counted(new.world_size, 'worker')} ({here} here)"
        self.say(f"generation {new.number} with {size}: {new.cause}")

    def left(self, decision: Leave, head: Commit | None) -> None:
        """This node has gone, by `decision`: what is saved by now (`head`), and how to go on."""
        if decision.others_go_on:
            self.say(f"to bring this node back: the same command, with --run-id {self._settings.run_id}")
            return
        if decision.saving and (head is None or head.reached < decision.saving):
            saved = f"the node of rank 0 is saving step {decision.saving:,}; "
        else:
            saved = f"step {head.reached:,} is saved; " if head is not None else ""
        self.say(f"{saved}to go on: the same command, with --run-id {self._settings.run_id}")

    def stopped(self, code: int) -> None:
        """This agent ends with `code`. One that was never a member says nothing: its name may be another's."""
        if self._joined:
            self.event(events.AgentStopped(code=code))
        self.events.close()

    def ended(self, result: Result, *, leads: bool) -> None:
        """The run has its `result`; the node that `leads` shows the report."""
        if result.text and leads:
            self.event(events.Failure(text=result.text))
            self.say(result.text)
        self.event(events.Result(status=result.status, code=result.code, reason=result.reason))
        for line in summary(self.story):
            self.say(line)
        if self.story.chapters:
            self.say(f"more: elasticrt report {shell([str(self._settings.run_dir)])}")
        self.say(f"run {self._settings.run_id} {result.status}: {result.reason}")


def _machine() -> str:
    """This machine since it booted: where the monotonic clock counts from."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
