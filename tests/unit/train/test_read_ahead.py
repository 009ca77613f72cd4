"""Batches that are drawn before the one before is trained: refused, and nothing of them counts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrt import ElasticBatchSampler, Loop
from elasticrt.audit.exactly_once import check
from elasticrt.cli.audit import books
from elasticrt.errors import ReadAheadError

SAMPLES, PER_EPOCH = 12, 4

Around = Callable[[Iterator[Any]], Iterable[Any]]


class Run:
    """One start of a script, which saves after each step."""

    def __init__(self, directory: Path, *, micro: int | None = None, optimizer: bool = True) -> None:
        data = TensorDataset(torch.arange(SAMPLES), torch.ones(SAMPLES, 1))
        sampler = ElasticBatchSampler(data, SAMPLES // PER_EPOCH, micro_batch_size=micro)
        self.loader = DataLoader(data, batch_sampler=sampler)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        given: dict[str, Any] = {"model": self.model, **({"optimizer": self.optimizer} if optimizer else {})}
        self.ledger = directory / "ledger"
        self.loop = Loop(directory / "ckpt", sampler=sampler, every="1 step", ledger=self.ledger, **given)
        self.trained: list[int] = []
        self.saved: list[int] = []
        take = self.loop._saving.take

        def noting(**wanted: Any) -> None:
            self.saved.append(self.loop.steps_done)
            take(**wanted)
            self.loop._saving.checkpointer.wait()

        self.loop._saving.take = noting  # type: ignore[method-assign]

    def train(self, batch: Any) -> None:
        """Forward, backward, and the optimizer's step when the global batch is complete."""
        ids, x = batch
        self.trained += ids.tolist()
        self.model(x).mean().backward()
        if self.loop.complete:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def to_the_end(self, around: Around = iter, epochs: int = 1) -> None:
        """One block for each batch that comes out of `around`."""
        for _ in self.loop.epochs(epochs):
            for batch in around(self.loop.batches(self.loader)):
                with self.loop.step():
                    self.train(batch)


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """What copies the next batch to a GPU while this one is trained."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch
        batch = following


def _one_behind(batches: Iterator[Any]) -> Iterator[Any]:
    """The same by a `for`."""
    before = None
    for batch in batches:
        if before is not None:
            yield before
        before = batch
    yield before


def _two_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    waiting = deque(itertools.islice(batches, 2))
    while waiting:
        yield waiting.popleft()
        waiting.extend(itertools.islice(batches, 1))


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("micro", [None, 1, 2])
@pytest.mark.parametrize("around", [list, deque, _one_ahead, _one_behind, _two_ahead])
def test_batches_that_are_drawn_ahead(tmp_path: Path, around: Around, micro: int | None, *, optimizer: bool) -> None:
    """The first step is refused, nothing is saved, the ledger proves nothing, and a right script begins anew."""
    wrong = Run(tmp_path, micro=micro, optimizer=optimizer)
    with pytest.raises(ReadAheadError, match=r"read ahead .*drawn before the first step.*num_workers"):
        wrong.to_the_end(around)
    assert wrong.trained == []
    assert check(books(wrong.ledger)).steps == 0
    if not optimizer:
        return  # What a script without one has trained cannot be seen.
    assert wrong.saved == []
    right = Run(tmp_path, micro=micro)
    right.to_the_end()
    assert sorted(right.trained) == list(range(SAMPLES))
    found = check(books(right.ledger))
    assert (found.steps, found.problems) == (PER_EPOCH, ())


def test_batches_that_are_drawn_ahead_after_a_restart(tmp_path: Path) -> None:
    """Of a run that went well until its script was changed nothing is lost, even where one batch is left."""
    for steps in range(1, PER_EPOCH):
        run = Run(tmp_path / str(steps))
        for _ in run.loop.epochs(1, max_steps=steps):
            for batch in run.loop.batches(run.loader):
                with run.loop.step():
                    run.train(batch)
        with pytest.raises(ReadAheadError):
            Run(tmp_path / str(steps)).to_the_end(_one_ahead)
        again = Run(tmp_path / str(steps))
        again.to_the_end()
        assert sorted(run.trained + again.trained) == list(range(SAMPLES))


def test_a_batch_that_is_drawn_inside_of_a_step(tmp_path: Path) -> None:
    """It is refused, as the one before has not been trained, or both are in one step."""
    run = Run(tmp_path)
    with pytest.raises(ReadAheadError, match="one drawn inside of a step"):
        for _ in run.loop.epochs(1):
            batches = run.loop.batches(run.loader)
            batch = next(batches)
            while batch is not None:
                with run.loop.step():
                    following = next(batches, None)
                    run.train(batch)
                batch = following
    assert (run.loop.steps_done, run.saved) == (0, [])


def _passed_on(batches: Iterator[Any]) -> Iterator[Any]:
    """What tqdm does."""
    yield from batches


def _by_hand(batches: Iterator[Any]) -> Iterator[Any]:
    while (batch := next(batches, None)) is not None:
        yield batch


def _looked_at(batches: Iterator[Any]) -> Iterator[Any]:
    return itertools.chain([next(batches)], batches)


@pytest.mark.parametrize(
    "around",
    [
        iter,
        _passed_on,
        _by_hand,
        _looked_at,
        lambda batches: (batch for _, batch in enumerate(batches)),
        lambda batches: (batch for _, batch in zip(itertools.count(), batches, strict=False)),
        lambda batches: filter(None, batches),
    ],
    ids=["iter", "a generator", "next", "a look at the first", "enumerate", "zip", "filter"],
)
@pytest.mark.parametrize("micro", [None, 2])
def test_iterators_that_draw_one_at_a_time(tmp_path: Path, around: Around, micro: int | None) -> None:
    """They are fine: each step is saved, and each sample trained once."""
    run = Run(tmp_path, micro=micro)
    run.to_the_end(around, epochs=2)
    assert sorted(run.trained) == sorted([*range(SAMPLES)] * 2)
    assert run.saved[:PER_EPOCH] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("number", "inside", "newcomer", "fine"),
    [
        (0, False, False, False),
        (0, False, True, True),
        (0, True, False, True),
        (2, False, False, True),
        (2, True, False, True),
    ],
)
def test_a_batch_that_is_skipped(tmp_path: Path, number: int, *, inside: bool, newcomer: bool, fine: bool) -> None:
    """It counts; as the first one of a run, before its block, it cannot be told from one that is read ahead."""
    run = Run(tmp_path)

    def train() -> None:
        for _ in run.loop.epochs(1):
            run.loop._world.seat_changes += newcomer
            for each, batch in enumerate(run.loop.batches(run.loader)):
                if each == number and not inside:
                    continue
                with run.loop.step():
                    if each == number:
                        continue
                    run.train(batch)

    if fine:
        train()
        assert (run.loop.steps_done, len(run.trained)) == (PER_EPOCH, SAMPLES - SAMPLES // PER_EPOCH)
        return
    with pytest.raises(ReadAheadError, match=r"skipped inside of `with loop.step\(\):`"):
        train()


@pytest.mark.parametrize(
    ("steps_at", "saved"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 8]),
        ([1, 2, 5], [2, 3, 4, 5, 6, 7, 8, 8]),
        ([3, 7], [4, 5, 6, 7, 8, 8]),
        ([], [4, 5, 6, 7, 8, 8]),
    ],
)
def test_a_script_without_blocks(tmp_path: Path, steps_at: list[int], saved: list[int]) -> None:
    """It may pass batches without an optimizer's step: all count, and saves begin with that, or the epoch's end."""
    run = Run(tmp_path)
    seen = []
    for _ in run.loop.epochs(2):
        for _, x in run.loop.batches(run.loader):
            seen.append(run.loop.steps_done)
            run.model(x).mean().backward()
            if run.loop.steps_done in steps_at:
                run.optimizer.step()
    assert (seen, run.saved) == (list(range(2 * PER_EPOCH)), saved)


def test_a_script_that_gives_no_optimizer(tmp_path: Path) -> None:
    """Without blocks nothing shows when it trains, so each batch counts and is saved when the next one is drawn."""
    run = Run(tmp_path, optimizer=False)
    for _ in run.loop.epochs(1):
        for batch in run.loop.batches(run.loader):
            run.train(batch)
    assert run.saved == [1, 2, 3, 4, 4]


def test_an_epoch_that_only_looks_before_those_with_blocks(tmp_path: Path) -> None:
    """The body of an epoch that has ended without a step has read nothing ahead."""
    run = Run(tmp_path)
    for epoch in run.loop.epochs(2):
        for batch in run.loop.batches(run.loader):
            if epoch:
                with run.loop.step():
                    run.train(batch)
    assert (run.loop.steps_done, len(run.trained)) == (2 * PER_EPOCH, SAMPLES)
