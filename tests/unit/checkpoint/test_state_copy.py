"""State as plain values: copied, convertible by weights_only loading, everything else refused by place."""

from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from elasticrt import ConfigError
from elasticrt.checkpoint.state_copy import Buffers, plain_copy


class Kind(enum.IntEnum):
    """A number with a name."""

    ONE = 1


def through_file(value: object) -> object:
    """Saved and loaded as a checkpoint is."""
    buffer = io.BytesIO()
    torch.save(plain_copy(value, "state"), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (Kind.ONE, 1),
        (np.float64(0.5), 0.5),
        (np.int32(7), 7),
        (np.bool_(True), True),
        (defaultdict(list, {"a": [1]}), {"a": [1]}),
        (Counter("aab"), Counter("aab")),
        (OrderedDict(x=1), OrderedDict(x=1)),
        ({1: (2, {"y": b"z"})}, {1: (2, {"y": b"z"})}),
        (float("inf"), float("inf")),
        ({1, 2}, {1, 2}),
        (torch.float16, torch.float16),
    ],
)
def test_values_come_back_plain(value, expected):
    """Numbers, texts and containers survive, as builtin types."""
    back = through_file(value)
    assert back == expected
    assert type(back) is type(expected)


def test_real_state_dicts():
    """Modules with their metadata, optimizers, schedulers and scalers load with weights_only."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    ]
    state = [each.state_dict() for each in (model, optimizer, *schedulers, torch.amp.GradScaler(enabled=False))]
    back = through_file(state)
    assert back[0]._metadata == state[0]._metadata
    model.load_state_dict(back[0])
    optimizer.load_state_dict(back[1])
    for scheduler, saved in zip(schedulers, back[2:], strict=False):
        scheduler.load_state_dict(saved)


def test_tensors_are_copies_and_ties_stay_ties():
    """A copy does not change with its original; a tensor under two names is stored once; views lose their storage."""
    tied = torch.arange(6.0)
    view = torch.zeros(10_000)[:3]
    copied = plain_copy({"a": tied, "b": tied, "c": nn.Parameter(view), "d": torch.empty(0)}, "state")
    tied.fill_(9)
    assert copied["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert copied["a"] is copied["b"]
    assert copied["c"].untyped_storage().nbytes() == 12
    assert type(copied["c"]) is torch.Tensor
    assert not copied["c"].requires_grad


@pytest.mark.parametrize("value", [print, lambda: 1, object(), np.zeros(3), nn.Linear(1, 1), {"a": [1, {2: open}]}])
def test_anything_else_is_refused_by_place(value):
    """What can't be loaded safely is not saved; the message says where it is."""
    with pytest.raises(ConfigError, match=r"can't be saved \(state\['x'\]"):
        plain_copy({"x": value}, "state")


def test_buffers_are_written_over() -> None:
    """With buffers each copy is right, lies where the one before lay, and what is no longer needed is let go."""
    buffers = Buffers()
    big, turned = torch.randn(300, 200), torch.randn(200, 300).t()
    first = plain_copy({"a": big, "b": turned, "small": torch.ones(2)}, "state", buffers)
    assert torch.equal(first["a"], big)
    assert torch.equal(first["b"], turned)
    places = {first[name].data_ptr() for name in "ab"}
    second = plain_copy({"b": turned + 1, "a": big + 1, "small": torch.zeros(2), "tied": big}, "state", buffers)
    assert torch.equal(second["a"], big + 1)
    assert torch.equal(second["b"], turned + 1)
    assert torch.equal(second["tied"], big)
    assert second["b"].stride() == turned.stride()
    assert places <= {second[name].data_ptr() for name in ("a", "b", "tied")}
    assert first["small"].tolist() == [1, 1], "what is small is always copied afresh"
    third = plain_copy({"a": big}, "state", buffers)
    assert third["a"].data_ptr() in {second[name].data_ptr() for name in ("a", "tied")}
    assert sum(map(len, buffers._taken.values())) == 1
    assert not buffers._free


def test_a_variable_that_cannot_be_saved_is_named_as_the_script_names_it() -> None:
    """The message says which of `loop.vars`, and what to keep instead: no word of `state_dict`."""
    state = {"elasticrt": {"vars": {"best": {"at": Path("x")}}}}
    with pytest.raises(
        ConfigError,
        match=r"\(loop\.vars\['best'\]\['at'\]\): got pathlib.*Keep a tensor, a list or a dict$",
    ):
        plain_copy(state, "state")
