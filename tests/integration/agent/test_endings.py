"""How an agent ends: told to, refused, outvoted, or without its etcd. Real processes, real etcd."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from elasticrt.rendezvous.records import Keys
from elasticrt.store.embedded import find
from elasticrt.store.etcd import EtcdStore
from elasticrt.story.run_dir import read
from tests.cluster import TOGETHER, Cluster, gone, kill
from tests.servers import EtcdServer, wheel_binary

SLEEPER = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
print("training", os.environ["ELASTICRT_GENERATION"], flush=True)
open(os.path.join(sys.argv[1], f"{os.environ['ELASTICRT_GENERATION']}-{dist.get_rank()}"), "w").close()
end = time.monotonic() + 120
over = torch.zeros(1)
while not over:
    time.sleep(0.02)
    over += time.monotonic() > end or os.path.exists(os.path.join(sys.argv[1], "finish"))
    dist.broadcast(over, 0)  # Who has seen the file first must not leave the others behind.
dist.destroy_process_group()
"""


class Run(Cluster):
    """Agents whose workers meet in barriers until a file called `finish` appears."""

    def __init__(self, tmp_path: Path, *options: str) -> None:
        self.marks = tmp_path / "marks"
        self.marks.mkdir()
        script = tmp_path / "sleeper.py"
        script.write_text(SLEEPER)
        super().__init__(tmp_path, f"end-{secrets.token_hex(4)}", list(options), [str(script), str(self.marks)])

    def wait_for_training(self, generation: int, ranks: int) -> None:
        """Wait until all ranks of a generation have made their group."""
        names = [f"{generation}-{rank}" for rank in range(ranks)]
        self.wait(f"training in generation {generation}", lambda: all((self.marks / name).exists() for name in names))

    def finish(self) -> None:
        """Let the script end well, on all ranks in the same barrier's turn or the next."""
        (self.marks / "finish").touch()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A real server of the test's own."""
    server = EtcdServer(wheel_binary(), tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


def _keys(server: EtcdServer, run_id: str) -> list[str]:
    store = EtcdStore((server.address,))
    try:
        prefix = f"/elasticrt/{run_id}/"
        return sorted(kv.key.removeprefix(prefix) for kv in store.read(prefix).keys)
    finally:
        store.close()


def test_a_finished_run_leaves_only_its_record(tmp_path: Path, etcd: EtcdServer) -> None:
    """After success no member, report, roster or lease key is left: spec, generation and result tell the story."""
    with Run(tmp_path, "--nnodes", "2", "--etcd", str(etcd.address)) as run:
        run.start("n0")
        run.start("n1")
        run.wait_for_training(1, 2)
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 0}
        assert _keys(etcd, run.run_id) == ["generation", "result/1", "spec"]
        # A late node finds the run finished: nothing to do, and that is success.
        late = run.start("n2")
        assert late.process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_makes_a_node_leave_at_once(tmp_path: Path, etcd: EtcdServer, number: int) -> None:
    """A02, K01: exit code 143, its workers and its key are gone, and the other goes on in the next generation."""
    with Run(tmp_path, "--nnodes", "1:2", *TOGETHER, "--etcd", str(etcd.address)) as run:
        run.start("n0")
        leaving = run.start("n1")
        run.wait_for_training(1, 2)
        workers = list(leaving.worker_pids().values())
        leaving.process.send_signal(number)
        assert leaving.process.wait(15) == 143
        assert gone(workers, 10.0) == []
        assert "members/n1" not in _keys(etcd, run.run_id)
        run.wait_for_training(2, 1)
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 143}


SAVES_WHEN_TOLD = """
import signal, sys, threading
import elasticrt

elasticrt.init()
checkpointer, told = elasticrt.Checkpointer(sys.argv[1]), threading.Event()
checkpointer.begin()
signal.signal(signal.SIGTERM, lambda *_: told.set())
open(sys.argv[1] + ".begun", "w").close()
while not told.wait(0.1):
    pass
checkpointer.save({"step": 7}, step=7)
checkpointer.finish()
"""


def test_a_script_that_saves_when_it_is_told_to_leave(tmp_path: Path) -> None:
    """A02: what a script saves in its own handling of the signal is committed while its agent leaves."""
    script, directory = tmp_path / "saves.py", tmp_path / "ckpt"
    script.write_text(SAVES_WHEN_TOLD)
    with Cluster(tmp_path, f"end-{secrets.token_hex(4)}", [], [str(script), str(directory)]) as cluster:
        leaving = cluster.start("n0")
        cluster.wait("the script runs", directory.with_suffix(".begun").exists)
        leaving.process.terminate()
        assert cluster.ended() == {"n0": 143}
        assert [each["step"] for each in cluster.events("committed")] == [7], cluster.story()


def test_a_second_signal_cuts_the_grace_short(tmp_path: Path) -> None:
    """A04, W10: workers that ignore SIGTERM get a grace time; a second signal ends it at once, without orphans."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up')\ntime.sleep(99)\n"
    )
    with Cluster(tmp_path, f"stubborn-{secrets.token_hex(4)}", ["--stop-timeout", "60"], [str(script)]) as cluster:
        agent = cluster.start("n0")
        cluster.wait("the worker's first words", lambda: "up" in agent.text())
        workers = list(agent.worker_pids().values())
        agent.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            agent.process.wait(1.0)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(10) == 143
        assert gone(workers, 10.0) == []


def test_below_min_nodes_all_end_with_the_same_words(tmp_path: Path, etcd: EtcdServer) -> None:
    """A14, L3: two of three nodes wait for the join timeout, then both end with code 3 and one reason."""
    options = ("--nnodes", "3", "--join-timeout", "2s", "--etcd", str(etcd.address))
    with Run(tmp_path, *options) as run:
        run.start("n0")
        run.start("n1")
        assert run.ended() == {"n0": 3, "n1": 3}
        assert len({event["reason"] for event in run.events("result")}) == 1


def test_a_live_agents_name_is_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    """A10: a second agent with the same --node is refused with the first one's pid; the first is not disturbed."""
    with Run(tmp_path, "--nnodes", "1:2", "--etcd", str(etcd.address)) as run:
        first = run.start("n0")
        run.wait_for_training(1, 1)
        second = run.start("n0")
        assert second.process.wait(30) == 7
        assert re.search(rf"elasticrt: error: .*node n0.*pid {first.pid}\b", second.text())
        assert "Traceback" not in second.text()
        run.finish()
        assert first.process.wait(30) == 0


def test_an_agent_that_meets_in_another_etcd_is_refused(tmp_path: Path, etcd: EtcdServer) -> None:
    """A10: --etcd was left out on one node: it says so, and what is told of the run stays true."""
    with Run(tmp_path, "--nnodes", "1:2") as run:
        first = run.start("n0", "--etcd", str(etcd.address))
        run.wait_for_training(1, 1)
        for name in ("n1", "n0"):
            other = run.start(name)
            assert other.process.wait(60) == 7, other.text()
            assert "the run is alive in another etcd" in other.text()
            assert "Traceback" not in other.text()
        run.finish()
        assert first.process.wait(30) == 0
        assert {each["node"] for each in run.events("agent_started")} == {"n0"}
        assert [each["status"] for each in run.events("result")] == ["succeeded"]


def test_an_agent_whose_lease_has_ended_is_not_in_another_etcd(tmp_path: Path, etcd: EtcdServer) -> None:
    """A04, E04: the only other agent is stopped for longer than its lease; who comes meanwhile waits for it."""
    with Run(tmp_path, "--nnodes", "2", "--lease-ttl", "1s", "--etcd", str(etcd.address)) as run:
        first = run.start("n0")
        run.wait("the first node has joined", lambda: bool(run.events("agent_started")))
        first.process.send_signal(signal.SIGSTOP)
        with closing(EtcdStore((etcd.address,))) as store:
            run.wait("its lease has ended", lambda: not store.read(Keys(run.run_id).members).keys)
        try:
            second = run.start("n1")
            run.wait(
                "the second node has joined or ended",
                lambda: len(run.events("agent_started")) > 1 or second.process.poll() is not None,
            )
            assert second.process.poll() is None, second.text()
        finally:
            first.process.send_signal(signal.SIGCONT)
        run.wait_for_training(1, 2)
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 0}


def test_a_worker_parent_that_was_stopped_goes_on(tmp_path: Path, etcd: EtcdServer) -> None:
    """W08: SIGSTOP to the process that starts and reaps the workers: without it none would ever end."""
    with Run(tmp_path, "--nnodes", "1", "--etcd", str(etcd.address)) as run:
        agent = run.start("n0")
        run.wait_for_training(1, 1)
        children = psutil.Process(agent.pid).children()
        (parent,) = (each for each in children if "elasticrt.bootstrap.fork_server_main" in each.cmdline())
        parent.suspend()
        run.wait("the parent is stopped", lambda: parent.status() == psutil.STATUS_STOPPED)
        run.wait("the parent goes on", lambda: parent.status() != psutil.STATUS_STOPPED)
        run.finish()
        assert run.ended() == {"n0": 0}


def test_a_dead_agents_name_is_taken_over_at_once(tmp_path: Path, etcd: EtcdServer) -> None:
    """A09: the same node again within its old lease; the dead life's key is replaced, not waited for."""
    with Run(tmp_path, "--nnodes", "1", "--lease-ttl", "60", "--etcd", str(etcd.address)) as run:
        first = run.start("n0")
        run.wait_for_training(1, 1)
        kill(first.pid)
        first.process.wait(10)
        again = run.start("n0")
        run.wait_for_training(2, 1)
        run.finish()
        assert again.process.wait(30) == 0


def test_other_options_are_refused_with_the_difference(tmp_path: Path, etcd: EtcdServer) -> None:
    """A15, S13: a node with other options, or another role, is told which ones, and the run goes on."""
    with Run(tmp_path, "--etcd", str(etcd.address)) as run:
        first = run.start("n0", "--nnodes", "1:2")
        run.wait_for_training(1, 1)
        other = run.start("n1", "--nnodes", "1:3")
        assert other.process.wait(30) == 7
        assert "--max-nodes: 3 here, 2 in the run" in other.text()
        other = run.start("n2", "--nnodes", "1:2", "--role", "evaluator")
        assert other.process.wait(30) == 7
        assert "--role: 'evaluator' here, 'default' in the run" in other.text()
        run.finish()
        assert first.process.wait(30) == 0


@pytest.mark.slow
def test_an_outage_of_etcd_restarts_nobody(tmp_path: Path, etcd: EtcdServer) -> None:
    """E04, L7: etcd is stopped and comes back after more than a lease term: the workers run on throughout."""
    with Run(tmp_path, "--nnodes", "2", "--lease-ttl", "2", "--etcd", str(etcd.address)) as run:
        agents = [run.start("n0"), run.start("n1")]
        run.wait_for_training(1, 2)
        pids = [pid for agent in agents for pid in agent.worker_pids().values()]
        etcd.kill()
        assert gone(pids, 4.0) == pids
        etcd.start()
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 0}
        assert [event["number"] for event in run.events("generation")] == [1, 1]


def test_the_embedded_etcd_dies_and_the_run_goes_on(tmp_path: Path) -> None:
    """The machine's own etcd is killed: agents start a fresh one and note it, numbers go on, and the run succeeds."""
    with Run(tmp_path, "--nnodes", "2", "--lease-ttl", "2") as run:
        run.start("n0")
        run.start("n1")
        run.wait_for_training(1, 2)
        served = find(run.run_id)
        assert served is not None
        (etcd,) = psutil.Process(served.keeper_pid).children()
        kill(etcd.pid)
        run.wait_for_training(2, 2)
        fresh = find(run.run_id)
        assert fresh is not None
        assert read(run.run_dir).run.etcd == str(fresh.address)
        run.finish()
        assert run.ended() == {"n0": 0, "n1": 0}


def test_an_agent_that_was_stopped_past_the_end_of_the_run_ends_with_it(tmp_path: Path) -> None:
    """Its machine's etcd has ended with the run, whose result the other node's log tells: nothing runs again."""
    with Run(tmp_path, "--nnodes", "1:2", "--lease-ttl", "2", *TOGETHER) as run:
        run.start("n0")
        stopped = run.start("n1")
        run.wait_for_training(1, 2)
        kill(stopped.pid, signal.SIGSTOP)
        run.finish()
        run.agents["n0"].process.wait(60)
        served = find(run.run_id)
        assert served is None or gone([served.keeper_pid], 30) == []
        kill(stopped.pid, signal.SIGCONT)
        assert run.ended() == {"n0": 0, "n1": 0}
        assert "training 3" not in stopped.text()
        assert [event["status"] for event in stopped.events if event["event"] == "result"] == ["succeeded"]
        assert not any(event.get("fresh") for event in stopped.events)


def test_no_etcd_is_one_line_and_code_4(tmp_path: Path) -> None:
    """An endpoint where nothing listens is said in one line, without a traceback, and nothing is left running."""
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "elasticrt", "run", "--etcd", "127.0.0.1:1", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4
    assert len(done.stderr.strip().splitlines()) == 1
    assert "elasticrt: error: etcd cannot be reached" in done.stderr


def test_the_report_names_the_cause(tmp_path: Path) -> None:
    """W01, W13: when the restarts are spent the report shows rank, exit code, exception and where the log is."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise ValueError('the moon is full')\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "elasticrt", "run", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("rank 1 failed first") :]
    assert "exit code 1: ValueError: the moon is full" in report
    assert "generation 2" in report
    log = Path(re.search(r"log: (.+)", report)[1])
    assert "the moon is full" in log.read_text()


@pytest.mark.slow
def test_fresh_does_not_undo_what_a_run_has_done(tmp_path: Path, etcd: EtcdServer) -> None:
    """F13: --fresh with the id of a run that has a head: it goes on from there, and says so and what to do instead."""
    script = tmp_path / "save.py"
    script.write_text(
        "import elasticrt; ctx = elasticrt.init(); keeper = elasticrt.Checkpointer('ckpt'); state = keeper.restore()\n"
        "print('at', 0 if state is None else state.step)\n"
        "keeper.save({'a': 1}, step=7 if state is None else state.step + 7); keeper.wait()\n"
    )
    command = [sys.executable, "-m", "elasticrt", "run", "--etcd", str(etcd.address), "--fresh", "--again"]
    said = []
    for run_id in ("known", "known", "unknown"):
        done = subprocess.run(
            [*command, "--run-id", f"{run_id}-{tmp_path.name}", str(script)],
            cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        said.append(re.findall(r"at \d+", done.stdout) + re.findall(r"step 7: --fresh", done.stderr))
    assert said == [["at 0"], ["at 7", "step 7: --fresh"], ["at 0"]]


def test_a_damaged_checkpoint_is_told_of_once(tmp_path: Path) -> None:
    """F07: all ranks end with the same error: rank 0 says it, the others at most where its traceback is.

    If rank 0 fails first, another may be ended before it has said so.
    """
    script = tmp_path / "save.py"
    script.write_text(
        "import elasticrt; ctx = elasticrt.init(); keeper = elasticrt.Checkpointer('ckpt'); keeper.restore()\n"
        "keeper.save({'a': 1}, step=7); keeper.wait()\n"
    )
    command = [sys.executable, "-m", "elasticrt", "run", "--nproc-per-node", "3", str(script)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    (payload,) = (tmp_path / "ckpt").glob("*.pt")
    payload.write_bytes(bytes(payload.stat().st_size))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5
    said = [line for line in done.stderr.splitlines() if re.match(r"\[rank \d\] rank \d", line)]
    others = [line for line in said if not line.startswith("[rank 0]")]
    assert ["no checkpoint can be used" in line for line in said if line not in others] == [True], done.stderr
    assert all("ends with the CheckpointError of rank 0" in line for line in others), done.stderr
    assert "rank 0 failed first" in done.stderr, done.stderr


def test_a_run_that_has_succeeded_is_not_run_again(tmp_path: Path) -> None:
    """The machine's own etcd has ended with the run; its logs tell what became of it. --again runs it once more."""
    (tmp_path / "script.py").write_text("print('at work')\n")
    command = [sys.executable, "-m", "elasticrt", "run", "--run-id", f"once-{tmp_path.name}"]
    said = []
    for more in ([], [], ["--again"]):
        done = subprocess.run(
            [*command, *more, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        said.append(("at work" in done.stdout, "has succeeded already" in done.stderr))
    assert said == [(True, False), (False, True), (True, False)]


TUTORIAL = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Trainer:
    def __init__(self, model, optimizer, path):
        self.path, self.first, self.optimizer = path, 0, optimizer
        if os.path.exists(path):
            kept = torch.load(path)
            model.load_state_dict(kept["model"])
            self.first = kept["epoch"] + 1
        self.model = DistributedDataParallel(model)

    def train(self, epochs):
        for epoch in range(self.first, epochs):
            for _ in range(8):
                self.optimizer.zero_grad()
                self.model(torch.rand(32, 20)).square().mean().backward()
                self.optimizer.step()
            if dist.get_rank() == 0:
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch}, self.path)

def main():
    dist.init_process_group("gloo")
    model = torch.nn.Linear(20, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 1e-3), "snapshot.pt")
    trainer.train(3)
    dist.destroy_process_group()

main()
"""


def alone(tmp_path: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A run of two workers on this machine, to its end."""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "elasticrt", "run", "--nproc-per-node", "2", *options, "script.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)


def test_a_group_that_goes_with_a_local_variable_hangs_nobody(tmp_path: Path) -> None:
    """A trainer in a function holds the last reference to gloo's group: under torch 2.13 half of such runs hung."""
    done = alone(tmp_path, TUTORIAL)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_worker_that_does_not_end_is_named_and_has_a_bound(tmp_path: Path) -> None:
    """L5: when others have ended and one does nothing, people hear who and where, and in the end it has failed."""
    script = "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(900)\n"
    done = alone(tmp_path, script, "--max-restarts", "0", "--hang-timeout", "7")
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert re.search(r"rank 0 ended 5 s ago; rank 1 still runs .*: script.py:3 in <module>", said)
    assert re.search(r"rank 1 on \S+ did not end, and did nothing for 7 s, after rank 0 had", said)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_node_whose_worker_does_not_end_after_that_of_another(tmp_path: Path, etcd: EtcdServer, first: int) -> None:
    """L5: the worker that does nothing is on another node than the one that has ended, which leads, or does not."""
    script, last = tmp_path / "script.py", 1 - first
    script.write_text(f"import os, time\nif os.environ['RANK'] == '{last}':\n    time.sleep(900)\n")
    options = ["--nnodes", "2", "--max-restarts", "0", "--hang-timeout", "7", "--etcd", str(etcd.address)]
    with Cluster(tmp_path, f"end-{secrets.token_hex(4)}", options, [str(script)]) as cluster:
        cluster.start("n0", "--node-rank", "0")
        cluster.wait("n0 leads", lambda: "members/n0" in _keys(etcd, cluster.run_id))
        cluster.start("n1", "--node-rank", "1")
        assert cluster.ended(60) == {"n0": 1, "n1": 1}, cluster.story()
        failed = {each["text"].partition(" in generation")[0] for each in cluster.events("failure")}
    assert failed == {f"rank {last} on n{last} did not end, and did nothing for 7 s, after those on n{first} had"}


READS_AHEAD = """
import elasticrt

elasticrt.init()
loop = elasticrt.Loop("ckpt")
for _ in loop.epochs(9):
    for _ in list(loop.batches([1, 2, 3])):
        with loop.step():
            pass
"""


@pytest.mark.parametrize(
    ("script", "generations"),
    [("x = = 1", 1), ("import not_there", 1), (READS_AHEAD, 1), ("import torch\nraise ValueError('no data')", 2)],
)
def test_what_is_certain_to_fail_again_ends_the_run(tmp_path: Path, script: str, generations: int) -> None:
    """W01: a script that cannot be compiled or imported, or reads batches ahead, is tried once; the same error before a
    step at most twice."""
    done = alone(tmp_path, script)
    assert done.returncode == 1
    assert re.search(rf"in generation {generations}(, after step \d+)?\n", done.stdout + done.stderr)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "json.not_there"],
        ["--start-method", "spawn", "wrong.py"],
        ["asks.py"],
        ["--no-python", "./none.sh"],
    ],
    ids=" ".join,
)
def test_what_cannot_run_is_tried_once(tmp_path: Path, words: list[str]) -> None:
    """W01: whichever way workers are started: the run ends with the first, and says what is to be done."""
    (tmp_path / "wrong.py").write_text("x = = 1")
    (tmp_path / "asks.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('n')\np.parse_args()"
    )
    (tmp_path / "none.sh").write_text("exit 0")
    (tmp_path / "none.sh").chmod(0o755)
    command = [sys.executable, "-m", "elasticrt", "run", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "in generation 1\n" in done.stderr
    assert "no restart cures this" in done.stderr


@pytest.mark.parametrize("mode", [0o644, None])
def test_a_program_that_is_none_is_refused_before_anything_starts(tmp_path: Path, mode: int | None) -> None:
    """L1: a missing program, or one without execute permission, is a wrong option."""
    if mode is not None:
        (tmp_path / "program").write_text("exit 0")
        (tmp_path / "program").chmod(mode)
    command = [sys.executable, "-m", "elasticrt", "run", "--no-python", "./program"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "not a program (./program)" in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_who_ends_early_is_the_cause_whichever_rank_it_is(tmp_path: Path, rank: str) -> None:
    """W12: one rank ends with 0 while the other is in a collective: that one is named, also rank 0, which lingers."""
    script = (
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        f"if os.environ['RANK'] == '{rank}':\n"
        "    sys.exit(0)\n"
        "for _ in range(10):\n"
        "    dist.all_reduce(torch.ones(1))\n"
    )
    done = alone(tmp_path, script, "--max-restarts", "0")
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert re.search(rf"failed: rank {rank} on \S+: exited with code 0 while other ranks were in a collective", said), (
        said
    )
