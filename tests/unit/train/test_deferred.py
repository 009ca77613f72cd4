"""Copies that are completed while training goes on: what they hold is the state between two steps, or they are none."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from itertools import repeat
from pathlib import Path

import pytest
import torch
from torch import nn

import elasticrt
from elasticrt.train import archive
from elasticrt.train.archive import parse
from elasticrt.train.background import Background
from elasticrt.train.deferred import PIECE_BYTES, SETTLE_S, Deferred, Later, Steady
from elasticrt.train.plain import Buffers, plain_copy
from elasticrt.train.stateful import collect

WIDTH = 160
"""Of a weight large enough to be copied later."""


@pytest.fixture(autouse=True)
def alone():
    """No locks from one test to the next."""
    yield
    while archive._locks:
        archive._locks.popitem()[1].release()


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, each with state that is copied later."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.Adam(model.parameters(), 0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    optimizer.zero_grad()
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()


def moments(state: dict) -> list[torch.Tensor]:
    """Adam's tensors in a state."""
    return [tensor for each in state["optimizer"]["state"].values() for tensor in each.values()]


def checkpoints(directory: Path) -> dict[int, dict]:
    """What is saved in a directory, by step."""
    found = [parse(path.read_bytes()) for path in directory.glob("*.pt")]
    return {state["elasticrt"]["position"]["steps"]: state for state in found}


def test_what_is_steady_is_copied_later() -> None:
    """Tensors under the mark wait, others and numbers do not; the mark itself is not part of the copy."""
    tensor, small = torch.ones(200, 200), torch.ones(3)
    deferred = Deferred()
    state = {"now": tensor + 1, "later": Steady({"a": tensor, "n": 7, "b": [small, 8]})}
    copied = plain_copy(state, "state", Buffers(), deferred)
    assert torch.equal(copied["now"], tensor + 1)
    assert copied["later"] == {"a": None, "n": 7, "b": [None, 8]}
    deferred.finish()
    assert torch.equal(copied["later"]["a"], tensor)
    assert torch.equal(copied["later"]["b"][0], small)
    assert copied["later"]["a"].data_ptr() != tensor.data_ptr()
    assert list(copied["later"]) == ["a", "n", "b"]
    assert plain_copy({"x": Steady([tensor])}, "state")["x"][0].data_ptr() != tensor.data_ptr()


def test_one_tensor_in_two_places_is_one_in_the_copy() -> None:
    """Also where it is copied at once in the one, and later in the other."""
    tensor = torch.ones(200, 200)
    deferred = Deferred()
    copied = plain_copy({"a": Steady({"x": tensor, "y": tensor}), "b": tensor}, "state", Buffers(), deferred)
    assert deferred._tasks
    deferred.finish()
    assert copied["a"]["x"] is copied["a"]["y"] is copied["b"]


def test_what_is_marked_as_later_is_made_later() -> None:
    """It is made once, by whoever comes first; nobody has to finish it before an optimizer steps; and there it is."""
    made = []

    def make() -> dict:
        made.append(threading.current_thread())
        return {"x": 1}

    deferred = Deferred()
    copied = plain_copy({"a": Later(make), "b": [Later(make)]}, "state", Buffers(), deferred)
    deferred.finish()
    assert not made
    began = time.monotonic()
    assert deferred.complete()
    assert time.monotonic() - began < SETTLE_S, "there is nothing to wait for"
    assert copied == {"a": {"x": 1}, "b": [{"x": 1}]}
    assert len(made) == 2
    assert plain_copy([Later(make)], "state") == [{"x": 1}]


def test_what_can_t_be_made_spoils_the_copy() -> None:
    """The error reaches whoever was to make it, and nobody takes the rest for a whole copy."""

    def make() -> dict:
        raise ZeroDivisionError

    deferred = Deferred()
    plain_copy({"a": Later(make)}, "state", Buffers(), deferred)
    with pytest.raises(ZeroDivisionError):
        deferred.complete()
    assert not deferred.complete()


def test_large_tensors_are_copied_in_pieces() -> None:
    """Whoever trains waits for one piece and not for a whole tensor, and all pieces together are the tensor."""
    tensor = torch.randn(3 * PIECE_BYTES // 8 + 5)
    deferred = Deferred()
    copied = plain_copy({"x": Steady([tensor])}, "state", Buffers(), deferred)
    assert deferred._do_one(), "the one that makes the pieces"
    assert len(deferred._tasks) == 2
    assert deferred.complete()
    assert torch.equal(copied["x"][0], tensor)
    assert deferred.spent_s > 0


@pytest.mark.parametrize("how", ["a view of it", "the tensor", "under no_grad"])
def test_a_tensor_that_was_changed_too_early_spoils_its_copy(how: str) -> None:
    """Its version counter tells, whichever way it was written to, and before or after the copying."""
    tensor = torch.ones(200, 200)
    deferred = Deferred()
    plain_copy({"x": Steady([tensor])}, "state", Buffers(), deferred)
    if how == "a view of it":
        tensor[3].mul_(2)
    elif how == "the tensor":
        tensor.add_(1)
    else:
        with torch.no_grad():
            tensor.copy_(torch.zeros_like(tensor))
    deferred.finish()
    assert not deferred.intact
    assert not deferred.complete()


def test_what_has_no_version_is_copied_at_once() -> None:
    """A tensor made in inference mode has no counter; one that is not contiguous takes torch to copy it."""
    with torch.inference_mode():
        tensor = torch.ones(200, 200)
    deferred = Deferred()
    copied = plain_copy(Steady([tensor, torch.randn(200, 200).t()]), "state", Buffers(), deferred)
    assert not deferred._tasks
    assert torch.equal(copied[0], tensor)


def test_only_optimizers_whose_steps_call_hooks_are_steady() -> None:
    """One that is not torch's may step without being noticed. A learning rate may be a tensor, and is not steady."""

    class Own:
        def state_dict(self) -> dict:
            return {"state": torch.ones(200, 200)}

        def load_state_dict(self, state: dict) -> None:
            """Not used here."""

    model, optimizer = build()
    state = collect({"model": model, "optimizer": optimizer, "own": Own()}, steady=True)
    marked = {(name, key) for name, each in state.items() for key in each if isinstance(each[key], Steady)}
    assert marked == {("optimizer", "state")}


def test_each_checkpoint_is_the_state_between_two_steps(tmp_path: Path) -> None:
    """Saved after every step that it can be, beside the training: each is what the same training had at that step."""
    model, optimizer = build()
    truth = {}
    for step in range(1, 61):
        train(model, optimizer)
        truth[step] = plain_copy({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "state")
    model, optimizer = build()
    loop = elasticrt.Loop(tmp_path, every="1 steps", keep=100, model=model, optimizer=optimizer)
    for _ in loop.epochs(1, max_steps=60):
        for _ in loop.batches(repeat(None)):
            train(model, optimizer)
    found = checkpoints(tmp_path)
    assert len(found) > 3
    assert 60 in found
    for step, state in found.items():
        assert all(torch.equal(mine, true) for mine, true in zip(moments(state), moments(truth[step]), strict=True))
        assert all(torch.equal(tensor, truth[step]["model"][name]) for name, tensor in state["model"].items())


def test_a_state_that_was_changed_between_two_steps_is_saved_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not committed half old and half new; the next step's is, all at once, and all later ones are."""
    model, optimizer = build()
    train(model, optimizer)
    loop = elasticrt.Loop(tmp_path, every="4 steps", keep=100, model=model, optimizer=optimizer)
    with caplog.at_level(logging.WARNING):
        for _ in loop.epochs(1, max_steps=9):
            for _ in loop.batches(repeat(None)):
                if loop.steps_done == 4:
                    optimizer.state[next(model.parameters())]["exp_avg"].zero_()
                train(model, optimizer)
                loop._checkpointer._writer.wait(10)
    assert sorted(checkpoints(tmp_path)) == [5, 9]
    assert "saved again" in caplog.text
    assert loop._checkpointer._snapshots._at_once


def test_a_learning_rate_may_be_set_before_each_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also one that is a tensor, in place: the checkpoint has the one of the step before, and is not spoilt."""
    model, _ = build()
    optimizer = torch.optim.Adam(model.parameters(), torch.tensor(0.5))
    loop = elasticrt.Loop(tmp_path, every="2 steps", keep=100, model=model, optimizer=optimizer)
    with caplog.at_level(logging.WARNING):
        for _ in loop.epochs(1, max_steps=6):
            for _ in loop.batches(repeat(None)):
                optimizer.param_groups[0]["lr"].fill_(0.001 * (loop.steps_done + 1))
                train(model, optimizer)
                loop._checkpointer._writer.wait(10)
    rates = {step: state["optimizer"]["param_groups"][0]["lr"].item() for step, state in checkpoints(tmp_path).items()}
    assert rates == pytest.approx({2: 0.002, 4: 0.004, 6: 0.006})
    assert not caplog.records


def test_after_the_loop_an_optimizer_may_step_at_once(tmp_path: Path) -> None:
    """An exception that leaves the Loop in the step after a save takes the hooks away, and not before the copy is."""
    model, optimizer = build()
    train(model, optimizer)
    loop = elasticrt.Loop(tmp_path, every="3 steps", model=model, optimizer=optimizer)
    with pytest.raises(ZeroDivisionError):
        for _ in loop.epochs(1):
            for _ in loop.batches(repeat(None)):
                if loop.steps_done == 3:
                    before = [tensor.clone() for tensor in moments(collect({"optimizer": optimizer}))]
                    raise ZeroDivisionError
                train(model, optimizer)
    train(model, optimizer)
    loop._checkpointer.wait()
    saved = moments(checkpoints(tmp_path)[3])
    assert all(torch.equal(mine, true) for mine, true in zip(saved, before, strict=True))


def test_a_save_does_not_wait_for_a_step_that_is_far(tmp_path: Path) -> None:
    """An evaluation between two steps leaves the checkpoint before it committed after a second, not at its end."""
    model, optimizer = build()
    train(model, optimizer)
    loop = elasticrt.Loop(tmp_path, every="2 steps", model=model, optimizer=optimizer)
    for _ in loop.epochs(1, max_steps=3):
        for _ in loop.batches(repeat(None)):
            if loop.steps_done == 2:
                with loop.pause("evaluate"):
                    assert loop._checkpointer._writer.wait(30)
                    assert 2 in checkpoints(tmp_path)
            train(model, optimizer)


def test_one_thread_for_all_jobs() -> None:
    """Jobs run one after the other on one thread, one that fails ends neither it nor the process, and it ends with its
    owner."""
    background = Background("elasticrt-test")
    seen = []
    for number in range(3):
        background.start(lambda: seen.append(threading.current_thread()))
        assert background.wait(10)
        if number == 1:
            background.start(lambda: 1 // 0)
            assert background.wait(10)
    assert len(set(seen)) == 1
    thread = seen[0]
    assert thread.daemon
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_forked_process_waits_for_no_job_of_its_parents() -> None:
    """A child that is forked while a job runs has its memory and not its thread."""
    background = Background("elasticrt-test")
    go = threading.Event()
    background.start(lambda: go.wait(30))
    assert background.busy
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        os._exit(0 if not background.busy and background.wait(20) and time.monotonic() - began < 10 else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    assert background.wait(10)
    assert status == 0
