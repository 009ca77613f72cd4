"""Workers that live and make no steps: found by their agents, shown with their stacks, ended and started anew.

Real processes. Rank 1 of two nodes gets stuck in one of several ways in the first generation, after enough steps.
"""

from __future__ import annotations

import re
import secrets
import signal
import time
from pathlib import Path

import pytest

from elasticrt.event_log import records
from elasticrt.ipc.proc import state_of
from elasticrt.story.sentences import happened
from tests.cluster import Cluster, kill
from tests.integration.trouble.stepping import Stepping
from tests.unit.story.told import story_of

SCRIPT = """
import contextlib, ctypes, os, signal, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

def stuck_here():
    while not os.path.exists(os.path.join(directory, "goes-on")):
        time.sleep(0.1)

def keeps_the_interpreter():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

WAYS = {
    "sleeps": stuck_here,
    "keeps-the-interpreter": keeps_the_interpreter,
    "is-stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "waits-for-more-than-others": dist.barrier,
}
class Data(TensorDataset):
    def __getitem__(self, at):
        if way == "draws" and ctx.rank == ctx.generation == 1:
            stuck_here()
        return super().__getitem__(at)

directory, way, always = sys.argv[1:]
ctx = elasticrt.init()
data = Data(torch.randn(320, 2), torch.randn(320, 1))
sampler = elasticrt.ElasticBatchSampler(data, 8)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
ours = {"sampler": sampler, "model": model, "optimizer": optimizer}
loop = elasticrt.Loop(os.path.join(directory, "ckpt"), every="10 steps", **ours)
for epoch in loop.epochs(2):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        with loop.step() if way.startswith("in-place") else contextlib.nullcontext():
            F.mse_loss(model(x), y).backward()
            optimizer.step(); optimizer.zero_grad()
            time.sleep(0.02)
            if way == "in-place-all" and loop.steps_done == 25 and ctx.generation == 1:
                stuck_here()
        if way == "in-place-pause" and loop.steps_done == 25:
            with loop.pause("evaluate"):
                if ctx.rank == 1 and always in ("kill", "away") and ctx.generation == 1:
                    if always == "away":
                        os.kill(int(open(f"/proc/{os.getppid()}/stat").read().split()[3]), signal.SIGSTOP)
                    os.kill(os.getpid(), signal.SIGKILL)
                if always == "slow":
                    time.sleep(5)
                ctx.sum(1)
        if loop.steps_done == 25 and ctx.rank == 1 and way in WAYS and (ctx.generation == 1 or always == "always"):
            WAYS[way]()
    if way == "pauses":
        with loop.pause("evaluate"):
            time.sleep(5.0)
            ctx.sum(1)
"""


def _run(tmp_path: Path, way: str, *options: str, always: str = "once") -> Cluster:
    script = tmp_path / "stuck.py"
    script.write_text(SCRIPT)
    given = ["--nnodes", "2", "--rdzv-conf", "last_call_timeout=3", "--hang-timeout", "2s", *options]
    return Cluster(tmp_path, f"hang-{secrets.token_hex(4)}", given, [str(script), str(tmp_path), way, always])


def _stacks(run: Cluster) -> dict[int, str]:
    """The last stacks of each rank, as text."""
    found = {}
    for event in run.events("stalled"):
        assert event["final"] in (True, False)
        if event["final"]:
            found.update({int(rank): "\n".join(lines) for rank, lines in event["stacks"].items()})
    return found


@pytest.mark.parametrize(
    ("way", "shows"),
    [
        pytest.param(
            "sleeps", r"stuck\.py.* in stuck_here|stuck_here \(.*stuck\.py", id="L5-sleeps", marks=pytest.mark.slow
        ),
        pytest.param(
            "keeps-the-interpreter", r"keeps_the_interpreter", id="W07-keeps-the-interpreter", marks=pytest.mark.slow
        ),
        pytest.param("waits-for-more-than-others", r"in barrier|barrier \(", id="W09-barrier", marks=pytest.mark.slow),
    ],
)
def test_a_hang_is_shown_and_ended(tmp_path: Path, way: str, shows: str) -> None:
    """W07, W08, W09, L5: both nodes show what their workers were doing, and the next generation does it better."""
    with _run(tmp_path, way) as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        stacks = _stacks(run)
        assert set(stacks) == {0, 1}, run.story()
        assert re.search(shows, stacks[1]), stacks[1]
        assert "stuck.py" in stacks[0], stacks[0]
        causes = [(event["number"], event["cause"]) for event in run.events("generation") if event["node"] == "n0"]
        assert [number for number, _ in causes] == [1, 2], causes
        assert re.search(r"no progress for \d+ s after step 2\d", causes[1][1]), causes
        warned = [event for event in run.events("stalled") if not event["final"]]
        assert warned, "people are told at half of the time"
        for rank in (0, 1):
            (path,) = (run.run_dir / "logs" / "generation-1").glob(f"rank-{rank}.*.stacks")
            assert path.read_text()


@pytest.mark.slow
def test_a_loader_that_does_not_begin_is_a_hang(tmp_path: Path) -> None:
    """L5: no first batch comes; after three times the limit all restart, and nothing is said of a pause."""
    with _run(tmp_path, "draws") as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        assert "in stuck_here" in _stacks(run)[1], run.story()
        causes = [event["cause"] for event in run.events("generation") if event["node"] == "n0"]
        assert len(causes) == 2, run.story()
        assert re.search(r"no progress for [6-9] s after step 0", causes[1]), causes
        for path in (run.run_dir / "logs" / "generation-1").glob("*.stacks"):
            assert path.read_text().count("without a step:") == 2, "a warning and the failure"


@pytest.mark.parametrize(
    ("way", "words"),
    [
        pytest.param("sleeps", r"is in the script's own code: .* in stuck_here; rank 0 waits for it", id="L5-sleeps"),
        pytest.param(
            "waits-for-more-than-others",
            r"waits in a collective: stuck\.py",
            id="W09-barrier",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_one_that_the_others_wait_for_is_named(tmp_path: Path, way: str, words: str) -> None:
    """W09, L5: long before the time of a hang rank, node and place in the script are told; nothing is ended.

    Where the steps go on, its node tells so at once, and the report still tells of the hang.
    """
    with _run(tmp_path, way, "--hang-timeout", "10m") as run:
        run.start("n0")
        run.start("n1")
        run.wait("somebody is named", lambda: bool(run.events("culprit")))
        (named,) = run.events("culprit")
        (second,) = [name for name, agent in run.agents.items() if 1 in agent.worker_pids()]
        assert (named["ranks"], named["nodes"]) == ([1], [second]), run.story()
        assert re.search(rf"^rank 1 on {second} {words}", named["reason"]), named
        assert [event["number"] for event in run.events("generation") if event["node"] == "n0"] == [1]
        told = story_of(*map(records, run.run_dir.glob("events-*.jsonl")))
        assert told.standstill_sentence(time.time()).endswith(named["reason"]), "the report says so while it lasts"
        if way == "sleeps":
            (tmp_path / "goes-on").touch()
            assert run.ended() == {"n0": 0, "n1": 0}, run.story()
            told = story_of(*map(records, run.run_dir.glob("events-*.jsonl")))
            assert [each.text for each in happened(told) if named["reason"] in each.text], run.story()
            steps = [each["step"] for each in run.events("progress") if each["node"] == second and each["step"] > 25]
            assert min(steps) < max(steps), "one when they went on, one at the end"


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_ended(tmp_path: Path) -> None:
    """W08: what a signal has stopped is found without waiting for the time of a hang, in any script with a Loop."""
    with _run(tmp_path, "is-stopped", "--hang-timeout", "10m") as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        causes = [event["cause"] for event in run.events("generation") if event["node"] == "n0"]
        assert len(causes) == 2, run.story()
        assert re.fullmatch(r"rank 1 on n[01] is stopped \(SIGSTOP\)", causes[1]), causes
        (stood,) = run.events("stalled")
        assert (stood["step"], stood["final"]) == (25, True), stood
        own = story_of(records(run.run_dir / f"events-{stood['node']}.jsonl"))
        assert [trouble.what for trouble in own.failures.all] == causes[1:]
        assert own.spent()["detect"] >= 1.0, "its own events alone say that it did not train"


@pytest.mark.slow
def test_the_last_report_of_a_hang_shows_all_nodes(tmp_path: Path) -> None:
    """L5: with the budget spent the run ends with code 1, and its report has the stacks of every node's workers."""
    with _run(tmp_path, "sleeps", "--max-restarts", "0", always="always") as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 1, "n1": 1}, run.story()
        (failure,) = run.events("failure")
        assert "stuck_here" in failure["text"], failure["text"]
        assert {"rank 0 on n", "rank 1 on n"} <= set(re.findall(r"rank [01] on n", failure["text"])), failure["text"]
        assert run.events("result")[-1]["reason"].count("no progress") == 1
        (trouble,) = story_of(*map(records, run.run_dir.glob("events-*.jsonl"))).failures.all
        assert "no progress" in trouble.what, "one hang is one failure of the report"


@pytest.mark.slow
def test_workers_known_to_hang_are_not_asked_to_go_on(tmp_path: Path) -> None:
    """L5: where all hang in a step that could be undone, they are ended at once: one hang is one generation."""
    with _run(tmp_path, "in-place-all") as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        causes = {event["number"]: event["cause"] for event in run.events("generation")}
        assert sorted(causes) == [1, 2], run.story()
        assert "no progress" in causes[2]


@pytest.mark.slow
def test_a_long_pause_is_told_with_the_places_of_its_workers(tmp_path: Path) -> None:
    """L5: nothing in a pause is a hang; after the time of one the stacks are kept."""
    with _run(tmp_path, "in-place-pause", always="slow") as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        kept = list((run.run_dir / "logs" / "generation-1").glob("*.stacks"))
        assert {path.name.split(".")[1] for path in kept} == {"n0", "n1"}, run.story()
        assert all("stuck.py" in path.read_text() for path in kept)
        assert {event["number"] for event in run.events("generation")} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 1])
def test_a_worker_that_dies_in_a_pause_costs_no_step(tmp_path: Path, nodes: int) -> None:
    """L5: the others' evaluation fails with it; they leave their newest step behind, and the next generation has it."""
    where = ["--nnodes", str(nodes), "--nproc-per-node", str(4 // nodes - 1)]
    with _run(tmp_path, "in-place-pause", *where, always="kill") as run:
        for number in range(nodes):
            run.start(f"n{number}")
        assert set(run.ended().values()) == {0}, run.story()
        begun = {event["number"]: event["resume_step"] for event in run.events("generation")}
        assert begun.pop(1) == 0
        assert begun, run.story()
        assert max(begun.values()) == 25, run.story()
        assert all("SIGKILL" in event["cause"] for event in run.events("generation") if event["number"] > 1), (
            run.story()
        )


@pytest.mark.slow
def test_the_newest_step_waits_for_an_agent_that_is_away(tmp_path: Path) -> None:
    """L5: the agent hears of a loss in a pause and of the survivors' newest step at once: none is done again."""
    with _run(tmp_path, "in-place-pause", "--nnodes", "1", "--nproc-per-node", "3", always="away") as run:
        agent = run.start("n0")
        run.wait("it is stopped", lambda: state_of(agent.pid) == "T")
        time.sleep(1.0)
        kill(agent.pid, signal.SIGCONT)
        assert run.ended() == {"n0": 0}, run.story()
        begun = [event["resume_step"] for event in run.events("generation")]
        assert (begun[0], begun[-1]) == (0, 25), run.story()


@pytest.mark.slow
def test_a_pause_is_no_hang(tmp_path: Path) -> None:
    """L5: an evaluation that takes longer than the time for a hang is left alone when it is in `loop.pause`."""
    with _run(tmp_path, "pauses", "--hang-timeout", "1s") as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 0, "n1": 0}, run.story()
        assert run.events("stalled") == []
        assert {event["number"] for event in run.events("generation")} == {1}


@pytest.mark.slow
def test_a_node_that_stands_still_is_left_out_before_its_lease_ends(tmp_path: Path) -> None:
    """A06, L1: of three nodes one is stopped as a whole; the lease lasts for a minute, but its silence tells."""
    with Stepping(tmp_path, "--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=3", "--lease-ttl", "60") as run:
        agents = run.start_many(["n0", "n1", "n2"], steps=10)
        run.wait("all are in", lambda: len(run.events("generation")[-1]["nodes"]) == 3)
        number = run.number()
        run.wait_for_steps(10, generation=number)
        stopped = agents[2]
        pids = [stopped.pid, *stopped.worker_pids().values()]
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        run.wait_for_steps(5, generation=number + 1, timeout_s=40)
        assert sorted(run.events("generation")[-1]["nodes"]) == ["n0", "n1"]
        for pid in pids:
            kill(pid, signal.SIGCONT)
        run.wait("it is back", lambda: sorted(run.events("generation")[-1]["nodes"]) == ["n0", "n1", "n2"])
        run.wait_for_steps(5, generation=run.number())
        run.finish()
        assert set(run.ended().values()) == {0}, run.story()
