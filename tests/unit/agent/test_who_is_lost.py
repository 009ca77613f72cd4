"""Which nodes a new generation has lost, by the leader's events, and how each of them has gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticrt import events
from elasticrt.agent.console import Console
from elasticrt.event_log import EventLog


def entry(incarnation: str, **fields: str | None) -> SimpleNamespace:
    """A record of a node's life in etcd."""
    return SimpleNamespace(record=SimpleNamespace(incarnation=incarnation, **fields))


SEATS = [SimpleNamespace(node=name, incarnation=name * 16) for name in "abcdef"]
BEFORE = SimpleNamespace(
    seats_in_rank_order=lambda: SEATS,
    members={"a": entry("a" * 16), "d": entry("0" * 16), "f": entry("f" * 16)},  # d has begun another life.
    reports={"b": entry("b" * 16, status="left", failure=None), "d": entry("0" * 16, status="left")},
    verdicts={each * 16: SimpleNamespace(kind=kind) for each, kind in (("c", "dead"), ("e", "silent"))},
)


@pytest.mark.parametrize(
    ("kind", "cause", "found"),
    [
        (
            "lost",
            "b left, c lost (agent ended), d lost (registered again), e lost (no answer; power or network)",
            {
                "c": "c lost (agent ended)",
                "d": "d lost (registered again)",
                "e": "e lost (no answer; power or network)",
            },
        ),
        ("drain", "b drained", {}),
    ],
)
def test_each_lost_node_has_its_own_evidence(kind: str, cause: str, found: dict[str, str], tmp_path: Path) -> None:
    """A node that has left in order is not lost, nor is one that lives and has no seat this time."""
    edges = SimpleNamespace(how_to_join=None, event_log=EventLog)
    options = SimpleNamespace(events_fd=-1, quiet=True)
    console = Console(SimpleNamespace(node="a", run_dir=tmp_path, options=options), edges)
    written: list[events.Event] = []
    console.events.follow(lambda record: written.append(record.event))
    console.published(SimpleNamespace(seats=SEATS[:1], draft=SimpleNamespace(kind=kind, cause=cause)), BEFORE)
    console.events.close()
    assert {event.lost: event.how for event in written} == found
