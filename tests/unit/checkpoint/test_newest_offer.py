"""Whose checkpoint all resume from, as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticrt.checkpoint.newest_offer import BEYOND, OLDER, RESUME, Offer, adds, choose, distinct_troubles
from elasticrt.ipc.env import Commit


def _offer(kind: int, serial: int, step: int = 0) -> Offer:
    return Offer(kind, Commit(step, 0, 1, "0" * 16, "", "/ckpt", "x.pt", "0" * 64, 1, serial))


def _older(serial: int, step: int = 0) -> Offer:
    return _offer(OLDER, serial, step)


def _chosen(offers: list[Offer], *, resuming: bool) -> tuple[str, int]:
    try:
        rank = choose(offers, resuming=resuming)
    except LookupError:
        return "refuse", -1
    return ("begin", -1) if rank is None else ("take", rank)


NONE = Offer()
ANY = Offer(marked=True)


@pytest.mark.parametrize(
    ("offers", "what", "rank"),
    [
        pytest.param([NONE], "begin", -1, id="an empty directory"),
        pytest.param([NONE, NONE, NONE], "begin", -1, id="three empty directories"),
        pytest.param([_older(3, 30)], "take", 0, id="alone"),
        pytest.param([_older(3, 30), _older(3, 30)], "take", 0, id="a shared directory: rank 0"),
        pytest.param([NONE, _older(3, 30)], "take", 1, id="rank 0 has none"),
        pytest.param([_older(2, 20), NONE, _older(3, 30)], "take", 2, id="rank 0 has an older one"),
        pytest.param([_older(3, 30), _older(2, 20)], "take", 0, id="rank 0 has the newest"),
        pytest.param([_older(2, 90), _older(3, 30)], "take", 1, id="the newest has fewer steps, after starting over"),
        pytest.param([_older(3, 30), _older(3, 40)], "take", 1, id="equal numbers, of separate histories"),
        pytest.param([NONE, _older(3, 30), _older(3, 30)], "take", 1, id="equal offers: the lowest rank"),
        pytest.param([NONE, ANY], "refuse", -1, id="a committed one that can't be used: never from 0 by itself"),
        pytest.param([_older(1, 10), ANY], "take", 0, id="another's are damaged"),
    ],
)
def test_without_a_resume_point(offers: list[Offer], what: str, rank: int) -> None:
    """F07, F16: the newest on any node; the beginning only where nothing was ever committed."""
    assert _chosen(offers, resuming=False) == (what, rank)


@pytest.mark.parametrize(
    ("offers", "what", "rank"),
    [
        pytest.param([_offer(RESUME, 3, 30)], "take", 0, id="alone"),
        pytest.param([_offer(RESUME, 3, 30), _offer(RESUME, 3, 30)], "take", 0, id="a shared directory: rank 0"),
        pytest.param([NONE, _offer(RESUME, 3, 30)], "take", 1, id="another node has it"),
        pytest.param([_older(9, 90), _offer(RESUME, 3, 30)], "take", 1, id="the newest never wins over it"),
        pytest.param(
            [_offer(RESUME, 3, 30), _offer(BEYOND, 4, 40)], "take", 1, id="etcd has forgotten what was after it"
        ),
        pytest.param([_offer(RESUME, 0), _offer(BEYOND, 0)], "take", 1, id="written by a version without numbers"),
        pytest.param([NONE, NONE], "refuse", -1, id="nobody has anything"),
        pytest.param([_older(2, 20), NONE], "take", 0, id="nobody has it: back to an ancestor"),
        pytest.param([_older(1, 10), _older(2, 20)], "take", 1, id="back to the nearest"),
        pytest.param([ANY, ANY], "refuse", -1, id="other histories do not count"),
    ],
)
def test_with_a_resume_point(offers: list[Offer], what: str, rank: int) -> None:
    """S6, F07, F16: exactly that, or its nearest ancestor when nobody has it; else the run stops."""
    assert _chosen(offers, resuming=True) == (what, rank)


@pytest.mark.parametrize(
    ("troubles", "expected"),
    [
        ([[], [], []], []),
        ([["x"], ["x"], ["x"]], ["x"]),
        ([[], ["x"], ["x"]], ["rank 1: x"]),
        ([["x"], ["y"], ["x"], ["x", "z"]], ["x", "rank 1: y", "rank 3: z"]),
    ],
)
def test_each_trouble_is_told_once(troubles: list[list[str]], expected: list[str]) -> None:
    """In a shared directory all see the same, and one says so; what only one node sees is told with its name."""
    offers = [Offer(who=f"rank {rank}", troubles=each) for rank, each in enumerate(troubles)]
    assert distinct_troubles(offers) == expected


def test_offers_travel() -> None:
    """An offer arrives as it was made."""
    offer = replace(_offer(BEYOND, 2**53, 3), run="r", world_size=2, marked=True, highest=2**53, troubles=["x"])
    for each in (offer, Offer(who="node a", troubles=[])):
        assert Offer.from_json(each.to_json()) == each


@pytest.mark.parametrize(
    ("step", "head", "elsewhere", "expected"),
    [
        pytest.param(0, None, False, False, id="nothing is trained"),
        pytest.param(1, None, False, True, id="no checkpoint yet"),
        pytest.param(11, 10, False, True, id="a later step"),
        pytest.param(10, 10, False, False, id="it is saved"),
        pytest.param(10, 10, True, True, id="it is saved on a node that may be lost"),
        pytest.param(9, 10, True, False, id="only a lost rank had finished the head's step"),
    ],
)
def test_which_state_adds_to_what_is_saved(step: int, head: int | None, elsewhere: bool, expected: bool) -> None:
    """Who waits saves a later step, or the head's own where its file is missing; never an earlier one in its place."""
    commit = None if head is None else _older(1, head).commit
    assert adds(step, commit, lacks_head=elsewhere) == expected
