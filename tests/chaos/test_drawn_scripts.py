"""Training scripts that are drawn by seed, with workers and nodes lost at drawn points: see `drawn_scripts`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.drawn_scripts import POINTS, check, draw

FAST = (4, 8)


@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60) if seed not in FAST)]
)
@pytest.mark.timeout(300)
def test_a_drawn_script_ends_as_if_nobody_were_lost(seed: int, tmp_path: Path) -> None:
    """W02: all ranks end with one state, which is that of an undisturbed run, and so are the evaluations' results."""
    check(draw(seed), tmp_path)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(["b", 0, 20, "top", 0.0, "kill"], id="in the middle of an epoch"),
        pytest.param(["b", 0, 24, "block", 0.0, "kill"], id="in the first step behind the head"),
        pytest.param(["b", 0, 24, "evaluation", 0.0, "kill"], id="behind the batches", marks=pytest.mark.slow),
        pytest.param(["a", 0, 24, "head", 0.01, "kill"], id="in the head", marks=pytest.mark.slow),
        pytest.param(["b", 0, 16, "stepped", 0.0, "kill"], id="when the step was made", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_evaluations_at_the_head_of_an_epoch(fault: list[Any], tmp_path: Path) -> None:
    """W02: newcomers that are needed at once run the head as well, where the others may have passed it or not."""
    drawn = draw(9)
    assert drawn.topology == "fixed" and drawn.script.count('"head again"') == 1
    check(replace(drawn, faults=[fault], late=""), tmp_path)


def test_scripts_are_drawn_alike_and_are_python() -> None:
    """A seed gives the same script each time, all ways to run and all points of loss are drawn, and each compiles."""
    drawn = [draw(seed) for seed in range(300)]
    assert drawn == [draw(seed) for seed in range(300)]
    assert len({each.topology for each in drawn}) == 4
    faults = [fault for each in drawn for fault in each.faults]
    assert {fault[3] for fault in faults} == set(POINTS)
    assert {fault[5] for fault in faults} == {"kill", "freeze", "lose", "drain"}
    for each in drawn:
        compile(each.script, "train.py", "exec")
