"""Every way to use DDP: the weights after two epochs are those of one process, at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run

BATCH, STEPS = 13, 6
"""27 samples in batches of 13 leave one sample for the last batch: of three ranks two have nothing."""
NORM_BATCH, NORM_STEPS = 14, 4
"""A rank that has nothing borrows a sample, and SyncBatchNorm counts it: here each rank has some."""

FAST = (
    "bare", "nested", "several", "object", "unused", "static", "view", "all", "hook", "no_sync", "accumulate",
    "scaler", "overflow", "autocast", "syncnorm",
)  # fmt: skip
SLOW = ("compiled inside", "compiled outside", "compiled inside, inductor", "compiled outside, inductor")
"""Compiling takes seconds, in every rank."""
WHOLE = ("static", "all", "syncnorm")
"""Refused with micro-batches."""

WAYS: tuple[tuple[int, int | None], ...] = ((1, None), (2, 3), (3, None))
"""World sizes with micro-batch sizes. The first is what the others are compared with."""


def _batch(form: str) -> int:
    return NORM_BATCH if form == "syncnorm" else BATCH


def _train(directory: Any, forms: tuple[str, ...]) -> dict[str, Any]:
    phases: list[tuple[int, str, dict[str, Any]]] = [
        (
            world,
            "flavours.train_all",
            {"forms": [(form, _batch(form), None if form in WHOLE else micro) for form in forms]},
        )
        for world, micro in WAYS
    ]
    phases.append((1, "flavours.refused", {"batch_size": BATCH}))
    *ways, (refused,) = run(directory, *phases, timeout_s=100 if forms is FAST else 600)
    return {form: [[rank[form] for rank in ranks] for ranks in ways] for form in forms} | {"refused": refused}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each form ends with, in each way, at each rank."""
    return _train(tmp_path_factory.mktemp("flavours"), FAST)


@pytest.mark.parametrize(("form", "words"), [("static", "static_graph"), ("syncnorm", "SyncBatchNorm")])
def test_what_cannot_have_micro_batches_says_so(trained: dict[str, Any], form: str, words: str) -> None:
    """Refused at the first batch, at any world size, rather than when a node has gone: torch fails, or would hang."""
    assert words in trained["refused"][form]


def _check(form: str, ways: list[list[dict[str, Any]]]) -> None:
    """All ranks of all ways are where one process is. In bfloat16 a sum of other summands is another one."""
    tolerance = 2e-3 if form == "autocast" else 1e-9 if form == "syncnorm" else 1e-11
    ((expected,), *others) = ways
    for rank in (rank for ranks in others for rank in ranks):
        assert rank["steps"] == expected["steps"] == (NORM_STEPS if form == "syncnorm" else STEPS)
        assert rank["scale"] == expected["scale"]
        assert rank["parameters"] == pytest.approx(expected["parameters"], rel=0, abs=tolerance)


@pytest.mark.parametrize("form", FAST)
def test_the_number_of_ranks_leaves_no_trace(trained: dict[str, Any], form: str) -> None:
    """D10: uneven and empty slices and micro-batches, whatever the model returns and however DDP is set up."""
    _check(form, trained[form])


def test_the_users_hook_is_called_once_for_each_global_batch(trained: dict[str, Any]) -> None:
    """Gradients meet once per global batch, in the user's own communication hook, on every rank."""
    for ranks in trained["hook"]:
        assert {rank["buckets"] for rank in ranks} == {STEPS}


def test_an_overflow_on_one_rank_is_seen_by_all(trained: dict[str, Any]) -> None:
    """An infinite gradient makes every rank skip the update and halve its scale; the step counts."""
    scales = {rank["scale"] for ranks in trained["overflow"] for rank in ranks}
    assert len(scales) == 1
    assert scales != {rank["scale"] for ranks in trained["scaler"] for rank in ranks}


@pytest.mark.slow
@pytest.mark.timeout(650)
def test_compiled_models(tmp_path: Any) -> None:
    """A model that is compiled, around DDP and inside of it, by the compiler's first half and by all of it."""
    found = _train(tmp_path, SLOW)
    for form in SLOW:
        _check(form, found[form])
