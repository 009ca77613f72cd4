"""`elasticrt stop`: a whole run is ended from outside, in order. Real agents."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from elasticrt import events
from elasticrt.event_log import EventLog, records
from elasticrt.ipc.proc import machine
from tests.cluster import TOGETHER, Cluster
from tests.integration.agent.test_narration import LOOP, terminals
from tests.servers import etcd_server, wait_until


def stop(directory: Path, *words: str, command: str = "stop") -> subprocess.CompletedProcess[str]:
    """The command, in the directory of the run."""
    line = [sys.executable, "-m", "elasticrt", command, "--log-dir", "run", *words]
    return subprocess.run(line, cwd=directory, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize(
    "by",
    [
        "the only live run",
        pytest.param("its id", marks=pytest.mark.slow),
        pytest.param("its directory", marks=pytest.mark.slow),
    ],
)
def test_all_nodes_save_and_leave(tmp_path: Path, by: str) -> None:
    """Without an address of etcd: every agent ends with 143, and the same step is on disk for all."""
    (tmp_path / "train.py").write_text(LOOP)
    run_id = f"stop-{secrets.token_hex(4)}"
    with Cluster(tmp_path, run_id, ["--nnodes", "1:2", *TOGETHER], ["train.py"]) as run:
        run.start("n0")
        run.start("n1")
        run.wait("steps", lambda: run.last_step() > 3)
        done = stop(tmp_path, *{"its id": [run_id], "its directory": [f"run/{run_id}"]}.get(by, []))
        assert done.returncode == 0, done.stderr
        assert run.ended() == {"n0": 143, "n1": 143}
        first, last = done.stdout.splitlines()
        assert first == f"run {run_id}: 2 nodes told to save and leave"
        step = last.partition("; step ")[2].partition(" is saved")[0]
        assert last.startswith(f"run {run_id} stopped; step ")
        assert list((tmp_path / "ckpt").glob(f"step-{step.replace(',', '')}-*"))


def test_a_drained_node_that_is_away_does_not_come_back(tmp_path: Path) -> None:
    """K04: a machine is suspended while its node is drained. When it wakes up it hears of that, and leaves."""
    (tmp_path / "train.py").write_text(LOOP)
    options = ["--nnodes", "1:2", "--lease-ttl", "2s", "--join", "now", *TOGETHER]
    with etcd_server() as etcd, Cluster(tmp_path, f"stop-{secrets.token_hex(4)}", options, ["train.py"]) as run:
        for name in ("n0", "n1"):
            run.start(name, "--etcd", str(etcd.address))
        run.wait("steps", lambda: run.last_step() > 3)
        away = psutil.Process(run.agents["n1"].pid)
        away.suspend()
        done = stop(tmp_path, "n1", "--etcd", str(etcd.address), command="drain")
        assert done.returncode == 0, done.stderr
        away.resume()
        assert run.agents["n1"].process.wait(60) == 143, run.story()
        again = run.start("n1", "--etcd", str(etcd.address))
        newest = lambda: run.events("generation")[-1]["nodes"]  # noqa: E731
        run.wait("a new agent of that name joins", lambda: "n1" in newest() and again.worker_pids())
        assert stop(tmp_path, "--etcd", str(etcd.address)).returncode == 0
        assert set(run.ended().values()) == {143}


def test_the_directory_of_another_run_of_that_id(tmp_path: Path) -> None:
    """S14: its agents are in another etcd than the one that is named, so nothing there is theirs."""
    with etcd_server() as etcd:
        log = EventLog("n0", tmp_path / "run" / "calm-fox")
        log.write(events.AgentStarted(1, "calm-fox", "http://127.0.0.1:9", "run/calm-fox", machine(), 1, 1, "another"))
        for command in (["stop"], ["drain", "n0"], ["resize", "1:2"]):
            done = stop(tmp_path, *command[1:], "calm-fox", "--etcd", str(etcd.address), command=command[0])
            assert done.returncode == 2, done.stderr
            assert "the living run of this directory is in another etcd" in done.stderr
            assert "expected --etcd http://127.0.0.1:9" in done.stderr
        log.close()


def test_a_node_that_is_away_does_not_go_on_alone(tmp_path: Path) -> None:
    """N03: a machine is suspended while the run is stopped. When it wakes up it hears of that, and leaves."""
    (tmp_path / "train.py").write_text(LOOP)
    options = ["--nnodes", "1:3", "--lease-ttl", "2s", *TOGETHER]
    with etcd_server() as etcd, Cluster(tmp_path, f"stop-{secrets.token_hex(4)}", options, ["train.py"]) as run:
        for name in ("n0", "n1", "n2"):
            run.start(name, "--etcd", str(etcd.address))
        run.wait("three nodes make steps", lambda: run.last_step() > 3)
        away = run.agents["n2"]
        machine = [psutil.Process(away.pid), *psutil.Process(away.pid).children(recursive=True)]
        for process in machine:
            process.suspend()
        run.wait("the others go on", lambda: run.number() > 1)
        assert stop(tmp_path, "--etcd", str(etcd.address)).returncode == 0
        assert {run.agents[name].process.wait(30) for name in ("n0", "n1")} == {143}
        last = run.last_step()
        for process in machine:
            process.resume()
        assert away.process.wait(30) == 143
        assert run.last_step() == last


@pytest.mark.parametrize("ignored", [False, True], ids=["alone", "under nohup"])
def test_a_hangup(tmp_path: Path, *, ignored: bool) -> None:
    """SIGHUP makes a node leave, unless whoever started it had it ignored: `nohup elasticrt run ... &` runs on."""
    command = [sys.executable, "-m", "elasticrt", "run", "--no-python", "--nproc-per-node=1"]
    command += ["sh", "-c", "echo begun; sleep 600"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    with run:
        try:
            assert run.stdout is not None
            assert any("begun" in line for line in run.stdout)
            run.send_signal(signal.SIGHUP)
            if ignored:
                run.send_signal(signal.SIGTERM)
            assert run.wait(60) == 143
            assert ("SIGHUP received" in run.stdout.read()) == (not ignored)
        finally:
            run.terminate()


FULL = LOOP.replace(
    "        time.sleep(0.05)",
    """
        if number == 2:
            save, full = loop._saving.checkpointer, OSError(28, "No space left on device")
            save.wait()
            save._directory.write = lambda *_: (_ for _ in ()).throw(full)
            print("the disk is full", flush=True)
        time.sleep(0.05)
""",
).replace('"ckpt"', '"ckpt", every="1 steps"')


def test_the_last_save_fails(tmp_path: Path) -> None:
    """A01: the agent of rank 0 and `stop` end with 5, and say up to where the run is saved; the other claims nothing.

    It may have left before the save fails.
    """
    with terminals(tmp_path, FULL, "ab", "--nnodes", "2", "--log-dir", "run") as agents:
        wait_until(lambda: any("could not be saved: [Errno 28]" in each.text() for each in agents), "a save fails", 60)
        done = stop(tmp_path)
        codes = {each.ended(): each for each in agents}
    assert set(codes) == {5, 143}
    said = r"step \d+ is saved, steps? [\d to]+ (is|are) not"
    assert (done.returncode, done.stderr) == (5, ""), done.stderr
    assert re.search(f"run said-.* stopped; {said}", done.stdout), done.stdout
    text = codes[5].text()
    assert "No space left on device" in text
    assert re.search(said, text), text
    assert text.splitlines()[-1].startswith("elasticrt: to go on: the same command, with --run-id said-")
    known = r"step \d+ is saved; the node of rank 0 says whether step \d+ is saved; to go on: the same command"
    assert re.search(known, codes[143].text()), codes[143].text()


SLOW = """
import time, torch, elasticrt
elasticrt.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", model=model, optimizer=optimizer)
for step in loop.steps(10_000):
    if step == 5:
        loop._saving.checkpointer._directory.write = lambda *_: time.sleep(600)
        print("a save takes long", flush=True)
    with loop.step():
        model(torch.randn(4, 2)).mean().backward()
        optimizer.step()
        time.sleep(0.05)
"""


def test_the_last_save_takes_too_long(tmp_path: Path) -> None:
    """K04: the node of rank 0 names the option that gives a save more time, and ends with 5."""
    with terminals(tmp_path, SLOW, "ab", "--nnodes", "2", "--drain-timeout", "3s", "--log-dir", "run") as agents:
        wait_until(lambda: all("a save takes long" in each.text() for each in agents), "steps", 60)
        assert stop(tmp_path).returncode == 5
        codes = {each.ended(): each for each in agents}
    assert set(codes) == {5, 143}
    said = "leaving: not handed over within 3 s, as a save takes longer: allow for it by --drain-timeout\n"
    assert said in codes[5].text(), codes[5].text()


@pytest.mark.slow
def test_a_drain_says_what_is_lost_with_the_only_node_that_has_trained(tmp_path: Path) -> None:
    """Its worker hangs, and the other node stands by: exit code 5, which steps are not saved, and the run goes on."""
    hang = "        if number == 5:\n            print('it hangs', flush=True)\n            time.sleep(600)\n"
    options = ("--nnodes", "1:1", "--drain-timeout", "1s", "--log-dir", "run")
    with terminals(tmp_path, LOOP + hang, "ab", *options) as agents:
        wait_until(lambda: sorted("it hangs" in each.text() for each in agents) == [False, True], "one hangs", 60)
        wait_until(lambda: any("standing by here" in each.text() for each in agents), "the other stands by", 60)
        hung = next(each for each in agents if "it hangs" in each.text())
        name = "ab"[agents.index(hung)]
        done = stop(tmp_path, name, command="drain")
        assert hung.ended() == 143
    assert done.returncode == 5, done.stderr
    said = r": no other node trained, and 1 node can go on; no step is saved, steps? [\d to]+ (is|are) not: "
    assert re.search(f"{name} has left run said-.*{said}", done.stdout), done.stdout
    told = [each.event for each in records(next(tmp_path.glob(f"run/*/events-{name}.jsonl")))]
    assert [type(each) for each in told if isinstance(each, events.Unsaved)] == [events.Unsaved]


def test_no_such_run(tmp_path: Path) -> None:
    """Exit code 2, and what to give."""
    done = stop(tmp_path, "nobody-here")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the etcd of this run is not known on this machine (run nobody-here)" in done.stderr
    assert "or its etcd with --etcd" in done.stderr
