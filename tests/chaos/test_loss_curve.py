"""The loss curve does not notice: every step's loss is that of an undisturbed run, whatever the world did meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.loss_curve import EPOCHS, STEPS_PER_EPOCH, Curve, largest_difference, run, weights_differ

EXACT = 1e-11
"""Relative. In double precision sums in another order differ by 1e-16; hundreds of steps of AdamW make that larger."""
NORM = 1e-8
"""With batch norm over all ranks: its variance divides by what may be small, at every step."""
SINGLE = 1e-4
"""In single precision a difference of 1e-7 grows the same way: this is what a user sees, and no sample's doing."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Curve]:
    """The run of a kind that is left alone, at world size 4; once for all tests."""
    known: dict[str, Curve] = {}

    def find(kind: str) -> Curve:
        if kind not in known:
            known[kind] = run(tmp_path_factory.mktemp(kind), disturb=False, kind=kind)
        return known[kind]

    return find


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("kind", "tolerance"), [("whole", EXACT), ("syncnorm", NORM), ("single", SINGLE)])
def test_the_loss_of_every_step_is_that_of_an_undisturbed_run(
    calm: Callable[[str], Curve], tmp_path: Path, kind: str, tolerance: float
) -> None:
    """L4, S5: worlds of 4, 2, 3, 1 and 4 nodes with kills in between leave no trace in losses or weights."""
    alone, disturbed = calm(kind), run(tmp_path, disturb=True, kind=kind)
    assert set(disturbed.worlds.values()) == {1, 2, 3, 4}
    assert sorted(disturbed.losses) == sorted(alone.losses) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert alone.losses[1] / alone.losses[max(alone.losses)] >= 10
    assert largest_difference(alone, disturbed) <= tolerance
    assert weights_differ(alone, disturbed) <= tolerance


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["unweighted", "shifted"])
def test_a_broken_run_is_seen(calm: Callable[[str], Curve], tmp_path: Path, kind: str) -> None:
    """The comparison has teeth: wrong weights of gradients, or one batch skipped at each restart, fail it."""
    disturbed = run(tmp_path, disturb=True, kind=kind)
    assert largest_difference(calm("whole"), disturbed) > 1e6 * EXACT
