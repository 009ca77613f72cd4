"""The work that the story of a large run takes, counted instead of timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticrt import events
from elasticrt.story.report import report
from tests.unit.story.told import Entry, started, story

PHASES = {"detect": 100.0, "agree": 100.0, "init": 100.0, "first_step": 100.0}
GENERATIONS = 3


class Names(tuple[str, ...]):
    """The names of a generation's nodes, which count how many of them are looked at."""

    looked = 0

    def __iter__(self) -> Iterator[str]:
        """All of them."""
        Names.looked += len(self)
        return super().__iter__()

    def __contains__(self, name: Any) -> bool:
        """As long as for the last of them."""
        Names.looked += len(self)
        return super().__contains__(name)


def _looked(count: int) -> int:
    """How many names are looked at in the story and the report of a run of `count` nodes, of which two are lost."""
    names = [f"node-{number}" for number in range(count)]
    entries: list[Entry] = [(0.0, name, started(maximum=count)) for name in names]
    for number in range(1, GENERATIONS + 1):
        nodes, at, kind = Names(names[number - 1 :]), 10.0 * number, "start" if number == 1 else "lost"
        lost = f"{names[number - 2]} lost"
        begun = events.Generation(number, len(nodes), lost, kind, 0, nodes, 5 * number, in_place=number > 1)
        for name in names[number - 1 :]:
            entries += [
                (at, name, begun),
                (at + 1, name, events.FirstStep(number, 5 * number + 1, 5 * number, 0.4, 0)),
                (at + 1, name, events.Recovery(number, 0.4, PHASES)),
                (at + 5, name, events.Progress(number, 5 * number + 5, 0.0, 0.0, 0.0)),
            ]
    Names.looked = 0
    report(story(entries))
    return Names.looked


def test_the_work_for_a_run_grows_with_its_nodes() -> None:
    """Twice as many nodes are twice the work: each of them tells of each generation, which names all of them."""
    assert _looked(80) <= 2.5 * _looked(40)
