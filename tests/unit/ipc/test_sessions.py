"""Finding and ending the processes of a session."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from elasticrt.bootstrap import child_process
from elasticrt.ipc import proc
from elasticrt.ipc.leash import die_with_parent
from elasticrt.ipc.messages import Start
from elasticrt.ipc.status_page import STACK_BEGINS, STACKS_SIGNAL
from tests.servers import wait_until

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(300)"]


@pytest.fixture
def leader():
    """A session of its own: a shell (the leader) with one process in another process group."""
    script = (
        "import os, subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], preexec_fn=os.setpgrp)\n"
        "print(p.pid, flush=True)\ntime.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        proc.kill_sessions([process.pid])


def test_members(leader):
    """A session's processes are found in whatever process group they are, and nobody else's."""
    process, member = leader
    assert set(proc.members([process.pid])) == {process.pid, member}
    assert os.getpid() in proc.members([os.getsid(0)])
    assert process.pid in proc.children()
    assert member not in proc.children()


def test_kill_sessions(leader):
    """One call ends the leader and what it has started, although this process is not the parent of that."""
    process, member = leader
    proc.kill_sessions([process.pid])
    assert process.wait(10) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(member, 0)
            if not proc.start_of(member):
                raise ProcessLookupError


@pytest.mark.parametrize("with_helpers", [False, True])
def test_a_helper_is_spared(with_helpers):
    """W11: it goes on until nobody holds its pipe, if it is not to be killed as well."""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", f"from multiprocessing.resource_tracker import main;main({reader})"]
    with subprocess.Popen(command, pass_fds=[reader], start_new_session=True) as process:
        try:
            # Its command line is empty for a moment after its start.
            wait_until(lambda: proc.is_helper(process.pid), "the helper runs")
            proc.kill_sessions([process.pid], with_helpers=with_helpers)
            os.close(writer)
            assert process.wait(20) == (-signal.SIGKILL if with_helpers else 0)
        finally:
            process.kill()
    os.close(reader)


def test_a_helper_of_this_session_is_none_to_wait_for():
    """W11: it does not end before the process that asks."""
    command = [sys.executable, "-c", "from multiprocessing.resource_tracker import main;main(0)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert not proc.is_helper(process.pid)


def test_the_dead_are_no_members():
    """A process that has ended and a number that nobody has are treated alike."""
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait(10)
    assert proc.members([process.pid]) == []
    assert not proc.start_of(process.pid)
    proc.kill(process.pid, signal.SIGKILL)
    proc.kill_sessions([process.pid])


WRITES_STACKS = """
import faulthandler, sys, threading, time
faulthandler.register(int(sys.argv[1]), sys.stdout, all_threads=False)
def main_thread():
    print("ready", flush=True)
    time.sleep(300)
for _ in range(8):
    threading.Thread(target=time.sleep, args=(300,)).start()
main_thread()
"""


def test_only_the_main_thread_gets_a_signal_that_asks_for_its_stack():
    """W09: two that come together are both answered, and by the main thread: no other one does the training."""
    asking = [sys.executable, "-c", WRITES_STACKS, str(STACKS_SIGNAL)]
    with subprocess.Popen(asking, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        late = threading.Timer(30.0, process.kill)  # Then there are no more lines.
        late.start()
        for _ in range(100):
            for _ in range(2):
                proc.signal_main_thread(process.pid, STACKS_SIGNAL)
            for _ in range(2):
                frames = [process.stdout.readline() for _ in range(3)]
                assert frames[0] == STACK_BEGINS + "\n"
                assert "in main_thread" in frames[1]
        late.cancel()
        process.kill()
    proc.signal_main_thread(process.pid, STACKS_SIGNAL)


@pytest.mark.parametrize("executes", [False, True])
def test_a_worker_dies_with_its_parent(tmp_path, executes):
    """A01: agent and worker parent killed at once leave nobody to end the workers but the kernel, and it does."""
    reader, writer = os.pipe()
    sleeper = [sys.executable, "-c", f"import os, time; os.write({writer}, b'%20d' % os.getpid()); time.sleep(300)"]
    start = Start(1, 0, sleeper, "program", dict(os.environ), str(tmp_path), [])
    parent = os.fork()
    if parent == 0:
        me = os.getpid()
        if os.fork() == 0:
            os.set_inheritable(writer, True)
            env = child_process.settle(child_process.Job(start, {}, me, executes), {})
            if executes:
                child_process.execute(child_process.Job(start, {}, me, executes), env)
            os.write(writer, b"%20d" % os.getpid())
        signal.pause()
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        worker = int(pipe.read(20))
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        # The end of the pipe is the end of the worker, which alone holds the other side.
        ended = select.select([pipe], [], [], 20)[0]
        if not ended:
            os.kill(worker, signal.SIGKILL)
        assert ended


def test_a_worker_whose_parent_has_gone_does_not_begin():
    """A01: a parent that ended before its death could be announced is noticed, and nothing of the user's runs."""
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(1 << 22, signal.SIGKILL)
        except ProcessLookupError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
