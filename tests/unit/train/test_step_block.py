"""The step's block: what counts as a step, and what is said about wrong use of it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, TensorDataset

from elasticrt import ElasticBatchSampler, ElasticDistributedSampler
from elasticrt.errors import ConfigError
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import Save
from elasticrt.train.loop import Change, Loop
from tests.fake_worker import Agent, under


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(1, 1)
    data = TensorDataset(torch.ones(6, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data)


def test_a_step_that_is_asked_for_and_not_entered(tmp_path: Path) -> None:
    """`loop.step()` without `with` is noticed when the next batch is asked for, and the remedy is told."""
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)called without a with block.*loop\.report"):
        for _ in loop.epochs(1):
            for _ in loop.batches(_parts()[2]):
                loop.step()


def test_a_step_in_a_step_and_outside_of_epochs(tmp_path: Path) -> None:
    """Both are refused."""
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match="the Loop is not running"):
        loop.step()
    with pytest.raises(ConfigError, match="a step inside a step"):
        for _ in loop.steps(2):
            with loop.step(), loop.step():
                pass


def test_a_step_without_a_batch_of_the_loop(tmp_path: Path) -> None:
    """A Loop with a sampler counts batches: a step of the loader's own batch would be lost when it is undone."""
    model, optimizer, _ = _parts()
    data = TensorDataset(torch.ones(6, 1))
    sampler = ElasticBatchSampler(data, global_batch_size=2)
    loop = Loop(tmp_path, sampler=sampler, model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"a step without a batch .*loop\.batches\(loader\)"):
        for _ in loop.epochs(1):
            for _ in DataLoader(data, batch_sampler=sampler):
                with loop.step():
                    optimizer.step()


@pytest.mark.parametrize("where", ["pause", "evaluate"])
def test_training_where_nothing_is_trained(tmp_path: Path, where: str) -> None:
    """Batches and steps are refused in a pause and in an evaluation, where they would take those of the epoch."""
    model, optimizer, loader = _parts()
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    said = []

    def train() -> None:
        for each in (lambda: next(iter(loop.batches(loader))), lambda: loop.step().__enter__()):
            with pytest.raises(ConfigError, match=r"training inside of loop\.pause"):
                each()
            loop._asked = None
            said.append(where)

    for _ in loop.epochs(1):
        if where == "pause":
            with loop.pause("a mistake"):
                train()
        else:
            loop.evaluate(train)
    assert said == [where] * 2


def test_two_blocks_for_one_batch(tmp_path: Path) -> None:
    """The second one would be a step without samples."""
    model, optimizer, loader = _parts()
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match="a second step with the same batch"):
        for _ in loop.epochs(1):
            for _ in loop.batches(loader):
                for _ in range(2):
                    with loop.step():
                        optimizer.step()


def test_two_blocks_for_one_number(tmp_path: Path) -> None:
    """What the first one was fed would be lost where it is undone, as the same number comes again for both."""
    for steps_early in (True, False):
        model, optimizer, _ = _parts()
        loop = Loop(tmp_path / str(steps_early), model=model, optimizer=optimizer)
        with pytest.raises(ConfigError, match="a second step with the same batch"):
            for _ in loop.steps(3):
                for part in range(2):
                    with loop.step():
                        if steps_early or part:
                            optimizer.step()


def test_a_block_outside_of_batches_and_steps(tmp_path: Path) -> None:
    """What it is fed would be lost where it is undone: nothing would come again."""
    model, optimizer, _ = _parts()
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"a step without a batch .*loop\.steps\(total\)"):
        for _ in loop.epochs(1):
            with loop.step():
                optimizer.step()


def test_a_break_right_after_an_inner_loop(tmp_path: Path) -> None:
    """It is one, although the instruction before it ends a loop."""
    model, optimizer, loader = _parts()
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    for epoch in loop.epochs(2):
        for _ in loop.batches(loader):
            for _ in range(2):
                pass
            with loop.step():
                optimizer.step()
            for _ in range(2):
                pass
            break
        assert loop.steps_done == epoch + 1


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(lambda each: islice(each, 2), id="islice"),
        pytest.param(lambda each: islice((batch for batch in each), 2), id="islice around a generator"),
        pytest.param(lambda each: zip(range(2), each, strict=False), id="zip"),
        pytest.param(lambda each: zip(each, range(2), strict=False), id="zip, which takes one more"),
    ],
)
@pytest.mark.parametrize("blocks", [True, False])
def test_an_iterator_that_ends_the_batches_early(
    tmp_path: Path, limit: Callable[[Any], Iterable[Any]], *, blocks: bool
) -> None:
    """It would count tries that are done again, so that a rank is lost cost a step: refused, in an undisturbed run."""
    model, optimizer, loader = _parts()
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"ended by an iterator around them .*by `break`"):
        for _ in loop.epochs(2):
            for _ in limit(loop.batches(loader)):
                with loop.step() if blocks else contextlib.nullcontext():
                    optimizer.step()


def test_an_optimizer_outside_of_the_block(tmp_path: Path) -> None:
    """What is outside could not be undone: refused at the first step."""
    model, optimizer, loader = _parts()
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match="the optimizer stepped outside of the step"):
        for _ in loop.epochs(1):
            for (x,) in loop.batches(loader):
                with loop.step():
                    model(x).sum().backward()
                optimizer.step()


def test_steps_without_a_block(tmp_path: Path) -> None:
    """A body of `loop.steps` that makes no step would be entered for ever."""
    loop = Loop(tmp_path)
    with pytest.raises(ConfigError, match="a step that was not made"):
        for _ in loop.steps(3):
            pass
    with pytest.raises(ValueError, match=r"steps"):
        next(Loop(tmp_path).steps(-1))


def test_steps_by_hand_go_on_where_they_were(tmp_path: Path) -> None:
    """Each number comes once, over two starts; a schedule after the block is saved with its step."""
    seen: list[int] = []
    for total in (3, 5):
        model, optimizer, _ = _parts()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loop = Loop(tmp_path, model=model, optimizer=optimizer, schedule=schedule)
        for step in loop.steps(total):
            with loop.step():
                seen.append(step)
                optimizer.step()
            assert (loop.complete, loop.steps_done) == (True, step + 1)
            schedule.step()
        assert schedule.last_epoch == total
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_break_inside_the_block(tmp_path: Path, stepped: bool) -> None:
    """The step counts if the optimizer has stepped, with a batch and without."""
    model, optimizer, loader = _parts()
    loop = Loop(tmp_path / "batches", model=model, optimizer=optimizer)
    for _ in loop.epochs(1):
        for _ in loop.batches(loader):
            with loop.step():
                if stepped:
                    optimizer.step()
                break
    assert loop.steps_done == int(stepped)
    loop = Loop(tmp_path / "steps", model=model, optimizer=optimizer)
    for _ in loop.steps(4):
        with loop.step():
            if stepped:
                optimizer.step()
            break
    assert loop.steps_done == int(stepped)


@pytest.mark.parametrize("how", ["batches", "steps"])
def test_steps_are_counted_alike_with_and_without_an_optimizer(tmp_path: Path, how: str) -> None:
    """After each block `steps_done` is one more, also while gradients are added up over three of them."""
    model, optimizer, loader = _parts()
    loop = Loop(tmp_path, model=model, optimizer=optimizer)
    seen: list[tuple[int, int]] = []
    for _ in loop.epochs(1) if how == "batches" else [None]:
        for _ in loop.batches(loader) if how == "batches" else loop.steps(4):
            with loop.step():
                before = loop.steps_done
                if before % 3 == 2:
                    optimizer.step()
            seen.append((before, loop.steps_done))
    assert len(seen) > 3
    assert seen == [(step, step + 1) for step in range(len(seen))]
    assert loop.steps_done == len(seen)


@pytest.mark.parametrize("kind", ["gradients are added up", "weights are changed by hand"])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_break_behind_a_block_without_an_optimizers_step(tmp_path: Path, stop: int, asks: bool, kind: str) -> None:
    """The step counts if the script has asked for the number of steps, or cannot be undone; else it leaves no trace."""

    def train(directory: str, until: int) -> tuple[object, ...]:
        torch.manual_seed(0)
        random.seed(0)
        data = TensorDataset(torch.arange(8.0).double().reshape(8, 1))
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticBatchSampler(data, 2, shuffle=False)
        loop, steps = Loop(tmp_path / directory, sampler=sampler, model=model, optimizer=optimizer), 0
        loop.vars["seen"] = []
        for _ in loop.epochs(2):
            for (x,) in loop.batches(DataLoader(data, batch_sampler=sampler)):
                with loop.step():
                    loop.vars["seen"].append((x.sum().item(), random.random()))
                    model(x).square().mean().backward()
                    if kind == "weights are changed by hand":
                        with torch.no_grad():
                            model[0].weight -= 0.1
                    elif len(loop.vars["seen"]) % 3 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                steps += 1
                if (loop.steps_done if asks else steps) == until:
                    break
            if steps == until:
                assert not asks or loop.steps_done == until
                break
        return (
            loop.steps_done,
            loop.vars["seen"],
            random.random(),
            *(each.sum().item() for each in model.state_dict().values()),
        )

    expected = train("straight", -1)
    train("with a stop", stop)
    assert train("with a stop", -1) == expected


@pytest.mark.parametrize("micro", [None, 1], ids=["whole batches", "micro-batches"])
@pytest.mark.parametrize("where", ["in the block", "after it"])
def test_what_a_step_that_does_not_count_has_added_up(tmp_path: Path, where: str, micro: int | None) -> None:
    """Gradients added up by hand over two steps: the start after a `break` in any of them counts none twice."""

    def train(directory: str, stop: int) -> float:
        torch.manual_seed(0)
        model, data = nn.Linear(1, 1, bias=False).double(), TensorDataset(torch.arange(8.0).double().reshape(8, 1))
        optimizer, stopped = torch.optim.SGD(model.parameters(), lr=0.1), False
        sampler = ElasticBatchSampler(data, 2, micro_batch_size=micro, shuffle=False)
        loop = Loop(tmp_path / directory, sampler=sampler, model=model, optimizer=optimizer)
        for _ in loop.epochs(1):
            for (x,) in loop.batches(DataLoader(data, batch_sampler=sampler)):
                with loop.step():
                    stopped = loop.steps_done == stop
                    model(x).mean().backward()
                    if stopped and where == "in the block":
                        break
                    if loop.complete and loop.steps_done % 2:
                        optimizer.step()
                        optimizer.zero_grad()
                if stopped:
                    break
            if stopped:
                break
        return model.weight.item()

    for stop in range(4):
        train(f"until {stop}", stop)
        assert train(f"until {stop}", -1) == pytest.approx(train(f"whole {stop}", -1), abs=1e-12)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("how", ["batches", "steps"])
def test_an_error_that_is_caught_outside_of_its_step(tmp_path: Path, how: str, *, stepped: bool) -> None:
    """The step would count, or the ranks would drift apart: the script cannot go on, and may leave the loop."""
    model, loader = nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)

    def fail() -> None:
        raise ValueError("a bad batch")

    def train(directory: str, *, leaves: bool) -> Loop:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loop = Loop(tmp_path / directory, model=model, optimizer=optimizer)
        for _ in loop.epochs(1) if how == "batches" else [None]:
            for _ in loop.batches(loader) if how == "batches" else loop.steps(4):
                try:
                    with loop.step():
                        if loop.steps_done == 2 and not stepped:
                            fail()
                        model(torch.ones(2, 1)).sum().backward()
                        optimizer.step()
                        if loop.steps_done == 2:
                            fail()
                except ValueError:
                    if leaves:
                        break
        return loop

    with pytest.raises(RuntimeError, match=r"got step 3: ValueError, caught outside of the block") as found:
        train("goes-on", leaves=False)
    assert isinstance(found.value.__cause__, ValueError)
    if not stepped:
        assert train("leaves", leaves=True).steps_done == 2


@pytest.mark.parametrize("given", [True, False])
def test_a_rank_that_was_given_does_not_outlive_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, given: bool
) -> None:
    """A sampler with a rank of its own would train the samples of that rank for ever: such workers are started anew."""
    model, optimizer, _ = _parts()
    data = TensorDataset(torch.ones(2, 1))
    sampler = ElasticDistributedSampler(data, 1, 0) if given else ElasticDistributedSampler(data)
    monkeypatch.setattr(Loop, "_any_was_entered", False)  # As in a process of its own.
    with under(Agent(), monkeypatch):
        loop = Loop(tmp_path, sampler=sampler, model=model, optimizer=optimizer)
        for _ in loop.epochs(1):
            for (x,) in loop.batches(DataLoader(data, sampler=sampler)):
                with loop.step():
                    model(x).sum().backward()
                    optimizer.step()
    assert ("the sampler was given its rank" in caplog.text) is given


class Wrapped:
    """A loader in a class, as scripts write it to copy batches to a GPU ahead."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


@pytest.mark.parametrize(
    ("wrap", "hinders"),
    [(Wrapped, False), (lambda loader: (each for each in loader), True), (lambda loader: islice(loader, 10), True)],
    ids=["a class", "a generator", "itertools"],
)
def test_an_iterator_around_a_loader_does_not_outlive_a_change(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    wrap: Callable[[DataLoader[Any]], Iterable[Any]],
    hinders: bool,
) -> None:
    """It would go on with the slices of the old world: such workers are started anew, and told why."""
    model, optimizer, _ = _parts()
    data = TensorDataset(torch.ones(2, 1))
    sampler = ElasticBatchSampler(data, 1)
    loader = DataLoader(data, batch_sampler=sampler)
    monkeypatch.setattr(Loop, "_any_was_entered", False)  # As in a process of its own.
    with under(Agent(), monkeypatch):
        loop = Loop(tmp_path, sampler=sampler, model=model, optimizer=optimizer)
        for _ in loop.epochs(1):
            for _ in loop.batches(wrap(loader)):
                with loop.step():
                    optimizer.step()
    assert ("the batches come from an iterator" in caplog.text) is hinders


class Weighted(Sampler[int]):
    """A sampler of the script's own."""

    def __init__(self, data: TensorDataset, world_size: int, rank: int) -> None:
        self._mine = range(rank, len(data), world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)


@pytest.mark.parametrize("how", ["sampler", "batch_sampler", "a class", "by hand"])
@pytest.mark.parametrize("kind", [DistributedSampler, Weighted])
def test_another_sampler_does_not_outlive_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str, kind: type
) -> None:
    """It cuts for the world that it was made in: wherever it is, workers are started anew."""
    model, optimizer, _ = _parts()
    data = TensorDataset(torch.ones(2, 1))
    sampler = kind(data, 1, 0)
    loader = DataLoader(data, sampler=sampler)
    if how == "batch_sampler":
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 1, drop_last=False))
    monkeypatch.setattr(Loop, "_any_was_entered", False)
    with under(Agent(), monkeypatch):
        loop = Loop(tmp_path, model=model, optimizer=optimizer)
        if how == "by hand":
            for _ in loop.steps(1):
                with loop.step():
                    optimizer.step()
        for _ in loop.epochs(1) if how != "by hand" else ():
            for _ in loop.batches(Wrapped(loader) if how == "a class" else loader):
                with loop.step():
                    optimizer.step()
    assert f"all workers restart when the membership changes: the script has a {kind.__name__}," in caplog.text


def test_on_change_is_told_at_the_beginning(tmp_path: Path) -> None:
    """Who makes subgroups does so in one place."""
    loop = Loop(tmp_path)
    told: list[Change] = []
    loop.on_change(told.append)
    for _ in loop.epochs(1):
        assert told == [Change(generation=0, world_size=1, world_size_before=0)]


def test_on_change_is_told_what_a_restart_has_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last step of the node's workers before, which their agent remembers; a second Loop has cost nothing."""
    told: list[Change] = []

    def train(directory: str, steps: int) -> None:
        loop = Loop(tmp_path / directory)
        loop.on_change(told.append)
        for _ in loop.steps(steps):
            with loop.step():
                pass

    first = Agent()
    with under(first, monkeypatch):
        train("ckpt", 3)
    head, last_ns = Commit.from_fields(first.of(Save)[-1].commit), time.monotonic_ns() - 2 * 10**9
    with under(Agent(head.nonce), monkeypatch, resume=head, generation=2, last_step=8, last_step_at_ns=last_ns):
        train("ckpt", 5)
        train("second", 1)
    assert [each.steps_lost for each in told] == [0, 5, 0]
    assert [each.pause_s is None for each in told] == [True, False, True]
    assert [each.world_size_before for each in told] == [0, 1, 0]  # The saved state is of one process.
    assert 2.0 <= (told[1].pause_s or 0.0) < 60.0
