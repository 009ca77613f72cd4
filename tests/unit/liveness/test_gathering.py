"""Answers to probes: passed on together while all are well, and at once when somebody is not."""

from __future__ import annotations

import pytest

from elasticrt.liveness.prober import Gathering
from elasticrt.rendezvous.records import Seat


def _seat(index: int) -> Seat:
    life = f"{index:016x}"
    return Seat(
        node=f"n{index}", incarnation=life, index=index, rank_offset=index, workers=1, address="10.0.0.1", probe_port=1
    )


@pytest.mark.parametrize(
    ("answers", "passed_on"),
    [
        pytest.param("a", ["a"], id="one alone"),
        pytest.param("aaa", ["", "", "aaa"], id="all live"),
        pytest.param("ada", ["", "ad", "a"], id="one is dead"),
        pytest.param("daa", ["d", "", "aa"], id="the first is dead"),
        pytest.param("aas", ["", "", "aas"], id="the last is silent"),
        pytest.param("sda", ["s", "d", "a"], id="silence is news, too"),
    ],
)
def test_what_is_passed_on_when(answers: str, passed_on: list[str]) -> None:
    """L1: good news wait for the last answer; bad news wait for nothing, and take along what came before."""
    kinds = {"a": "alive", "d": "dead", "s": "silent"}
    heard: list[str] = []
    gathering = Gathering(lambda _, answer, at: heard.append(answer))
    for _ in answers:
        gathering.asked()
    for index, letter in enumerate(answers):
        before = len(heard)
        gathering.answered(_seat(index), kinds[letter], 1.0)
        assert "".join(answer[0] for answer in heard[before:]) == passed_on[index]
