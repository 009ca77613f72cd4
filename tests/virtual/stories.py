"""Directed plans: schedules that are too rare to be drawn, each written for the rules that it tests.

Most have one snag: a transaction that is late in exactly the wrong way. Each passes as it is (`test_stories.py`), and
catches some of the mutants (`MUTANTS.md`).
"""

from __future__ import annotations

from tests.virtual.plan import Plan
from tests.virtual.stories_in_place import IN_PLACE
from tests.virtual.stories_of_change import CHANGES
from tests.virtual.stories_of_copies import COPIES
from tests.virtual.stories_of_loss import LOSSES

STORIES: dict[str, Plan] = {plan.seed: plan for plan in (*LOSSES, *CHANGES, *COPIES, *IN_PLACE)}
