"""The agents of a run and their lives: who is alive, how each spent its time, what is missing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass

from elasticrt import events
from elasticrt.story.buckets import LifeSpans, Span
from elasticrt.story.failures import RunFailure
from elasticrt.story.generations import Chapter


@dataclass(eq=False)
class AgentLife:
    """One agent, from its start to its end. Each is equal to itself alone."""

    node: str
    pid: int  # The agent's process id; 0: unknown, because the first lines of its file are damaged.
    begin: float  # When it started.
    # The same by its machine's monotonic clock. Event times of one machine are compared with it.
    started_at: float
    last: float  # The time of its last event.
    spans: LifeSpans  # How the node's time was spent.
    code: int | None = None  # The agent's exit code; None while it runs, and after it was killed.
    # When the leader took the node out, if the node has written nothing since. Where no node was left to notice, the
    # time of its last event. None: not known to be gone.
    gone_at: float | None = None
    is_leaving: bool = False  # Whether the agent has said that it leaves the run.
    loss: RunFailure | None = None  # The failure as which the node was taken out; None: it was not.
    result_at: float = math.inf  # When the agent told the run's result.
    # Since when etcd has not answered the agent; None while it answers.
    away_since: float | None = None


class Lives:
    """The agents of a run.

    Args:
        chapters: the generations by number; see `LifeSpans`.
    """

    def __init__(self, chapters: Mapping[int, Chapter]) -> None:
        self.all: list[AgentLife] = []  # The agents, in the order of their starts.
        # From when until when no agent ran, between two generations, and how the agents of the first had ended, in
        # words.
        self.breaks: list[tuple[float, float, str]] = []
        self._chapters = chapters
        self.newest: dict[str, AgentLife] = {}  # By node: its newest agent.
        # From when until when etcd did not answer a node.
        self._outages: list[tuple[float, float]] = []

    @property
    def nodes(self) -> KeysView[str]:
        """The nodes that have written events of this run."""
        return self.newest.keys()

    def alive(self) -> tuple[str, ...]:
        """The nodes whose agents run, as far as is known."""
        return tuple(life.node for life in self.living())

    def living(self) -> list[AgentLife]:
        """The agents that run, as far as is known."""
        return [life for life in self.newest.values() if life.code is None and life.gone_at is None]

    def seated(self, chapter: Chapter) -> list[AgentLife]:
        """The agents that have a seat in `chapter`, as far as they are known."""
        nodes = frozenset(chapter.nodes)
        lives = [life for life in self.all if life.node in nodes and life.begin <= chapter.begin]
        return list({life.node: life for life in lives}.values())

    def last_seat(self, node: str, chapter: Chapter) -> AgentLife | None:
        """The agent of `node` that may have had a seat up to `chapter`; None if there is none.

        An agent that started later has no seat that it could lose.
        """
        lives = (life for life in reversed(self.all) if life.node == node and life.begin <= chapter.begin)
        return next(lives, None)

    def stayed(self, before: Chapter, chapter: Chapter) -> int:
        """How many nodes of `chapter` have kept their agents of the generation `before`."""
        lives = [self.newest.get(node) for node in {*before.nodes}.intersection(chapter.nodes)]
        return sum(life is None or life.begin <= before.begin for life in lives)

    def times_without_etcd(self, now: float | None = None) -> list[tuple[float, float]]:
        """From when until when etcd did not answer some node. Times that overlap are merged.

        Args:
            now: up to when an outage of a living node lasts; None: up to the node's last event.
        """
        away = [(life, life.away_since) for life in self.all if life.away_since is not None]
        living = set(self.living())
        still = [(since, life.last if now is None or life not in living else now) for life, since in away]
        found: list[tuple[float, float]] = []
        for begin, end in sorted([*self._outages, *still]):
            if found and begin <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((begin, end))
        return found

    def witnessed_end(self, since: float, until: float) -> float:
        """The end of a standstill, as far as an agent was there to see it.

        That is `until`, or the last event of the agents of that time, if all of these have ended.
        """
        there = [life for life in self.all if life.begin <= since]
        left = [life for life in there if life is not self.newest[life.node] or life.code is not None]
        return min(until, max(life.last for life in there)) if there and left == there else until

    def spans_of(self, life: AgentLife, now: float | None = None) -> tuple[Span, ...]:
        """How the time of `life` was spent, from its start.

        The spans reach up to the last event; for a running agent up to `now`, if given; for a lost node up to the
        moment at which the others noticed the loss.
        """
        if life.gone_at is not None:
            return life.spans.spans_until(life.gone_at, lost=life.gone_at > life.last)
        runs = life.code is None and self.newest[life.node] is life
        return life.spans.spans_until(max(now, life.last) if runs and now is not None else life.last)

    # What happens.

    def author(self, record: events.Record, at: float) -> AgentLife:
        """The agent that has written `record` at `at`. If that is its first event, its life begins."""
        node, event = record.node, record.event
        pid = event.pid if isinstance(event, events.AgentStarted) else 0
        # Without a start before it: the file's first lines are damaged.
        if isinstance(event, events.AgentStarted) or node not in self.newest:
            self.newest[node] = AgentLife(node, pid, at, record.at, at, LifeSpans(at, self._chapters))
            self.all.append(self.newest[node])
        return self.newest[node]

    def fold(self, event: events.Event, life: AgentLife, at: float) -> None:
        """Fold in an event of `life`, which happened at `at`, after it was folded into the courses of generations."""
        match event:
            case events.EtcdAway():
                life.away_since = at - event.away_s if event.problem else None
                if not event.problem:
                    self._outages.append((at - event.away_s, at))
            case events.Result():
                life.result_at = at
            case events.Leaves():
                life.is_leaving = True
            case events.AgentStopped():
                life.code = event.code
        life.spans.fold(event, at)
        # An event of a node that was taken out shows that its agent lives.
        life.last, life.gone_at = max(life.last, at), None

    def lose(self, life: AgentLife, loss: RunFailure, at: float) -> None:
        """Note that the node of `life` was lost at `at`, or with its last event if that is later."""
        life.gone_at, life.loss = max(at, life.last), loss

    def interrupted(self, before: Chapter) -> float | None:
        """Another generation follows `before`: when its agents had ended; None if one of them has lived on."""
        seated = self.seated(before)
        ended_at = max((life.last for life in seated), default=before.begin)
        later = [life for life in self.all if life.begin > ended_at]
        if not seated or any(self.newest[life.node] is life for life in seated):
            return None
        # All agents of the present started later, so there was a time without any agent.
        if len(later) == len(self.newest):
            self.breaks.append((ended_at, min(life.begin for life in later), ends(seated)))
        return ended_at


def ends(lives: Iterable[AgentLife]) -> str:
    """With which exit codes these agents ended, in words."""
    return ", ".join(sorted({"killed" if life.code is None else f"code {life.code}" for life in lives}))
