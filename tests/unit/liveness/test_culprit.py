"""Who is to blame when steps stand still, as tables: where the ranks are, and who is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elasticrt.liveness.culprit import Position, doing, find

TORCH = "/venv/lib/python3.11/site-packages/torch"
OURS = "/venv/lib/python3.11/site-packages/elasticrt"


def _stack(*frames: str) -> list[str]:
    """Frames as "file:line in name", innermost first."""
    split = [frame.partition(" in ") for frame in frames]
    return [
        f'  File "{place.rpartition(":")[0]}", line {place.rpartition(":")[2]} in {name}' for place, _, name in split
    ]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        pytest.param([], ("", ""), id="no stack"),
        pytest.param(["/a/train.py:7 in stuck", "/a/train.py:40 in m"], ("code", "train.py:7 in stuck"), id="own"),
        pytest.param(
            ["/usr/lib/python3.11/threading.py:320 in wait", "/a/train.py:7 in stuck"],
            ("code", "train.py:7 in stuck"),
            id="a lock",
        ),
        pytest.param(
            [f"{TORCH}/distributed/distributed_c10d.py:4000 in barrier", f"{TORCH}/distributed/c10d_logger.py:81 in w",
             "/a/train.py:9 in <module>"],
            ("collective", "train.py:9 in <module>"),
            id="a collective",
        ),
        pytest.param(
            [f"{TORCH}/distributed/distributed_c10d.py:4000 in all_reduce",
             f"{OURS}/distributed/collectives.py:90 in s",
             f"{OURS}/checkpoint/locate.py:9 in f", f"{OURS}/train/loop.py:9 in g", "/a/train.py:9 in <module>"],
            ("collective", "train.py:9 in <module>"),
            id="a collective of ours",
        ),
        pytest.param(
            [f"{TORCH}/autograd/graph.py:824 in _engine_run_backward", f"{TORCH}/_tensor.py:648 in backward",
             "/a/train.py:9 in <module>"],
            ("gradients", "train.py:9 in <module>"),
            id="backward",
        ),
        pytest.param(
            [f"{TORCH}/nn/parallel/distributed.py:2230 in _sync_buffers", f"{TORCH}/nn/modules/module.py:1 in _call",
             "/a/train.py:9 in <module>"],
            ("gradients", "train.py:9 in <module>"),
            id="buffers before forward",
        ),
        pytest.param(
            ["/a/data.py:3 in __getitem__", f"{TORCH}/utils/data/_utils/fetch.py:52 in fetch",
             f"{OURS}/train/loop.py:270 in _batches", "/a/train.py:9 in <module>"],
            ("loader", "data.py:3 in __getitem__"),
            id="a dataset",
        ),
        pytest.param(
            ["/usr/lib/python3.11/queue.py:180 in get", f"{TORCH}/utils/data/dataloader.py:1 in _try_get_data",
             f"{OURS}/train/loop.py:270 in _batches", "/a/train.py:9 in <module>"],
            ("loader", "train.py:9 in <module>"),
            id="a loader's workers",
        ),
        pytest.param(
            ["/usr/lib/python3.11/threading.py:320 in wait", f"{OURS}/checkpoint/checkpointer.py:5 in wait",
             f"{OURS}/train/saving.py:100 in last", f"{OURS}/train/loop.py:9 in g", "/a/train.py:9 in <module>"],
            ("save", "train.py:9 in <module>"),
            id="a save",
        ),
        pytest.param(
            ["/usr/lib/python3.11/threading.py:320 in wait", f"{TORCH}/_inductor/codecache.py:4455 in result",
             f"{TORCH}/_inductor/async_compile.py:600 in wait", "/tmp/torchinductor_me/ab/cab.py:90 in <module>",
             f"{TORCH}/_inductor/compile_fx.py:900 in codegen", f"{TORCH}/_dynamo/convert_frame.py:1300 in compile",
             f"{TORCH}/nn/parallel/distributed.py:1645 in forward", "/a/common.py:21 in step"],
            ("compile", "common.py:21 in step"),
            id="torch.compile",
        ),
        pytest.param(
            [f"{TORCH}/_tensor.py:648 in backward", f"{TORCH}/_dynamo/symbolic_convert.py:1300 in run",
             f"{TORCH}/_dynamo/convert_frame.py:1300 in compile", "/a/common.py:21 in step"],
            ("compile", "common.py:21 in step"),
            id="dynamo",
        ),
        pytest.param(
            [f"{TORCH}/autograd/graph.py:824 in _engine_run_backward", f"{TORCH}/_inductor/lowering.py:4 in inner_fn",
             *[f"{TORCH}/_inductor/ir.py:1 in realize"] * 98],
            ("compile", "graph.py:824 in _engine_run_backward"),
            id="a stack that is cut before the script",
        ),
        pytest.param(
            [f"{TORCH}/distributed/_functional_collectives.py:150 in wait_tensor",
             "/tmp/torchinductor_me/ab/cab.py:90 in call", f"{TORCH}/_inductor/utils.py:3 in run",
             f"{TORCH}/_inductor/output_code.py:600 in __call__", f"{TORCH}/_dynamo/eval_frame.py:736 in _fn",
             "/a/common.py:21 in step"],
            ("collective", "common.py:21 in step"),
            id="compiled code",
        ),
    ],
)  # fmt: skip
def test_what_a_stack_says(frames: list[str], expected: tuple[str, str]) -> None:
    """The innermost function of a library that says something, and the innermost place in the script."""
    assert doing(_stack(*frames)) == expected


def _at(rank: int, doing: str = "gradients", *, begun: int = 9, state: str = "S", **more: object) -> Position:
    fields = {"step": 25, "stepping": True, "place": f"train.py:{len(doing)} in f", **more}
    return Position(rank=rank, doing=doing, begun=begun, state=state, **fields)


@pytest.mark.parametrize(
    ("positions", "ranks", "words"),
    [
        pytest.param([_at(0), _at(1, "code", begun=7)], (1,), "script's own code: train.py:4 in f", id="code"),
        pytest.param([_at(0, "collective"), _at(1, begun=7)], (1,), "computes gradients", id="slow backward"),
        pytest.param([_at(0), _at(1, "loader", begun=7)], (1,), "waits for its data loader", id="loader"),
        pytest.param([_at(1), _at(0, "save", begun=7)], (0,), "saves", id="save"),
        pytest.param(
            [_at(1), _at(0, "compile")],
            (0,),
            "rank 0 on n0 compiles (torch.compile): train.py:7 in f; rank 1 waits for it",
            id="compile",
        ),
        pytest.param([_at(0), _at(1, "code", stepping=False)], (1,), "in no step (loop.pause", id="pause"),
        pytest.param(
            [_at(0), _at(1, "code", stepping=False), _at(2, "code")], (2,), "own code", id="a pause beside"
        ),
        pytest.param([_at(0), _at(1, "", state="T")], (1,), "is stopped by a signal (SIGSTOP)", id="stopped"),
        pytest.param([_at(0), _at(1, "", state="D", place="")], (1,), "waits inside the kernel", id="disk"),
        pytest.param([_at(0), _at(1, "", state="S", begun=0)], (1,), "does not say", id="no answer"),
        pytest.param([_at(0), _at(1), _at(2, "collective")], (2,), "waits in a collective", id="mismatch"),
        pytest.param([_at(0, begun=11), _at(1, "collective", begun=10)], (1,), "waits in a collective", id="of two"),
        pytest.param([_at(0, begun=0), _at(1, begun=0), _at(2, begun=0)], (), "no rank is to blame", id="network"),
    ],
)  # fmt: skip
def test_who_is_named(positions: list[Position], ranks: tuple[int, ...], words: str) -> None:
    """The one that is not where the others wait; where all wait, the one that waits elsewhere."""
    culprit = find({f"n{position.rank}": [position] for position in positions})
    assert culprit is not None
    assert culprit.ranks == ranks
    assert culprit.nodes == tuple(f"n{rank}" for rank in ranks)
    assert words in culprit.reason


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param([], id="nobody"),
        pytest.param([_at(0, "code"), _at(1, "code")], id="all compute"),
        pytest.param([_at(0, "compile"), _at(1, "compile")], id="all compile"),
        pytest.param([_at(0), *(_at(rank, "code", begun=7) for rank in range(1, 9))], id="most compute"),
    ],
)
def test_nobody_is_named(positions: list[Position]) -> None:
    """While nobody waits, or most are busy, a step is slow, and no rank of it stands out."""
    assert find({"n0": positions}) is None


@pytest.mark.parametrize(
    ("position", "words"),
    [
        pytest.param(_at(0, "code"), "rank 0 on n0 is in the script's own code: train.py:4 in f", id="code"),
        pytest.param(_at(0, "gradients"), "rank 0 on n0 computes gradients: train.py:9 in f", id="gradients"),
        pytest.param(_at(0, "loader"), "rank 0 on n0 waits for its data loader: train.py:6 in f", id="loader"),
        pytest.param(_at(0, "compile"), None, id="compile"),
        pytest.param(_at(0, "code", stepping=False), None, id="no step is expected"),
        pytest.param(_at(0, "", stepping=False, state="T"), "rank 0 on n0 is stopped by a signal (SIGSTOP)", id="T"),
    ],
)
def test_the_only_rank_of_a_run(position: Position, words: str | None) -> None:
    """It is named where a step is expected, although nobody waits for it."""
    found = find({"n0": [position]}, own="n0", alone=True)
    assert (found.reason if found is not None else None) == words
    assert found is None or (found.ranks, found.nodes) == ((0,), ("n0",))


def test_a_pause_is_no_mistake() -> None:
    """Who is in no step may be right: that is known of the finding, and not of one that a signal has stopped."""
    waits, pauses = _at(0), _at(1, "code", stepping=False)
    found = [find({"n0": [waits, other]}) for other in (pauses, _at(1, "code"), replace(pauses, state="T"))]
    assert [each is not None and each.resting for each in found] == [True, False, False]


NAMES = {"10.0.0.1": "n0", "10.0.0.2": "n1", "10.0.0.3": "n2"}


@pytest.mark.parametrize(
    ("unheard", "nodes", "words"),
    [
        pytest.param(
            ["", "10.0.0.3", ""],
            ("n1", "n2"),
            "no data passes between n1 and n2: n2 acknowledges nothing that rank 1 on n1 has sent",
            id="one way",
        ),
        pytest.param(["", "10.0.0.3", "10.0.0.2"], ("n1", "n2"), "rank 1 on n1 has sent", id="both ways"),
        pytest.param(
            ["", "10.0.0.3,10.0.0.1", "10.0.0.2"],
            ("n1", "n2", "n0"),
            "no data passes between n1 and n2, between n0 and n1",
            id="two links",
        ),
        pytest.param(
            ["", "10.9.9.9", ""], ("n1",), "no data passes between 10.9.9.9 and n1", id="another interface's address"
        ),
    ],
)
def test_a_link_that_is_cut(unheard: list[str], nodes: tuple[str, ...], words: str) -> None:
    """Where all wait, and what some have sent is not acknowledged, its two ends are named, and no rank is."""
    found = find({f"n{rank}": [_at(rank, unheard=each)] for rank, each in enumerate(unheard)}, names=NAMES)
    assert found is not None
    assert (found.ranks, set(found.nodes)) == ((), set(nodes))
    assert words in found.reason
    busy = find({"n0": [_at(0)], "n1": [_at(1, "code", begun=7, unheard="10.0.0.3")]}, names=NAMES)
    assert busy is not None
    assert busy.ranks == (1,), "one that is not there explains more"


def _flights(*rows: tuple[str, int, int, str]) -> str:
    return json.dumps(rows)


SUM, BARRIER = "all_reduce of [12]", "barrier"
SIXTH = _flights(("default_pg", 6, 6, SUM))


@pytest.mark.parametrize(
    ("flights", "ranks", "words"),
    [
        pytest.param(
            [SIXTH, _flights(("default_pg", 6, 6, BARRIER)), _flights(("default_pg", 7, 6, SUM))],
            (1,),
            "and is in barrier instead of all_reduce of [12] (number 6 of default_pg), in which the others wait",
            id="another one",
        ),
        pytest.param(
            [SIXTH, _flights(("default_pg", 6, 6, "all_reduce of [13]")), SIXTH],
            (1,),
            "is in all_reduce of [13] instead of all_reduce of [12]",
            id="another size",
        ),
        pytest.param(
            [SIXTH, SIXTH, _flights(("default_pg", 5, 0, SUM), ("mine 1", 1, 1, BARRIER))],
            (2,),
            "and has not begun all_reduce of [12] (number 6 of default_pg), in which the others wait",
            id="another group",
        ),
        pytest.param([SIXTH] * 3, (), "no rank is to blame", id="all in one"),
        pytest.param(["", "", ""], (), "no rank is to blame", id="no recorder"),
        pytest.param(["[[1]]", "{}", "x"], (), "no rank is to blame", id="no flights"),
    ],
)
def test_what_the_flight_recorder_says(flights: list[str], ranks: tuple[int, ...], words: str) -> None:
    """Where the stacks look alike, torch's own record of collectives tells who is in another one, or behind."""
    found = find({f"n{rank}": [_at(rank, "collective", flights=each)] for rank, each in enumerate(flights)})
    assert found is not None
    assert found.ranks == ranks
    assert words in found.reason


@pytest.mark.parametrize(
    ("by_node", "ranks"),
    [
        pytest.param({"n0": [_at(0)], "n1": [_at(1, "code")]}, (1,), id="one-does-something-else"),
        pytest.param({"n0": [_at(0)], "n1": [_at(1, "code")], "n2": []}, None, id="another-node-has-not-looked"),
        pytest.param({"n0": [_at(0)], "n1": [_at(1, "gradients", begun=6)]}, None, id="it-may-wait-too"),
        pytest.param({"n0": [_at(0)], "n1": [_at(1, place="b.py:2 in g")]}, None, id="two-collectives"),
    ],
)
def test_who_is_named_before_all_is_known(by_node: dict[str, list[Position]], ranks: tuple[int, ...] | None) -> None:
    """W09: at once only what cannot be mistaken; the rest when the nodes have been asked again."""
    found = find(by_node, again=True)
    assert (found.ranks if found is not None else None) == ranks
    assert find(by_node, {"n9": ""}, again=True) is None


def test_a_node_that_says_nothing() -> None:
    """A node that has not answered is named where all others wait; one whose steps do not stand yet is waited for."""
    waits = [_at(0), _at(1)]
    found = find({"n0": waits}, {"n1": ""})
    assert found is not None
    assert (found.ranks, found.nodes) == ((), ("n1",))
    assert found.reason == "n1 does not answer, and 2 ranks wait in a collective at train.py:9 in f"
    assert find({"n0": waits, "n1": []}) is None
    assert find({"n0": [_at(0), _at(1, "code")]}, {"n1": ""}).ranks == (1,)


@pytest.mark.parametrize(
    ("silent", "nodes", "reason"),
    [
        pytest.param(
            {"n2": "n1"},
            ("n0", "n2"),
            "no data passes between n0 and n2: n1 reaches n2, and n0 does not; 2 ranks wait",
            id="a link",
        ),
        pytest.param(
            {"n2": "n1", "n3": "n4"},
            ("n0", "n2", "n3"),
            "no data passes between n0 and n2, between n0 and n3: n1 reaches n2 and n4 reaches n3, and n0",
            id="two links",
        ),
        pytest.param({"n2": "n1", "n3": ""}, ("n3",), "n3 does not answer, and 2 ranks wait", id="a link and a node"),
    ],
)
def test_a_link_of_the_node_that_asks(silent: dict[str, str], nodes: tuple[str, ...], reason: str) -> None:
    """A node that another one reaches lives: the link to it is named, with both of its ends."""
    found = find({"n0": [_at(0)], "n1": [_at(1)]}, silent, own="n0")
    assert found is not None
    assert (found.ranks, found.nodes) == ((), nodes)
    assert found.reason.startswith(reason)
    fewer = find({"n0": [_at(0)], "n1": []}, silent, own="n0")
    assert fewer is not None
    assert fewer.key == found.key, "it is the same finding when more ranks wait"
