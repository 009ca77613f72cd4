"""The loss curve does not notice: every step's loss is that of an undisturbed run, whatever the world did meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.loss_curve import EPOCHS, STEPS_PER_EPOCH, Curve, largest_difference, run, weights_differ

LOSS_TOLERANCE = 1e-3
"""Relative. Sums in another order differ by 1e-7; two hundred steps of AdamW make that larger."""
WEIGHT_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """The run that is left alone, at world size 4."""
    return run(tmp_path_factory.mktemp("calm"), disturb=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_loss_of_every_step_is_that_of_an_undisturbed_run(calm: Curve, tmp_path: Path) -> None:
    """L4, S5: worlds of 4, 2, 3, 1 and 4 nodes with kills in between leave no trace in losses or weights."""
    disturbed = run(tmp_path, disturb=True)
    assert set(disturbed.worlds.values()) == {1, 2, 3, 4}
    assert len(calm.losses) == EPOCHS * STEPS_PER_EPOCH
    assert calm.losses[1] / calm.losses[max(calm.losses)] >= 10
    assert largest_difference(calm, disturbed) <= LOSS_TOLERANCE
    assert weights_differ(calm, disturbed) <= WEIGHT_TOLERANCE


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("broken", ["unweighted", "shifted"])
def test_a_broken_run_is_seen(calm: Curve, tmp_path: Path, broken: str) -> None:
    """The comparison has teeth: wrong weights of gradients, or one batch skipped at each restart, fail it."""
    disturbed = run(tmp_path, disturb=True, broken=broken)
    assert largest_difference(calm, disturbed) > LOSS_TOLERANCE
