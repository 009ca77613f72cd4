"""Teeth: every rule that is broken on purpose is noticed, by an invariant, in the story or seed written down for it."""

from __future__ import annotations

import re

import pytest

from tests.virtual.catches import CATCHES
from tests.virtual.harmless import HARMLESS
from tests.virtual.mutants import caught, mutants


@pytest.mark.parametrize("name", CATCHES)
def test_a_broken_rule_is_caught(name: str) -> None:
    """An invariant, not an exception, notices. If not, hunt: `python -m tests.virtual.mutants --known --write`."""
    what, place = CATCHES[name]
    assert re.fullmatch("[SL][0-9]+", what)
    assert caught(name, place) == what


def test_every_mutant_is_caught_or_harmless() -> None:
    """A rule whose absence nobody notices is not a rule: it goes, or why nothing can go wrong is written down."""
    known = {*CATCHES, *HARMLESS}
    assert set(mutants()) == known, set(mutants()) ^ known
    assert not set(CATCHES) & set(HARMLESS)
    assert all(why.startswith("harmless because ") and len(why) > 60 for why in HARMLESS.values())
