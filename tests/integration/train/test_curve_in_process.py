"""The loss curve does not notice, in small: without agents, the same script and the same comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run

from tests.bench.loss_curve import STEPS_PER_EPOCH, Curve, largest_difference, read, weights_differ

pytestmark = pytest.mark.timeout(600)  # The first test waits for the fixture, which is sixty worlds' training.

EPOCHS = 2
CALM: list[tuple[int, dict[str, int]]] = [(4, {})]
DISTURBED: list[tuple[int, dict[str, int]]] = [
    (4, {"until": 5}), (2, {"crash": 11}), (3, {"until": 14}), (1, {"crash": 22}), (4, {}),
]  # fmt: skip
"""World sizes, and the step after which each is left; after a crash the last one or two steps are done again."""

RUNS: dict[str, tuple[str, list[tuple[int, dict[str, int]]]]] = {
    "calm": ("whole", CALM),
    "disturbed": ("whole", DISTURBED),
    "single calm": ("single", CALM),
    "single disturbed": ("single", DISTURBED),
    "syncnorm calm": ("syncnorm", CALM),
    "syncnorm disturbed": ("syncnorm", DISTURBED),
    "localnorm calm": ("localnorm", CALM),
    "localnorm alone": ("localnorm", [(1, {})]),
    "unweighted": ("unweighted", [(3, {})]),
    "shifted": ("shifted", [(4, {"until": 5}), (4, {})]),
}
EXACT, NORM, SINGLE = 1e-11, 1e-9, 1e-3
"""Relative: double precision; the same with batch norm over all ranks; single precision, whose 1e-7 grows."""


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Curve]:
    """Every run's record."""
    directory = tmp_path_factory.mktemp("curves")
    phases: list[tuple[int, str, dict[str, Any]]] = [
        (world, "curves.train", {"name": name, "kind": kind, **limits})
        for name, (kind, worlds) in RUNS.items()
        for world, limits in worlds
    ]
    run(directory, *phases)
    return {name: read(Path(directory, name)) for name in RUNS}


@pytest.mark.parametrize(("kind", "tolerance"), [("", EXACT), ("single ", SINGLE), ("syncnorm ", NORM)])
def test_worlds_and_crashes_leave_no_trace(curves: dict[str, Curve], kind: str, tolerance: float) -> None:
    """S5, S6, D08, D09: with worlds of 4, 2, 3, 1 and 4 and two crashes every loss is that of four left alone."""
    calm, disturbed = curves[f"{kind}calm"], curves[f"{kind}disturbed"]
    assert set(disturbed.worlds.values()) == {1, 2, 3, 4}
    assert disturbed.again >= 2
    assert sorted(disturbed.losses) == sorted(calm.losses) == list(range(1, EPOCHS * STEPS_PER_EPOCH + 1))
    assert calm.losses[1] / calm.losses[max(calm.losses)] >= 5
    assert largest_difference(calm, disturbed) <= tolerance
    assert weights_differ(calm, disturbed) <= tolerance


@pytest.mark.parametrize("kind", ["unweighted", "shifted"])
def test_a_broken_one_is_seen(curves: dict[str, Curve], kind: str) -> None:
    """The comparison has teeth: gradients that are not weighted, or one batch skipped at a restart, fail it."""
    assert largest_difference(curves["calm"], curves[kind]) > 1e3 * EXACT


def test_batch_norm_of_ones_own_is_another_model_at_another_world_size(curves: dict[str, Curve]) -> None:
    """Why the docs say what they say: plain batch norm normalises by its own slice, and the slices differ."""
    assert largest_difference(curves["localnorm calm"], curves["localnorm alone"]) > 1e-2
