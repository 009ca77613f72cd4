"""Whose checkpoint all resume from, as tables."""

from __future__ import annotations

import pytest

from elasticrt.checkpoint.newest_offer import BEYOND, OLDER, RESUME, Offer, choose, digest_of, speakers


def _older(serial: int, step: int = 0) -> Offer:
    return Offer(OLDER, serial, step, serial)


NONE = Offer()
ANY = Offer(marked=1)


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
    choice = choose(offers, resuming=False)
    assert (choice.what, choice.rank) == (what, rank)
    assert choice.why


@pytest.mark.parametrize(
    ("offers", "what", "rank"),
    [
        pytest.param([Offer(RESUME, 3, 30)], "take", 0, id="alone"),
        pytest.param([Offer(RESUME, 3, 30), Offer(RESUME, 3, 30)], "take", 0, id="a shared directory: rank 0"),
        pytest.param([NONE, Offer(RESUME, 3, 30)], "take", 1, id="another node has it"),
        pytest.param([_older(9, 90), Offer(RESUME, 3, 30)], "take", 1, id="the newest never wins over it"),
        pytest.param(
            [Offer(RESUME, 3, 30), Offer(BEYOND, 4, 40)], "take", 1, id="etcd has forgotten what was after it"
        ),
        pytest.param([Offer(RESUME), Offer(BEYOND)], "take", 1, id="written by a version without numbers"),
        pytest.param([NONE, NONE], "refuse", -1, id="nobody has anything"),
        pytest.param([_older(2, 20), NONE], "take", 0, id="nobody has it: back to an ancestor"),
        pytest.param([_older(1, 10), _older(2, 20)], "take", 1, id="back to the nearest"),
        pytest.param([ANY, ANY], "refuse", -1, id="other histories do not count"),
    ],
)
def test_with_a_resume_point(offers: list[Offer], what: str, rank: int) -> None:
    """S6, F07, F16: exactly that, or its nearest ancestor when nobody has it; else the run stops."""
    choice = choose(offers, resuming=True)
    assert (choice.what, choice.rank) == (what, rank)
    assert choice.why


@pytest.mark.parametrize(
    ("troubles", "expected"),
    [
        ([[], [], []], []),
        ([["x"], ["x"], ["x"]], [0]),
        ([[], ["x"], ["x"]], [1]),
        ([["x"], ["y"], ["x"], ["x", "y"]], [0, 1, 3]),
    ],
)
def test_each_trouble_is_told_once(troubles: list[list[str]], expected: list[int]) -> None:
    """In a shared directory all see the same, and one says so; what only one node sees it says itself."""
    assert speakers([Offer(troubles=digest_of(each)) for each in troubles]) == expected


def test_offers_travel_as_numbers() -> None:
    """An offer survives as whole numbers of 64 bits, the digest of its troubles as well."""
    for number in range(50):
        offer = Offer(BEYOND, 2**53, number, 2**53, digest_of([str(number)]), 1)
        assert Offer(*offer.to_numbers()) == offer
        assert offer.troubles
        assert all(-(2**63) <= each < 2**63 for each in offer.to_numbers())
