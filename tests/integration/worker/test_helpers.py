"""Helpers of Python and torch remove what a killed worker leaves in /dev/shm, and nothing waits for them for ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from rig import Rig, alive, wait_until

from elasticrt.ipc import proc
from elasticrt.settings import Command
from elasticrt.workers import fork_server

TELL = """
def tell(helper, name):
    with open("told.tmp", "w") as file:
        file.write(f"{helper} {name.lstrip('/')}")
    os.rename("told.tmp", "told")
    time.sleep(300)
"""

# The loaders of this context have such semaphores. The child has the helper's pipe as well.
SPAWN = """
import multiprocessing, os, time
from multiprocessing import resource_tracker

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    held = context.Semaphore()
    context.Process(target=time.sleep, args=(300,)).start()
    tell(resource_tracker._resource_tracker._pid, f"sem.{held._semlock.name[1:]}")
"""

FILE_SYSTEM = """
import os, time, torch
from pathlib import Path

torch.multiprocessing.set_sharing_strategy("file_system")
held = torch.ones(4).share_memory_()
children = Path("/proc/thread-self/children").read_text().split()
helper = next(each for each in children if "torch_shm" in Path(f"/proc/{each}/comm").read_text())
tell(helper, held.untyped_storage()._share_filename_cpu_()[1].decode())
"""

# A helper whose pipe the test holds: it does not end by itself.
STUCK = """
import os, subprocess, sys, time

pipe = os.open("pipe", os.O_RDONLY)
code = f"from multiprocessing.resource_tracker import main;main({pipe})"
tell(subprocess.Popen([sys.executable, "-c", code], pass_fds=[pipe]).pid, "")
"""


@pytest.fixture
def told(tmp_path):
    """Start a worker with this body; its pid, its helper's, and the file that it has in /dev/shm."""

    def start(rig, body):
        (tmp_path / "script.py").write_text(TELL + body)
        rig.start(Command(("script.py",)), tmp_path)
        pid = rig.pids()[0]
        wait_until((tmp_path / "told").exists, "the worker has a helper")
        helper, _, name = (tmp_path / "told").read_text().partition(" ")
        return pid, int(helper), Path("/dev/shm") / name

    return start


@pytest.mark.parametrize("body", [pytest.param(SPAWN, id="spawn"), pytest.param(FILE_SYSTEM, id="file_system")])
@pytest.mark.parametrize(
    ("own", "kills"), [("fork", "worker"), ("exec", "agent"), ("exec", "channel")], indirect=["own"]
)
def test_a_killed_worker_leaves_nothing_in_shared_memory(own, told, body, kills):
    """W11: whoever kills the worker, its helper removes the file, and is gone after that."""
    pid, helper, file = told(own, body)
    wait_until(lambda: proc.is_helper(helper), "the helper's program has begun")
    assert file.exists()
    if kills == "channel":
        own.parent.close()
        assert not alive(helper)
    elif kills == "agent":
        own.group.kill(own.generation)
    else:
        os.kill(pid, signal.SIGKILL)
    assert own.finish().codes == {0: -signal.SIGKILL}
    wait_until(lambda: not alive(helper), "the helper has ended")
    assert not file.exists()


@pytest.mark.parametrize("ends", ["worker", "channel", "parent"])
def test_a_helper_that_does_not_end_is_killed(session_mark, tmp_path, told, monkeypatch, ends):
    """W11: the end of the worker is told at once, and the helper ends with SIGKILL, later."""
    monkeypatch.setattr(fork_server, "HELPER_MAX_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    rig = Rig("exec")
    try:
        pid, helper, _ = told(rig, STUCK)
        if ends == "channel":
            rig.parent.close()
            assert not alive(helper)
        else:
            os.kill(pid if ends == "worker" else rig.parent.pid, signal.SIGKILL)
        assert rig.finish().codes == {0: -signal.SIGKILL}
        assert alive(helper) == (ends == "worker")
        wait_until(lambda: not alive(helper), "the helper has been killed")
    finally:
        rig.close()
        os.close(pipe)
