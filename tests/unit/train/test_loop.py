"""The loop in one process: what counts as a step, where a restart goes on, what is saved, what is refused."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import random
import time
import weakref
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elasticrt import CheckpointError, ConfigError, ElasticBatchSampler, ElasticDistributedSampler, Loop
from elasticrt.data import sample_order
from elasticrt.data.position import SaveInterval
from elasticrt.distributed import agent_client
from elasticrt.ipc.env import Commit
from elasticrt.ipc.messages import Save, Step
from elasticrt.ipc.status_page import FIRST_BATCH, STACKS_SIGNAL, StatusPage
from elasticrt.train import batches
from elasticrt.train.weighting import Weighting
from tests.fake_worker import Agent, under

SAMPLES, BATCH = 20, 6
PER_EPOCH = 4


class Run:
    """One start of a script: everything made anew, then restored by the loop."""

    def __init__(self, directory: Path, *, micro: int | None = None, every: str = "1000 steps", **options) -> None:
        torch.manual_seed(0)
        self.data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 3, dtype=torch.float64))
        self.sampler = ElasticBatchSampler(self.data, BATCH, micro_batch_size=micro, seed=2)
        self.loader = DataLoader(self.data, batch_sampler=self.sampler)
        self.model = nn.Linear(3, 1).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loop = Loop(
            directory, sampler=self.sampler, model=self.model, optimizer=self.optimizer, every=every, **options
        )
        self.ids: list[list[int]] = []

    def train(self, batch) -> None:
        """Forward, backward, and the step when the global batch is complete."""
        ids, x = batch
        self.ids.append(ids.tolist())
        self.model(x).square().mean().backward()
        if self.loop.complete:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def to_the_end(self, epochs: int, max_steps: int | None = None) -> list[int]:
        """All that is left; the epochs entered."""
        entered = []
        for epoch in self.loop.epochs(epochs, max_steps=max_steps):
            entered.append(epoch)
            for batch in self.loop.batches(self.loader):
                self.train(batch)
        return entered

    def weights(self) -> list[float]:
        """All parameters."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def test_trains_every_sample_once_per_epoch(tmp_path):
    """The plain case: all epochs, all samples, all steps, one checkpoint at the end."""
    run = Run(tmp_path)
    assert run.to_the_end(3) == [0, 1, 2]
    assert (run.loop.steps_done, run.loop.epoch) == (3 * PER_EPOCH, 3)
    for epoch in range(3):
        ids = itertools.chain(*run.ids[epoch * PER_EPOCH : (epoch + 1) * PER_EPOCH])
        assert sorted(ids) == list(range(SAMPLES))
    assert Run(tmp_path).to_the_end(3) == []
    assert Run(tmp_path).to_the_end(4) == [3]


@pytest.mark.parametrize("micro", [1, 4, 6, 100])
def test_micro_batches_equal_whole_ones(tmp_path, micro):
    """The gradient is that of the mean over the global batch, however many forwards it takes."""
    whole, cut = Run(tmp_path / "a"), Run(tmp_path / "b", micro=micro)
    whole.to_the_end(2)
    cut.to_the_end(2)
    assert cut.weights() == pytest.approx(whole.weights(), rel=0, abs=1e-13)
    assert cut.loop.steps_done == whole.loop.steps_done


@pytest.mark.parametrize("stop", range(2 * PER_EPOCH + 1))
def test_restart_after_any_step(tmp_path, stop):
    """Stopping after step k and starting again gives the same samples and the same weights, bit for bit (S5, S6)."""
    straight, first, second = Run(tmp_path / "a"), Run(tmp_path / "b"), Run(tmp_path / "b")
    straight.to_the_end(2)
    first.to_the_end(2, max_steps=stop)
    assert first.loop.steps_done == stop
    second.to_the_end(2)
    assert first.ids + second.ids == straight.ids
    assert second.weights() == straight.weights()


@pytest.mark.parametrize("crash", range(2, 2 * PER_EPOCH))
def test_restart_after_a_crash(tmp_path, crash):
    """After a crash in step k training goes on after the last commit; committed steps count once (W01, D09, S5)."""
    straight, first, second = Run(tmp_path / "a"), Run(tmp_path / "b", every="2 steps"), Run(tmp_path / "b")
    straight.to_the_end(2)
    with pytest.raises(ZeroDivisionError):
        for _ in first.loop.epochs(2):
            for batch in first.loop.batches(first.loader):
                first.train(batch)
                first.loop._saving.checkpointer.wait()
                if len(first.ids) == crash:
                    raise ZeroDivisionError
    first.loop._saving.checkpointer.wait()
    second.to_the_end(2)
    kept = first.ids[: (crash - 1) // 2 * 2]
    assert kept + second.ids == straight.ids
    assert second.weights() == straight.weights()


def _no_step(run, batch):
    del run, batch
    return "break"


def _with_step(run, batch):
    run.train(batch)
    return "break"


def _skip(run, batch):
    del run, batch


@pytest.mark.parametrize(("act", "steps", "again"), [(_no_step, 2, 2), (_with_step, 3, 1), (_skip, 4, 0)])
def test_break_and_continue(tmp_path, act, steps, again):
    """After break a step counts if the optimizer stepped; continue is harmless."""
    run = Run(tmp_path)
    for _ in run.loop.epochs(1):
        for number, batch in enumerate(run.loop.batches(run.loader)):
            if number == 2:
                if act(run, batch) == "break":
                    break
                continue
            run.train(batch)
        assert (run.loop.steps_done, run.sampler.remaining) == (steps, again)
        rest = [ids.tolist() for ids, _ in run.loop.batches(run.loader)]
        assert len(rest) == again


@pytest.mark.parametrize("act", [_no_step, _with_step])
@pytest.mark.parametrize("wrap", [lambda it: it, enumerate, lambda it: zip(itertools.count(), it, strict=False)])
def test_leaving_both_loops_by_return_saves(tmp_path, act, wrap):
    """`return` out of both loops counts like break, and the final checkpoint is written."""

    def script(run):
        for _ in run.loop.epochs(3):
            for item in wrap(run.loop.batches(run.loader)):
                batch = item if wrap(iter([0])) is not None and isinstance(item, list) else item[1]
                if len(run.ids) == 2:
                    act(run, batch)
                    return
                run.train(batch)

    run = Run(tmp_path)
    script(run)
    expected = 2 + (act is _with_step)
    assert run.loop.steps_done == expected
    again = Run(tmp_path)
    again.to_the_end(1)
    assert len(again.ids) == PER_EPOCH - expected


@pytest.mark.parametrize("stepped", [False, True])
def test_an_exception_never_counts_and_never_saves(tmp_path, stepped):
    """The step in which an exception flew is not counted, and there is no final checkpoint (W01)."""
    run = Run(tmp_path, every="1 steps")
    with pytest.raises(KeyError):
        for _ in run.loop.epochs(1):
            for batch in run.loop.batches(run.loader):
                if len(run.ids) < 2 or stepped:
                    run.train(batch)
                run.loop._saving.checkpointer.wait()
                if run.loop.steps_done == 2:
                    raise KeyError
    assert run.loop.steps_done == 2
    again = Run(tmp_path)
    again.to_the_end(1)
    assert len(again.ids) == PER_EPOCH - 2


def test_going_on_after_an_exception(tmp_path):
    """Caught inside the epoch: fine while the optimizer had not stepped, refused when the model is ahead."""
    run = Run(tmp_path / "a")
    for _ in run.loop.epochs(1):
        with pytest.raises(KeyError):
            for _batch in run.loop.batches(run.loader):
                raise KeyError
        assert run.loop.steps_done == 0
        for batch in run.loop.batches(run.loader):
            run.train(batch)
    assert run.loop.steps_done == PER_EPOCH
    run = Run(tmp_path / "b")
    with pytest.raises(ConfigError, match="left by an exception"):
        for _ in run.loop.epochs(2):
            with pytest.raises(KeyError):
                for batch in run.loop.batches(run.loader):
                    run.train(batch)
                    raise KeyError
    assert run.loop.steps_done == 0


def test_stepping_inside_an_unfinished_global_batch(tmp_path):
    """The optimizer may step only when the global batch is complete."""
    run = Run(tmp_path, micro=2)
    with pytest.raises(RuntimeError, match="unfinished global batch"):
        for _ in run.loop.epochs(1):
            for _, x in run.loop.batches(run.loader):
                run.model(x).mean().backward()
                run.optimizer.step()
    run.optimizer.step()


def test_a_drained_epoch_is_entered_again(tmp_path):
    """A crash after the last batch and before the end of the epoch's body: the body runs again, with no batch."""
    run = Run(tmp_path, every="1 steps")
    with pytest.raises(ZeroDivisionError):
        for _ in run.loop.epochs(2):
            for batch in run.loop.batches(run.loader):
                run.train(batch)
                run.loop._saving.checkpointer.wait()
            run.loop._saving.checkpointer.wait()
            raise ZeroDivisionError
    again = Run(tmp_path)
    bodies = []
    for epoch in again.loop.epochs(2):
        bodies.append((epoch, len(list(map(again.train, again.loop.batches(again.loader))))))
    assert bodies == [(0, 0), (1, PER_EPOCH)]


@pytest.mark.parametrize(
    ("every", "saves"),
    [
        # The last step is saved twice: when it ends, and when the body of its epoch has.
        ("1 step", [1, 2, 3, 4, 5, 6, 7, 8, 8]),
        ("3 steps", [3, 6, 8]),
        ("1 epoch", [4, 8]),
        ("2 epochs", [8]),
        ("1000 steps", [8]),
        ("1 h", [8]),
        ("0.000001s", [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]),
    ],
)
def test_how_often_it_saves(tmp_path, every, saves, monkeypatch):
    """By steps, epochs or time; the end is always saved, and never twice."""
    run = Run(tmp_path, every=every)
    take = run.loop._saving.take
    steps = []

    def counting(**wanted):
        steps.append(run.loop.steps_done)
        take(**wanted)
        run.loop._saving.checkpointer.wait()

    monkeypatch.setattr(run.loop._saving, "take", counting)
    run.to_the_end(2)
    assert steps == saves


@pytest.mark.parametrize(
    ("text", "seconds"), [("500 ms", 0.5), ("30s", 30), ("2 mins", 120), ("1 m", 60), ("3 hours", 10800)]
)
def test_seconds_between_saves(text, seconds):
    """Units of time as the command line knows them."""
    assert SaveInterval.parse(text) == SaveInterval(seconds, "seconds")


def test_nothing_is_saved_between_two_parts_of_a_step(tmp_path):
    """With micro-batches, what a step has done to the user's variables and to the random numbers is saved with it."""
    run, parts, drawn = Run(tmp_path, micro=2, every="1 h"), 3, []
    with pytest.raises(ZeroDivisionError):
        for _ in run.loop.epochs(1):
            for batch in run.loop.batches(run.loader):
                drawn.append(torch.rand(1).item())
                run.loop.vars["parts"] = len(drawn)
                run.train(batch)
                if len(drawn) == 2 * parts + 1:
                    run.loop._saving._saved_at -= 3600  # The hour is over after the first part of the third step.
                if len(drawn) == 3 * parts + 1:
                    run.loop._saving.checkpointer.wait()
                    raise ZeroDivisionError
    again = Run(tmp_path, micro=2)
    for _ in again.loop.epochs(1):
        assert again.loop.steps_done == 3
        assert again.loop.vars["parts"] == 3 * parts
        next(again.loop.batches(again.loader))
        assert torch.rand(1).item() == drawn[3 * parts]
        break


def test_with_a_seed_each_step_has_numbers_of_its_own(tmp_path):
    """The parts of a step draw different numbers; a restart draws the same as the run that was not disturbed."""

    def drawn(run: Run, max_steps: int | None = None) -> list[float]:
        numbers = []
        for _ in run.loop.epochs(2, max_steps=max_steps):
            torch.rand(1 + run.loop.steps_done)  # Once more where the epoch is entered again.
            for batch in run.loop.batches(run.loader):
                run.train(batch)
                numbers.append(torch.rand(1).item())
        return numbers

    straight = drawn(Run(tmp_path / "a", micro=2, seed=7))
    assert len(set(straight)) == len(straight)
    first = drawn(Run(tmp_path / "b", micro=2, seed=7), max_steps=3)
    second = drawn(Run(tmp_path / "b", micro=2, seed=7))
    assert first + second == straight
    assert not set(drawn(Run(tmp_path / "c", micro=2, seed=8))) & set(straight)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_a_seed_a_loader_that_shuffles_goes_on_in_its_order(tmp_path, workers):
    """Without one of our samplers, too, a restart in the middle of an epoch trains what is left of it, and no other."""

    def samples(name: str, max_steps: int | None = None) -> list[list[int]]:
        torch.manual_seed(0)
        loader = DataLoader(TensorDataset(torch.arange(SAMPLES)), BATCH, shuffle=True, num_workers=workers)
        loop = Loop(tmp_path / name, seed=3)
        epochs = loop.epochs(2, max_steps=max_steps)
        return [ids.tolist() for _ in epochs for (ids,) in loop.batches(loader)]

    straight = samples("a")
    assert straight[:PER_EPOCH] != straight[PER_EPOCH:]
    assert samples("b", PER_EPOCH + 2) + samples("b") == straight


def test_a_seed_is_a_whole_number(tmp_path):
    """Anything else is refused at once."""
    for seed in (True, 1.0, "1"):
        with pytest.raises(TypeError, match=r"Loop\(seed=\)"):
            Loop(tmp_path, seed=seed)


@pytest.mark.parametrize(("value", "got"), [(object(), "builtins.object"), (defaultdict(int), "a defaultdict")])
def test_a_variable_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path, value, got):
    """Not some steps later, when the first checkpoint is due."""
    run = Run(tmp_path)
    run.loop.vars["best"] = {"so far": value}
    with pytest.raises(ConfigError, match=rf"can't be saved \(loop.vars\['best'\]\['so far'\]\): got {got}"):
        run.to_the_end(1)
    assert not run.ids


def test_vars_scheduler_and_random_numbers_come_back(tmp_path):
    """The user's variables in place, the scheduler, and all generators exactly as they were (S6)."""

    def start() -> tuple[Run, torch.optim.lr_scheduler.LRScheduler]:
        run = Run(tmp_path / "x")
        schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=100)
        run.loop = Loop(
            tmp_path / "ckpt", sampler=run.sampler, model=run.model, optimizer=run.optimizer, scheduler=schedule
        )
        return run, schedule

    run, schedule = start()
    for _ in run.loop.epochs(1):
        for batch in run.loop.batches(run.loader):
            run.train(batch)
            schedule.step()
        run.loop.vars["best"] = [0.5, {"epoch": 0}]
    expected = (torch.rand(3).tolist(), random.random(), schedule.get_last_lr())
    again, schedule = start()
    kept = again.loop.vars
    torch.manual_seed(99)
    random.seed(99)
    for _ in again.loop.epochs(1):
        raise AssertionError("nothing is left")
    assert (torch.rand(3).tolist(), random.random(), schedule.get_last_lr()) == expected
    assert kept == {"best": [0.5, {"epoch": 0}]}


def test_compiled_and_parallel_modules_are_saved_bare(tmp_path):
    """A checkpoint of a wrapped module fits the bare one, and the other way round (F14)."""
    torch.manual_seed(0)
    bare = nn.Linear(2, 2)
    loop = Loop(tmp_path, model=nn.DataParallel(torch.compile(bare)))
    for _ in loop.steps(1):
        with loop.step():
            pass
    other = nn.Linear(2, 2)
    for _ in Loop(tmp_path, model=other).epochs(1):
        pass
    assert torch.equal(other.weight, bare.weight)


def test_without_a_sampler_batches_that_were_done_are_skipped(tmp_path):
    """A loader of the user's own: a restart in the middle of an epoch leaves out as many batches as were done."""

    def start(max_steps: int | None) -> list[int]:
        loop = Loop(tmp_path)
        loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=2)
        seen = []
        for _ in loop.epochs(2, max_steps=max_steps):
            for (x,) in loop.batches(loader):
                seen += x.tolist()
        return seen

    assert start(3) + start(7) + start(None) == [*range(10), *range(10)]


def test_distributed_sampler_in_a_loop(tmp_path):
    """With ElasticDistributedSampler the loader's batch size says how far a step goes."""

    def start(max_steps: int | None) -> list[int]:
        data = TensorDataset(torch.arange(11))
        sampler = ElasticDistributedSampler(data, seed=4)
        loop = Loop(tmp_path, sampler=sampler)
        loader = DataLoader(data, batch_size=3, sampler=sampler)
        return [i for _ in loop.epochs(1, max_steps=max_steps) for (x,) in loop.batches(loader) for i in x.tolist()]

    assert sorted(start(2) + start(3) + start(None)) == list(range(11))


def test_objects_that_change_their_shape(tmp_path, caplog):
    """No process that makes them as before could load such a state: it is said once, when it is saved."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = Loop(tmp_path, every="1 steps", model=model, optimizer=optimizer)
    for step in loop.steps(4):
        with loop.step():
            if step == 1:
                prune.l1_unstructured(model, "weight", amount=0.5)
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert caplog.text.count("'model' and 'optimizer' got another shape in the training") == 1


class Stream(IterableDataset):
    """Numbers without a length."""

    def __iter__(self):
        return iter(range(6))


def test_iterable_dataset(tmp_path):
    """At the same world size it is continued by skipping, at another one refused in words."""
    loop = Loop(tmp_path)
    for _ in loop.epochs(1, max_steps=2):
        assert [int(x) for x in loop.batches(DataLoader(Stream(), batch_size=None))] == [0, 1]
    loop = Loop(tmp_path)
    for _ in loop.epochs(1, max_steps=3):
        assert [int(x) for x in loop.batches(DataLoader(Stream(), batch_size=None))] == [2]
    loop = Loop(tmp_path)
    with pytest.raises(CheckpointError, match="another world size"):
        for _ in loop.epochs(1):
            loop._world.size = 4
            loop.batches(DataLoader(Stream(), batch_size=None))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda path: Loop(path, model=nn.Linear(4, 2)), "does not fit 'model'"),
        (lambda path: Loop(path, model=nn.Sequential(nn.Linear(2, 2))), "does not fit 'model'"),
        (lambda path: Loop(path, net=nn.Linear(2, 2)), r"\['net'\]"),
        (Loop, r"\['model'\]"),
        (lambda path: Loop(path, model=nn.Linear(2, 2), sampler=ElasticBatchSampler([1], 1)), "sampler changed"),
    ],
)
def test_a_checkpoint_of_other_code_is_refused(tmp_path, make, word):
    """Missing or unexpected names, keys and shapes are refused with both (FAULTS section 4, F14)."""
    for _ in Loop(tmp_path, model=nn.Linear(2, 2)).epochs(1):
        pass
    with pytest.raises(CheckpointError, match=word):
        next(make(tmp_path).epochs(2))


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path):
    """Torch loads it, and fails at the next step, which says nothing of a checkpoint."""
    weight = nn.Parameter(torch.zeros(1))
    for _ in Loop(tmp_path, optimizer=torch.optim.AdamW([weight])).epochs(1):
        pass
    said = r"does not fit 'optimizer'.* another optimizer's state, without dampening"
    with pytest.raises(CheckpointError, match=said):
        next(Loop(tmp_path, optimizer=torch.optim.SGD([weight])).epochs(2))


OPTIMIZERS = sorted(name for name in vars(torch.optim) if name[0].isupper() and name != "Optimizer" and "_" not in name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_of_torch_goes_on(tmp_path, kind):
    """Its state is taken, and the next step gives the weights of a training that was not interrupted."""
    sparse = kind == "SparseAdam"

    def trained(directory, steps):
        torch.manual_seed(0)
        model = nn.Embedding(3, 3, sparse=True) if sparse else nn.Linear(3, 3, bias=False)
        optimizer = getattr(torch.optim, kind)(model.parameters())
        loop = Loop(directory, model=model, optimizer=optimizer)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.tensor([1]) if sparse else torch.ones(1, 3)).square().sum()
            loss.backward()
            return loss

        for _ in loop.steps(steps):
            with loop.step():
                optimizer.step(closure)
        assert loop.steps_done == steps
        return model.weight

    trained(tmp_path / "interrupted", 2)
    torch.testing.assert_close(trained(tmp_path / "interrupted", 3), trained(tmp_path / "whole", 3), rtol=0, atol=0)


class HasNoLoad:
    """Only half of what is needed."""

    def state_dict(self):
        """Nothing."""
        return {}


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda path: Loop(path, thing=3), TypeError),
        (lambda path: Loop(path, thing=HasNoLoad()), TypeError),
        (lambda path: Loop(path, elasticrt=nn.Linear(1, 1)), ConfigError),
        (lambda path: Loop(path, sampler=[1, 2]), TypeError),
        (lambda path: Loop(path, resume="yes"), ConfigError),
        (lambda path: Loop(path, keep=0), ValueError),
        (lambda path: Loop(7), TypeError),
        (lambda path: Loop(None), TypeError),
        (lambda path: Loop(""), ValueError),
        (lambda path: Loop("a\0b"), ValueError),
        (lambda path: Loop(path).on_change(None), TypeError),
        (lambda path: Loop(path, every=30), TypeError),
        (lambda path: Loop(path, every="soon"), ConfigError),
        (lambda path: Loop(path, every="0 steps"), ConfigError),
        (lambda path: Loop(path, every="1.5 epochs"), ConfigError),
        (lambda path: Loop(path, every="-3s"), ConfigError),
        (lambda path: Loop(path).epochs(-1), ValueError),
        (lambda path: Loop(path).epochs(1.0), TypeError),
        (lambda path: Loop(path).epochs(1, max_steps=-1), ValueError),
        (lambda path: Loop(path).batches([]), ConfigError),
        (lambda path: Loop(path).step(), ConfigError),
    ],
)
def test_wrong_use(tmp_path, act, error):
    """Wrong types, sizes, names and order of calls are refused at once (FAULTS section 4, worker API)."""
    with pytest.raises(error):
        act(tmp_path)


def test_used_twice(tmp_path):
    """A Loop has one life, and one at a time runs in a directory."""
    run = Run(tmp_path / "a")
    run.to_the_end(1)
    with pytest.raises(ConfigError, match="used twice"):
        run.loop.epochs(1)
    with pytest.raises(ConfigError, match="another Loop"):
        for _ in Loop(tmp_path / "b").epochs(1):
            next(Loop(tmp_path / "b").epochs(1))


def steps_of(directory: Path, total: int, batches: int = 3) -> list[int]:
    """The steps that a Loop of its own trains, as it counts them."""
    loop, steps = Loop(directory, every="1 steps"), []
    for _ in loop.epochs(total):
        for _ in loop.batches(range(batches)):
            steps.append(loop.steps_done)
    return steps


def test_several_loops_in_one_process(tmp_path, monkeypatch):
    """Training before fine-tuning, folds, a search inside another loop: each goes on in its own directory.

    The run's steps are counted over all of them, in the same way after a restart.
    """

    def script() -> list[list[int]]:
        trained = [steps_of(tmp_path / "before", 1), steps_of(tmp_path / "fine", 2)]
        outer = Loop(tmp_path / "search", every="1 steps")
        for _ in outer.epochs(1):
            for trial in outer.batches(range(2)):
                trained.append(steps_of(tmp_path / f"trial-{trial}", 1))
        return trained

    agent = Agent()
    page_fd = StatusPage.create()
    page = StatusPage(page_fd)
    with under(agent, monkeypatch, page_fd=page_fd):
        assert script() == [[0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2]]
        newest = agent.of(Save)[-1].commit
        total = page.step
    assert total == newest["total"] == 3 + 6 + 3 + 3 + 2
    again = Agent(head=newest["nonce"])
    again.heads = agent.heads
    with under(again, monkeypatch, resume=Commit.from_fields(newest), generation=2):
        assert script() == [[], []]
        assert again.of(Save) == []
        assert steps_of(tmp_path / "more", 1) == [0, 1, 2]
        assert again.of(Save)[-1].commit["total"] == total + 3


def test_loaders_that_do_not_fit(tmp_path):
    """A loader with another sampler, or one that draws other than one batch per share, is refused."""
    for number, loader in enumerate(
        (lambda run: DataLoader(run.data, batch_size=4), lambda run: [1, 2], lambda run: 5)
    ):
        run = Run(tmp_path / str(number))
        with pytest.raises((ConfigError, TypeError)):
            for _ in run.loop.epochs(1):
                for _batch in run.loop.batches(loader(run)):
                    pass
    run = Run(tmp_path / "z")
    other = Loop(tmp_path / "y")
    with pytest.raises(ConfigError, match="not the Loop's"):
        for _ in other.epochs(1):
            other.batches(run.loader)


def test_a_pause_in_a_pause_is_a_part_of_it(tmp_path):
    """An evaluation that pauses by itself may be called in a pause: that lasts until its own end, and counts once."""
    run = Run(tmp_path)
    page = agent_client.status_page()
    for _ in run.loop.epochs(1):
        for _ in run.loop.batches(run.loader):
            before_ns, since_ns = page.pause_ns, time.monotonic_ns()
            with run.loop.pause("look"):
                with run.loop.pause("look closely"):
                    assert page.pausing_ns >= since_ns
                assert (page.stepping, page.pausing_ns >= since_ns) == (0, True)
            assert (page.stepping, page.pausing_ns) == (1, 0)
            assert 0 < page.pause_ns - before_ns <= time.monotonic_ns() - since_ns


def test_behind_the_last_loop_the_training_is_over(tmp_path):
    """That time counts as a pause, until the script ends or begins another Loop; a Loop inside of another is none."""
    page = agent_client.status_page()
    outer, since_ns = Run(tmp_path / "outer"), time.monotonic_ns()
    for _ in outer.loop.epochs(1):
        assert (page.over, page.pausing_ns) == (0, 0)
        Run(tmp_path / "inner").to_the_end(1)
        assert (page.over, page.pausing_ns) == (0, 0)
        for _batch in outer.loop.batches(outer.loader):
            pass
    assert page.over
    assert page.pausing_ns >= since_ns
    before_ns, behind_ns = page.pause_ns, time.monotonic_ns() - page.pausing_ns
    for _ in Run(tmp_path / "next").loop.epochs(1):
        assert (page.over, page.pausing_ns) == (0, 0)
        assert page.pause_ns - before_ns >= behind_ns


def test_what_on_change_draws_shifts_nothing(tmp_path):
    """It is called once more in each generation, which an undisturbed run has not."""
    drawn = []
    for calls in (0, 3):
        run = Run(tmp_path / str(calls))
        for _ in range(calls):
            run.loop.on_change(lambda _: torch.rand(3))
        torch.manual_seed(5)
        for _ in run.loop.epochs(1):
            drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]


def test_a_loader_with_its_own_generator_is_warned_of_once(tmp_path, caplog):
    """Nobody restores it, so an epoch that is entered in its middle would go on in another order."""
    batches._warn_of_generator.cache_clear()
    data = TensorDataset(torch.zeros(8, 1))
    for name in "ab":
        loop = Loop(tmp_path / name)
        for _ in loop.epochs(1):
            for _batch in loop.batches(DataLoader(data, 4, shuffle=True, generator=torch.Generator())):
                pass
    assert [each.getMessage()[:26] for each in caplog.records] == ["a loader with a generator "]


def test_restoring_begins_with_the_loop(tmp_path):
    """What the script has done before is no part of it."""
    page = agent_client.status_page()
    run = Run(tmp_path)
    since_ns = time.monotonic_ns()
    run.to_the_end(1)
    assert since_ns <= page.loop_at_ns < page.restored_at_ns < page.step_at_ns


def test_samples_on_the_page(tmp_path):
    """After each step they are those of the run, restarts and epochs included, however fast the steps come."""
    page = agent_client.status_page()
    for entered in (1, 2):
        run = Run(tmp_path)
        seen = []
        for _ in run.loop.epochs(entered):
            for batch in run.loop.batches(run.loader):
                seen.append(page.samples)
                run.train(batch)
        assert seen[1:] == [(entered - 1) * SAMPLES + done for done in (6, 12, 18)]
        assert page.samples == entered * SAMPLES


def test_pause_takes_the_weights_off(tmp_path):
    """A backward inside pause is nobody's share."""
    run = Run(tmp_path, micro=2)
    for _ in run.loop.epochs(1):
        for _, x in run.loop.batches(run.loader):
            run.model(x).sum().backward()
            weighted = run.model.weight.grad.clone()
            run.optimizer.zero_grad()
            with run.loop.pause("look"):
                run.model(x).sum().backward()
            assert torch.allclose(run.model.weight.grad, weighted * 3)
            break


def test_a_new_parameter_in_the_place_of_an_old_one_is_weighted():
    """A layer that is made anew gets its weights; nothing is kept of the old one, at whose address it may lie."""
    layer = nn.Linear(1, 1, bias=False)
    weighting = Weighting([layer])
    weighting.attach()
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(torch.ones(1, 1))
    weighting.renew()
    gc.collect()
    assert old() is None
    weighting.begin(sample_order.BatchSlice(0, 1, 3.0, True))
    layer(torch.ones(1, 1)).sum().backward()
    assert layer.weight.grad.item() == 3
    weighting.detach()


@pytest.mark.parametrize("factor", [3.0, 0.5])
def test_an_inner_gradient_is_not_weighted_and_the_outer_one_is_once(factor: float):
    """An inner step of meta-learning computes with what `autograd.grad` returns; only what a backward adds counts."""
    layer, x = nn.Linear(2, 1, bias=False).double(), torch.tensor([[1.0, -2.0]]).double()
    weighting, found = Weighting([layer]), []
    for weight in (1.0, factor):
        weighting.begin(sample_order.BatchSlice(0, 1, weight, True))
        (inner,) = torch.autograd.grad(layer(x).square().sum(), [layer.weight], create_graph=True)
        layer.weight.grad = None
        (x @ (layer.weight - 0.1 * inner).T).square().sum().backward()
        found.append((inner.detach(), layer.weight.grad))
    weighting.detach()
    (plain, outer), (same, weighted) = found
    assert torch.equal(same, plain)
    assert torch.allclose(weighted, factor * outer)


def test_a_parameter_that_is_unfrozen_in_a_step_is_weighted():
    """Whoever warms up a head first unfreezes the rest in the middle of an epoch, at any line of the body."""
    frozen, learns, words = nn.Parameter(torch.ones(1), requires_grad=False), nn.Linear(1, 1), torch.ones(1).long()
    learns.frozen, learns.words = frozen, nn.Parameter(words, requires_grad=False)
    weighting = Weighting([learns])
    weighting.begin(sample_order.BatchSlice(0, 1, 3.0, True))
    assert not frozen.requires_grad
    frozen.requires_grad_()
    (learns(torch.ones(1)) * frozen).sum().backward()
    assert frozen.grad.item() == pytest.approx(3 * learns(torch.ones(1)).item())
    weighting.detach()


def test_a_borrowed_sample_never_counts(tmp_path):
    """Weight 0 gives a gradient of zero even where the sample's own is infinite."""
    run = Run(tmp_path)
    run.loop._weighting.begin(sample_order.BatchSlice(0, 1, 0.0, True))
    run.model(torch.full((1, 3), torch.inf, dtype=torch.float64)).sum().backward()
    assert run.model.weight.grad.abs().sum() == 0
    run.loop._weighting.detach()


@pytest.mark.parametrize("each", [False, True], ids=["few steps", "each step"])
def test_reports_to_the_agent(tmp_path, monkeypatch, each):
    """The first step at once, the last with its own numbers; every step on the page; the commit by the agent (S10)."""
    agent = Agent()
    page_fd = StatusPage.create()
    page = StatusPage(page_fd)
    with under(agent, monkeypatch, page_fd=page_fd):
        run = Run(tmp_path)
        entered = []
        for _ in run.loop.epochs(1):
            for batch in run.loop.batches(run.loader):
                entered.append((page.entered, page.step))
                run.train(batch)
                run.loop.report(loss=torch.tensor(0.25, requires_grad=True), rate=2 + len(entered))
                run.loop._reporter._next_report_ns *= not each
        steps = agent.of(Step)
        assert len(agent.of(Save)) == 1
    assert entered == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert (page.step, page.entered) == (4, 5)
    assert (steps[0].step, steps[0].first, steps[0].resumed_from) == (1, True, 0)
    assert steps[0].scalars == {"loss": 0.25, "rate": 3.0}
    assert (steps[-1].step, steps[-1].scalars) == (4, {"loss": 0.25, "rate": 6.0})
    assert len(steps) == 5 if each else len(steps) < 4


def test_says_when_steps_are_to_be_expected(tmp_path, monkeypatch):
    """L5: from the wait for an epoch's first batch to its last, but for pauses; not before, between, or after."""
    page_fd = StatusPage.create()
    page = StatusPage(page_fd)

    class Watched:
        def __iter__(self):
            drawn = []
            for batch in run.loader:
                drawn.append(page.stepping)
                yield batch
            assert drawn == [FIRST_BATCH, *[1] * (PER_EPOCH - 1)]

    with under(Agent(), monkeypatch, page_fd=page_fd):
        run = Run(tmp_path)
        inside, paused, between = [], [], [page.stepping]
        for _ in run.loop.epochs(2):
            between.append(page.stepping)
            for batch in run.loop.batches(Watched()):
                inside.append(page.stepping)
                with run.loop.pause("look"):
                    paused.append(page.stepping)
                inside.append(page.stepping)
                run.train(batch)
                if run.loop.epoch and run.loop.steps_done % PER_EPOCH == 2:
                    break
            between.append(page.stepping)
        between.append(page.stepping)
    assert set(inside) == {1}
    assert (set(paused), set(between)) == ({0}, {0})
    assert len(inside) == 2 * len(paused) == 2 * (PER_EPOCH + 3)


def test_reads_how_long_gradients_are_waited_for(tmp_path, monkeypatch):
    """W18: what DDP's timers measure, a step about every 2 s, is added to the page's totals, once each."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        page_fd = StatusPage.create()
        page = StatusPage(page_fd)
        with under(Agent(), monkeypatch, page_fd=page_fd):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            reporter = Loop(tmp_path, model=model)._reporter
            for _ in range(8):
                model(torch.ones(2, 3)).sum().backward()
            reporter._read_waits()
            reporter._read_waits()
            assert page.waits == 1
            assert page.waited_ns > 0
            for step, second in ((10, 5), (14, 7)):  # Steps of half a second: one in four is to be measured.
                page.finished(step, second * 10**9)
                reporter._read_waits()
            for _ in range(20):
                model(torch.ones(2, 3)).sum().backward()
            assert model._get_ddp_logging_data()["iteration"] == 24, "DDP alone would measure the 100th after the 10th"
    finally:
        del model, reporter  # Torch 2.13 can hang where a reducer lets the last reference to a group go.
        torch.distributed.destroy_process_group()


def test_shows_its_stacks(tmp_path, monkeypatch):
    """W07: at the agent's signal a worker writes where it is, behind the words of its page, and goes on."""
    page_fd = StatusPage.create()
    page = StatusPage(page_fd)
    with under(Agent(), monkeypatch, page_fd=page_fd):
        run = Run(tmp_path)
        assert run.to_the_end(1) == [0]
        words = bytes(page)
        for _ in range(2):
            before = len(page.text())
            os.kill(os.getpid(), STACKS_SIGNAL)
            assert b"in test_shows_its_stacks" in page.text()[before:]
        assert bytes(page) == words
        faulthandler.unregister(STACKS_SIGNAL)


def test_scalars_that_are_none(tmp_path):
    """Only numbers are reported."""
    loop = Loop(tmp_path)
    for _ in loop.epochs(1):
        for wrong in ("high", None, torch.zeros(2)):
            with pytest.raises(TypeError):
                loop.report(loss=wrong)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside one that steps always"])
@pytest.mark.parametrize("ends_after", [3, 4])
def test_gradients_that_are_added_up_are_in_a_checkpoint(tmp_path: Path, ends_after: int, *, beside: bool) -> None:
    """An optimizer that steps at every second block loses no batch when all begin anew between the two."""

    def train(directory: Path, last: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW([model.weight], lr=0.1)
        other = torch.optim.SGD([model.bias], lr=0.1)
        data = TensorDataset(torch.randn(12, 2, generator=torch.Generator().manual_seed(1)))
        sampler = ElasticBatchSampler(data, global_batch_size=2)
        loop = Loop(directory, sampler=sampler, every="1 steps", model=model, optimizer=optimizer, other=other)
        for _ in loop.epochs(2):
            for (x,) in loop.batches(DataLoader(data, batch_sampler=sampler)):
                loop._saving._wait()
                step = loop.steps_done + 1
                if step > last:
                    raise KeyboardInterrupt
                with loop.step():
                    model(x).square().mean().backward()
                    if beside:
                        other.step()
                        other.zero_grad()
                    if step % 2 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
        return [float(each) for each in model.weight.detach()[0]]

    undisturbed = train(tmp_path / "a", 99)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", ends_after)
    newest = max(int(each.name.split("-")[1]) for each in (tmp_path / "b").glob("step-*.json"))
    assert newest == ends_after
    assert train(tmp_path / "b", 99) == undisturbed
