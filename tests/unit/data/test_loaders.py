"""Loaders that draw ahead: what counts is what was trained, in whichever way the batches come and the loop is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrt import ConfigError, ElasticBatchSampler, Loop

SAMPLES, BATCH, EPOCHS = 22, 4, 3
PER_EPOCH = 6


def _stateful(*args: Any, **options: Any) -> Any:
    pytest.importorskip("torchdata", reason="torchdata is not installed: its loader can't be tried")
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*args, **options)


LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (DataLoader, {}),
    "workers": (DataLoader, {"num_workers": 2, "prefetch_factor": 4}),
    "persistent": (DataLoader, {"num_workers": 2, "persistent_workers": True}),
    "stateful": (_stateful, {}),
    "stateful workers": (_stateful, {"num_workers": 2}),
    "stateful persistent": (_stateful, {"num_workers": 1, "persistent_workers": True}),
}


FAST = ("plain", "persistent", "stateful workers")
"""The others are like these: each starts processes, often."""


class Run:
    """One start of a script."""

    def __init__(self, directory: Path, kind: str = "plain", **more: Any) -> None:
        torch.manual_seed(0)
        make, options = LOADERS[kind]
        self.data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 3, dtype=torch.float64))
        self.sampler = ElasticBatchSampler(self.data, BATCH, seed=2)
        self.loader = make(self.data, batch_sampler=self.sampler, **options)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loop = Loop(
            directory, sampler=self.sampler, model=self.model, optimizer=self.optimizer, every="1 h", **more
        )
        self.trained: list[int] = []

    def train(self, batch: list[torch.Tensor]) -> None:
        """One step, which counts."""
        ids, x = batch
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trained += ids.tolist()

    def weights(self) -> list[float]:
        """All parameters."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def _straight(run: Run, stop: int) -> None:
    for _ in run.loop.epochs(EPOCHS, max_steps=stop):
        for batch in run.loop.batches(run.loader):
            run.train(batch)


def _break_untrained(run: Run, stop: int) -> None:
    """`return` with a batch in hand that was drawn and not trained."""
    for _ in run.loop.epochs(EPOCHS):
        for batch in run.loop.batches(run.loader):
            if run.loop.steps_done == stop:
                return
            run.train(batch)


def _again_and_again(run: Run, stop: int) -> None:
    """Within each epoch the loader is begun anew after every second batch."""
    for _ in run.loop.epochs(EPOCHS, max_steps=stop):
        left = True
        while left:
            left = False
            for number, batch in enumerate(run.loop.batches(run.loader)):
                run.train(batch)
                if number == 1:
                    left = True
                    break


def _after_an_exception(run: Run, stop: int) -> None:
    """A batch fails before it is trained, and is drawn again."""
    for _ in run.loop.epochs(EPOCHS, max_steps=stop):
        failed = False
        while True:
            try:
                for batch in run.loop.batches(run.loader):
                    if not failed and run.loop.steps_done % 4 == 3:
                        failed = True
                        raise KeyError  # noqa: TRY301  In the body of the loop is where users' errors are.
                    run.train(batch)
            except KeyError:
                continue
            break


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in LOADERS]
)
@pytest.mark.parametrize("way", [_straight, _break_untrained, _again_and_again, _after_an_exception])
def test_what_was_trained_counts_not_what_was_drawn(tmp_path: Path, kind: str, way: Callable[[Run, int], None]) -> None:
    """D11, S5: left after 8 of 18 steps and started again, each sample is trained once an epoch, in one order."""
    straight = Run(tmp_path / "straight")
    _straight(straight, EPOCHS * PER_EPOCH)
    first, second = Run(tmp_path / "a", kind), Run(tmp_path / "a", kind)
    way(first, 8)
    assert (first.loop.steps_done, len(first.trained)) == (8, SAMPLES + 2 * BATCH)
    way(second, EPOCHS * PER_EPOCH)
    assert first.trained + second.trained == straight.trained
    assert second.weights() == straight.weights()


def test_a_loaders_own_state_is_refused(tmp_path: Path) -> None:
    """D11: it would be rank 0's, as of what was drawn; the message says what to do instead."""
    with pytest.raises(ConfigError, match="sampler="):
        Run(tmp_path, "stateful", loader=_stateful([1, 2]))


def test_several_samplers(tmp_path: Path) -> None:
    """A second training set and a test set keep positions of their own, beside the Loop's, over a restart."""

    def start(steps: int) -> tuple[Run, list[int], list[int]]:
        other = ElasticBatchSampler(range(10), 3, seed=5)
        seen: list[int] = []
        run = Run(tmp_path, other=other)
        tested: list[int] = []
        for epoch in run.loop.epochs(EPOCHS, max_steps=steps):
            for batch in run.loop.batches(run.loader):
                if not other.remaining:
                    other.set_epoch(other.epoch + 1)
                seen += next(iter(other))
                other.advance()
                run.train(batch)
            with run.loop.pause("evaluate"):
                test = ElasticBatchSampler(range(7), 2, shuffle=False)
                test.set_epoch(epoch)
                tested += [i for indices in DataLoader(range(7), batch_sampler=test) for i in indices.tolist()]
        return run, seen, tested

    first, seen, _ = start(8)
    second, more, tested = start(EPOCHS * PER_EPOCH)
    assert sorted(first.trained + second.trained) == sorted([*range(SAMPLES)] * EPOCHS)
    rounds = seen + more
    assert [sorted(rounds[i : i + 10]) for i in range(0, 40, 10)] == [list(range(10))] * 4
    assert tested == [*range(7)] * 2


def test_early_stopping_by_vars(tmp_path: Path) -> None:
    """What the script remembers in `vars` says after a restart that it is over: no epoch is trained again."""

    def start() -> tuple[Run, list[int]]:
        run = Run(tmp_path)
        bodies = []
        for epoch in run.loop.epochs(10):
            if run.loop.vars.get("worse", 0) >= 2:
                break
            bodies.append(epoch)
            for batch in run.loop.batches(run.loader):
                run.train(batch)
            losses = run.loop.vars.setdefault("losses", [])
            losses.append(epoch if epoch > 1 else -epoch)  # It gets better once, and worse from then on.
            run.loop.vars["worse"] = sum(loss > min(losses) for loss in losses[losses.index(min(losses)) :])
        return run, bodies

    first, bodies = start()
    assert bodies == [0, 1, 2, 3]
    second, again = start()
    assert (again, second.trained) == ([], [])
    assert second.loop.vars == first.loop.vars
    assert second.weights() == first.weights()


def test_evaluation_in_pause_leaves_no_trace(tmp_path: Path) -> None:
    """Forwards with and without gradients inside `pause`, between batches and in the middle of one, change nothing."""

    def start(name: str, *, look: bool) -> Run:
        run = Run(tmp_path / name)
        for _ in run.loop.epochs(EPOCHS):
            for batch in run.loop.batches(run.loader):
                if look and run.loop.steps_done % 3 == 0:
                    with run.loop.pause("look"), torch.no_grad():
                        run.model(batch[1] * 2)
                run.train(batch)
            if look:
                with run.loop.pause("evaluate"):
                    loss = run.model(run.data.tensors[1]).sum()
                    torch.autograd.grad(loss, list(run.model.parameters()))
        return run

    assert start("a", look=True).weights() == start("b", look=False).weights()


def test_set_epoch_by_the_script_is_harmless(tmp_path: Path) -> None:
    """A habit from DistributedSampler: `sampler.set_epoch(epoch)` at the top of each epoch keeps its position."""

    def start(stop: int) -> Run:
        run = Run(tmp_path)
        for epoch in run.loop.epochs(EPOCHS, max_steps=stop):
            run.sampler.set_epoch(epoch)
            for batch in run.loop.batches(run.loader):
                run.train(batch)
        return run

    trained = start(8).trained + start(EPOCHS * PER_EPOCH).trained
    assert [sorted(trained[i * SAMPLES : (i + 1) * SAMPLES]) for i in range(EPOCHS)] == [list(range(SAMPLES))] * EPOCHS
