"""Where the time of a recovery goes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elasticrt import events
from elasticrt.event_log import EventLog
from elasticrt.ipc.messages import Step
from elasticrt.ipc.status_page import StatusPage
from elasticrt.liveness.progress import PHASES, Progress, phases

MS = 1_000_000


@pytest.mark.parametrize(
    ("since_ms", "marks_ms", "expected_ms"),
    [
        pytest.param(100, {}, {}, id="nothing-marked"),
        pytest.param(
            100,
            dict(zip(PHASES, (110, 115, 118, 120, 150, 160, 162, 165, 180), strict=True)),
            dict(zip(PHASES, (10, 5, 3, 2, 30, 10, 2, 3, 15), strict=True)),
            id="all",
        ),
        pytest.param(
            100,
            {"detect": 110, "start": 130, "first_step": 150},
            {"detect": 10, "start": 20, "first_step": 20},
            id="gaps",
        ),
        pytest.param(
            100,
            {"detect": 90, "agree": 95, "stop": 105, "first_step": 120},
            {"detect": 0, "agree": 0, "stop": 5, "first_step": 15},
            id="a-step-ended-after-the-handover-was-asked-for",
        ),
        pytest.param(0, {"detect": 110, "agree": 115}, {"detect": 0, "agree": 5}, id="no-step-before"),
        pytest.param(100, {"detect": 110, "init": 0, "restore": 120}, {"detect": 10, "restore": 10}, id="never-marked"),
    ],
)
def test_phases(since_ms: int, marks_ms: dict[str, int], expected_ms: dict[str, float]) -> None:
    """Each phase lasts from the mark before it to its own; they add up to the time from last step to last mark."""
    found = phases(since_ms * MS, {name: at * MS for name, at in marks_ms.items()})
    assert found == expected_ms
    if marks_ms and since_ms:
        assert sum(found.values()) == max(marks_ms.values()) - since_ms


def test_a_second_loop_costs_nothing(tmp_path: Path) -> None:
    """A restarted script says once what the restart has cost: the first step of its next Loop ends no recovery."""
    page, kept = StatusPage(StatusPage.create()), []
    event_log = EventLog("n0", tmp_path, -1)
    event_log.follow(lambda record: kept.append(record.event))
    progress = Progress(lambda: [page], event_log, time)
    page.finished(7, 1 * MS)
    progress.replaced(1)
    progress.note_last_step()
    progress.stepped(2, Step(6, 0, 5 * MS, 5, True, {}))
    progress.stepped(2, Step(1, 0, 900 * MS, 0, True, {}))
    assert [(each.step, each.redone) for each in kept if isinstance(each, events.FirstStep)] == [(6, 2)]
