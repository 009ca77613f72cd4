"""The list of what torch tests of itself is honest: its tests of ours exist, and what has none says why."""

from __future__ import annotations

from tests.compat.yardstick import BEHAVIOURS, missing


def test_every_named_test_exists() -> None:
    """Each behaviour names tests that are there, or says in a sentence why there is no counterpart, never both."""
    assert missing() == set()
    for behaviour in BEHAVIOURS:
        assert bool(behaviour.tests) != bool(behaviour.why_not), behaviour.what
        assert behaviour.tests or behaviour.why_not.endswith("."), behaviour.what
    assert len({(behaviour.area, behaviour.what) for behaviour in BEHAVIOURS}) == len(BEHAVIOURS)
