"""Which step a worker leaves after, and how long it holds before it knows."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from elasticrt.distributed import handover
from elasticrt.ipc.status_page import StatusPage


@pytest.fixture
def page() -> StatusPage:
    """A page of which the agent has the same words."""
    fd = StatusPage.create()
    found = StatusPage(fd)
    os.close(fd)
    return found


@pytest.mark.parametrize(
    ("stop", "go", "step", "leaves"),
    [
        (0, 0, 5, False),
        (0, 5, 5, False),  # Given up: what was agreed before counts no more.
        (1, 5, 4, False),  # Others are further, and need this worker in their collectives.
        (1, 5, 5, True),
        (1, 5, 6, True),
    ],
)
def test_all_leave_after_exactly_the_agreed_step(page: StatusPage, stop: int, go: int, step: int, leaves: bool) -> None:
    """S6: not one step earlier and not one later, else the others hang or the step is done twice."""
    page.stop, page.go = stop, go
    assert handover.must_leave(page, step) is leaves


@pytest.mark.parametrize(("word", "value", "leaves"), [("go", 5, True), ("go", 6, False), ("stop", 0, False)])
def test_a_worker_holds_until_it_is_told(page: StatusPage, word: str, value: int, leaves: bool) -> None:
    """Told to hold after step 5, it comes back only with the agreement, or when the handover is given up."""
    page.stop = 1
    answers: list[bool] = []
    worker = threading.Thread(target=lambda: answers.append(handover.must_leave(page, 5)))
    worker.start()
    worker.join(0.05)
    assert (worker.is_alive(), answers) == (True, []), "nothing is agreed yet"
    setattr(page, word, value)
    worker.join(20)
    assert answers == [leaves]


def test_an_agent_that_has_forgotten_a_worker_does_not_hold_it_for_ever(
    page: StatusPage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait has an end, which trains on and says so."""
    monkeypatch.setattr(handover, "HOLD_S_MAX", 0.0)
    page.stop = 1
    with caplog.at_level(logging.WARNING):
        assert not handover.must_leave(page, 5)
    assert "held after step 5" in caplog.text
