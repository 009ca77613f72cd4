"""What a newcomer says when the state of the others does not fit its script."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elasticrt.data.sampler import ElasticBatchSampler
from elasticrt.errors import CheckpointError, MisfitError
from elasticrt.train.training_state import TrainingState


def state(width: int = 2, samples: int | None = 10, **more: Any) -> TrainingState:
    """The state of a small script."""
    sampler = None if samples is None else ElasticBatchSampler(range(samples), 2)
    return TrainingState({"model": torch.nn.Linear(width, 1), **more}, sampler, None, None, "ckpt")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"width": 3}, r"does not fit 'model' .*size mismatch for weight.* torch.Size\(\[1, 3\]\)"),
        ({"samples": 9}, "got samples=10 in the checkpoint; expected samples=9"),
        ({"samples": None}, "the sampler changed .*with a sampler"),
        ({"other": torch.nn.Linear(1, 1)}, r"\['model'\]; expected as given to Loop \['model', 'other'\]"),
    ],
)
def test_what_differs_is_named_with_one_remedy(own: dict[str, Any], words: str) -> None:
    """Beside a run that goes on the script is to blame; from a checkpoint, the directory may be as well."""
    taken = state().collect(alike=[], total=0)
    with pytest.raises(MisfitError, match=f"this node's script differs from the run's .*{words}") as beside:
        state(**own).take_over(taken)
    assert str(beside.value).count(". Start this node again with the run's script and arguments") == 1
    assert "new directory" not in str(beside.value)
    with pytest.raises(CheckpointError, match=words) as anew:
        state(**own).restore(taken)
    assert str(anew.value).endswith(", or start over in a new directory")
    assert not isinstance(anew.value, MisfitError)
