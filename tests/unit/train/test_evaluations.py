"""`loop.evaluate`: what is made again, and what it refuses. With lost ranks: `tests/chaos/test_in_place.py`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticrt import Loop
from elasticrt.checkpoint import rng_state
from elasticrt.errors import ConfigError
from elasticrt.train.evaluations import Evaluations, Standing


@pytest.mark.parametrize(
    ("standings", "makes"),
    [
        pytest.param([(1, 1, -1), (1, 1, -1)], [[], []], id="all are in it, and each makes its own again"),
        pytest.param([(1, 1, 0), (1, 0, 0)], [[], [1]], id="one has ended it, and takes part again"),
        pytest.param([(1, 1, -1), (2, 2, 1), (2, 0, 1)], [[], [1], [1, 2]], id="some are in the next, or behind it"),
        pytest.param([(2, 1, -1), (2, 2, -1)], [[], [1]], id="one makes the first again, and is lost in that"),
        pytest.param([(1, 1, -1), (0, 0, -1), (1, 0, -1)], [[], [], [1]], id="one has not come to it"),
    ],
)
def test_which_are_made_again(standings: list[tuple[int, int, int]], makes: list[list[int]]) -> None:
    """From the first that a rank is in, all that had ended it."""
    found = []
    for standing in standings:
        mine = _standing(*standing)
        found.append(list(_meet(mine, standings)))
        assert mine.standing(is_newcomer=False) == Standing(*_whole(standing))
        assert mine.awaited == 0 or not standing[0]
    assert found == makes


def test_an_evaluation_that_a_rank_has_not_come_to() -> None:
    """A rank behind the others goes on with the script until it comes to where they wait."""
    late = _standing(0, 0, -1)
    _meet(late, [(2, 2, 1), (0, 0, -1)])
    for awaited in (2, 2, 0):
        assert late.awaited == awaited
        late.begin(lambda: None)
    _meet(late, [(2, 2, 1), (3, 0, 1)])
    late.forget()
    assert late.awaited == 0


@pytest.mark.parametrize("mine", [(2, 2, -1), (3, 0, 3), (0, 0, -1)])
@pytest.mark.parametrize("is_newcomer", [False, True])
def test_an_evaluation_that_a_newcomer_cannot_come_to(mine: tuple[int, int, int], is_newcomer: bool) -> None:
    """One from before the boundary cannot be made again with it by anybody, and nobody waits for that."""
    found = _standing(*mine)
    assert list(_meet(found, [(2, 2, -1), (3, 0, 3)], newcomers=1, is_newcomer=is_newcomer)) == []
    assert (found.current, found.awaited, found.standing(is_newcomer=False)) == (0, 0, Standing())


@pytest.mark.parametrize(
    ("survivors", "makes", "awaited"),
    [
        pytest.param([(1, 0, 1), (1, 0, 1)], [[], []], 0, id="at the boundary"),
        pytest.param([(0, 0, -1), (0, 0, -1)], [[], []], 0, id="before the first one"),
        pytest.param([(3, 3, 1), (3, 3, 1)], [[2], [2]], 2, id="in the second behind it"),
        pytest.param([(3, 0, 1), (3, 0, 1)], [[2, 3], [2, 3]], 2, id="in the step behind those"),
        pytest.param([(1, 1, 0), (0, 0, -1)], [[], []], 1, id="one has not come to it either"),
    ],
)
def test_evaluations_behind_the_boundary_are_made_with_a_newcomer(
    survivors: list[tuple[int, int, int]], makes: list[list[int]], awaited: int
) -> None:
    """It comes to all of them, and to none from before: so the others make these again, and wait for it there."""
    each = [_standing(*survivor) for survivor in survivors]
    assert [list(_meet(mine, survivors, newcomers=1)) for mine in each] == makes
    newcomer = _standing(0, 0, -1)
    assert list(_meet(newcomer, survivors, newcomers=1, is_newcomer=True)) == []
    assert newcomer.awaited == awaited
    passed = max(0, *(passed for *_, passed in survivors))
    assert newcomer.standing(is_newcomer=False) == Standing(passed, 0, 0, passed)
    newcomer.end(newcomer.begin(lambda: None), "mine")
    newcomer.replay_from_boundary()
    assert newcomer.replay() == (True, "mine")


def test_a_state_has_the_random_numbers_before_what_is_to_come() -> None:
    """Who gets it draws in the evaluations that it comes to what the others have drawn there."""
    mine = Evaluations()
    assert mine.rng_for_newcomer is None
    mine.begin(random.random)
    assert mine.rng_for_newcomer is not None, "whoever was in the step comes to this one"
    mine.pass_boundary()
    assert mine.rng_for_newcomer is None
    before = rng_state.capture_raw()["python"]
    mine.begin_try(mine.begin(random.random))()
    mine.begin(random.random)
    assert mine.rng_for_newcomer is not None
    assert mine.rng_for_newcomer["python"] == before


def _standing(begun: int, at: int, passed: int) -> Evaluations:
    found = Evaluations()
    for number in range(begun + 1):
        if number == passed:
            found.pass_boundary()
        if number < begun:
            found.begin(lambda: None)
    found.current = found.called = at
    return found


def _whole(standing: tuple[int, int, int]) -> list[int]:
    begun, at, passed = standing
    return [begun, at, at, passed]


def _meet(
    mine: Evaluations, others: list[tuple[int, int, int]], *, newcomers: int = 0, is_newcomer: bool = False
) -> range:
    said = [Standing(*_whole(each)) for each in others] + [Standing(is_newcomer=True)] * newcomers
    return mine.decide(said, is_newcomer=is_newcomer)


def test_an_evaluation_begins_with_the_same_random_numbers(tmp_path: Path) -> None:
    """When it is made again it draws what it drew before."""
    mine = Evaluations()
    number = mine.begin(random.random)
    first = mine.begin_try(number)()
    random.random()
    assert mine.begin_try(number)() == first
    mine.forget()
    assert (mine.current, mine.standing(is_newcomer=False)) == (0, Standing())


def test_after_a_try_that_is_done_again_nothing_is_called(tmp_path: Path) -> None:
    """It returns what it returned after the step before, evaluation by evaluation; what has no result is refused."""
    mine = Evaluations()
    for number in (1, 2):
        assert mine.begin(lambda: None) == number
        mine.end(number, f"result {number}")
    for _ in range(2):
        mine.replay_from_first()
        assert [mine.replay() for _ in range(3)] == [(True, "result 1"), (True, "result 2"), (False, None)]
    mine.forget()
    mine.replay_from_first()
    assert mine.replay() == (False, None)
    model = nn.Linear(1, 1)
    loop = Loop(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in loop.steps(1):
        loop._tracker.was_undone = True
        with pytest.raises(ConfigError, match="an evaluation after a try that is done again"):
            loop.evaluate(random.random)
        loop._world.evaluations.end(2, 0.5)
        assert loop.evaluate(random.random) == 0.5
        with loop.step():
            loop._undo._after_optimizer(loop._undo._optimizers[0])


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
            loop._undo._after_optimizer(loop._undo._optimizers[0])
        assert loop.evaluate(doubled, step, plus=1) == 2 * step + 1
        assert loop.evaluate(lambda: loop.evaluate(doubled, 1, plus=0)) == 2
        with pytest.raises(TypeError, match=r"nothing to call \(evaluate\): got 3"):
            loop.evaluate(3)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            loop.evaluate(lambda: 1 / 0)
        assert not loop._page.pausing_ns
    assert loop.steps_done == 2


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
        found.append((loop.steps_done, loop.evaluate(lambda: loop._is_between_steps)))
        with loop.pause("look"):
            found.append((loop.steps_done, loop._is_between_steps))
    assert found == [(step, True) for step in (1, 1, 2, 2, 3, 3, 4, 4)]
    assert loop.steps_done == 4
