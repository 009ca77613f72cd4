"""What scripts do: in each way of writing a training loop a rank is killed, and the others live on, in place.

One agent has three workers. One of them kills itself at a point of a step; its replacement sets up beside the training
and is let in at step 30 or soon after. What is compared are the weights of all three at the end, with those of the same
script, undisturbed and alone, and the steps that each process has finished: none is lost, and none is done again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticrt import Checkpointer
from tests.chaos.ways import SAMPLES, STEPS, WAYS
from tests.cluster import REPOSITORY, Cluster

SCRIPT = REPOSITORY / "tests" / "chaos" / "ways.py"
COMPILED = ("compiled", "compiled_inside")
NOT_DEFINED = ("drawn_by_rank", "no_sync", "streamed", "strided")
"""Here other ranks mean other samples, or what a lost rank had not told the others yet: no other run is the same."""

WALK = """
import json, os, signal
from pathlib import Path
import torch, torch.distributed as dist, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP

ctx = elasticrt.init()
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", every="1000 steps", model=model, optimizer=optimizer)
first, trained, word = ctx.generation == 1, [], torch.zeros(1)
rank = ctx.rank
for _ in loop.epochs(1):
    for number in loop.batches(range(12)):
        with loop.step():
            loses = first and ctx.generation == 1 and loop.steps_done == 5
            model(torch.ones(1, 1)).sum().backward()
            if loses and ctx.rank == 2:  # Rank 0 steps, and rank 1 never hears of it.
                dist.send(word, 0)
                dist.recv(word, 0)
                os.kill(os.getpid(), signal.SIGKILL)
            elif loses:
                dist.recv(word, 2)
            optimizer.step()
            optimizer.zero_grad()
            if loses:
                dist.send(word, 2)
        if loop.complete:
            trained.append(number)
if first:
    Path(f"trained-{rank}").write_text(json.dumps(trained))
"""

SEVERAL = """
import os, signal, time
import torch, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP

ctx = elasticrt.init()
model, other = DDP(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
loop = elasticrt.Loop("first", every="5 steps", model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01))
second = elasticrt.Loop("second", every="5 steps", model=other)
best = elasticrt.Checkpointer("best")
best.restore()
is_victim = ctx.rank == 0 and ctx.generation == 1
for _ in loop.steps(100_000):
    if ctx.generation > 2 and loop.steps_done % 5 == 0:
        break
    with loop.step():
        model(torch.ones(1, 1)).sum().backward()
        if is_victim and loop.steps_done == 12:
            os.kill(os.getpid(), signal.SIGKILL)
    if loop.complete and loop.steps_done % 5 == 0:
        best.save({"steps": loop.steps_done}, step=1000 * loop.steps_done)
        best.wait()
    time.sleep(0.01)
best.save({"steps": loop.steps_done}, step=1000 * loop.steps_done)
for _ in second.steps(10):
    with second.step():
        ctx.sum(1)
"""

Case = tuple[str, int, int, str]
FAST: tuple[Case, ...] = (
    ("plain", 1, 11, "backward"),
    ("subgroups", 2, 11, "forward"),
    ("drawn_by_hand", 0, 10, "backward"),
    ("caught_and_stepped", 1, 11, "begin"),
    ("scheduled_after", 0, 11, "backward"),
    ("changed_early", 1, 9, "backward"),
    ("two_optimizers", 1, 11, "stepped"),
)
SLOW: tuple[Case, ...] = (
    ("gan", 1, 12, "stepped"),
    ("changed_since", 1, 25, "backward"),
    ("caught", 2, 11, "begin"),
    ("frozen", 1, 12, "backward"),
    ("plain", 0, 17, "begin"),
    ("plain", 2, 9, "stepped"),
    ("plain", 1, 0, "backward"),
    ("micro_batches", 1, 10, "backward"),
    ("stateful_loader", 1, 12, "backward"),
    ("loader_workers", 2, 13, "forward"),
    ("persistent_workers", 0, 14, "begin"),
    ("subgroups", 1, 10, "begin"),
    ("gan", 0, 7, "backward"),
    ("averaged", 2, 9, "stepped"),
    ("scaled", 1, 10, "backward"),
    ("scaled", 2, 11, "stepped"),
    ("accumulated", 1, 10, "backward"),
    ("no_sync", 0, 11, "begin"),
    ("evaluated", 1, 13, "backward"),
    ("early", 1, 10, "backward"),
    ("own_rate", 2, 10, "backward"),
    ("summed_late", 1, 12, "stepped"),
    ("in_a_closure", 1, 12, "backward"),
    ("outside", 1, 12, "backward"),
    ("compiled", 1, 10, "begin"),
    ("compiled_inside", 2, 12, "backward"),
    ("norm_of_all", 1, 10, "forward"),
    ("drawn_by_rank", 1, 10, "backward"),
    ("strided", 1, 12, "backward"),
    ("without_sampler", 1, 12, "backward"),
    ("frozen", 0, 8, "begin"),
    ("caught", 0, 12, "backward"),
    ("caught_and_stepped", 0, 12, "backward"),
)


def _name(case: Case) -> str:
    return "-".join(map(str, case))


Notes = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Notes]:
    """Every script's notes, undisturbed, in a world of one. Compiling is left to the slow tests' own processes."""
    directory = tmp_path_factory.mktemp("alone")
    names = [name for name in WAYS if name not in (*NOT_DEFINED, *COMPILED)]
    subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), *names],
        check=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
    )
    found = {name: _notes(directory / name) for name in names}
    return found | dict.fromkeys(COMPILED, found["simple"])


def _notes(directory: Path) -> Notes:
    """What each process has written down, by process id."""
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
        for path in directory.glob("[0-9]*.jsonl")
    }


def _check_ends(directory: Path, alone: Notes) -> None:
    """All three processes end with the weights of the same script, undisturbed and alone."""
    ends = [each[-1] for each in _notes(directory).values() if each and "end" in each[-1]]
    ((*_, reference),) = alone.values()
    assert len(ends) == 3
    for end in ends:
        assert end["end"] == pytest.approx(reference["end"], rel=0, abs=1e-11)


def _check(tmp_path: Path, case: Case, alone: dict[str, Notes]) -> None:
    name, victim, step, point = case
    options = ["--nproc-per-node", "3"]
    script = [str(SCRIPT), name, str(tmp_path), str(victim), str(step), point]
    with Cluster(tmp_path, f"way-{secrets.token_hex(4)}", options, script) as cluster:
        cluster.start("node")
        assert cluster.ended(150 if name in COMPILED else 60) == {"node": 0}, cluster.story()
        numbers = [event["number"] for event in cluster.events("generation")]
        assert numbers == [1, 2, 3], cluster.story()
    notes = _notes(tmp_path)
    ends = {pid: each[-1] for pid, each in notes.items() if each and "end" in each[-1]}
    assert sorted(end["rank"] for end in ends.values()) == [0, 1, 2], cluster.story()
    survivors = [pid for pid in ends if not notes[pid][0]["beside"]]
    assert len(survivors) == 2, "they went on in place: their processes are the first ones"
    (expected,) = {tuple(end["end"]) for end in ends.values()}
    (steps,) = {end["steps"] for end in ends.values()}
    finished = {pid: [note["step"] for note in each if "step" in note] for pid, each in notes.items()}
    whole, less = sorted((finished[pid] for pid in survivors), key=len, reverse=True)
    assert whole == list(range(1, steps + 1)), "no step is lost, none done again"
    # One survivor may have finished the step in which the rank was lost, or the one before, before the other, which
    # takes it over: a step whose optimizer has not begun when a rank is lost is not trusted.
    assert less in (whole, *([each for each in whole if each != number] for number in (step, step + 1)))
    (newcomer,) = set(ends) - set(survivors)
    assert finished[newcomer] == list(range(finished[newcomer][0], steps + 1))
    # It is waited for after step LET_IN. On a busy machine it is ready before.
    assert finished[newcomer][0] > step
    if name not in NOT_DEFINED:
        ((*_, reference),) = alone[name].values()
        assert reference["steps"] == steps
        assert list(expected) == pytest.approx(reference["end"], rel=0, abs=1e-11)
    if point in ("begin", "forward") and any("samples" in note for note in notes[survivors[0]]):
        _check_samples(notes)


def _check_samples(notes: Notes) -> None:
    """Each epoch's samples were trained once each, by the ranks together: no batch of an old slicing came through."""
    trained: dict[int, list[int]] = {}
    done = max(note["step"] for each in notes.values() for note in each if "step" in note)
    assert done == STEPS
    for each in notes.values():
        for note in each:
            if "samples" in note:
                trained.setdefault(note["epoch"], []).extend(note["samples"])
    for samples in trained.values():
        assert sorted(samples) == list(range(SAMPLES))


@pytest.mark.parametrize("case", FAST, ids=_name)
def test_survivors_live_on(tmp_path: Path, alone: dict[str, Notes], case: Case) -> None:
    """W02, S5: in the README's script, with subgroups, two models, own data, frozen layers, errors that are caught."""
    _check(tmp_path, case, alone)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=_name)
def test_in_every_way(tmp_path: Path, alone: dict[str, Notes], case: Case) -> None:
    """W02, S5: whatever the script does between two steps, and at whatever point of one the rank is lost."""
    if case[0] in COMPILED and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a compiler; there is no g++ here")
    _check(tmp_path, case, alone)


@pytest.mark.parametrize("name", ["grouped", pytest.param("wrapped_anew", marks=pytest.mark.slow)])
def test_what_cannot_be_renewed(tmp_path: Path, alone: dict[str, Notes], name: str) -> None:
    """W02: a group of the script's own, or a DDP module that the Loop does not know: one kill is one restart of all."""
    script = [str(SCRIPT), name, str(tmp_path), "1", "12", "backward"]
    with Cluster(tmp_path, f"way-{secrets.token_hex(4)}", ["--nproc-per-node", "3"], script) as cluster:
        cluster.start("node")
        assert cluster.ended(90) == {"node": 0}, cluster.story()
        assert [event["in_place"] for event in cluster.events("generation")] == [False, False], cluster.story()
    _check_ends(tmp_path, alone[name])


@pytest.mark.parametrize("name", ["changed_early", pytest.param("in_a_closure", marks=pytest.mark.slow)])
def test_a_first_step_that_cannot_be_undone(tmp_path: Path, alone: dict[str, Notes], name: str) -> None:
    """W02, S13: no survivor has a state then: all start once more, at the cost of one restart, and nobody is blamed."""
    script = [str(SCRIPT), name, str(tmp_path), "1", "0", "backward"]
    with Cluster(tmp_path, f"way-{secrets.token_hex(4)}", ["--nproc-per-node", "3"], script) as cluster:
        cluster.start("node")
        assert cluster.ended(90) == {"node": 0}, cluster.story()
        generations = cluster.events("generation")
        assert [each["in_place"] for each in generations] in ([False, False], [False, True, False]), cluster.story()
        assert generations[-1]["restarts"] == 1, cluster.story()
        blamed = [each["failure"] for each in cluster.events("worker_ended") if each["failure"]]
        assert blamed and all("killed by SIGKILL" in each for each in blamed), cluster.story()
        assert "Traceback" not in cluster.agents["node"].text(), cluster.story()
    _check_ends(tmp_path, alone[name])


def test_a_stream_cannot_go_on_with_fewer(tmp_path: Path) -> None:
    """W02: nobody knows which samples of an IterableDataset are left: the run ends, and what was trained is saved."""
    script = [str(SCRIPT), "streamed", str(tmp_path), "1", "3", "backward"]
    with Cluster(tmp_path, f"way-{secrets.token_hex(4)}", ["--nproc-per-node", "3"], script) as cluster:
        cluster.start("node")
        assert cluster.ended(90) == {"node": 5}, cluster.story()
        assert [event["step"] for event in cluster.events("committed")] in ([3], [4]), cluster.story()
    assert "an IterableDataset can't be continued at another world size" in cluster.story()


def test_a_step_that_another_rank_has_finished(tmp_path: Path) -> None:
    """W02: without a sampler, whoever takes over a finished step goes on with the next batch."""
    (tmp_path / "walk.py").write_text(WALK)
    with Cluster(tmp_path, f"walk-{secrets.token_hex(4)}", ["--nproc-per-node", "3"], ["walk.py"]) as cluster:
        cluster.start("node")
        assert cluster.ended(60) == {"node": 0}, cluster.story()
    trained = [json.loads((tmp_path / f"trained-{rank}").read_text()) for rank in range(2)]
    assert trained == [list(range(12)), [number for number in range(12) if number != 5]]


def test_whatever_else_saves_does_so_in_every_generation(tmp_path: Path) -> None:
    """A second Loop and a Checkpointer of before a change in place save after it; its numbers are not the run's."""
    script = tmp_path / "several.py"
    script.write_text(SEVERAL)
    with Cluster(tmp_path, f"several-{secrets.token_hex(4)}", ["--nproc-per-node", "3"], [str(script)]) as cluster:
        cluster.start("n")
        assert cluster.ended() == {"n": 0}, cluster.story()
        assert len({event["number"] for event in cluster.events("generation")}) == 3, cluster.story()
        assert not cluster.events("unsaved"), cluster.story()
    reached = {name: Checkpointer(tmp_path / name).restore() for name in ("first", "best", "second")}
    assert reached["second"] is not None and reached["second"].step == 10
    assert reached["first"] is not None and reached["first"].step > 12
    assert reached["best"] is not None and reached["best"].step == 1000 * reached["first"].step
    assert max(event["step"] for event in cluster.events("committed")) == reached["first"].step + 10


@pytest.mark.slow
def test_a_peer_that_is_lost_outside_of_a_step(tmp_path: Path, alone: dict[str, Notes]) -> None:
    """W02: a collective in `pause` fails where no block can be left: all restart, and the result is the same.

    No step is done again, and the tail of the epoch counts once: the scheduler and the variables are checked there.
    """
    script = [str(SCRIPT), "evaluated", str(tmp_path), "1", "20", "evaluate"]
    with Cluster(tmp_path, f"way-{secrets.token_hex(4)}", ["--nproc-per-node", "3"], script) as cluster:
        cluster.start("node")
        assert cluster.ended(90) == {"node": 0}, cluster.story()
    _check_ends(tmp_path, alone["evaluated"])
