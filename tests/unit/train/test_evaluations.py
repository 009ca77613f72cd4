"""`loop.evaluate`: what is made again, and what it refuses. With lost ranks: `tests/chaos/test_in_place.py`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticrt import Loop
from elasticrt.errors import ConfigError
from elasticrt.train.evaluations import Evaluations


@pytest.mark.parametrize(
    ("standings", "makes"),
    [
        pytest.param([(2, 0), (2, 0), (0, 0, True)], [[], [], []], id="nobody is in one: a newcomer may come in"),
        pytest.param([(1, 1), (1, 1)], [[], []], id="all are in it, and each makes its own again"),
        pytest.param([(1, 1), (1, 0)], [[], [1]], id="one has ended it, and takes part again"),
        pytest.param([(1, 1), (2, 2), (2, 0)], [[], [1], [1, 2]], id="some are in the next, or behind it"),
        pytest.param([(2, 1), (2, 2)], [[], [1]], id="one makes the first again, and is lost in that"),
        pytest.param([(1, 1), (0, 0), (1, 0)], [[], [], [1]], id="one has not come to it"),
    ],
)
def test_which_are_made_again(standings: list[tuple[int, ...]], makes: list[list[int]]) -> None:
    """From the first that a rank is in, all that had ended it."""
    found = []
    for standing in standings:
        mine = _standing(*standing)
        found.append(list(mine.meet(json.dumps([*each, False][:3]) for each in standings)))
        assert mine.standing(is_newcomer=bool(standing[2:])) == json.dumps([*standing, False][:3])
        assert mine.awaited == 0 or not standing[0]
    assert found == makes


def test_an_evaluation_that_a_rank_has_not_come_to() -> None:
    """A rank behind the others goes on with the script until it comes to where they wait."""
    late = _standing(0, 0)
    late.meet(["[2, 2, false]", "[0, 0, false]"])
    assert (late.awaited, late.comes_to_awaited) == (2, False)
    late.begin(lambda: None)
    assert (late.awaited, late.comes_to_awaited) == (2, True)
    late.begin(lambda: None)
    assert (late.awaited, late.comes_to_awaited) == (0, False)
    late.meet(["[2, 2, false]", "[3, 0, false]"])
    late.forget()
    assert late.awaited == 0


@pytest.mark.parametrize("mine", [(2, 2), (3, 0), (1, 0, True), (0, 0)])
def test_an_evaluation_that_a_newcomer_cannot_come_to(mine: tuple[int, ...]) -> None:
    """It cannot be made again by anybody, and nobody waits for that."""
    found = _standing(*mine)
    assert list(found.meet(["[2, 2, false]", "[3, 0, false]", "[1, 0, true]"])) == []
    assert (found.at, found.awaited, found.standing(is_newcomer=False)) == (0, 0, "[0, 0, false]")


def _standing(begun: int, at: int, is_newcomer: bool = False) -> Evaluations:
    found = Evaluations()
    for _ in range(begun):
        found.begin(lambda: None)
    found.at = at
    return found


def test_an_evaluation_begins_with_the_same_random_numbers(tmp_path: Path) -> None:
    """When it is made again it draws what it drew before."""
    mine = Evaluations()
    number = mine.begin(random.random)
    first = mine.enter(number)()
    random.random()
    assert mine.enter(number)() == first
    mine.forget()
    assert (mine.at, mine.standing(is_newcomer=False)) == (0, "[0, 0, false]")


def test_after_a_try_that_is_done_again_nothing_is_called(tmp_path: Path) -> None:
    """It returns what it returned after the step before, evaluation by evaluation; what has no result is refused."""
    mine = Evaluations()
    for number in (1, 2):
        assert mine.begin(lambda: None) == number
        mine.end(number, f"result {number}")
    for _ in range(2):
        mine.repeat_from_first()
        assert [mine.repeat() for _ in range(3)] == [(True, "result 1"), (True, "result 2"), (False, None)]
    mine.forget()
    mine.repeat_from_first()
    assert mine.repeat() == (False, None)
    model = nn.Linear(1, 1)
    loop = Loop(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in loop.steps(1):
        loop._redo = True
        with pytest.raises(ConfigError, match="an evaluation after a try that is done again"):
            loop.evaluate(random.random)
        loop._world.evaluations.end(2, 0.5)
        assert loop.evaluate(random.random) == 0.5
        with loop.step():
            loop._undo._has_stepped(loop._undo._optimizers[0])


def test_evaluate_without_an_agent(tmp_path: Path) -> None:
    """It calls the function with its arguments, in a pause; an error of it is the script's; in a step it is refused."""
    model = nn.Linear(1, 1)
    loop = Loop(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def doubled(number: int, *, plus: int) -> int:
        assert loop._page.pausing_ns
        return 2 * number + plus

    with pytest.raises(ConfigError, match="the Loop is not running"):
        loop.evaluate(doubled, 2, plus=1)
    for step in loop.steps(2):
        with loop.step():
            with pytest.raises(ConfigError, match="an evaluation inside a step"):
                loop.evaluate(doubled, 2, plus=1)
            loop._undo._has_stepped(loop._undo._optimizers[0])
        assert loop.evaluate(doubled, step, plus=1) == 2 * step + 1
        assert loop.evaluate(lambda: loop.evaluate(doubled, 1, plus=0)) == 2
        with pytest.raises(TypeError, match=r"nothing to call \(evaluate\): got 3"):
            loop.evaluate(3)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            loop.evaluate(lambda: 1 / 0)
    assert (loop.steps_done, loop._page.pausing_ns) == (2, 0)


@pytest.mark.parametrize("fed", [False, True], ids=["steps", "batches"])
def test_a_step_counts_before_its_evaluation_also_where_no_optimizer_has_stepped(tmp_path: Path, *, fed: bool) -> None:
    """Gradients are added up over two steps: an evaluation or a pause after the first is one between two steps."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    found = []
    batches = (x for _ in loop.epochs(1, max_steps=4) for x in loop.batches([1, 2, 3, 4, 5]))
    for _ in batches if fed else loop.steps(4):
        with loop.step():
            model(torch.ones(1)).sum().backward()
            if loop.steps_done % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append((loop.steps_done, loop.evaluate(lambda: loop._is_between)))
        with loop.pause("look"):
            found.append((loop.steps_done, loop._is_between))
    assert found == [(step, True) for step in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert loop.steps_done == 4
