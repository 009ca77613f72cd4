"""Nodes whose checkpoint directories are their own: whoever has the checkpoint sends it, or the run says who has it."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run

REFUSED = "no checkpoint can be used"

STORIES: dict[str, list[tuple[int | str | None, dict[str, Any]]]] = {
    "newest": [
        (None, {"nodes": "abc", "saves": [1, 2]}),
        (2, {"nodes": "bca", "saves": [3]}),
        (3, {"nodes": "abc"}),
        (2, {"nodes": "acb", "saves": [9], "damaged": "b"}),
        (9, {"nodes": "cab"}),
        (REFUSED, {"nodes": "bc"}),
    ],
    "head": [
        (None, {"nodes": "ab", "saves": [1, 2], "generation": 1}),
        (2, {"nodes": "ba", "saves": [3], "generation": 2, "head": "head-2"}),
        (REFUSED, {"nodes": "dc", "generation": 3, "head": "head-3"}),
        (2, {"nodes": "ca", "generation": 3, "head": "head-3"}),
        (3, {"nodes": "cba", "generation": 4, "head": "head-3"}),
        (3, {"nodes": "cab", "generation": 5, "head": "head-2"}),
        (2, {"nodes": "ab", "generation": 6, "head": "head-3", "lost": "b"}),
        (REFUSED, {"nodes": "b", "generation": 7, "head": "head-2"}),
    ],
    "another run's": [
        (None, {"nodes": "ab", "saves": [1], "generation": 1}),
        (None, {"nodes": "b", "saves": [5, 6], "generation": 2, "run": "another"}),
        (1, {"nodes": "ba", "generation": 3, "head": "head-1"}),
    ],
    "damaged": [
        (None, {"nodes": "ab", "saves": [1], "generation": 1}),
        (1, {"nodes": "ba", "saves": [2], "generation": 2, "head": "head-1"}),
        (1, {"nodes": "cab", "saves": [3], "generation": 3, "head": "head-2", "damaged": "b"}),
        (3, {"nodes": "acb", "generation": 4, "head": "head-3"}),
        (1, {"nodes": "cab", "generation": 5, "head": "head-3", "damaged": "c"}),
        (REFUSED, {"nodes": "acb", "generation": 6, "head": "head-3", "damaged": "a"}),
    ],
    "shared": [
        (None, {"nodes": "abc", "saves": [1, 2, 3], "generation": 1, "shared": True}),
        (3, {"nodes": "bc", "generation": 2, "head": "head-3", "shared": True}),
        (2, {"nodes": "bca", "generation": 3, "head": "head-3", "shared": True, "damaged": "b"}),
        (2, {"nodes": "bc", "generation": 4, "head": "head-3", "shared": True, "lost": "b"}),
    ],
    "from memory": [
        (None, {"nodes": "ab", "saves": [1, 2], "generation": 1}),
        (5, {"nodes": "b", "saves": [6], "generation": 2, "head": "head-2", "copy": 5}),
        (6, {"nodes": "ab"}),
    ],
    "fresh": [
        (None, {"nodes": "ab", "saves": [1, 2]}),
        (None, {"nodes": "ba", "saves": [1], "fresh": True}),
        (1, {"nodes": "ab"}),
    ],
    "kept": [
        (None, {"nodes": "ab", "saves": [1, 2, 3, 4], "generation": 1}),
        (4, {"nodes": "ba", "saves": [5, 6, 7, 8], "generation": 2, "head": "head-4"}),
        (8, {"nodes": "ab", "saves": [9], "generation": 3, "head": "head-8"}),
    ],
}
"""Of each life: the step that it goes on from (None: the beginning; a text: the error), and what it is."""


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    """What became of every life of every story, by rank."""
    directory = tmp_path_factory.mktemp("lives")
    phases = [
        (len(life["nodes"]), "lives.life", {"name": name, **life}) for name in STORIES for _, life in STORIES[name]
    ]
    results = iter(run(directory, *phases))
    return {name: [next(results) for _ in story] for name, story in STORIES.items()}


@pytest.mark.parametrize("story", STORIES)
def test_where_each_life_goes_on(lives: Any, story: str) -> None:
    """S6, F07, F16: every rank goes on from the same step of the right node, or stops with the same words."""
    for number, ((expected, _), ranks) in enumerate(zip(STORIES[story], lives[story], strict=True)):
        ends = {(each["step"], each["error"]) for each in ranks}
        assert len(ends) == 1, (number, ends)
        step, error = ends.pop()
        if isinstance(expected, str):
            assert expected in error, number
        else:
            assert (step, error) == (expected, ""), number
            assert len({each["start"] for each in ranks}) == 1


def test_numbers_rise_across_nodes(lives: Any) -> None:
    """S6: whoever writes next numbers it above all that was written before, wherever that is."""
    for story in ("newest", "head", "damaged", "from memory", "fresh", "kept"):
        wrote = [i for i, (_, life) in enumerate(STORIES[story]) if life.get("saves")]
        serials = [lives[story][number][0]["head"]["serial"] for number in wrote]
        assert serials == sorted(set(serials)), story
        nodes = [lives[story][number][0]["head"]["node"] for number in wrote]
        under = [life["nodes"][0] if life.get("generation") else "" for _, life in STORIES[story] if life.get("saves")]
        assert nodes == under, story


def test_the_user_is_told_who_has_it(lives: Any) -> None:
    """F16: one line of rank 0 names the node that the checkpoint comes from, and nobody else says anything."""
    first, second, *others = lives["newest"][1]
    assert "node-b/ on rank 2 from step 2; ELASTICRT_FRESH=1 starts over" in first["said"]
    assert [each["said"] + "".join(each["warned"]) for each in (second, *others)] == ["", ""]
    assert "step 3 comes from the checkpoint directory of node b" in lives["head"][4][0]["said"]
    assert "etcd has forgotten" in "".join(lives["head"][5][0]["warned"])


def test_a_checkpoint_that_nobody_has_is_named(lives: Any) -> None:
    """F16: the error names step, node and directory, and what can be done; so does the warning of who goes back."""
    refused, back = lives["head"][2][0]["error"], "".join(lives["head"][3][0]["warned"])
    for part in ("step 3", "step-3-g2-", "b has written it to", "node-b.", "start b together", "--run-id"):
        assert part in refused, part
    for part in ("step-3-g2-", "no node here has it", "b has written it to", "going back from step 3 to step 2"):
        assert part in back, part


def test_what_is_passed_over_is_named_with_its_node(lives: Any) -> None:
    """F06, F07: damage on another node is a warning of rank 0; in an error all that was tried is listed."""
    warned = lives["damaged"][2][0]["warned"]
    assert any("node b: step-2-" in text and "SHA-256" in text for text in warned)
    assert "going back from step 2 to step 1" in "".join(warned)
    error = lives["damaged"][5][0]["error"]
    assert "node c: step-3-" in error
    assert "Found: step-1-" in error
    warned = lives["head"][6][0]["warned"]
    assert any("step-3-g2-" in text and "no node here has it" in text for text in warned)
    assert "going back from step 3 to step 2" in "".join(warned)


def test_a_shared_directory_is_as_if_rank_0_were_alone(lives: Any) -> None:
    """F07: rank 0 sends, and what all see is said once."""
    whole, damaged, lost = lives["shared"][1:]
    assert [each["said"] + "".join(each["warned"]) for each in whole] == ["", ""]
    for ranks, parts in ((damaged, ("skipped", "going back")), (lost, ("no node here has it", "going back"))):
        assert [len(each["warned"]) for each in ranks] == [2] + [0] * (len(ranks) - 1)
        assert all(part in text for part, text in zip(parts, ranks[0]["warned"], strict=True))
        assert {each["said"] for each in ranks} == {""}
    assert "node" not in damaged[0]["warned"][0]


def test_each_node_tidies_up_its_own(lives: Any) -> None:
    """S11: rank 0 keeps the newest three in its own directory; what lies elsewhere is left alone."""
    assert [each["steps"] for each in lives["kept"][0]] == [[2, 3, 4], []]
    assert [each["steps"] for each in lives["kept"][1]] == [[6, 7, 8], [2, 3, 4]]
    assert [each["steps"] for each in lives["kept"][2]] == [[3, 4, 9], [6, 7, 8]]
