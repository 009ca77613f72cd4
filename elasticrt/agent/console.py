"""Writes what an agent tells: events for programs, lines for people, and a last line at a terminal that changes.

The sentences come from `story.sentences`. An agent folds its own events into a `Story`, as all other views of a run do.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from elasticrt import events
from elasticrt.agent.doing import SHOWN_AFTER_S, Doing, in_words
from elasticrt.agent.edges import Edges
from elasticrt.agent.last_line import LastLine, fits
from elasticrt.agent.store_discovery import OpenStore
from elasticrt.ipc import std_streams
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import Step
from elasticrt.ipc.proc import machine
from elasticrt.ipc.std_streams import Unwritable, write
from elasticrt.ipc.wording import counted, how_to_go_on, which_steps_are_saved
from elasticrt.rendezvous.decision import Leave, Me, Publish
from elasticrt.rendezvous.leader_context import describe_loss
from elasticrt.rendezvous.records import Generation, Result
from elasticrt.rendezvous.view import Stored, View
from elasticrt.settings import Settings
from elasticrt.story import sentences
from elasticrt.story.changes import Changes, Sentence
from elasticrt.story.fold import Story, cause_of
from elasticrt.story.report import summary
from elasticrt.story.sentences import to_go_on
from elasticrt.text import log_line, plain, shell

WAIT_SAID_EVERY_S = 10.0
"""The shortest time between two lines about the nodes for which the agent waits."""

DRAWN_EVERY_S = 0.4
"""The shortest time between two changes of the last line."""

GOODPUT_SHARE = 1e-3
"""The goodput is summed up again after this share of the run's time. In that time it cannot change by more than the
same share."""

_STANDS_BY_UNTIL = {
    "now": "",
    "budget": " for 20 s after a start, or for 20 times as long as the last change took: --join budget",
    "failure": " until the next failure or departure: --join failure",
}


class Console:
    """The console of one agent. Only the agent's main thread uses it.

    Args:
        settings: the agent's settings.
        edges: makes the event log, and the lines that say how to join.

    Attributes:
        events: the node's event log.
        story: the run's story, folded from the events of this agent and from what it has heard of others.
    """

    def __init__(self, settings: Settings, edges: Edges) -> None:
        self._settings = settings
        self._how_to_join = edges.how_to_join
        # Whether stderr can no longer be written.
        self._is_closed = False
        # The newest generation without this node that was printed.
        self._announced_standby = 0
        self.events = edges.event_log(settings.node, settings.run_dir, settings.options.events_fd)
        self.story = Story()
        self._changes = Changes(self.story)
        # Sentences to print at the next `tick`.
        self._due_sentences: list[Sentence] = []
        self.events.follow(self._fold)
        self._last_line: LastLine | None = None
        self._draw_at = self._goodput_at = 0.0
        self._goodput = 0.0
        self._doing: Doing | None = None
        self._doing_since = 0.0
        self._waiting_said, self._wait_said_at = "", 0.0
        # The nonce of the run's newest checkpoint.
        self._head = ""
        self._node = settings.node

    @property
    def narrates(self) -> bool:
        """Whether lines are printed: not with --events-fd, whose reader gets events, nor once stderr is closed."""
        return self._settings.options.events_fd < 0 and not self._is_closed

    def say(self, text: str, kind: str = "said", *, level: str = "info", **fields: Any) -> None:
        """Print `text`, each line with the prefix `elasticrt: `.

        With --log-format json the line also has `kind`, `level` and `fields`. With --quiet, lines of level "info" are
        left out.
        """
        if not self.narrates or (self._settings.options.quiet and level == "info"):
            return
        if self._settings.options.log_format == "json":
            now = datetime.now(timezone.utc).isoformat()
            lines = log_line(now, level, kind, text, node=self._node, **fields) + "\n"
        else:
            lines = "".join(f"elasticrt: {line}\n" for line in plain(text).splitlines())
        try:
            self._is_closed = not write(sys.stderr, lines)
        # A full disk or a closed terminal must not end the run.
        except Unwritable:
            self._is_closed = True

    def warn(self, text: str) -> None:
        """Print a warning."""
        self.say(text, "warning", level="warning")

    def _fold(self, record: events.Record) -> None:
        """Fold an event that this agent writes, and note the sentences that it brings."""
        told = self._changes.fold(record)
        self._due_sentences += told if self.narrates else []

    def note_step(self, generation: int, rank: int, step: Step) -> None:
        """Note a `step` of a worker in the story.

        Only rank 0's node writes steps as events. On any other node, the steps of its lowest rank keep the last line
        current.
        """
        newest, ranks = self.story.generations.workers.get(self._node, (0, {}))
        if generation == newest and ranks and 0 < rank == min(ranks):
            self._fold_unwritten(events.Step(generation, step.step, step.epoch, step.scalars), step.at_ns / 1e9)

    def _note_checkpoint(self, head: Stored[Commit] | None, now: float) -> None:
        """Note a new checkpoint of the run in the story. Only rank 0's node writes it as an event."""
        nonce = head.record.nonce if head is not None else ""
        if head is not None and nonce != self._head and self.story.generations.all:
            _, ranks = self.story.generations.workers.get(self._node, (0, {}))
            if ranks and 0 not in ranks:
                self._fold_unwritten(
                    events.Committed(head.record.reached, head.record.generation, head.record.size), now
                )
        self._head = nonce

    def _note_saved(self, step: int) -> None:
        """Note in the story up to which `step` the run is saved: a node that stands by has not heard of all commits."""
        if self.story.generations.all and step > self.story.checkpoints.newest:
            self._fold_unwritten(
                events.Committed(step, self.story.generations.newest.number), self.story.last - self.clock_offset_s
            )

    def _fold_unwritten(self, event: events.Event, at: float) -> None:
        """Fold an event of another node at `at`, in seconds of the monotonic clock, without writing it."""
        self.story.fold(events.Record(event, self._node, at, at + self.clock_offset_s))

    # The last line of a terminal.

    def open_last_line(self) -> None:
        """Keep a line at the end of the terminal, if stderr is a terminal and --quiet is not given."""
        options = self._settings.options
        if self.narrates and not options.quiet and options.log_format == "text" and fits(sys.stderr, os.environ):
            self._last_line = LastLine(sys.stderr)
            std_streams.keep_last_line(self._last_line.aside)
            self._last_line.draw(f"run {self._settings.run_id}: looking for other nodes")

    def close_last_line(self) -> None:
        """Remove the last line."""
        std_streams.keep_last_line(None)
        if self._last_line is not None:
            self._last_line.draw("")
        self._last_line = None

    def tick(
        self, now: float, doing: Doing | None, step: int | None = None, head: Stored[Commit] | None = None
    ) -> None:
        """Print what is due, and draw the last line.

        Args:
            now: seconds of the monotonic clock.
            doing: what takes the agent's time besides training; None: nothing.
            step: the last step that this node's workers have finished; None if unknown.
            head: the newest checkpoint of the run.
        """
        self._note_checkpoint(head, now)
        # Another wait begins to count. A change of `more` alone is the same wait.
        if self._doing is None or doing is None or doing.what != self._doing.what:
            self._doing_since = now
        self._doing = doing
        self._say_changes(now)
        words = ""
        if doing is not None and now >= self._doing_since + SHOWN_AFTER_S:
            words = in_words(doing, self._doing_since, now)
            if doing.for_people and doing.more != self._waiting_said and now >= self._wait_said_at:
                self._waiting_said, self._wait_said_at = doing.more, now + WAIT_SAID_EVERY_S
                self.say(words, "waiting")
        if self._last_line is not None and now >= self._draw_at:
            self._draw_at = now + DRAWN_EVERY_S
            self._last_line.draw("  ".join(filter(None, (words, self._state_line(now, step)))))

    def alarms(self, now: float) -> list[float]:
        """The times after `now` at which `tick` is due, in seconds of the monotonic clock."""
        due = self._changes.due() if self.narrates else None
        found = [due - self.clock_offset_s] if due is not None else []
        if self.narrates and self._doing is not None and self._doing.for_people:
            found.append(self._doing_since + SHOWN_AFTER_S)
        if self._last_line is not None:
            found.append(self._draw_at)
        return [at for at in found if at > now]

    @property
    def clock_offset_s(self) -> float:
        """What to add to a time of the monotonic clock to get the story's time, which is seconds since 1970."""
        first = self.story.lives.all[0] if self.story.lives.all else None
        return first.begin - first.started_at if first is not None else 0.0

    def _say_changes(self, now: float) -> None:
        # A millisecond more than `now`: the sum is rounded, and an alarm that comes a little too early is not set
        # again.
        told, self._due_sentences = [*self._due_sentences, *self._changes.tick(now + self.clock_offset_s + 1e-3)], []
        for chapter, text in told:
            # `announce_standby` has printed this generation. A former agent of this node may have had a seat there.
            if self._node not in chapter.nodes or chapter.number == self._announced_standby:
                continue
            generation, pids = self.story.generations.workers.get(self._node, (0, {}))
            here = f" ({_ranks(min(pids), len(pids))} here)" if pids and generation == chapter.number else ""
            # With --log-format json the line has the facts about the generation as fields.
            fields = {
                name: value
                for name, value in chapter.told().items()
                if name not in ("reported", "kind", "follows", "reached")
            }
            fields["change"] = chapter.kind
            self.say(text + (here if chapter.world_size > len(pids) else ""), "generation", **fields)

    def _state_line(self, now: float, step: int | None) -> str:
        """The state of the run in words, for the last line."""
        story, at = self.story, now + self.clock_offset_s
        newest = max(story.steps.newest, step or 0)
        if newest and now >= self._goodput_at:
            self._goodput_at, self._goodput = now + GOODPUT_SHARE * (at - story.begin), story.goodput(at)
        return sentences.now_at(story, at, self._goodput if newest else None, step=newest)

    def joined(self, me: Me, store: OpenStore, store_id: str) -> None:
        """Say that this agent has become a member, in the etcd of `store`, and how other nodes can join.

        `store_id`: the identity of etcd's data.
        """
        settings, etcd, name = self._settings, ",".join(map(str, store.endpoints)), me.record.node
        self.events.rename(name)
        self._node = name
        started = events.AgentStarted(
            pid=os.getpid(),
            run_id=settings.run_id,
            etcd=etcd,
            store=store_id,
            run_dir=str(settings.run_dir),
            machine=machine(),
            min_nodes=me.spec.min_nodes,
            max_nodes=me.spec.max_nodes,
        )
        self.events.write(started)
        self.say(f"run {settings.run_id}, node {name}, etcd {etcd}, logs in {settings.run_dir}")
        if me.spec.max_nodes > 1:
            for line in self._how_to_join(settings, me.spec, store):
                self.say(line)

    def fresh_ignored(self, step: int) -> None:
        """Say that --fresh is ignored and the run goes on from `step`: no node may discard others' work."""
        self.say(f"run {self._settings.run_id} goes on from step {step:,}: --fresh is for its first start only")
        self.say("to start from the beginning, give another --run-id")

    def nothing_to_do(self, result: Result) -> None:
        """Say that the run has succeeded before, with this `result`."""
        self.say(f"run {self._settings.run_id} has succeeded already ({result.reason}); --again runs it once more")

    def committed(self, event: events.Committed) -> None:
        """Write the `event` of a commit. Also print it if the checkpoint before could not be saved."""
        missed = self.story.checkpoints.unsaved
        self.events.write(event)
        if missed is not None:
            self.warn(sentences.saved_again(event))

    def published(self, decision: Publish, before: View) -> None:
        """Write which nodes the published generation has lost, compared with the view `before`.

        Nodes that have left in order are not lost.
        """
        stay = {seat.incarnation for seat in decision.seats}
        for seat in before.seats_in_rank_order() if decision.draft.kind == "lost" else ():
            key, how = before.members.get(seat.node), describe_loss(before, seat)
            lives = key is not None and key.record.incarnation == seat.incarnation
            if seat.incarnation not in stay and not lives and how != "left":
                self.events.write(events.MemberLost(lost=seat.node, how=f"{seat.node} {how}"))

    def announce_standby(self, view: View, me: Me, tell: Callable[[Generation, tuple[str, ...]], None]) -> None:
        """Say once that the generation of `view` runs without this node, `me`, which stands by.

        `tell` takes that generation and the names of its nodes. Generations with this node are printed from the story.
        """
        if view.generation is None or view.generation_number <= self._announced_standby or not view.roster_known:
            return
        new, seat = view.generation.record, view.seat_of(me.record)
        # No node stands by for a generation of an earlier attempt.
        if new.attempt != me.attempt or seat is not None:
            return
        leader = view.members.get(view.leader_node or "")
        runs = leader is not None and leader.record.generation == view.generation_number
        # That generation ended before this node joined, and the next one follows.
        if not runs and view.has_no_seated_member:
            return
        self._announced_standby = view.generation_number
        tell(new, tuple(seat.node for seat in view.seats_in_rank_order()))
        # Only sentences that are there already: those about the generation before come first.
        self._say_changes(-math.inf)
        size = f"{counted(new.nodes, 'node')}, world size {new.world_size}"
        room = new.nodes < me.spec.max_nodes and not (new.waits or me.record.draining)
        until = _STANDS_BY_UNTIL[me.spec.join] if room else ""
        cause = cause_of(self.story, new.number, new.cause)
        self.say(f"generation {new.number}: {cause}, {size} (standing by here{until})", "generation")

    def left(
        self,
        decision: Leave,
        head: Commit | None,
        *,
        saves: bool = False,
        lost: bool = False,
        late_after: int = 0,
        known: bool = True,
    ) -> None:
        """Say how the run went on this node, which leaves it, what is saved, and how to go on.

        Args:
            decision: the decision to leave.
            head: the newest committed checkpoint that this node knows; None without one.
            saves: whether this node had to save the step of `decision`.
            lost: whether the step that this node had to save is not saved, so that nobody saves it any more.
            late_after: the last step that the workers have finished, if they could not hand over in time; else 0.
            known: whether `head` is certainly the newest checkpoint.
        """
        chapter, reached = self.story.generations.newest, head.reached if head is not None else 0
        alone = chapter.nodes == (self._node,)
        # The step that is lost with this node: the one that it had to save, or the last one of a node that trained
        # alone. On other nodes the run goes on with the step.
        missed = decision.save_step if lost else late_after if alone else 0
        told = self.story.checkpoints.unsaved.step if self.story.checkpoints.unsaved is not None else 0
        self._note_saved(reached)
        if self.story.generations.all and missed > max(reached, told):
            self.events.write(events.Unsaved(missed, chapter.number, f"{self._node} left before the step was saved"))
        self._say_changes(math.inf)
        self._summarize()
        if decision.others_go_on:
            if late_after > reached:
                why = "and etcd does not say whether a checkpoint has it"
                if known:
                    steps = f"steps {reached + 1:,} to {late_after:,} are" if late_after > reached + 1 else "it is"
                    unless = "" if alone else " unless another node's workers go on"
                    why = f"and no checkpoint has it: {steps} lost{unless}"
                self.say(f"step {late_after:,} was not handed over, {why}", "unsaved", level="error")
            self.say(f"to bring this node back: the same command, with --run-id {self._settings.run_id}")
            return
        behind = decision.save_step if reached < decision.save_step else 0
        if lost:
            stand, why = self.story.standstill, ""
            if stand is not None and stand.culprit.ranks:
                sentence = self.story.standstill_sentence(self.story.last)
                why = f"; {sentence}. A shorter --hang-timeout restarts workers that hang"
            self.say(which_steps_are_saved(reached, behind) + why, "unsaved", level="error")
        parts = []
        # Another node may have saved steps of which this one has not heard.
        if (reached or (behind and (saves or alone))) and not lost:
            parts.append(which_steps_are_saved(reached))
        if behind and not lost:
            who = "etcd does not say" if saves else "the node of rank 0 says"
            parts.append(f"{who} whether step {behind:,} is saved")
        self.say(how_to_go_on(self._settings.run_id, "; ".join(parts)))

    def stopped(self, code: int) -> None:
        """Write that this agent ends with `code`, and close the event log."""
        self.close_last_line()
        # An agent that was never a member writes no event: its node's name may be that of another agent.
        if self.story.lives.all:
            self.events.write(events.AgentStopped(code=code))
        self.events.close()

    def ended(self, result: Result, *, leads: bool) -> None:
        """Say the `result` of the run. The node that `leads` also prints the report of a failure."""
        self._note_saved(result.step)
        self._say_changes(math.inf)
        self.close_last_line()
        # Every agent knows the result. Only the leader prints the report, so that it is there once.
        if result.text and leads:
            self.events.write(events.Failure(text=result.text))
            self.say(result.text, "failure", level="error")
        self.events.write(events.Result(status=result.status, code=result.code, reason=result.reason))
        self._summarize()
        level = "info" if result.status == "succeeded" else "error"
        said = {"status": result.status, "code": result.code, "reason": result.reason}
        if leads and (remedy := to_go_on(self.story)):
            self.say(remedy, "summary")
        self.say(f"run {self._settings.run_id} {result.status}: {result.reason}", "result", level=level, **said)

    def _summarize(self) -> None:
        """Say how the run went, as far as this node knows, and which command tells more."""
        for line in summary(self.story):
            self.say(line, "summary")
        if self.story.generations.all and self._settings.run_dir.is_dir():
            self.say(f"more: elasticrt report {shell([str(self._settings.run_dir)])}", "summary")


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first} to {first + count - 1}"
