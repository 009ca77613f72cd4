"""The story of a run: one fold over the events of all its agents. Pure.

The terminal, `simulate`, `status`, `report` and the dashboard are views of a `Story`, so they cannot disagree. Nothing
here reads a clock: what depends on the present takes `now`. Events may be late, missing or repeated, because files are
read while agents write them, and agents may be frozen or killed; so a later event can correct what was folded before.

Times are seconds since 1970. Within one machine they follow the monotonic clock, so they stay in order when the wall
clock is set. Machines are compared by the wall clock that each had at its first event.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

from elasticrt import events
from elasticrt.ipc.failure import ENDED_EARLY
from elasticrt.ipc.wording import UNAGREED
from elasticrt.story.buckets import AGREE, STANDBY, TRAIN, WAITING, Span, totals
from elasticrt.story.failures import SILENT, Failures, RunFailure, explained
from elasticrt.story.generations import FROZEN_S, Chapter, Generations, Standstill, is_failure
from elasticrt.story.lives import AgentLife, Lives
from elasticrt.story.run import Run
from elasticrt.story.steps import Checkpoints, Steps

SILENT_S, SILENT_SHARE = 60.0, 0.01
"""A run counts as ended when its agents have written nothing for this many seconds, or for this share of its time so
far, whichever is longer."""


FROZEN_SHARE = 0.002
"""The silence of frozen agents is also longer than this share of the run's time so far: files keep at least one line of
progress in each thousandth of it."""


class Story:
    """What is known of a run: its parts, and what takes several of them to say.

    `fold` takes the events of all its agents, best in the order of `when`. The parts are what the events so far
    say; views only read them. What an event says to one part alone is in the `fold` of that part; what it says to
    several is in `_fold_together`.
    """

    def __init__(self) -> None:
        self.machines: dict[str, str] = {}  # By node.
        # By machine, the wall clock's time at which its monotonic clock was 0.
        self._zeros: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        """Begin with a story in which nothing has happened."""
        self.run = Run()
        self.generations = Generations()
        self.lives = Lives(self.generations.numbers)
        self.steps, self.checkpoints, self.failures = Steps(), Checkpoints(), Failures()
        # The times of the first and the last event; 0 before the first.
        self.begin = self.last = 0.0

    # The present.

    @property
    def waits_since(self) -> float | None:
        """Since when the newest generations in a row have waited for nodes; None: the newest does not wait."""
        waiting = list(takewhile(lambda chapter: chapter.waits, reversed(self.generations.all)))
        return waiting[-1].begin if waiting and self.run.result is None else None

    @property
    def standstill(self) -> Standstill | None:
        """The present standstill, if a node has found whom the others wait for; None: steps are made, or not known."""
        stand = self.generations.newest.standstill
        # The cheap conditions come first: this is asked at every `Progress`, and few of them find a culprit.
        if stand is None or not stand.is_explained or self.run.result is not None or not self.lives.alive():
            return None
        return stand

    def standstill_sentence(self, now: float) -> str:
        """The sentence about `standstill` at `now`; "" if it is None."""
        stand = self.standstill
        return stand.sentence(now, numbered=self.has_step_numbers) if stand is not None else ""

    def standstill_s(self, now: float) -> float:
        """For how many seconds no step has been made at `now`.

        0 if steps are made, or if neither a reason is known nor nodes are waited for.
        """
        since = self.standstill.since if self.standstill is not None else self.waits_since
        return max(0.0, now - since) if since is not None else 0.0

    @property
    def straggler(self) -> events.Straggler | None:
        """The finding about the node that is slow now, in the newest generation; None: no node is known to be slow."""
        findings = self.failures.straggler_findings
        at, event = findings[-1] if findings else (0.0, None)
        return event if event is not None and event.slow and at >= self.generations.newest.begin else None

    def seated_lives(self) -> list[AgentLife]:
        """The running agents that have a seat in the newest generation."""
        living = set(self.lives.living())
        return [life for life in self.lives.seated(self.generations.newest) if life in living]

    def now_if_running(self, now: float) -> float | None:
        """`now` if the run still goes on then, as far as its events tell; else None.

        The result is the `now` of `spent` and of the other sums.
        """
        silent_s = max(SILENT_S, SILENT_SHARE * (self.last - self.begin))
        return now if self.run.result is None and self.lives.alive() and now - self.last < silent_s else None

    # The whole.

    @property
    def has_step_numbers(self) -> bool:
        """Whether steps are counted over the whole run, as far as is known. They are for a script with a Loop.

        That is assumed until a script succeeds without a step or a checkpoint, or makes steps without numbers.
        """
        if self.steps.first_at is not None or self.checkpoints.count:
            return True
        return not self.run.succeeded and all(chapter.stepped_at is None for chapter in self.generations.all)

    def nodes_without_events(self) -> list[str]:
        """The nodes of the newest generation that have no event here.

        Nodes without a shared disk write to run directories of their own.
        """
        return [node for node in self.generations.newest.nodes if node not in self.lives.nodes]

    def explained_standstills(self, now: float | None = None) -> list[Standstill]:
        """The newest standstills whose reason was found, each with its end, as far as an agent was there to see it.

        Args:
            now: the end of one that still lasts; None: the time of the last event.
        """
        last = min(self.run.ended_at, self.last if now is None else max(now, self.last))
        found = explained(self.generations.all, last)
        return [replace(stand, until=self.lives.witnessed_end(stand.since, stand.until)) for stand in found]

    def spent(self, now: float | None = None) -> dict[str, float]:
        """Seconds by bucket, summed over all nodes, without the time in which a node stood by.

        Args:
            now: up to when running agents count; None: up to their last events.
        """
        nodes = self.spans_by_node(now).values()
        return totals(span for spans in nodes for span in spans if span.bucket != STANDBY)

    def spans_by_node(self, now: float | None = None) -> dict[str, list[Span]]:
        """How each node's time was spent until the run's result: the spans of all its agents, one after the other."""
        found: dict[str, list[Span]] = {}
        for life in self.lives.all:
            end, spans = min(self.run.ended_at, life.result_at), self.lives.spans_of(life, now)
            cut = [replace(span, end=min(span.end, end)) for span in spans if span.begin < end]
            found.setdefault(life.node, []).extend(cut)
        return found

    def goodput(self, now: float | None = None) -> float:
        """The share of the nodes' time (see `spent`) that went into steps that count (`train`), from 0 to 1."""
        spent = self.spent(now)
        return spent.get(TRAIN, 0.0) / sum(spent.values()) if spent else 0.0

    # The events.

    def when(self, record: events.Record) -> float:
        """When `record` happened. Ask for a node's records in the order in which they were written."""
        if isinstance(record.event, events.AgentStarted) and record.event.machine:
            self.machines[record.node] = record.event.machine
        machine = self.machines.get(record.node) or f"the machine of {record.node}"
        return self._zeros.setdefault(machine, record.time - record.at) + record.at

    def fold(self, record: events.Record) -> float:
        """Fold `record` into the story. Returns when it happened."""
        at, event = self.when(record), record.event
        # The run is run `--again` after a success. An agent that joins while the others end is no new beginning.
        if isinstance(event, events.AgentStarted) and self.run.succeeded and not self.lives.alive():
            self._begin()
        frozen_s = max(FROZEN_S, FROZEN_SHARE * (self.last - self.begin))
        if at - self.last > frozen_s:
            self.generations.newest.silent_since = self.last
        self.begin, self.last = min(self.begin or at, at), max(self.last, at)
        life = self.lives.author(record, at)
        self.run.fold(event, at)
        self.checkpoints.fold(event, at)
        self.generations.fold(event, record.node, at, self.lives.nodes)
        self._fold_together(event, life, at)
        self.lives.fold(event, life, at)
        return at

    def _fold_together(self, event: events.Event, life: AgentLife, at: float) -> None:
        """Fold in what an event of `life` says to several parts."""
        generations, failures = self.generations, self.failures
        number = generations.newest.number
        match event:
            case events.Generation():
                self._generation(event, life, at)
            case events.FirstStep() if 0 < event.generation == number:
                highest, told = self.steps.highest, self.lives.nodes
                if generations.first_step(event, life.node, at, highest=highest, told=told):
                    self.checkpoints.passed_over(event.resumed_from)
                self._stepped(event.generation, event.step, at)
            case events.Recovery() | events.SetUp() if event.generation in generations.numbers:
                self._phases(event, life.node, at - event.age_s)
            case events.Step():
                self._stepped(event.generation, event.step, at)
                self.steps.reported(event, at)
            case events.Progress():
                self._progressed(event, life.node, at)
            case events.WorkerEnded() if is_failure(event):
                failures.all.append(RunFailure(at, life.node, event.failure, event.generation))
            case events.Culprit() | events.Stalled() if event.generation in generations.numbers:
                failures.hung(generations.numbers[event.generation], has_step_numbers=self.has_step_numbers)
            case events.Straggler() if event.generation == number:
                failures.straggler_findings.append((at, event))
            case events.MemberLost():
                self._member_lost(event, life, at)
            # The node may have been taken out before: the clocks of two machines differ.
            case events.Leaves():
                failures.take_back(life.loss)

    def _generation(self, event: events.Generation, life: AgentLife, at: float) -> None:
        generations, before = self.generations, self.generations.newest
        known = generations.is_known(event.number)
        # A fresh etcd counts generations from 1 again. It is recognised by a known number from an agent that started
        # after the newest generation began: no agent has a seat in a generation older than itself.
        later = life.pid != 0 and life.begin > before.begin
        chapter: Chapter | None
        if known and (isinstance(event, events.StandsBy) or not later):
            chapter = generations.learn_nodes(event)
        else:
            cause, kind = self._cause(event, before, at) if generations.all else (event.cause, event.kind)
            before.left_at = self.lives.interrupted(before) or before.left_at
            self._note_early_end(event.cause, before.number, at)
            chapter = generations.begin(event, at, cause=cause, kind=kind, needed=self.run.min_nodes)
        previous = generations.numbers.get(event.number - 1)
        if chapter is not None and previous is not None:
            chapter.short = self.lives.stayed(previous, chapter) < self.run.min_nodes

    def _note_early_end(self, cause: str, generation: int, at: float) -> None:
        """Note the failure of a worker that ended with code 0 too early. Only the leader sees that it is one."""
        who, found, _ = cause.partition(f": {ENDED_EARLY}")
        if found:
            self.failures.all.append(RunFailure(at, who.rpartition(" on ")[2], f"{who}: {ENDED_EARLY}", generation))

    def _cause(self, event: events.Generation, before: Chapter, at: float) -> tuple[str, str]:
        """The cause and kind of the generation that `event` begins at `at`, after the generation `before`.

        The leader publishes a cause in its own words. Add what only the story knows: whom the last generation waited
        for, who joined on this occasion, who was slow, whether etcd was replaced.
        """
        cause, kind, stand = event.cause, event.kind, self.standstill
        if kind == "start" and self.run.fresh_at >= before.begin:
            cause = "etcd had died, and a fresh one was started"
        elif kind == "start":
            cause, kind = self._cause_of_restart(before, event, at)
        if stand is not None:
            cause = self._cause_with_standstill(stand, cause, at)
        follows = self.generations.follows(event.number)
        if event.kind in ("failure", "lost", "drain") and follows is not None:
            known_nodes = frozenset(follows)
            newcomers = [name for name in event.nodes if name not in known_nodes and name not in cause]
            cause = "; ".join([cause, *(f"{name} joined" for name in newcomers)])
        if event.kind == "drain" and self.straggler is not None and self.straggler.slow not in event.nodes:
            cause = f"{cause}; {self.straggler.slow} was slow"
        return cause, kind

    def _cause_of_restart(self, before: Chapter, event: events.Generation, at: float) -> tuple[str, str]:
        """The cause and kind of a generation that `event` reports as a "start".

        Its leader may have found an empty etcd, and does not know which agents were killed together with the etcd
        before.
        """
        seated = self.lives.seated(before)
        killed = [life for life in seated if life.code is None and not (life.is_leaving or life.loss)]
        for life in killed:
            loss = RunFailure(at, life.node, f"{life.node} lost (killed)", before.number)
            self.failures.all.append(loss)
            self.lives.lose(life, loss, life.last)
        names = ", ".join(life.node for life in killed)
        return (f"{names} lost (killed)", "lost") if killed else (event.cause, event.kind)

    def _cause_with_standstill(self, stand: Standstill, cause: str, at: float) -> str:
        """The `cause` of the generation that ended the standstill `stand` at `at`, with the standstill's reason added.

        The standstill counts as a failure, too.
        """
        culprit = stand.culprit
        # A hang that ended its generation is in the cause already; nodes that do not answer are reported as lost.
        if self.generations.numbers[culprit.generation].hung or (culprit.nodes and not culprit.ranks):
            return cause
        until = self.lives.witnessed_end(stand.since, at)
        _, unagreed, why = culprit.reason.partition(UNAGREED)
        if unagreed:
            # The failure came first, and is the cause already.
            return f"{cause}; agreed only after {until - stand.since:.0f} s: {why}"
        what = stand.sentence(until, numbered=self.has_step_numbers)
        self.failures.add_hang(at, what, culprit.generation, culprit.nodes, since=stand.since)
        return f"{cause}; before that no step for {until - stand.since:.0f} s: {culprit.reason}"

    def _progressed(self, event: events.Progress, node: str, at: float) -> None:
        stand = self.standstill
        # The nodes that wait for the blamed one had made one step more. It does not end the standstill.
        ahead = stand is not None and node not in stand.culprit.nodes and event.step == stand.culprit.step + 1
        # A file leaves out most `Step` events, so progress may be news.
        if event.step > self.steps.newest and not ahead:
            self._stepped(event.generation, event.step, at - event.age_s)
        self.steps.progressed(event, self.generations.ranks(node, event.generation), at)

    def _stepped(self, generation: int, step: int, at: float) -> None:
        is_over = self.generations.is_over(generation)
        self.steps.made(step, at, late=is_over)
        if generation in self.generations.numbers and not is_over:
            self.generations.numbers[generation].stepped(step, at)

    def _phases(self, event: events.Recovery | events.SetUp, node: str, at: float) -> None:
        """Note what the time until the first step of `node`, made at `at`, went into."""
        chapter = self.generations.numbers[event.generation]
        # A script without a Loop reports no first step.
        if chapter is self.generations.newest:
            chapter.reported_first(node, at)
        seconds: dict[str, float] = {}
        for name, took_ms in event.phases.items():
            waited_s = self._waited_s(chapter, took_ms / 1000) if name == AGREE else 0.0
            seconds |= {WAITING: waited_s} if waited_s else {}
            seconds[name] = took_ms / 1000 - waited_s
        if isinstance(event, events.Recovery) and event.pause_s >= (chapter.pause_s or 0.0):
            chapter.pause_s, chapter.phases = event.pause_s, seconds
        elif chapter.pause_s is None:
            chapter.phases = max(chapter.phases, seconds, key=lambda each: sum(each.values()))

    def _waited_s(self, chapter: Chapter, agree_s: float) -> float:
        """For how many of the `agree_s` seconds that it took to agree on `chapter` there were too few nodes for it."""
        chapters = self.generations.all
        before = takewhile(lambda each: each.waits, reversed(chapters[: chapters.index(chapter)]))
        short = [each for each in before if each.lacks_nodes]
        if short:
            return min(agree_s, chapter.begin - short[-1].begin)
        return agree_s if chapter.short else 0.0

    def _member_lost(self, event: events.MemberLost, teller: AgentLife, at: float) -> None:
        """A node was taken out.

        If the agent that reports it, `teller`, started only after the lost node's last event, the moment of the loss is
        unknown. The loss then counts from the last event.
        """
        chapter = self.generations.newest
        life = self.lives.last_seat(event.lost, chapter)
        # An agent that ended or left of its own accord is no loss, unless it stopped answering.
        if life is not None and (life.code is not None or (life.is_leaving and SILENT not in event.how)):
            return
        loss = RunFailure(at, event.lost, event.how, chapter.number)
        self.failures.all.append(loss)
        if life is not None:
            self.lives.lose(life, loss, life.last if teller.begin > life.last else at)

    def note_killed(self, node: str) -> None:
        """Note that the newest agent of `node` ended with its last event, as is known from elsewhere."""
        life, chapter = self.lives.newest[node], self.generations.newest
        life.gone_at = life.last
        if not self.seated_lives():
            chapter.left_at = max((each.last for each in self.lives.seated(chapter)), default=life.last)


def cause_of(story: Story | None, generation: int, said: str) -> str:
    """The cause of the newest `generation`, as `said` by the leader; if the `story` knows it, its cause says more."""
    if story is not None and story.generations.newest.number == generation:
        return story.generations.newest.cause
    return said
