"""Teeth: every rule that is broken on purpose is noticed, by an invariant, in the seed that is written down for it."""

from __future__ import annotations

import pytest

from tests.virtual.catches import CATCHES, UNCAUGHT
from tests.virtual.mutants import caught, mutants

LEFT = set(mutants()) - set(CATCHES)


@pytest.mark.parametrize("name", CATCHES)
def test_a_broken_rule_is_caught(name: str) -> None:
    """An invariant, not an exception, notices. If not, hunt: `python -m tests.virtual.mutants --write`."""
    what, seed = CATCHES[name]
    assert caught(name, seed) == what


def test_every_mutant_is_caught_or_explained() -> None:
    """A rule whose absence nobody notices is not a rule: it goes, or what else holds it up is written down."""
    assert not LEFT - set(UNCAUGHT)
    assert not set(CATCHES) - set(mutants())
