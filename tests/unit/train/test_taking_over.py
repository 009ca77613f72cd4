"""What a newcomer says when the state of the others does not fit its script."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from elasticrt import Loop
from elasticrt.data.position import Position
from elasticrt.data.sampler import ElasticBatchSampler, ElasticDistributedSampler
from elasticrt.errors import CheckpointError, MisfitError
from elasticrt.train.batches import length_of
from elasticrt.train.training_state import TrainingState
from elasticrt.train.validation import check_same_samplers


def state(width: int = 2, samples: int | None = 10, cut: dict[str, Any] | None = None, **more: Any) -> TrainingState:
    """The state of a small script."""
    sampler = (
        None if samples is None else ElasticBatchSampler(range(samples), **{"global_batch_size": 2, **(cut or {})})
    )
    return TrainingState({"model": torch.nn.Linear(width, 1), **more}, sampler, None, None, "ckpt")


def taken_from(other: TrainingState, *alike: str) -> dict[str, Any]:
    """What `other` sends to a newcomer; generators that are `alike` on all ranks."""
    loader = {"batch_size": other.batch_size, "length": other.length}
    return other.collect(alike=alike, total=0, settings=other.sampler_settings(), **loader)


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
    taken = taken_from(state())
    with pytest.raises(MisfitError, match=f"this node's script differs from the run's .*{words}") as beside:
        state(**own).take_over(taken)
    assert str(beside.value).count(". Start this node again with the run's script and arguments") == 1
    assert "new directory" not in str(beside.value)
    with pytest.raises(CheckpointError, match=words) as anew:
        state(**own).restore(taken)
    assert str(anew.value).endswith(", or start over in a new directory")
    assert not isinstance(anew.value, MisfitError)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ({"global_batch_size": 3}, "got global_batch_size=3 here; expected global_batch_size=2, as on other ranks"),
        ({"drop_last": True}, "got drop_last=True here; expected drop_last=False, as on other ranks"),
        ({"seed": 4}, "got seed=4 here; expected seed=0, as on other ranks"),
    ],
)
def test_a_sampler_that_cuts_otherwise_fits_a_checkpoint_only(cut: dict[str, Any], words: str) -> None:
    """Beside others each step would have other samples; a new start of the run may choose, and so may a micro-batch."""
    taken = taken_from(state())
    with pytest.raises(MisfitError, match=f"this node's script differs from the run's .*{words}"):
        state(cut=cut).take_over(taken)
    state(cut=cut).restore(taken)
    state(cut={"micro_batch_size": 1}).take_over(taken)


def test_a_newcomers_loader_has_the_batches_of_the_others() -> None:
    """In the middle of an epoch another size would move samples; in the next one all ranks may have another."""

    def newcomer(trained: int) -> TrainingState:
        made = [TrainingState({}, ElasticDistributedSampler(range(9)), None, None, "ckpt") for _ in range(2)]
        made[0].batch_size, made[0].position = 4, Position(steps=3, epoch=1, batches=trained)
        made[1].take_over(taken_from(made[0]))
        return made[1]

    newcomer(2).check_batch_size(4)
    newcomer(0).check_batch_size(8)
    with pytest.raises(MisfitError, match=r"differs from the run's .*got a loader with batch_size=8 here, and 4 on"):
        newcomer(2).check_batch_size(8)


def test_a_newcomers_loader_has_as_many_batches_as_those_of_the_others() -> None:
    """Without a sampler of ours nothing else shows that it cuts its data for a world of one."""

    def newcomer(trained: int, length: int | None = 20) -> TrainingState:
        other, own = (TrainingState({}, None, None, None, "ckpt") for _ in range(2))
        other.length, other.position = length, Position(steps=3, epoch=1, batches=trained)
        own.take_over(taken_from(other))
        return own

    for fits, length in ((newcomer(2), 20), (newcomer(0), 60), (newcomer(2, None), 60), (newcomer(2), None)):
        fits.check_length(length)
    with pytest.raises(MisfitError, match=r"a loader with 60 batches here, and 20 on other ranks.*ElasticBatchSampler"):
        newcomer(2).check_length(60)


@pytest.mark.parametrize(
    ("theirs", "mine", "late"),
    [(1, None, True), (1, 0, True), (1, 1, False), (0, None, False), (None, None, False)],
    ids=["a newcomer", "from the epoch before", "in it as well", "they are at its head", "they draw by hand"],
)
def test_an_epoch_whose_batches_have_begun(theirs: int | None, mine: int | None, late: bool) -> None:
    """Whoever begins them later must not draw once more what the loader draws when it begins."""
    other, own = state(), state()
    other.position, other.begun_epoch, own.begun_epoch = Position(steps=5, epoch=1), theirs, mine
    own.take_over(taken_from(other))
    assert own.begun_elsewhere is late


def test_a_newcomer_draws_what_the_others_draw(tmp_path: Path) -> None:
    """Let in at the first step of an epoch, it goes on with their random numbers behind the beginning of the loader."""
    data = TensorDataset(torch.zeros(8, 1))
    drawn, taken = [], None
    for name in ("survivor", "newcomer"):
        sampler = ElasticBatchSampler(data, 2)
        loop = Loop(tmp_path / name, sampler=sampler, model=torch.nn.Linear(1, 1))
        for _ in loop.epochs(1):
            if taken is not None:
                torch.manual_seed(7)
                loop._state.take_over(taken)
                loop._enter_head()
            for _batch in loop.batches(DataLoader(data, batch_sampler=sampler)):
                taken = taken_from(loop._state, "torch") if taken is None else taken
                drawn.append(torch.rand(1).item())
                break
    assert drawn[0] == drawn[1]


def test_a_newcomer_at_the_end_of_an_epoch_draws_what_the_others_draw(tmp_path: Path) -> None:
    """Let in after the last batch, it has nothing to draw again: neither there, nor when the next epoch begins."""
    data = TensorDataset(torch.zeros(8, 1))
    drawn: dict[str, list[float]] = {"survivor": [], "newcomer": []}
    taken = None
    for name, mine in drawn.items():
        sampler = ElasticBatchSampler(data, 2)
        loop = Loop(tmp_path / name, sampler=sampler, model=torch.nn.Linear(1, 1))
        for epoch in loop.epochs(3):
            if taken is not None and not epoch:
                torch.manual_seed(7)
                loop._state.take_over(taken)
            for _batch in loop.batches(DataLoader(data, batch_sampler=sampler)):
                mine.extend([torch.rand(1).item()] if epoch else [])
            taken = taken_from(loop._state, "torch") if taken is None else taken
            mine.append(torch.rand(1).item())
    assert len(drawn["survivor"]) == 11
    assert drawn["survivor"] == drawn["newcomer"]


FIFTY, FORTY = ElasticBatchSampler(range(99), 50).settings(), ElasticBatchSampler(range(99), 40).settings()
SAID = "got global_batch_size=40 on rank 1 of b; expected global_batch_size=50, as on other ranks"


@pytest.mark.parametrize(
    ("everyones", "has_trained", "raised"),
    [
        ([FIFTY, FIFTY, FIFTY], False, [None, None, None]),
        ([FIFTY, FORTY, FIFTY], False, [CheckpointError, CheckpointError, CheckpointError]),
        ([FIFTY, FORTY], False, [CheckpointError, CheckpointError]),
        ([FIFTY, FORTY, FIFTY], True, [None, MisfitError, None]),
        ([FIFTY, FORTY], True, [None, MisfitError]),
    ],
)
def test_ranks_that_start_together(everyones: list[Any], has_trained: bool, raised: list[Any]) -> None:
    """A first start ends on all ranks alike; later the one that differs from most leaves, of two the later one."""
    for rank, kind in enumerate(raised):
        named = list(zip("abc", everyones, strict=False))
        if kind is None:
            check_same_samplers(named, rank, has_trained=has_trained)
            continue
        with pytest.raises(CheckpointError, match=SAID) as found:
            check_same_samplers(named, rank, has_trained=has_trained)
        assert type(found.value) is kind


def test_each_rank_may_have_data_of_its_own() -> None:
    """With a rank that is given, and a sampler of its own, nothing is compared."""
    assert ElasticBatchSampler(range(9), 2, rank=0, world_size=1).settings() == {}
    assert "epoch" not in FIFTY
    assert "drop_last" in ElasticDistributedSampler(range(9)).settings()


@pytest.mark.parametrize(
    ("here", "there", "differ"),
    [
        ({"best": 0.5, "seen": [1, 2]}, {"seen": [1, 2], "best": 0.5}, None),
        ({"best": torch.ones(2), "kept": {1, 2}}, {"best": torch.ones(2), "kept": {2, 1}}, None),
        ({"hidden": torch.zeros(2, 3), "n": 1}, {"hidden": torch.ones(2, 3), "n": 1}, "'hidden'"),
        ({"sum": 1.0, "one": 1}, {"sum": 2.0}, "'one', 'sum'"),
        ({"seen": [1] * 5000}, {"seen": [1] * 4999 + [2]}, "'seen'"),
        ({"at": {"a": (1, [2])}}, {"at": {"a": (1, [3])}}, "'at'"),
    ],
)
def test_values_of_one_rank_are_told_once(
    caplog: pytest.LogCaptureFixture, here: dict[str, Any], there: dict[str, Any], differ: str | None
) -> None:
    """What differs between ranks would be replaced by another rank's on a newcomer, and nothing else would say so."""
    states = [state(), state()]
    for each, values in zip(states, (here, there), strict=True):
        each.vars.update(values)
    said = [each.var_digests() for each in states]
    for _ in range(2):
        states[0].warn_of_own_vars(said)
    told = [f"loop.vars[{differ}] differ between ranks"] if differ else []
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == told


def test_tensors_without_plain_numbers_have_a_digest() -> None:
    """Whatever may be in `vars`, a change of the membership does not fail for it."""
    odd = [torch.ones(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.ones((), dtype=torch.bfloat16)]
    odd += [torch.tensor([True]), torch.zeros(0)]
    own = state()
    own.vars.update({f"v{number}": each for number, each in enumerate(odd)})
    assert own.var_digests().keys() == own.vars.keys()


class Stream(IterableDataset[int]):
    """Two samples, whatever its length says."""

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))

    def __len__(self) -> int:
        return 1


class Around:
    """A class around a loader that it has not got yet."""

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("loader", "length"),
    [(DataLoader([1, 2, 3]), 3), (DataLoader(Stream()), None), (Around(), None), (iter([1]), None)],
)
def test_the_length_of_a_loader_is_known_or_not(loader: object, length: int | None) -> None:
    """Asking for it raises nothing, and makes torch warn of nothing."""
    assert length_of(loader) == length
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loader if isinstance(loader, DataLoader) else ())) in (0, 2, 3)
