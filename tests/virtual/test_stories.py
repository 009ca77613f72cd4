"""The directed plans as they are: each of these schedules is survived, and as quickly as its story says."""

from __future__ import annotations

import pytest

from tests.virtual.scale import measure
from tests.virtual.simulator import simulate
from tests.virtual.stories import STORIES


@pytest.mark.parametrize("name", STORIES)
def test_a_story_has_a_good_end(name: str) -> None:
    """All invariants hold, and what the story promises besides: how soon, in how many generations, without a loss."""
    simulate(STORIES[name])


def test_the_cost_per_agent_does_not_grow() -> None:
    """Forming, and losing one, cost a hundred agents as many requests each as ten; nothing happens in quiet times."""
    for few, many in zip(measure(10), measure(100), strict=True):
        assert many.everybody.requests / 100 <= few.everybody.requests / 10 * 1.05
        assert many.everybody.deliveries / 100 <= few.everybody.deliveries / 10 * 1.1
    assert many.everybody.requests == many.everybody.deliveries == 0
