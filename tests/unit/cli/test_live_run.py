"""Which live run a command means that does not name one."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

import pytest

from elasticrt import events
from elasticrt.cli.change_run import left_after
from elasticrt.cli.live_run import LiveRun, live_here, live_run, named_run
from elasticrt.cli.main import build_parser, main
from elasticrt.cli.status import look, show
from elasticrt.event_log import EventLog
from elasticrt.ipc.proc import machine as own_machine
from elasticrt.ipc.proc import start_of
from elasticrt.rendezvous.records import Generation, HandoverRecord, Keys, Member, Result, SpecRecord
from elasticrt.run_options import EtcdOptions
from elasticrt.spec import RunSpec
from elasticrt.store.embedded import EmbeddedServer, find, locked, record_of, write_record
from elasticrt.store.protocol import Address, Delete, Put, Txn
from elasticrt.story import run_dir
from elasticrt.story.sentences import state
from tests.memory_store import MemoryServer, MemoryStore


@pytest.fixture(autouse=True)
def _runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


NOBODY = 2**22 + 1
"""No process has a greater id than 2**22."""


def _run(
    name: str, *more: events.Event, lives: bool, pid: int = 0, etcd: str = "unix:/no/such:0", machine: str = ""
) -> None:
    """A run with a directory; one that lives is this process, with an etcd whose keeper it is as well."""
    log = EventLog("node-0", Path("runs", name))
    pid, served = pid or (os.getpid() if lives else NOBODY), Address("http", "127.0.0.1", 9)
    etcd = str(served) if lives else etcd
    for event in (events.AgentStarted(pid, name, etcd, f"runs/{name}", machine or own_machine(), 1, 1), *more):
        log.write(event)
    log.close()
    if lives:
        with locked() as (directory, _):
            write_record(record_of(directory, name), EmbeddedServer(served, os.getpid(), start_of(os.getpid())))


def _arguments(run: str | None = None) -> argparse.Namespace:
    return argparse.Namespace(run=run, log_dir="runs")


def test_the_only_live_run_is_meant() -> None:
    """Runs that have ended do not count, however new they are."""
    _run("calm-fox", lives=True)
    _run("old-owl", lives=False)
    _run("done-dove", events.Result("succeeded", 0, "all ended well"), lives=True)  # Its etcd is about to end.
    _run("left-lark", events.AgentStopped(143), lives=True)
    assert [path.name for path in live_here("runs")] == ["calm-fox"]
    with live_run(_arguments(), EtcdOptions()) as run:
        assert run.keys.run_id == "calm-fox"


@pytest.mark.parametrize("etcd", ["http://127.0.0.1:9", "unix:/no/such/etcd:0"])
def test_the_only_live_run_may_use_a_named_etcd(etcd: str) -> None:
    """It has no etcd of its own here. One whose agents were killed does not count, nor one of another machine."""
    _run("calm-fox", lives=False, pid=os.getpid(), etcd=etcd)
    _run("dead-dove", lives=False, etcd=etcd)
    _run("far-finch", lives=False, pid=os.getpid(), etcd=etcd, machine="another machine")
    assert [path.name for path in live_here("runs")] == ["calm-fox"]
    with live_run(_arguments(), EtcdOptions()) as run:
        assert run.keys.run_id == "calm-fox"


@pytest.mark.parametrize("command", [["stop"], ["drain", "node-0"], ["resize", "1:2"]], ids=lambda words: words[0])
def test_of_several_live_runs_none_is_chosen(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that changes a run does not guess: exit code 2, and the names."""
    _run("keen-koala", lives=True)
    _run("calm-fox", lives=True)
    assert main([*command, "--log-dir", "runs"]) == 2
    assert (
        "no run was named (RUN): got 2 live runs on this machine; expected one of calm-fox, keen-koala"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "command", [["drain", "node-0"], ["stop", "--run-id", "calm-fox"], ["status"]], ids=lambda words: words[0]
)
def test_an_own_etcd_that_does_not_answer(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The run's agents live here, so its newest etcd is asked without --etcd, at a socket too: exit code 4."""
    _run("calm-fox", lives=False, etcd="unix:/an/earlier/etcd:0")
    _run("calm-fox", lives=False, pid=os.getpid(), etcd="unix:/no/such/etcd:0")
    assert main([*command, "--log-dir", "runs"]) == 4
    said = capsys.readouterr().err
    assert "(unix:/no/such/etcd:0)" in said
    assert "`elasticrt doctor --etcd unix:/no/such/etcd:0` looks for the reason" in said


def test_a_directory_never_means_another_run_of_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own etcd is asked, though another directory's run of that id has one on this machine."""
    _run("calm-fox", lives=True)
    Path("runs").rename("theirs")
    _run("calm-fox", lives=False)
    assert live_here("runs") == []
    assert main(["status", "runs/calm-fox"]) == 0
    assert "run calm-fox: ended without a result (killed)" in capsys.readouterr().out
    assert main(["stop", "runs/calm-fox"]) == 2
    said = capsys.readouterr().err
    assert "got ended without a result (killed)" in said
    assert "name its directory, or give --etcd http://127.0.0.1:9" in said
    assert main(["stop", "theirs/calm-fox"]) == 4
    assert "2 s (http://127.0.0.1:9)" in capsys.readouterr().err
    _run("calm-fox", lives=False, etcd="http://127.0.0.1:8")
    assert main(["stop", "runs/calm-fox"]) == 4
    assert "2 s (http://127.0.0.1:8)" in capsys.readouterr().err


def test_an_agent_that_nobody_has_reaped_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """A01: a killed agent stays in the table of processes until its parent looks, as in some containers."""
    with subprocess.Popen(["true"]) as agent:
        os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
        _run("calm-fox", lives=False, pid=agent.pid)
        assert main(["report", "runs/calm-fox"]) == 0
        assert "ended without a result (killed)" in capsys.readouterr().out


def test_a_fresh_etcd_in_place_of_one_that_had_died(capsys: pytest.CaptureFixture[str]) -> None:
    """The run's directory notes it, so that a command finds it there."""
    _run("calm-fox", lives=True)
    _run("calm-fox", events.EtcdAway(3.0, fresh=True, etcd="http://127.0.0.1:9"), lives=False, pid=os.getpid())
    assert main(["stop", "runs/calm-fox"]) == 4
    assert "2 s (http://127.0.0.1:9)" in capsys.readouterr().err


def test_a_run_whose_agents_are_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Its socket is of no use here: `stop` asks for --etcd, and `status` says that the directory alone has told it."""
    _run("far-finch", lives=False, pid=os.getpid(), machine="another machine")
    assert main(["stop", "far-finch", "--log-dir", "runs"]) == 2
    assert "the etcd of this run is not known on this machine (run far-finch)" in capsys.readouterr().err
    assert main(["status", "far-finch", "--log-dir", "runs"]) == 0
    assert (
        "from the run's directory alone: the etcd of this run is not known on this machine" in capsys.readouterr().out
    )


def test_ways_of_naming_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN is an id or a directory, and overrules --run-id."""
    _run("calm-fox", lives=False)
    assert named_run(_arguments(), EtcdOptions()) is None
    assert named_run(_arguments(), EtcdOptions(run_id="digits")) == ("digits", Path("runs/digits"))
    assert named_run(_arguments("calm-fox"), EtcdOptions(run_id="digits")) == ("calm-fox", Path("runs/calm-fox"))
    assert named_run(_arguments("runs/calm-fox"), EtcdOptions()) == ("calm-fox", Path("runs/calm-fox"))
    monkeypatch.chdir("runs")
    assert named_run(_arguments("calm-fox"), EtcdOptions()) == ("calm-fox", Path("calm-fox"))


def test_a_run_that_has_its_name_from_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """`status` and `stop` mean the run that `elasticrt run` makes of these words; an etcd's endpoint is no name."""
    _run("calm-fox", lives=False)
    _run("127.0.0.1-29400", lives=False)
    for command in ("status", "stop"):
        main([command, "--rdzv-endpoint", "127.0.0.1:29400", "--log-dir", "runs"])
        said = capsys.readouterr()
        assert "127.0.0.1-29400" in said.out + said.err
    assert main(["status", "--rdzv-endpoint", "localhost:0", "--log-dir", "runs"]) == 0
    assert "run 127.0.0.1-29400" in capsys.readouterr().out
    ours = ("--rdzv-backend", "etcd-v3", "--rdzv-endpoint", "127.0.0.1:9")
    main(["status", *ours, "--log-dir", "runs"])
    assert "127.0.0.1-9" not in capsys.readouterr().out


def test_status_of_an_ended_run_takes_its_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `report` does, with and without a slash in its name."""
    _run("calm-fox", lives=False)
    assert main(["status", str(Path("runs/calm-fox").absolute())]) == 0
    monkeypatch.chdir("runs")
    assert main(["status", "calm-fox"]) == 0
    assert main(["status", "."]) == 2
    assert main(["status", "no/such"]) == 2
    said = capsys.readouterr()
    assert said.out.count("run calm-fox: ") == 2
    assert "no such run (no/such)" in said.err


def test_looking_at_a_run_does_not_keep_its_etcd() -> None:
    """The keeper waits for agents that have found it, as its record's time says. `status --watch` looks every 2 s."""
    _run("calm-fox", lives=True)
    with locked() as (directory, _):
        record = record_of(directory, "calm-fox")
    os.utime(record, (1, 1))
    assert find("calm-fox") is not None
    assert record.stat().st_mtime == 1


def test_status_while_etcd_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    """What the run's directory tells is shown, then the reason: exit code 4; `--watch` ends when the agents have."""
    _run("calm-fox", lives=True)  # Nobody listens at the port of its etcd.
    assert main(["status", "--log-dir", "runs"]) == 4
    said = capsys.readouterr()
    assert said.out.startswith("run calm-fox: starting\n1 node: node-0\n")
    assert "no answer from etcd" in said.err
    arguments = build_parser().parse_args(["status", "calm-fox", "--watch", "--log-dir", "runs"])
    looks = []
    for more in ((), (events.AgentStopped(143),)):
        _run("calm-fox", *more, lives=True)
        looks.append(look("calm-fox", Path("runs/calm-fox"), arguments, EtcdOptions()))
    assert looks == [False, True]
    assert (
        capsys.readouterr().out.count("etcd does not answer: no answer from etcd") == 1
    )  # Once it has ended, none is to.


def test_a_run_whose_bundled_etcd_has_died_has_not_ended() -> None:
    """Its agents start a fresh one: `status --watch` goes on, until they have fallen silent."""
    _run("calm-fox", lives=False, pid=os.getpid())
    arguments = build_parser().parse_args(["status", "calm-fox", "--watch", "--log-dir", "runs"])
    directory = Path("runs/calm-fox")
    assert not look("calm-fox", directory, arguments, EtcdOptions())
    _run("calm-fox", events.AgentStopped(143), lives=False)
    assert look("calm-fox", directory, arguments, EtcdOptions())


@pytest.mark.parametrize("elsewhere", ["", "another machine"])
def test_an_agent_that_was_killed_here_has_ended(elsewhere: str) -> None:
    """It is a process no more, and notes no end; of one elsewhere that is not known. How to go on is said."""
    _run("calm-fox", events.Committed(7, 1), lives=False, machine=elsewhere)
    story = run_dir.read(Path("runs/calm-fox"))
    end = "ended without a result (killed); step 7 is saved; to go on: the same command, with --run-id calm-fox"
    assert story.lives.alive() == (("node-0",) if elsewhere else ())
    assert (state(story) == end) is not bool(elsewhere)


@pytest.mark.parametrize("command", [["stop"], ["drain", "node-0"], ["resize", "1:2"]], ids=lambda words: words[0])
def test_a_run_that_has_ended(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command that changes it says so, and how: exit code 2."""
    _run("calm-fox", events.Result("succeeded", 0, "all ended well"), lives=False)
    _run("late-lark", events.Committed(7, 1), events.AgentStopped(143), lives=False)
    for name, how in (("calm-fox", "succeeded: all ended well"), ("late-lark", "stopped; step 7 is saved")):
        assert main([*command, "--run-id", name, "--log-dir", "runs"]) == 2
        assert f"the run has ended (run {name}): got {how}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("generation", "step", "last"),
    [(1, 101, 101), (1, 100, 100), (1, 90, 101), (2, 100, 101), (None, 0, 101)],
    ids=["it was made", "it was only begun", "events are late", "of another generation", "the run is elsewhere"],
)
def test_what_was_finished_before_a_leave(generation: int | None, step: int, last: int) -> None:
    """`stop` counts the agreed step unless the run's events say that its generation has finished the one before.

    Where none was agreed, as by workers that hang, it counts the newest step.
    """
    if generation is not None:
        begun = events.Generation(generation, 1, "start", "start", 0, ("node-0",), 0, False, False)
        _run("calm-fox", begun, events.Progress(generation, step, 0.0, 0.0, 0.0), lives=False)
    directory = Path("runs/calm-fox")
    assert left_after(HandoverRecord(generation=1, cause="x", step=101, save=True), directory) == last
    for handover in (HandoverRecord(generation=1, cause="x"), None):
        assert left_after(handover, directory) == step


def test_a_run_without_nodes() -> None:
    """One whose first node is starting is not one that is over; of one with a result it is said how it has ended."""
    run = LiveRun(MemoryStore(MemoryServer(lambda: 0.0)), Keys("calm-fox"), Path("runs"))
    assert "no node of this run has registered yet (run calm-fox)" in str(run.without_nodes())
    spec = SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script", "train.py")), attempt=1)
    run.store.commit(Txn((), (Put(run.keys.spec, spec.encode()),), why="a test"))
    assert "this run has no nodes (run calm-fox)" in str(run.without_nodes())
    spec = SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script", "train.py")), attempt=2)
    for attempt, status in ((1, "succeeded"), (2, "failed")):
        result = Result(attempt=attempt, status=status, code=attempt - 1, reason="rank 0 raises", generation=1)
        run.store.commit(Txn((), (Put(run.keys.result(attempt), result.encode()),), why="a test"))
    run.store.commit(Txn((), (Put(run.keys.spec, spec.encode()),), why="a test"))
    assert "the run has ended (run calm-fox): got failed: rank 0 raises" in str(run.without_nodes())


def test_who_watches_for_a_program_ends_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Also after `stop`, and when all agents were killed: such a run has no result."""
    arguments = build_parser().parse_args(["status", "calm-fox", "--watch", "--json", "--log-dir", "runs"])
    looks = []
    for more, pid in (((), os.getpid()), ((events.AgentStopped(143),), os.getpid()), ((), NOBODY)):
        _run("calm-fox", *more, lives=False, pid=pid)
        looks.append(look("calm-fox", Path("runs/calm-fox"), arguments, EtcdOptions()))
    assert looks == [False, True, True]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_who_watches_from_elsewhere_ends_with_the_run() -> None:
    """Without its directory, etcd tells of a run's end: it has a result, or had nodes and has none any more."""
    run = LiveRun(MemoryStore(MemoryServer(lambda: 0.0)), Keys("calm-fox"), Path("runs"))
    spec = SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script", "train.py")), attempt=1)
    member = Member(
        node="n0", incarnation="a" * 16, address="127.0.0.1", pid=1, workers=1, probe_port=5000, port=5001,
    )  # fmt: skip
    generation = Generation(
        number=1, attempt=1, nonce="c" * 16, nodes=1, world_size=1, master_address="::1", master_port=5001,
        cause="start", kind="start", chunks=1,
    )  # fmt: skip
    result = Result(attempt=1, status="succeeded", code=0, reason="all ended well", generation=1)
    ended = []
    for operation in (
        Put(run.keys.spec, spec.encode()),
        Put(f"{run.keys.members}n0", member.encode()),
        Put(run.keys.generation, generation.encode()),
        Delete(f"{run.keys.members}n0"),
        Put(f"{run.keys.members}n0", member.encode()),
        Put(run.keys.result(1), result.encode()),
    ):
        run.store.commit(Txn((), (operation,), why="a test"))
        ended.append(show(run, None, 0.0)[1])
    assert ended == [False, False, False, True, False, True]


def test_a_container_that_was_restarted_is_shown() -> None:
    """Its new agent has the node's name and the process id of the one that ended, and is not taken for that."""
    run = LiveRun(MemoryStore(MemoryServer(lambda: 0.0)), Keys("calm-fox"), Path("runs"))
    spec = SpecRecord(spec=RunSpec(min_nodes=1, max_nodes=1, command=("script", "train.py")), attempt=1)
    member = Member(
        node="node-0", incarnation="a" * 16, address="127.0.0.1", pid=7, workers=1, probe_port=5000, port=5001,
    )  # fmt: skip
    for operation in (Put(run.keys.spec, spec.encode()), Put(f"{run.keys.members}node-0", member.encode())):
        run.store.commit(Txn((), (operation,), why="a test"))
    shown = []
    for more in ((), (events.AgentStopped(1),)):
        _run("calm-fox", *more, lives=False, pid=7, machine="a container")
        story = run_dir.read(Path("runs", "calm-fox"))
        shown.append(any("node-0: " in line for line in show(run, story, 0.0)[0]))
    _run("calm-fox", lives=False, pid=7, machine="a container")
    shown.append(any("node-0: " in line for line in show(run, run_dir.read(Path("runs", "calm-fox")), 0.0)[0]))
    assert shown == [True, False, True]


def test_what_a_node_is_shown_to_do_before_its_first_step() -> None:
    """L6: it sets up. When the other one is gone, the run waits for one more, though nobody has agreed to yet."""
    run = LiveRun(MemoryStore(MemoryServer(lambda: 0.0)), Keys("calm-fox"), Path("runs"))
    spec = SpecRecord(spec=RunSpec(min_nodes=2, max_nodes=2, command=("script", "train.py")), attempt=1)
    members = [
        Member(
            node=f"node-{number}", incarnation=f"{number}" * 16, address="127.0.0.1", pid=os.getpid(), workers=1,
            probe_port=5000, port=5001, warm=True, generation=1,
        )
        for number in range(2)
    ]  # fmt: skip
    generation = Generation(
        number=1, attempt=1, nonce="c" * 16, nodes=2, world_size=2, master_address="::1", master_port=5001,
        cause="start", kind="start", chunks=1,
    )  # fmt: skip
    begun = events.Generation(1, 2, "start", "start", 0, ("node-0", "node-1"), 0, in_place=False)
    _run("calm-fox", begun, lives=False, pid=os.getpid())
    puts = [Put(run.keys.spec, spec.encode()), Put(run.keys.generation, generation.encode())]
    puts += [Put(f"{run.keys.members}{member.node}", member.encode()) for member in members]
    run.store.commit(Txn((), tuple(puts), why="a test"))

    def shown() -> str:
        return "; ".join(show(run, run_dir.read(Path("runs", "calm-fox")), time.time())[0])

    assert "calm-fox: running" in shown()
    assert "node-0: setting up" in shown()
    run.store.commit(Txn((), (Delete(f"{run.keys.members}node-1"),), why="a test"))
    assert "calm-fox: waits for 1 more node" in shown()
    _run("calm-fox", events.FirstStep(1, 1, 0, None, None), lives=False, pid=os.getpid())
    assert "node-0: training" in shown()
