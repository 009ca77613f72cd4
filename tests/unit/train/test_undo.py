"""Steps that are undone because a peer was lost: with a GradScaler, where that is seen as late as NCCL shows it; and
with values that the script changes in place."""

from __future__ import annotations

import collections
import copy

import pytest
import torch

from elasticrt.checkpoint.state_copy import plain_copy
from elasticrt.train.training_state import StepTraits, TrainingState
from elasticrt.train.undo import Undo

STEPS, LOST_IN = 6, 3


class PeerLost(Exception):  # noqa: N818  As the pre-hook of the Loop raises one.
    """An aborted kernel has left these gradients."""


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("left", [1.0, float("inf")], ids=["wrong gradients", "an overflow"])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_gradscaler_forgets_an_aborted_step(*, fused: bool, left: float, unscales: bool) -> None:
    """Its scale, its count of steps and what it has told a fused optimizer go back: else this rank's gradients would
    be scaled otherwise than those of the others, and the replicas would part."""

    def train(*, loses: bool) -> tuple[list[float], float]:
        lost = False

        def before(*_: object) -> None:
            if lost:
                raise PeerLost
            undo.before_optimizer()

        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        undo = Undo(TrainingState({"net": net, "a": optimizer, "b": scaler}, None, None, None, ""), seeded=True)
        undo.watch(before)
        tries = [(number, False) for number in range(STEPS)]
        if loses:
            tries.insert(LOST_IN, (LOST_IN, True))
        for number, lost in tries:
            undo.has_stepped = False
            undo.note()
            scaler.scale(net(torch.full((2, 4), 1.0 + number)).square().sum()).backward()
            if lost:
                for each in net.parameters():
                    each.grad.fill_(left)
            try:
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            except PeerLost:
                pass
            if lost:
                assert undo.undo()
            else:
                optimizer.zero_grad()
                undo.end_step()
        undo.unwatch()
        return [float(each.detach().sum()) for each in net.parameters()], scaler.get_scale()

    assert train(loses=True) == train(loses=False)


def test_a_gradscaler_that_is_disabled() -> None:
    """A script that trains with and without mixed precision has `GradScaler(enabled=False)`: its step is undone."""
    net = torch.nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", enabled=False)
    undo = Undo(TrainingState({"net": net, "a": optimizer, "b": scaler}, None, None, None, ""), seeded=True)
    undo.note()
    scaler.scale(net(torch.ones(2, 4)).sum()).backward()
    assert undo.undo()
    assert net.weight.grad is None


def test_values_that_contain_others_are_undone() -> None:
    """S6: lists and dicts in `loop.vars` and in an optimizer's groups go back, at every try."""
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = TrainingState({"net": net, "optimizer": optimizer}, None, None, None, "")
    state.vars.update(history=[1], best={"step": 1, "each": [torch.ones(1)]}, seen={1}, count=1)
    state.vars["loss"] = net(torch.ones(1, 4)).sum()  # With a graph behind it.
    state.vars["by_name"] = collections.defaultdict(list, a=[1])
    optimizer.param_groups[0]["log"] = [1]
    undo = Undo(state, seeded=True)
    for _ in range(2):
        undo.note()
        state.vars["history"].append(2)
        state.vars["best"]["each"][0] += 1
        state.vars["best"]["step"] = 2
        state.vars["seen"].add(2)
        state.vars["count"] += 1
        state.vars["by_name"]["a"].append(2)
        state.vars["by_name"]["b"].append(2)
        optimizer.param_groups[0]["log"].append(2)
        assert undo.undo()
        assert not state.vars.pop("loss").requires_grad
        state.vars["loss"] = net(torch.ones(1, 4)).sum()
        kept = {name: each for name, each in state.vars.items() if name != "loss"}
        best = {"step": 1, "each": [torch.ones(1)]}
        assert kept == {"history": [1], "best": best, "seen": {1}, "count": 1, "by_name": {"a": [1]}}
        assert optimizer.param_groups[0]["log"] == [1]


def test_what_a_script_holds_of_its_variables_stays_the_same_object() -> None:
    """S6: a list, a dict, a set or a tensor that a script has taken from `loop.vars` is what is undone and restored."""
    state = TrainingState({}, None, None, None, "")
    history, best, seen, mean = [1], {"step": 1, "each": [1]}, {1}, torch.ones(2)
    state.vars.update(history=history, best=best, seen=seen, mean=mean)
    each, saved = best["each"], copy.deepcopy(state.vars)
    undo = Undo(state, seeded=True)
    undo.note()
    history.append(2)
    each.append(2)
    best.update(step=2, more=3)
    seen.add(2)
    mean += 1
    state.vars["history"] = [*history, 3]
    undo.undo()
    for _ in range(2):
        assert state.vars == {"history": [1], "best": {"step": 1, "each": [1]}, "seen": {1}, "mean": mean}
        assert mean.tolist() == [1, 1]
        assert (state.vars["history"], state.vars["seen"], state.vars["mean"]) == (history, seen, mean)
        assert state.vars["history"] is history and best["each"] is each and state.vars["mean"] is mean
        undo.note_for_discard(whole=False)
        history.clear()
        each.append(5)
        undo.discard_changes()
    history.append(7)
    state.put_vars(dict(state.vars), saved)  # As when another rank's state comes, or a checkpoint's.
    assert (history, each) == ([1], [1]) and state.vars["best"] is best


def test_a_newcomer_knows_what_steps_of_the_script_do() -> None:
    """S6: its first step can be undone where those of the others can: it knows which need a copy before them."""
    net = torch.nn.Linear(2, 1)
    one, other = (TrainingState({"net": net}, None, None, None, "") for _ in range(2))
    one.traits = StepTraits(communicates_late=True, early_parameters={1}, early_objects={"net"})
    collected = one.collect(settings={}, batch_size=None, length=None, alike=[])
    assert other.traits == StepTraits()
    other.take_over(plain_copy(collected, "a test"))
    assert other.traits == one.traits
    other.traits.early_parameters.add(0)
    assert one.traits.early_parameters == {1}


def test_what_a_step_has_frozen_or_put_into_evaluation_is_undone() -> None:
    """S6: a GAN freezes one of its models within a step; one that fails there must not begin again with it frozen."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout(), torch.nn.Linear(2, 1))
    net[0].weight.requires_grad_(False)
    net[1].eval()
    undo = Undo(TrainingState({"net": net}, None, None, None, ""), seeded=True)
    for _ in range(2):
        undo.note()
        net.requires_grad_(False)
        net[0].weight.requires_grad_(True)
        net.eval()
        net[1].train()
        assert undo.undo()
        assert [each.requires_grad for each in net.parameters()] == [False, True, True, True]
        assert [each.training for each in net.modules()] == [True, True, False, True]


class Statistics(torch.nn.Module):
    """Its forward binds a buffer anew, changes one in place, and makes one at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("unset", None)
        self.inner = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As written in scripts."""
        self.mean = 0.5 * self.mean + x
        self.count += 1
        if self.unset is None:
            self.unset = x.clone()
        if not hasattr(self.inner, "first"):
            self.inner.register_buffer("first", x.clone())
        return x


def test_buffers_that_a_forward_binds_anew_are_undone() -> None:
    """S6: `self.mean = ...` in a step that is undone leaves no trace, at the first step and at later ones."""
    net = Statistics()
    undo = Undo(TrainingState({"net": net}, None, None, None, ""), seeded=True)
    for step in range(3):
        before = {name: each.clone() for name, each in net.state_dict().items()}
        undo.note()
        for _ in range(2):
            net(torch.full((3,), 7.0))
            assert undo.undo()
            after = net.state_dict()
            assert after.keys() == before.keys()
            assert all(torch.equal(each, before[name]) for name, each in after.items())
        net(torch.full((3,), float(step)))
        undo.end_step()
    assert net.mean.tolist() == [2.5] * 3
    assert (net.count.item(), net.unset.tolist(), net.inner.first.tolist()) == (3, [0.0] * 3, [0.0] * 3)


@pytest.mark.parametrize("restores", [True, False])
@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_write_by_data_before_the_optimizer(*, restores: bool, kind: torch.dtype) -> None:
    """W02: torch does not count it. It is found in the first step, also where it is taken back before the optimizer's
    (adversarial training), and later steps are undone with it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(kind)
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    net.register_parameter("quantized", frozen)
    optimizer = torch.optim.SGD(net[1].parameters(), lr=0.01)
    state = TrainingState({"net": net, "optimizer": optimizer}, None, None, None, "")
    undo, weight = Undo(state, seeded=True), net[0].weight
    undo.watch(lambda *_: undo.before_optimizer())
    for lost in (False, False, True, False, True):
        before = copy.deepcopy(net.state_dict())
        undo.has_stepped = False
        undo.note()
        backup = weight.data.clone()
        weight.data.add_(0.01 * torch.ones_like(weight))
        net(torch.ones(2, 4, dtype=kind)).sum().backward()
        if lost:
            assert undo.undo()
            for name, each in net.state_dict().items():
                assert torch.equal(each, before[name]), name
            continue
        if restores:
            weight.data = backup
        optimizer.step()
        undo.end_step()
    undo.unwatch()
    assert state.traits.early_parameters == {1}, "the weight"
    assert not weight._post_accumulate_grad_hooks


def test_a_write_by_data_in_an_evaluation_that_fails() -> None:
    """W02: weights of an average are in the model: its state is known to be no step's."""
    net = torch.nn.Linear(4, 1)
    undo = Undo(TrainingState({"net": net}, None, None, None, ""), seeded=True)
    undo.note(evaluates=True)
    assert undo.undo()
    undo.note(evaluates=True)
    net.weight.data.mul_(0.5)
    assert not undo.undo()
