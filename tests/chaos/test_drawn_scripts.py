"""Training scripts that are drawn by seed, with workers lost at drawn points: see `drawn_scripts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.drawn_scripts import check, draw

FAST = (4, 9, 11, 101)
"""9 and 11 failed first: an evaluation at the head of an epoch; code before a block that counted twice."""


@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60) if seed not in FAST)]
)
@pytest.mark.timeout(300)
def test_a_drawn_script_ends_as_if_nobody_were_lost(seed: int, tmp_path: Path) -> None:
    """W02: all ranks end with one state, which is that of an undisturbed run, and so are the evaluations' results."""
    check(seed, tmp_path)


def test_scripts_are_drawn_alike_and_are_python() -> None:
    """A seed gives the same script each time, all ways to run and all points of loss are drawn, and each compiles."""
    drawn = [draw(seed) for seed in range(200)]
    assert drawn == [draw(seed) for seed in range(200)]
    assert len({each.topology for each in drawn}) == 4
    assert len({fault[3] for each in drawn for fault in each.faults}) == 8
    for each in drawn:
        compile(each.script, "train.py", "exec")
