"""The guard: no worker outlives its agent or its parent, nothing a worker started outlives it, every end is told."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rig import Rig

from elasticrt.ipc.channel import ChannelClosed
from elasticrt.ipc.messages import Signal
from elasticrt.ipc.proc import state_of
from elasticrt.settings import Command
from elasticrt.workers import logs
from elasticrt.workers.fork_server import ParentLost
from elasticrt.workers.worker_io import GroupEnded, WorkerEnded, WorkerStarted

BROOD = """\
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
stubborn = os.fork()
if stubborn == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)
reader, writer = os.pipe()
if os.fork() == 0:                    # A daemon as in the books: two forks, a session of its own.
    os.setsid()
    pid = os.fork()
    if pid:
        os.write(writer, str(pid).encode())
        os._exit(0)
    time.sleep(300)
os.wait()
daemon = int(os.read(reader, 20))
with open("pids.tmp", "w") as f:
    f.write(f"{os.getpid()} {child.pid} {stubborn} {daemon}")
os.rename("pids.tmp", "pids")
"""


@pytest.fixture
def brood(tmp_path, until):
    """Start a worker that has a child, one that ignores TERM, and a daemon; their pids and the worker's."""

    def start(rig, after="time.sleep(300)"):
        (tmp_path / "brood.py").write_text(BROOD + after + "\n")
        rig.start(Command(("brood.py",)), tmp_path)
        rig.pids()  # Until the parent has told of the worker, its end would leave the brood behind.
        pids = until((tmp_path / "pids").exists, "the worker has started its brood") and (tmp_path / "pids").read_text()
        return [int(pid) for pid in pids.split()]

    return start


def test_nothing_outlives_a_killed_worker(either, brood, is_alive):
    """W11: when GroupEnded is said, the killed worker, its children and its double-forked daemon are gone."""
    pids = brood(either)
    assert [is_alive(pid) for pid in pids] == [True] * 4
    os.kill(pids[0], signal.SIGKILL)
    result = either.finish()
    assert [is_alive(pid) for pid in pids] == [False] * 4
    assert result.codes == {0: -signal.SIGKILL}


@pytest.mark.parametrize("after", ["", "sys.exit(3)", "os._exit(0)"])
def test_nothing_outlives_a_worker_that_ended(either, brood, is_alive, after):
    """W11: the same after an exit, in whatever way."""
    pids = brood(either, after)
    either.finish()
    assert [is_alive(pid) for pid in pids] == [False] * 4


@pytest.mark.parametrize("stopped", [False, True])
def test_the_agent_is_killed(tmp_path, until, is_alive, stopped):
    """A01, W08: SIGKILL the agent: its worker parent, even a stopped one, its workers and their broods are gone."""
    agent = f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from elasticrt.settings import Command
        from rig import Rig
        rig = Rig(sys.argv[1])
        print(rig.parent.pid, flush=True)
        rig.start(Command(("brood.py",)), Path({str(tmp_path)!r}))
        rig.finish()
        """
    (tmp_path / "agent.py").write_text(textwrap.dedent(agent))
    (tmp_path / "brood.py").write_text(BROOD + "time.sleep(300)\n")
    for method in ("fork", "exec"):
        (tmp_path / "pids").unlink(missing_ok=True)
        command = [sys.executable, str(tmp_path / "agent.py"), method]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            parent = int(process.stdout.readline())
            until((tmp_path / "pids").exists, "the worker has started its brood")
            if stopped:
                os.kill(parent, signal.SIGSTOP)
                until(lambda parent=parent: state_of(parent) == "T", "the parent is stopped")
            process.kill()
        pids = [parent, *map(int, (tmp_path / "pids").read_text().split())]
        until(lambda pids=pids: not any(map(is_alive, pids)), "all processes of the killed agent are gone")


def test_the_parent_is_closed(own, brood, until, is_alive):
    """The agent closes the channel: workers and their broods are gone then, and each end is told."""
    pids = brood(own)
    own.parent.close()
    assert not any(map(is_alive, (*pids, own.parent.pid)))
    assert own.finish().codes == {0: -signal.SIGKILL}
    with pytest.raises(ChannelClosed):
        own.parent.send(Signal(1, signal.SIGTERM, [0]))


def test_a_start_after_the_parent_was_lost(own, tmp_path):
    """A generation that is started with a lost parent ends at once, with a failure for every worker."""
    os.kill(own.parent.pid, signal.SIGKILL)
    own.wait(ParentLost)
    (tmp_path / "x.py").write_text("")
    own.start(Command(("x.py",)), tmp_path, 2)
    result = own.finish(2)
    assert all(e.failure is not None and "worker parent" in e.failure.summary for e in result.ended.values())


def test_the_parent_is_killed(own, brood, until, is_alive):
    """A01: SIGKILL the parent: workers die by its death, their sessions are swept, and the agent is told."""
    worker, child, stubborn, daemon = brood(own)
    os.kill(own.parent.pid, signal.SIGKILL)
    result = own.finish()
    if not any(isinstance(event, ParentLost) for event in result.events):  # The two come from different threads.
        own.wait(ParentLost)
    until(lambda: not any(map(is_alive, (worker, child, stubborn))), "the worker's session is gone")
    os.kill(daemon, signal.SIGKILL)  # It left its session, and the only process that knew of it was killed.
    failure = result.ended[0].failure
    assert failure is not None
    assert "the worker parent" in failure.summary


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_signals_of_a_scheduler_do_not_end_the_parent(warm, tmp_path, name):
    """What a scheduler sends to every process of a job leaves the worker parent at work."""
    os.kill(warm.parent.pid, getattr(signal, name))
    assert warm.run("print('still here')", tmp_path).out[0] == "still here\n"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL"])
def test_signals_are_named(warm, tmp_path, name):
    """W04: a worker that dies of a signal is reported with the signal's name, as a cause."""
    result = warm.run(f"import signal; signal.raise_signal(signal.{name})", tmp_path)
    failure = result.ended[0].failure
    assert failure is not None
    assert failure.code == -getattr(signal, name)
    assert failure.summary.endswith(f"killed by {name}")
    assert not failure.collateral


def test_a_real_crash_is_a_signal(warm, tmp_path):
    """W04: reading address 0 through ctypes is SIGSEGV in the report."""
    result = warm.run("import ctypes; ctypes.string_at(0)", tmp_path)
    failure = result.ended[0].failure
    assert failure is not None
    assert failure.summary.endswith("killed by SIGSEGV")


def test_term_then_kill(either, tmp_path, until, is_alive):
    """W10: TERM reaches main processes only; a worker that ignores it goes with KILL, and neither is a failure."""
    (tmp_path / "stay.py").write_text(
        "import os, signal, sys, time\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.signal(signal.SIGTERM, lambda *a: open('child got it', 'w'))\n"
        "    while True: time.sleep(300)\n"
        "def term(*_):\n"
        "    open(f'got it {os.environ[\"RANK\"]}', 'w')\n"
        "    if os.environ['RANK'] == '0': os._exit(0)\n"
        "signal.signal(signal.SIGTERM, term)\n"
        "open(f'ready {os.environ[\"RANK\"]}', 'w')\n"
        "while True: time.sleep(0.1)\n"  # Python notices a signal that comes just before a sleep only after it.
    )
    either.start(Command(("stay.py",)), tmp_path, 2)
    pids = either.pids(2)
    until(lambda: all((tmp_path / f"ready {n}").exists() for n in (0, 1)), "both workers are ready")
    either.group.terminate(either.generation)
    assert either.wait(WorkerEnded).local_rank == 0
    until((tmp_path / "got it 1").exists, "rank 1 has got its TERM")
    assert is_alive(pids[1])
    either.group.kill(either.generation)
    ended = either.wait(WorkerEnded)
    either.wait(GroupEnded)
    assert (ended.local_rank, ended.code, ended.failure) == (1, -signal.SIGKILL, None)
    assert not (tmp_path / "child got it").exists()


def test_a_directory_that_is_not_there(either, tmp_path):
    """W17: a worker that cannot be placed is reported with the system's words, and no part of the group is left."""
    either.start(Command(("x.py",)), tmp_path / "nowhere", 2, run_dir=str(tmp_path))
    result = either.finish(2)
    for ended in result.ended.values():
        assert ended.failure is not None
        assert ended.code == 127
        assert "could not be started" in ended.failure.summary
        assert "No such file or directory" in ended.failure.summary
        assert not ended.failure.collateral


@pytest.mark.parametrize(
    ("program", "code", "words"),
    [
        ("missing-program", 127, "No such file"),
        ("./not-executable", 126, "Permission denied"),
        ("./empty", 126, "format"),
    ],
)
def test_a_program_that_cannot_be_executed(tmp_path, session_mark, program, code, words):
    """W17: ENOENT, EACCES and a file that is no program: reported by name, for every worker."""
    (tmp_path / "not-executable").write_text("#!/bin/sh\n")
    (tmp_path / "empty").write_bytes(b"\0\1")
    (tmp_path / "empty").chmod(0o755)
    rig = Rig("exec", kind="program")
    try:
        rig.start(Command((program,), "program"), tmp_path, 2)
        result = rig.finish(2)
    finally:
        rig.close()
    for ended in result.ended.values():
        assert ended.failure is not None
        assert ended.code == code
        assert "could not be started" in ended.failure.summary
        assert words in ended.failure.summary
        assert program in ended.failure.summary


def test_no_descriptors_left(own, tmp_path):
    """W17: a parent at its limit of open files refuses a worker in words and starts the next when it can."""
    pid = own.parent.pid
    now = _open_files(pid)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (now + 2, limits[1]))
    result = own.run("pass", tmp_path)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    failure = result.ended[0].failure
    assert failure is not None
    assert "could not be started" in failure.summary
    assert "Too many open files" in failure.summary
    assert own.run("print('again')", tmp_path).out[0] == "again\n"


def test_no_descriptors_left_in_the_agent(warm, tmp_path):
    """W17: an agent at its limit of open files starts nothing, says so for every worker, and goes on."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _open_files(os.getpid())
    (tmp_path / "x.py").write_text("print('again')")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 12, limits[1]))
    try:
        warm.start(Command(("x.py",)), tmp_path, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    result = warm.finish(4)
    assert all(e.failure is not None and "Too many open files" in e.failure.summary for e in result.ended.values())
    assert _open_files(os.getpid()) == before
    assert warm.run("print('again')", tmp_path).out[0] == "again\n"


def test_a_new_generation_while_the_old_one_dies(warm, tmp_path):
    """Events of an old generation that is being killed keep its number, and the new one is not disturbed."""
    (tmp_path / "wait.py").write_text("import time; time.sleep(300)")
    warm.start(Command(("wait.py",)), tmp_path, 2)
    old = warm.generation
    for _ in range(2):
        warm.wait(WorkerStarted, lambda e: e.generation == old)
    warm.group.kill(warm.generation)
    (tmp_path / "new.py").write_text("print('new')")
    warm.start(Command(("new.py",)), tmp_path, 2)
    seen = []
    ended = [warm.wait(WorkerEnded, seen=seen) for _ in range(4)]
    assert {(e.generation - old, e.code) for e in ended} == {(0, -9), (1, 0)}, ended
    assert all(e.failure is None for e in ended)
    warm.group.release(warm.generation)
    warm.wait(GroupEnded, lambda e: e.generation == old + 1, seen)
    assert [e.generation - old for e in seen if isinstance(e, GroupEnded)] == [0, 1]


def test_the_channel_of_a_worker(warm, tmp_path):
    """Messages arrive with rank and generation, replies are received, the page is readable, nonsense is survived."""
    from elasticrt.ipc.messages import ClaimBuild, Reply, Step
    from elasticrt.workers.worker_io import WorkerMessage

    body = """
        import os, time
        from elasticrt.ipc.channel import Channel
        from elasticrt.ipc.env import WorkerEnv
        from elasticrt.ipc.messages import ClaimBuild, Step
        from elasticrt.ipc.status_page import StatusPage
        env = WorkerEnv.from_env(os.environ)
        channel, page = Channel.adopt(env.channel_fd), StatusPage(env.page_fd)
        page.finished(11, 12345)
        for step in range(100):
            channel.send(Step(step, 0, 1, 0, step == 0))
        channel.send(ClaimBuild(1, "digits", "1"))
        reply, _ = channel.receive(20)
        while not page.stop:
            time.sleep(0.01)
        print(reply.reason, page.stop)
        os.write(env.channel_fd, b"\\0\\0\\0\\3abc" * 3)
        """
    (tmp_path / "talk.py").write_text(textwrap.dedent(body))
    warm.start(Command(("talk.py",)), tmp_path)
    said = []
    claim = warm.wait(WorkerMessage, lambda e: isinstance(e.message, ClaimBuild), said)
    steps = [e.message.step for e in said if isinstance(e, WorkerMessage) and isinstance(e.message, Step)]
    assert steps == list(range(100))
    assert (claim.rank, claim.local_rank, claim.generation) == (0, 0, warm.generation)
    page = warm.group.page(0, warm.generation)
    assert (page.step, page.step_at_ns) == (11, 12345)
    claim.answer(Reply(1, True, reason="build"))
    page.stop = 5
    result = warm.finish()
    assert (result.codes[0], result.out[0]) == (0, "build 5\n"), result.err


def test_much_output_little_memory(warm, tmp_path, monkeypatch):
    """W16: 200 MB, binary garbage and a 10 MB line: the agent's memory stays flat and the log keeps to its limit."""
    body = """
        import os, sys
        block = bytes(range(256)) * 4096
        for _ in range(100):
            sys.stdout.buffer.write(block)
            sys.stderr.buffer.write(block)
        sys.stdout.buffer.write(b"x" * 10_000_000)
        sys.stderr.buffer.write(b"\\nthe end\\n")
        os._exit(3)
        """
    monkeypatch.setattr(logs, "FILE_MAX_BYTES", 1_000_000)
    before = _resident_bytes()
    result = warm.run(body, tmp_path)
    assert _resident_bytes() - before < 20_000_000
    files = (tmp_path / "run" / "logs").rglob("rank-0.*.???")
    sizes = [path.stat().st_size for path in files if path.suffix != ".json"]
    assert len(sizes) == 2
    assert all(1_000_000 < size < 1_001_000 for size in sizes)
    failure = result.ended[0].failure
    assert failure is not None
    assert "  | the end" in failure.text.splitlines()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
