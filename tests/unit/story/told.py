"""Events at seconds, for tests of the story: what agents of one machine would write."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from elasticrt import events
from elasticrt.story.fold import Story

Entry = tuple[float, str, events.Event]


def record(at: float, node: str, event: events.Event) -> events.Record:
    """An event of `node` at second `at`; all nodes are on one machine, whose clocks agree."""
    return events.Record(event, node, at, at)


def started(minimum: int = 1, maximum: int = 4) -> events.AgentStarted:
    """An agent starts."""
    return events.AgentStarted(7, "calm-fox", "etcd", "runs/calm-fox", "a machine", minimum, maximum)


def warm() -> events.ParentWarm:
    """Its worker parent can start workers."""
    return events.ParentWarm("fork", "", 1.0)


def begun(
    number: int, nodes: str, kind: str = "lost", cause: str = "", *, in_place: bool = True, waits: bool = False
) -> events.Generation:
    """A generation of these nodes, one letter each."""
    return events.Generation(
        number, len(nodes), cause or kind, kind, 0, tuple(nodes), 0, in_place=in_place, waits=waits
    )


def story(entries: Iterable[Entry]) -> Story:
    """What they tell together."""
    by_node: dict[str, list[events.Record]] = {}
    for at, node, event in entries:
        by_node.setdefault(node, []).append(record(at, node, event))
    return story_of(*by_node.values())


def story_of(*sources: Iterable[events.Record]) -> Story:
    """The story of the events in several `sources`, such as a file for each node. Each source is in order."""
    told = Story()

    def timed(source: Iterable[events.Record]) -> Iterator[tuple[float, events.Record]]:
        return ((told.when(each), each) for each in source)

    for _, each in heapq.merge(*map(timed, sources), key=lambda pair: pair[0]):
        told.fold(each)
    return told


def write(directory: Path, entries: Iterable[Entry]) -> None:
    """Write them into the `directory` of a run, as the agents of these nodes would."""
    directory.mkdir(parents=True, exist_ok=True)
    for at, node, event in entries:
        with (directory / f"events-{node}.jsonl").open("ab") as file:
            file.write(events.encode(event, node, at, datetime.fromtimestamp(at, timezone.utc)) + b"\n")


THREE_STEPS: list[Entry] = [
    (0.0, "a", started()),
    (0.5, "b", started()),
    (1.0, "a", warm()),
    (1.5, "b", warm()),
    (2.0, "a", begun(1, "ab", "start", in_place=False)),
    (2.0, "b", begun(1, "ab", "start", in_place=False)),
    (2.5, "a", events.WorkersStarted(1, (0,), (11,))),
    (2.5, "b", events.WorkersStarted(1, (1,), (12,))),
    (4.0, "a", events.FirstStep(1, 1, 0, None, 0)),
    (4.0, "a", events.SetUp(1, {"start": 500, "script": 500, "init": 250, "restore": 250, "first_step": 500})),
    (4.0, "b", events.FirstStep(1, 1, 0, None, 0)),
    (4.0, "b", events.SetUp(1, {"start": 500, "script": 500, "init": 250, "restore": 250, "first_step": 500})),
]
"""Two nodes start, and have made their first step at second 4."""
