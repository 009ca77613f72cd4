"""What the ledger proves: which entries count, and what is said of samples that were lost or repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrt import ConfigError, ElasticBatchSampler, ElasticDistributedSampler, Loop
from elasticrt.audit.exactly_once import check
from elasticrt.cli.audit import books as books_in
from elasticrt.cli.main import main
from elasticrt.ipc.ledger_file import Closing, LedgerEntry, LedgerFile, Opening, end_line, read

SAMPLES = 8
PER_EPOCH = 4
OPENING = Opening("a", "run", 1, 0, 1, "n", 0, 0, (), SAMPLES)


def book(start: str, went_on: int, entries: str, *, history: str = "", rank: int = 0, **other: Any) -> LedgerFile:
    """A rank's book. `entries`: "1:01 2:23" says that step 1 had samples 0 and 1; step 5 begins epoch 1 unless "5@0".

    `history`: "a3 b5" says that the state at `went_on` descends from step 3 of start a and from step 5 of start b. All
    starts came in the order of their letters, in one directory.
    """
    links = tuple((link[0], int(link[1:])) for link in history.split())
    number = ord(start) - ord("a") + 1
    before = tuple(map(chr, range(ord("a"), ord(start))))
    fields = {"before": before, "generation": number, "epoch": went_on // PER_EPOCH, **other}
    end, closings = fields.pop("end", None), fields.pop("closings", [])
    opening = replace(OPENING, start=start, rank=rank, steps=went_on, history=links, **fields)
    found = LedgerFile(f"{start}{rank}", opening, closings=[Closing(*closing) for closing in closings], end=end)
    for entry in entries.split():
        where, _, ids = entry.partition(":")
        step, _, epoch = where.partition("@")
        number = int(epoch) if epoch else (int(step) - 1) // PER_EPOCH
        found.entries[int(step)] = LedgerEntry(int(step), number, [int(each) for each in ids])
    return found


FIRST = "1:01 2:23 3:45 4:67"
SECOND = "5:76 6:54 7:32 8:10"


@pytest.mark.parametrize(
    ("books", "steps", "superseded"),
    [
        pytest.param([book("a", 0, f"{FIRST} {SECOND}", end=8)], 8, 0, id="one start"),
        pytest.param([book("a", 0, f"{FIRST} {SECOND}")], 7, 1, id="killed in the last step"),
        pytest.param([book("a", 0, "")], 0, 0, id="nothing trained yet"),
        pytest.param([book("a", 0, FIRST, end=4, closings=[(0, 4, 8, 0)])], 4, 0, id="a closed epoch"),
        pytest.param([book("a", 0, "1:01 2:23 3:45"), book("b", 2, "3:45 4:67", history="a2", end=4)], 4, 1, id="kill"),
        pytest.param(
            [book("a", 0, "1:01 2:23 3:45"), book("b", 0, "1:54 2:32"), book("c", 2, "3:45 4:67", history="a2", end=4)],
            4, 3, id="a start that came to nothing",
        ),
        pytest.param(
            [book("a", 0, "1:01 2:23"), book("b", 1, "2:45 3:23", history="a1"),
             book("c", 3, "4:67", history="a1 b3", end=4)],
            4, 1, id="back, and another way",
        ),
        pytest.param(
            [book("a", 0, "1:0 2:23", world_size=2), book("a", 0, "1:1 2:", rank=1, world_size=2),
             book("b", 2, "3:45 4:67", history="a2", end=4)],
            4, 0, id="from two ranks to one, after an empty slice",
        ),
        pytest.param(
            [book("a", 0, "1:01 2:23", world_size=2), book("a", 0, "1:", rank=1, world_size=2),
             book("b", 1, "2:2 3:4 4:6", history="a1", world_size=2, end=4),
             book("b", 1, "2:3 3:5 4:7", history="a1", rank=1, world_size=2)],
            4, 1, id="one rank was killed before it wrote its part",
        ),
        pytest.param(
            [book("b", 2, "3:45 4:67", history="a2", end=4), book("a", 0, "1:01 2:23 3:00 4:00", end=4, before=("b",))],
            4, 2, id="a zombie goes on, and ends, and counts for nothing",
        ),
        pytest.param(
            [book("a", 0, "1:01 2:23", run="old"), book("b", 1, "2:45 3:00", history="a1", run="old", generation=7),
             book("c", 2, "3:45 4:67", history="a2", run="new", generation=1, end=4)],
            4, 2, id="another run goes on, its generations begin with 1",
        ),
        pytest.param(
            [book("a", 0, "1:01 2:23"), book("b", 1, "2:45 3:00", history="a1"),
             book("c", 2, "3:45 4:67", history="a2", generation=1, end=4)],
            4, 2, id="etcd has lost its data, and numbers the generations of the run from 1 again",
        ),
        pytest.param([book("a", 0, "1:01 2:23 3:45 4@1:76 5@1:5432 6@1:10", closings=[(0, 3, 6, 0)], end=6)], 6, 0,
                     id="the script has left an epoch early"),
        pytest.param([book("a", 0, "1:01 2:23 3:45", closings=[(0, 3, 6, 2)], end=3)], 3, 0, id="drop_last"),
        pytest.param(
            [book("a", 0, "1:01 2:23", closings=[(0, 2, 4, 0)]), book("b", 2, "3:45 4:67 5:76", history="a2", epoch=0)],
            4, 1, id="an end of an epoch that was lost with what came after the state",
        ),
    ],
)  # fmt: skip
def test_exactly_once(books: list[LedgerFile], steps: int, superseded: int) -> None:
    """S5: what the newest start descends from counts, the rest does not, and each sample of an epoch is there once."""
    verdict = check(books)
    assert verdict.problems == ()
    assert (verdict.steps, verdict.redone) == (steps, superseded)


@pytest.mark.parametrize(
    ("books", "problem"),
    [
        pytest.param([book("a", 0, f"1:01 2:2 3:45 4:67 {SECOND}", end=8)], "epoch 0: lost: 1 sample: 3", id="lost"),
        pytest.param([book("a", 0, "1:01 2:2 3:45 4:67", end=4, closings=[(0, 4, 8, 0)])], "lost: 1 sample: 3",
                     id="lost in the last epoch"),
        pytest.param([book("a", 0, "1:01 2:23", end=2, closings=[(0, 2, 6, 0)])],
                     "lost: 2 samples, among these 4: 4, 5, 6, 7", id="lost in an epoch that was left early"),
        pytest.param([book("a", 0, "1:01 2:12 3:43", end=3)],
                     "epoch 0: repeated: 1 sample: 1 (steps 1 and 2)", id="repeated"),
        pytest.param([book("a", 0, "1:01 2:12 3:33", end=3)],
                     "epoch 0: repeated: 2 samples: 1 (steps 1 and 2), 3 (steps 3 and 3)", id="twice in a step"),
        pytest.param([book("a", 0, "1:1", world_size=2, end=1), book("a", 0, "1:1", world_size=2, rank=1)],
                     "repeated: 1 sample: 1 (steps 1 and 1)", id="two ranks trained the same"),
        pytest.param([book("a", 0, "1:01 2:23"), book("b", 2, "3:23 4:67", history="a2", end=4)],
                     "repeated: 2 samples: 2 (steps 2 and 3), 3 (steps 2 and 3)", id="the position was one batch off"),
        pytest.param([book("a", 0, "1:01 2:23", world_size=2, end=2)],
                     "steps 1-2: nothing was written by rank 1 of start a (generation 1; there are files of n)",
                     id="a rank is missing"),
        pytest.param([book("a", 0, "1:01 3:45 5:76", end=5)],
                     "steps 2, 4: nothing was written by rank 0 of start a (generation 1, n)", id="steps are missing"),
        pytest.param([book("b", 2, "3:45 4:67", history="a2", end=4)], "steps 1 to 2: nothing was written by start a",
                     id="a start's files are missing"),
        pytest.param([book("b", 2, "3:45 4:67", end=4)], "steps 1 to 2: trained without a ledger", id="begun without"),
        pytest.param([book("a", 0, "1:09", end=1)], "not in the data set: 1 sample: 9", id="foreign"),
        pytest.param([book("a", 0, FIRST, end=4, closings=[(0, 4, 6, 0)])],
                     "epoch 0: 8 samples trained; 6 were to be", id="too many"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(books: list[LedgerFile], problem: str) -> None:
    """S5: lost and repeated samples, and missing parts of the ledger, are named with their steps."""
    verdict = check(books)
    assert any(problem in each for each in verdict.problems), verdict.problems


@pytest.mark.parametrize(
    ("books", "why"),
    [([], "nothing in it"), ([book("a", 0, "1:01"), book("a", 0, "1:23")], "the same rank"),
     ([book("a", 0, "1:01", history="b1"), book("b", 0, "1:01", history="a1")], "came after another one of them: a, b"),
     ([book("a", 0, "1:01", before=("b",)), book("b", 0, "1:01")], "came after another one of them: a, b"),
     ([book("a", 0, "", before=("b",)), book("b", 0, ""), book("c", 0, "", before=())], "another one of them: a, b"),
     ([book("a", 0, "1:01"), book("b", 0, "1:01", run="other", node="m", before=())],
      r"each of these may be: a \(run 'run', generation 1; there are files of n\), b \(run 'other', .* of m\)\. Give")],
)  # fmt: skip
def test_what_cannot_be_a_ledger(books: list[LedgerFile], why: str) -> None:
    """Nothing, the same file twice, and starts of which none is known to be the newest are refused."""
    with pytest.raises(ValueError, match=why):
        check(books)


WRITTEN = OPENING.to_line() + LedgerEntry(1, 0, [0, 1]).to_line() + LedgerEntry(2, 0, [2, 3]).to_line()


def test_a_step_that_was_begun_again_counts_once() -> None:
    """A `break` before the optimizer's step: the number of the step is used again, and its last entry counts."""
    again = read("a", (WRITTEN + LedgerEntry(2, 0, [4, 5]).to_line() + end_line(2)).encode())
    assert again is not None
    assert list(again.entries[2].ids) == [4, 5]
    assert again.finished == 2


@pytest.mark.parametrize("cut", range(len(WRITTEN)))
def test_cut_anywhere(cut: int) -> None:
    """At whatever byte a killed process has stopped, its lines before count and the last one is none."""
    found = read("a", WRITTEN[:cut].encode())
    lines = WRITTEN[:cut].count("\n")
    assert (found is None) == (lines == 0)
    assert found is None or len(found.entries) == lines - 1


@pytest.mark.parametrize(
    "damage",
    ["", "{}", "[1]", '{"step": 3}', '{"step": "x", "epoch": 0, "ids": [1]}', '{"step": 3, "epoch": 0, "ids": [1.5]}',
     '{"step": 3, "epoch": 0, "ids": "12"}', '{"closed": {"epoch": 1}}', '{"end": "x"}', "\x00\x00", "[" * 10_000],
)  # fmt: skip
def test_damage_is_an_error(damage: str) -> None:
    """Any other line that is none is refused, with its number: it could have been an entry."""
    with pytest.raises(ValueError, match="a, line 4: "):
        read("a", (WRITTEN + damage + "\n").encode())


@pytest.mark.parametrize(
    "change",
    [{"format": 3}, {"rank": -1}, {"steps": "0"}, {"extra": 1}, {"history": [["a"]]}, {"before": 1},
     {"serial": 1}],
)  # fmt: skip
def test_a_first_line_of_another_kind_is_an_error(change: dict[str, Any]) -> None:
    """A file of another format, or with fields that cannot be, is refused."""
    with pytest.raises(ValueError, match="a, line 1: "):
        read("a", (json.dumps({**json.loads(OPENING.to_line()), **change}) + "\n").encode())


class Training:
    """One start of a script on one process; what its model was really fed, by step, for those steps that counted."""

    def __init__(self, directory: Path, *, ledger: Path | None = None, **options: Any) -> None:
        data = TensorDataset(torch.arange(22), torch.randn(22, 2))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self._sampler = ElasticBatchSampler(data, 5, **options)
        self._loader = DataLoader(data, batch_sampler=self._sampler)
        self._model, self._optimizer = model, optimizer
        self.loop = Loop(directory / "ckpt", sampler=self._sampler, every="2 steps", model=model, optimizer=optimizer,
                         ledger=ledger or directory / "ledger")  # fmt: skip
        self.fed: dict[int, list[int]] = {}

    def run(self, epochs: int, *, fail_at: int = 0, leave_at: int = 0) -> None:
        """Train; raise within step `fail_at`, end the epoch after step `leave_at`. Afterwards no save is in flight."""
        try:
            self._run(epochs, fail_at, leave_at)
        finally:
            self.loop._saving.checkpointer.wait()

    def _run(self, epochs: int, fail_at: int, leave_at: int) -> None:
        for _ in self.loop.epochs(epochs):
            for ids, x in self.loop.batches(self._loader):
                self.loop._saving.checkpointer.wait()  # So that each second step is saved, and not those in between.
                self.fed.setdefault(self.loop.steps_done + 1, []).extend(ids.tolist())
                self._model(x).sum().backward()
                if self.loop.steps_done + 1 == fail_at:
                    raise KeyError(fail_at)
                if self.loop.complete:
                    self._optimizer.step()
                    if self.loop.steps_done + 1 == leave_at:
                        break


@pytest.mark.parametrize("options", [{}, {"micro_batch_size": 2}, {"drop_last": True}], ids=str)
def test_what_a_loop_writes_is_what_its_model_was_fed(tmp_path: Path, options: dict[str, Any]) -> None:
    """D09: killed within a step, resumed from a checkpoint, done again: the entries are the model's batches."""
    first = Training(tmp_path, **options)
    with pytest.raises(KeyError):
        first.run(3, fail_at=6)
    second = Training(tmp_path, **options)
    second.run(3)
    (lost,) = [each for each in books_in(tmp_path / "ledger") if not each.opening.history]
    (last,) = [each for each in books_in(tmp_path / "ledger") if each.opening.history]
    assert {step: list(entry.ids) for step, entry in lost.entries.items() if step < 6} == {
        step: ids for step, ids in first.fed.items() if step < 6
    }
    assert {step: list(entry.ids) for step, entry in last.entries.items()} == second.fed
    verdict = check([lost, last])
    assert verdict.problems == ()
    trained = 20 if "drop_last" in options else 22
    assert [(epoch.trained, epoch.left_out, epoch.over) for epoch in verdict.epochs] == [(trained, 0, True)] * 3
    assert verdict.redone == len(lost.entries) - last.opening.steps > 0


def test_an_epoch_that_the_script_leaves_early(tmp_path: Path) -> None:
    """What a `break` leaves out is no loss, and is said."""
    Training(tmp_path).run(2, leave_at=3)
    verdict = check(books_in(tmp_path / "ledger"))
    assert verdict.problems == ()
    assert [str(epoch) for epoch in verdict.epochs] == [
        "epoch 0: 15 of 22 samples, 7 left out by the script",
        "epoch 1: 22 of 22 samples",
    ]


def test_a_start_without_a_ledger_leaves_a_gap(tmp_path: Path) -> None:
    """Steps that nobody wrote down are not taken for good, and later starts know of them."""
    with pytest.raises(KeyError):
        Training(tmp_path).run(3, fail_at=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(KeyError):
        Training(tmp_path, ledger=tmp_path / "file" / "ledger").run(3, fail_at=8)
    Training(tmp_path).run(3)
    (problem, *_) = check(books_in(tmp_path / "ledger")).problems
    assert problem.startswith("steps 3 to 6: nothing was written by start ")


def test_a_ledger_that_cannot_be_written_on_costs_the_ledger_only(tmp_path: Path, monkeypatch, caplog, capsys) -> None:
    """On a full disk the file ends with its last whole line, with a warning, and proves no step after it."""
    real, calls = os.write, []

    def full(fd: int, data: memoryview) -> int:
        if fd != training.loop._state.ledger._fd:
            return real(fd, data)
        calls.append(fd)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return real(fd, data[:5] if len(calls) == 4 else data)

    training = Training(tmp_path)
    monkeypatch.setattr(os, "write", full)
    training.run(1)
    monkeypatch.undo()
    assert training.loop.steps_done == 5
    assert caplog.text.count("is not continued: [Errno 28] No space left on device") == 1
    assert len(calls) == 5
    (path,) = (tmp_path / "ledger").iterdir()
    assert path.read_bytes().endswith(b"]}\n")
    verdict = check(books_in(tmp_path / "ledger"))
    assert (verdict.steps, verdict.ended, verdict.problems) == (1, False, ())
    main(["ledger", "check", str(tmp_path / "ledger")])
    assert "this ledger proves nothing about steps after 1" in capsys.readouterr().out


def test_a_rank_whose_disk_is_full_leaves_a_gap() -> None:
    """The steps that other ranks went on to note are named as missing."""
    books = [book("a", 0, "1:0 2:2 3:4 4:6", world_size=2, end=4), book("a", 0, "1:1 2:3", rank=1, world_size=2)]
    assert check(books).problems[0].startswith("steps 3-4: nothing was written by rank 1 of start a")


def test_an_end_that_is_not_noted_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A proof says up to which step it reaches, where the loop may have gone on without its ledger."""
    with pytest.raises(KeyError):
        Training(tmp_path).run(2, fail_at=8)
    assert main(["ledger", "check", str(tmp_path / "ledger")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "the end of the loop is not recorded: this ledger proves nothing about steps after 7" in said
    assert said[-1] == "each sample counts exactly once, as far as step 7"


def test_only_for_the_sampler_that_counts(tmp_path: Path) -> None:
    """DistributedSampler's way repeats samples by design, and a loop without a sampler knows none."""
    for sampler in (None, ElasticDistributedSampler(range(4))):
        with pytest.raises(ConfigError, match="a ledger needs an ElasticBatchSampler"):
            Loop(tmp_path, sampler=sampler, ledger=tmp_path)
        Loop(tmp_path, sampler=sampler)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`elasticrt ledger check` says 0 for a proof, 1 for a finding, and 2 for what is no ledger."""
    Training(tmp_path).run(2)
    monkeypatch.chdir(tmp_path)
    assert main(["ledger", "check", "ledger"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "epoch 0: 22 of 22 samples",
        "epoch 1: 22 of 22 samples",
        "steps 1 to 10 count; 1 start; 0 steps superseded",
        "each sample counts exactly once",
    ]
    (path,) = (tmp_path / "ledger").iterdir()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], *lines[2:]]))
    assert main(["ledger", "check", "ledger"]) == 1
    assert "WRONG: steps 1: nothing was written by rank 0 of start" in capsys.readouterr().out
    path.write_text("".join([*lines[:3], "damaged\n", *lines[3:]]))
    assert main(["ledger", "check", "ledger"]) == 2
    assert f"{path.name}, line 4: " in capsys.readouterr().err
    for wrong in ("nowhere", str(path), "ckpt"):
        assert main(["ledger", "check", wrong]) == 2
    assert capsys.readouterr().err.count("elasticrt: error: not a ledger that can be checked") == 3


def test_checking_needs_no_torch() -> None:
    """The command runs where only the files are."""
    code = "import sys, elasticrt.cli.audit; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
