"""Decides when to print a change of membership, and as which sentence. Pure.

A change is printed when its cost is known, or when waiting for the cost takes too long. The sentences depend on the
run's story alone, so the agents' terminals and `simulate` print the same.
"""

from __future__ import annotations

from elasticrt import events
from elasticrt.story import sentences
from elasticrt.story.fold import Story
from elasticrt.story.generations import Chapter

COST_COMPLETE_S = 1.0
"""How long a sentence waits for the first steps of the other nodes, after the first one."""

COST_NONE_S = 3.0
"""How long a sentence waits for any first step. Then it is printed without the cost, which is printed by itself later.
"""

Sentence = tuple[Chapter, str]
"""A generation, and a sentence about it."""


class Changes:
    """The sentences about the generations of a story.

    Args:
        story: this object feeds it; nothing else may.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        # The numbers of the newest generations whose sentence, and whose cost, was printed.
        self._announced = self._costed = 0

    def fold(self, record: events.Record) -> list[Sentence]:
        """Fold `record` into the story. Returns the sentences that are due now."""
        story, before = self._story, self._story.generations.newest
        said: list[Sentence] = []
        story.fold(record)
        # A newer generation ends the wait for the one before. Its sentence is printed if nothing was printed, or its
        # cost known.
        chapter = story.generations.newest
        if before is not chapter and before.number > self._costed:
            said += [self._announce(before)] if before.reported or before.number > self._announced else []
        if chapter.number > self._costed and chapter.reported:
            # A node that has written no events is not waited for: an agent's story has those of its own node alone.
            complete = chapter.reported.keys() >= story.lives.nodes & {*chapter.nodes}
            said += [self._announce(chapter)] if complete else []
        elif chapter.waits and chapter.number > self._announced:
            said.append(self._announce(chapter))
        return said

    def tick(self, now: float) -> list[Sentence]:
        """The sentences that are due at `now`."""
        due = self.due()
        return [self._announce(self._story.generations.newest)] if due is not None and now >= due else []

    def due(self) -> float | None:
        """When `tick` will return a sentence if no event comes before; None: never."""
        chapter = self._story.generations.newest
        if chapter.number <= self._costed:
            return None
        if chapter.stepped_at is not None:
            return chapter.stepped_at + COST_COMPLETE_S
        return chapter.begin + COST_NONE_S if chapter.number > self._announced else None

    def _announce(self, chapter: Chapter) -> Sentence:
        """The sentence of a generation, with its cost if known. If the sentence was printed before, only the cost."""
        first = chapter is self._story.generations.all[0]
        name = f"generation {chapter.number}: "
        parts = [] if chapter.number <= self._announced else [sentences.beginning(chapter, first=first)]
        self._announced = chapter.number
        if chapter.stepped_at is not None:
            self._costed = chapter.number
            parts.append(sentences.cost(chapter))
        text = ", ".join(parts)
        return chapter, text if text.startswith(name) else name + text
