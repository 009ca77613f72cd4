"""Code of the script between two steps counts once: at an epoch's head, and in a body before its block."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrt.checkpoint.stateful import LOOP_KEY
from elasticrt.data.sample_order import WHOLE, BatchSlice
from elasticrt.data.sampler import ElasticBatchSampler
from elasticrt.errors import ConfigError, ReadAheadError
from elasticrt.train.loop import Loop, _warn_of_head
from elasticrt.train.step_tracker import StepTracker
from tests.fake_worker import Agent, under

DATA = TensorDataset(torch.arange(12.0).view(12, 1))


class StopError(Exception):
    """Ends a training in its middle."""


class Run:
    """A script with a head and a body, which each start begins anew."""

    def __init__(self, directory: Path, every: str = "1 steps") -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.sampler = ElasticBatchSampler(DATA, global_batch_size=3, shuffle=False)
        given = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.loop = Loop(directory, sampler=self.sampler, every=every, **given)
        self.loop.vars["heads"] = 0
        self.evaluated: list[object] = []
        self.calls = 0

    def measure(self) -> list[float]:
        """An evaluation, with a result that the script changes."""
        self.calls += 1
        return [random.random()]

    def train(self, stop_at: int = -1) -> None:
        """Two epochs, or until a step begins."""
        for _ in self.loop.epochs(2):
            self.loop.vars["heads"] += 1
            found = self.loop.evaluate(self.measure)
            self.evaluated.append(found[0])
            found.clear()
            self.scheduler.step()
            for (x,) in self.loop.batches(DataLoader(DATA, batch_sampler=self.sampler)):
                if self.loop.steps_done == stop_at:
                    self.loop._saving.save_last()
                    raise StopError
                with self.loop.step():
                    self.model(x).square().mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("stop_at", [1, 2, 5, 7])
def test_an_epochs_head_counts_once(tmp_path: Path, stop_at: int) -> None:
    """L5: it runs again when the epoch is entered in its middle: changes are undone, results are given again."""
    whole, first, second = Run(tmp_path / "whole"), Run(tmp_path / "two starts"), Run(tmp_path / "two starts")
    random.seed(1)
    whole.train()
    random.seed(1)
    with pytest.raises(StopError):
        first.train(stop_at)
    second.train()
    entered = 1 + stop_at // 4
    assert second.evaluated == whole.evaluated[entered - 1 :], "the result as it was, and not as the script left it"
    assert (first.calls, second.calls, whole.calls) == (entered, 2 - entered, 2)
    assert second.loop.vars["heads"] == whole.loop.vars["heads"] == 2
    assert second.scheduler.last_epoch == whole.scheduler.last_epoch
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("stop_at", [0, 1, 2, 4, 5, 7])
def test_an_epochs_head_draws_the_same_numbers(tmp_path: Path, stop_at: int, seed: int | None) -> None:
    """L5: also behind an evaluation in it, which is not made again; and the steps after it go on as they were to."""

    def draws() -> list[float]:
        return [random.random(), torch.rand(()).item()]

    def train(directory: Path, stop_at: int = -1) -> dict[str, list[float]]:
        random.seed(1)
        torch.manual_seed(1)
        sampler = ElasticBatchSampler(DATA, global_batch_size=3)
        loop, found = Loop(directory, sampler=sampler, seed=seed, model=nn.Linear(1, 1)), dict[str, list[float]]()
        for epoch in loop.epochs(2):
            found[f"head {epoch}"] = draws()
            loop.evaluate(lambda: [each for _ in range(3) for each in draws()])
            found[f"behind the evaluation in {epoch}"] = draws()
            for _batch in loop.batches(DataLoader(DATA, batch_sampler=sampler)):
                if loop.steps_done == stop_at:
                    loop._saving.save_last()
                    return found
                with loop.step():
                    found[f"step {loop.steps_done}"] = draws()
        return found

    whole, first, second = train(tmp_path / "whole"), train(tmp_path / "2", stop_at), train(tmp_path / "2")
    assert {**first, **second} == whole
    assert set(first) & set(second), "the head has run twice"


@pytest.mark.parametrize("fed", [False, True], ids=["steps", "batches"])
def test_the_code_before_a_block_draws_the_same_numbers_in_each_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fed: bool
) -> None:
    """L5: and so does the code behind the block of a step that is undone, although it runs once more. An evaluation
    before the block is not made again, but its numbers count as drawn."""
    drawn: dict[bool, list[float]] = {}
    for is_undone in (False, True):
        with under(Agent(), monkeypatch) if is_undone else nullcontext():
            random.seed(1)
            mine = drawn[is_undone] = []
            model = nn.Linear(1, 1)
            loop = Loop(tmp_path / str(is_undone), model=model)
            to_undo = is_undone

            def train(loop: Loop, mine: list[float], model: nn.Module) -> None:
                nonlocal to_undo
                loop._world.in_place.possible = True
                before = random.random() if fed else loop.evaluate(random.random) + random.random()
                with loop.step():
                    inside = random.random()
                    model(torch.ones(1, 1)).sum().backward()
                    if to_undo and loop.steps_done == 2:
                        to_undo = False
                        monkeypatch.setattr(loop._world.in_place, "report_if_lost", lambda *_, **__: True)
                        monkeypatch.setattr(loop._world, "go_on", lambda: None)
                        raise RuntimeError("a lost peer")
                behind = random.random()
                if loop.complete:
                    mine += [before, inside, behind]

            if fed:
                for _ in loop.epochs(1):
                    for _batch in loop.batches(DataLoader(DATA, batch_size=3)):
                        train(loop, mine, model)
            else:
                for _ in loop.steps(4):
                    train(loop, mine, model)
    assert len(drawn[False]) == 12
    assert drawn[True] == drawn[False]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_what_is_discarded_twice(tmp_path: Path) -> None:
    """L5: with a note that is kept, as for a newcomer that still comes to an evaluation of the others: the script's
    variables stay the same objects."""
    run = Run(tmp_path)
    run.loop.vars["seen"] = seen = [1]
    undo = run.loop._undo
    undo.note_for_discard(whole=False)
    for keeps_note in (True, True, False, False):
        run.loop.vars["seen"].append(2)
        run.loop.vars["new"] = 3
        run.scheduler.step()
        undo.discard_changes(keeps_note=keeps_note)
        if undo._discard_note is None and seen == [1, 2]:
            break  # The second call without a note does nothing.
        assert run.loop.vars == {"heads": 0, "seen": [1]} and run.loop.vars["seen"] is seen
        assert run.scheduler.last_epoch == 0


def test_a_result_that_cannot_be_saved_is_made_again(tmp_path: Path) -> None:
    """L5: an evaluation at the head with an object for its result is called again after a restart."""
    for run, stop_at in ((Run(tmp_path), 2), (Run(tmp_path), -1)):
        for _ in run.loop.epochs(1):
            assert isinstance(run.loop.evaluate(lambda: StopError("a result")), StopError)
            for (x,) in run.loop.batches(DataLoader(DATA, batch_sampler=run.sampler)):
                with run.loop.step():
                    run.model(x).square().mean().backward()
                    run.optimizer.step()
                if run.loop.steps_done == stop_at:
                    break


CALLS = ("request", "enter", "leave", "leave by an error", "undo", "next")


def _play(calls: tuple[str, ...], tracker: StepTracker) -> list[str]:
    """What a script in `steps` may do, one call after the other: which numbers were counted, or the first refusal."""
    counted, number, in_step = [], 0, False
    for call in calls:
        try:
            if call == "request":
                tracker.request_block()
            elif call == "enter":
                tracker.enter_block(in_step=in_step, is_paused=False, takes_over=False)
                tracker.begin_batch(WHOLE)
                in_step = True
            elif in_step and call in ("leave", "leave by an error", "undo"):
                in_step = False
                if call == "leave" and tracker.leave_block(has_stepped=True, has_optimizer=True):
                    assert tracker.end_batch() is WHOLE
                    tracker.awaits_boundary = True
                    counted.append(f"step {number}")
                elif call == "leave by an error":
                    tracker.break_off(has_stepped=False)
                    tracker.error = StopError("in the step")
                elif call == "undo":
                    tracker.undo()
            elif call == "next" and not in_step:
                tracker.check_left(number)
                tracker.check_body(has_counted=tracker.awaits_boundary)
                number += tracker.awaits_boundary
                tracker.awaits_boundary = False
                tracker.give_number(has_begun=tracker.was_undone, others_evaluate=False)
        except (ConfigError, RuntimeError):
            return [*counted, "refused"]
    return counted


def test_every_order_of_calls() -> None:
    """Of all orders of six calls none counts a step twice, or counts behind an error; blocks in blocks are refused."""
    for calls in product(CALLS, repeat=6):
        tracker = StepTracker()
        tracker.stage, tracker.draws_itself = "running", True
        found = _play(calls, tracker)
        steps = [each for each in found if each != "refused"]
        assert len(set(steps)) == len(steps) and steps == [f"step {number}" for number in range(len(steps))], calls
        if "refused" in found:
            assert found[-1] == "refused"
    tracker = StepTracker()
    tracker.stage, tracker.draws_itself = "running", True
    assert _play(("request", "enter", "enter"), tracker) == ["refused"]


def test_batches_that_were_passed_before_the_first_step() -> None:
    """L5: they are counted until a block begins, which refuses them, but in a process whose state is that of others."""
    for takes_over in (False, True):
        tracker = StepTracker()
        tracker.stage = "running"
        for _ in range(3):
            tracker.begin_batch(BatchSlice(0, 1, 1.0, last=True))
            tracker.request_batch(in_step=False, has_stepped=False)
        tracker.has_batch = True
        if takes_over:
            tracker.enter_block(in_step=False, is_paused=False, takes_over=True)
            assert tracker.untrained_batches is None
        else:
            with pytest.raises(ReadAheadError, match="3 drawn before the first step"):
                tracker.enter_block(in_step=False, is_paused=False, takes_over=False)
    with pytest.raises(ReadAheadError, match="inside of a step"):
        tracker.request_batch(in_step=True, has_stepped=False)


@pytest.mark.parametrize("where", ["in an evaluation", "at the head", "without an agent"])
def test_a_collective_at_an_epochs_head_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """L5: a newcomer would wait in it for the others, which are in their steps; once, and not of `evaluate`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _warn_of_head.cache_clear()
    try:
        with nullcontext() if where == "without an agent" else under(Agent(), monkeypatch):
            run = Run(tmp_path)
            for _ in run.loop.epochs(2):
                run.loop.evaluate(dist.barrier)
                if where != "in an evaluation":
                    dist.barrier()
                for _ in run.loop.batches(DataLoader(DATA, batch_sampler=run.sampler)):
                    dist.barrier()
    finally:
        dist.destroy_process_group()
    warned = [each.getMessage() for each in caplog.records if "a collective before loop.batches" in each.getMessage()]
    assert len(warned) == (where == "at the head")


@pytest.mark.parametrize("again", [False, True])
def test_a_break_that_leaves_batches_over_is_remembered(tmp_path: Path, *, again: bool) -> None:
    """L5: a restart behind it goes on with what follows the batches; a second `batches` has those that are left."""
    trained: list[list[tuple[int, int]]] = []
    for start in range(2):
        run, told = Run(tmp_path), list[tuple[int, int]]()
        trained.append(told)
        with nullcontext() if start else pytest.raises(StopError):
            for epoch in run.loop.epochs(2):
                for part in range(1 + again):
                    for (x,) in run.loop.batches(DataLoader(DATA, batch_sampler=run.sampler)):
                        with run.loop.step():
                            run.model(x).square().mean().backward()
                            run.optimizer.step()
                        told.append((epoch, part))
                        if told[-2:] == [(epoch, 0)] * 2:
                            break
                    if not start and part == 0:  # As an agent has it from a rank that dies here.
                        run.loop._saving.checkpointer.wait()
                        state = run.loop._undo.state_of_position()
                        assert state is not None and state[LOOP_KEY]["position"]["left"]
                        run.loop._saving.take(save=True, copy=False)
                        run.loop._saving.checkpointer.wait()
                        raise StopError
    assert trained[0] == [(0, 0), (0, 0)]
    assert trained[1] == [(0, 1)] * 2 * again + [(1, 0)] * 2 + [(1, 1)] * 2 * again


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("place", ["at the head", "after the batches", "after batches that are left over"])
def test_what_comes_before_a_break_counts_once(tmp_path: Path, place: str) -> None:
    """L5: code that a start after a `break` runs again is not in the state that was saved."""
    counted = []
    for name, stops in (("whole", [False]), ("two starts", [True, False])):
        random.seed(1)
        for leaves in stops:
            torch.manual_seed(0)
            run = Run(tmp_path / name)
            for epoch in run.loop.epochs(3):
                leaves_here = leaves and epoch == 1
                run.loop.vars["heads"] += 1
                run.loop.vars.setdefault("drawn", []).append(random.random())
                run.scheduler.step()
                if leaves_here and place == "at the head":
                    break
                for (x,) in run.loop.batches(DataLoader(DATA, batch_sampler=run.sampler)):
                    with run.loop.step():
                        run.model(x).square().mean().backward()
                        run.optimizer.step()
                        run.optimizer.zero_grad()
                    if leaves_here and place == "after batches that are left over" and run.loop.steps_done == 6:
                        break
                run.loop.vars.setdefault("ends", []).append(random.random())
                run.scheduler.step()
                if leaves_here:
                    break
        learned = run.optimizer.param_groups[0]["lr"], run.model.weight.item()
        counted.append((run.loop.steps_done, run.loop.vars, run.scheduler.last_epoch, *learned))
    assert counted[0] == counted[1]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("place", ["at the head", "after the batches"])
def test_what_was_done_outside_of_the_batches_is_not_saved_while_nodes_are_missing(tmp_path: Path, place: str) -> None:
    """L5: a survivor saves and waits in the middle of such code, and all is lost: it counts once after the restart."""
    counted = []
    for name, stops in (("whole", [False]), ("two starts", [True, False])):
        for stops_here in stops:
            torch.manual_seed(0)
            run = Run(tmp_path / name, every="1000 steps")

            def all_is_lost(run: Run = run) -> None:
                run.loop._world._report_waiting()
                run.loop._saving.checkpointer.wait()
                raise StopError

            with pytest.raises(StopError) if stops_here else nullcontext():
                for epoch in run.loop.epochs(3):
                    run.loop.vars["heads"] += 1
                    run.scheduler.step()
                    if stops_here and epoch == 1 and place == "at the head":
                        all_is_lost()
                    for (x,) in run.loop.batches(DataLoader(DATA, batch_sampler=run.sampler)):
                        with run.loop.step():
                            run.model(x).square().mean().backward()
                            run.optimizer.step()
                            run.optimizer.zero_grad()
                    run.scheduler.step()
                    if stops_here and epoch == 1:
                        all_is_lost()
        counted.append((run.loop.vars, run.scheduler.last_epoch, run.model.weight.item()))
    assert counted[0] == counted[1]
