"""What an agent reads from, and writes to, the status pages of its workers."""

from __future__ import annotations

from collections.abc import Sequence

from elasticrt.clock import Clock
from elasticrt.ipc.status_page import StatusPage

HOLD_SEEN_S = 0.002
"""A worker that did not see `stop` had written `entered` before it looked; its store buffer needs microseconds."""


def hold(pages: Sequence[StatusPage], clock: Clock) -> int:
    """Make all workers hold at the end of their present step; how far one of them has been let in.

    0 when one of them is in no Loop: such a script cannot hold.
    """
    for page in pages:
        page.go = 0
        page.stop = 1
    clock.sleep(HOLD_SEEN_S)
    entered = [page.entered for page in pages]
    return max(entered) if entered and all(entered) else 0


def go(pages: Sequence[StatusPage], step: int, *, save: bool) -> None:
    """Tell workers that hold the step after which they leave."""
    for page in pages:
        page.save = int(save)
        page.go = step


def release(pages: Sequence[StatusPage]) -> None:
    """Let workers that hold go on."""
    for page in pages:
        page.stop = 0
        page.go = 0


def end(pages: Sequence[StatusPage]) -> None:
    """Announce a SIGTERM: workers that leave one from elsewhere to their agent obey it."""
    for page in pages:
        page.ending = 1


def in_loop(pages: Sequence[StatusPage]) -> bool:
    """Whether all workers are inside a Loop."""
    return bool(pages) and all(page.entered for page in pages)


def building(pages: Sequence[StatusPage]) -> bool:
    """Whether one of the workers prepares data."""
    return any(page.building for page in pages)


def have_stepped(pages: Sequence[StatusPage]) -> bool:
    """Whether all workers have finished a step."""
    return all(page.step_at_ns for page in pages)
