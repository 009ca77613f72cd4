"""The lines that a simulation prints about its run, in order. Pure.

`story.fold` folds the events, and `story.changes` words the changes of membership. The rest is here.
"""

from __future__ import annotations

import math

from elasticrt import events
from elasticrt.errors import EXIT_TERMINATED, EXIT_WORKERS
from elasticrt.ipc.wording import listed, signal_name
from elasticrt.story import report, sentences
from elasticrt.story.changes import Changes, Sentence
from elasticrt.story.fold import Story
from elasticrt.story.generations import Standstill

STATUS_EVERY_S = 5.0


class Narration:
    """Turns the events of one simulation, which began at `started_at`, into lines."""

    def __init__(self, *, started_at: float) -> None:
        self.story = Story()
        self.started_at = started_at
        self.ended: dict[str, int] = {}  # The agents' exit codes by node (negative: signal).
        self._changes = Changes(self.story)
        # Whether the result was printed.
        self._ended = False
        # Ranks, nodes and step of the newest finding: each agent writes it, and it is printed once.
        self._blamed: tuple[object, ...] = ()
        self._status_at = 0.0

    # What happens.

    def tell(self, record: events.Record) -> list[str]:
        """Take an agent's event. Returns the lines about it."""
        story = self.story
        first_agent = not story.lives.all
        lines = _lines(self._changes.fold(record))
        match record.event:
            case events.AgentStarted():
                self.ended.pop(record.node, None)
                text = f"-- run {story.run.run_id}, etcd {story.run.etcd}, logs in {story.run.run_dir}"
                return [text] if first_agent else []
            case events.Culprit(ranks=ranks, nodes=nodes, step=step) if self._blamed != (ranks, nodes, step):
                self._blamed = (ranks, nodes, step)
                stand = Standstill(0.0, culprit=record.event)
                return [*lines, f"-- {stand.sentence(record.event.age_s, numbered=story.has_step_numbers)}"]
            case events.Failure(text=text):
                return text.splitlines()
            case events.Result() if not self._ended:
                self._ended = True
                return [*_lines(self._changes.tick(math.inf)), f"-- {sentences.ending(record.event)}"]
        return lines

    def exited(self, node: str, code: int) -> list[str]:
        """Note that the agent of `node` has ended with `code` (negative: signal). Returns the lines about it."""
        self.ended[node] = code
        quiet = code in (0, EXIT_TERMINATED) or (code < 0 and bool(self.story.generations.all))
        # A killed agent is told of by the next generation, and an orderly end by the result.
        how = f"code {code}" if code >= 0 else signal_name(-code)
        return [] if quiet else [f"-- the agent of {node} ended ({how})"]

    def tick(self, now: float) -> list[str]:
        """The lines that are due at `now`: a change whose cost is known by then, and the status."""
        lines = _lines(self._changes.tick(now))
        if now - max(self._status_at, self.started_at) >= STATUS_EVERY_S:
            lines.append(self._status(now))
            self._status_at = now
        return lines

    # What is said.

    def _status(self, now: float) -> str:
        story = self.story
        if self._ended:
            late = [node for node in dict.fromkeys(life.node for life in story.lives.all) if node not in self.ended]
            return f".. {now - self.started_at:.0f} s: the run has ended; still there: {listed(late)}"
        return f".. {sentences.now_at(story, now) or sentences.state(story, now)}"

    # The end.

    def verdict(self) -> tuple[int, str]:
        """The exit code of the whole, and one sentence.

        The code is 0 only if agents survived and all of them ended with 0.

        Agents that were ended by a signal, or by the SIGTERM of a drain (143), are what the run had to survive.
        """
        survivors = {node: code for node, code in self.ended.items() if code >= 0 and code != EXIT_TERMINATED}
        bad = {node: code for node, code in survivors.items() if code != 0}
        result = self.story.run.result
        if result is not None and result.status != "succeeded":
            code = result.code or next(iter(bad.values()), EXIT_WORKERS)
            return code, f"the run failed (code {code}): {result.reason}"
        if bad:
            node, code = next(iter(bad.items()))
            return code, f"the agent of {node} ended with code {code}"
        if not survivors:
            drained = bool(self.ended) and all(code == EXIT_TERMINATED for code in self.ended.values())
            return (EXIT_TERMINATED if drained else EXIT_WORKERS), "no agent survived: the run did not end, it stopped"
        return 0, "the run succeeded"

    def summary(self, stopped_by: str = "") -> list[str]:
        """The report of the run, and what it cannot know: the signal that stopped this, or how the agents ended."""
        said = f"stopped by {stopped_by}" if stopped_by else self.verdict()[1]
        more = [] if self.story.run.result is not None and said.startswith("the run ") else ["", said]
        return ["", *report.report(self.story), *more]


def _lines(told: list[Sentence]) -> list[str]:
    return [f"-- {text}" for _, text in told]
