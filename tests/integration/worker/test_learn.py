"""Learnt preloading: what workers have imported is there before the next fork, within its limits."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path

import pytest
from rig import Rig

from elasticrt.agent.group import Command, GroupEnded
from elasticrt.contract.messages import Learnt

SLOW = "import os\nwho = os.getpid()"
USES = """
    import os, sys, time
    there = "einops" in sys.modules
    import einops
    from torch.distributed import init_process_group
    init_process_group("gloo")
    print(there, einops.who == os.getpid(), flush=True)
    while not os.path.exists("go"):
        time.sleep(0.01)
    """


@pytest.fixture
def library(tmp_path):
    """A directory of installed libraries with an `einops` in it."""
    path = tmp_path / "library"
    path.mkdir()
    (path / "einops.py").write_text(SLOW)
    return path


@pytest.fixture
def rig(session_mark, library, tmp_path):
    """A worker parent of this test's own, that finds the library."""
    made = Rig("fork", env={"PYTHONPATH": str(library)}, target=str(tmp_path / "script.py"))
    yield made
    made.close()


def start(rig, directory: Path, body: str = USES, workers: int = 1) -> None:
    """Start a generation of a script that trains until told to end."""
    (directory / "go").unlink(missing_ok=True)
    (directory / "script.py").write_text(textwrap.dedent(body))
    rig.start(Command(("script.py",)), directory, workers)


def test_the_next_fork_has_it(rig, tmp_path, library):
    """What the first generation imported is imported once by the parent, in quiet training, and costs the next nothing.

    The report says what was learnt, and what the parent costs: memory that its workers share.
    """
    start(rig, tmp_path, workers=2)
    learnt = rig.wait(Learnt)
    (tmp_path / "go").write_text("")
    first = rig.finish(2)
    assert (first.out, first.err) == ({0: "False True\n", 1: "False True\n"}, {0: "", 1: ""})
    assert (learnt.modules, learnt.left_out, learnt.unsafe, learnt.pid) == (["einops"], {}, "", rig.parent.pid)
    assert learnt.rss_bytes > learnt.shared_bytes > 100_000_000
    assert rig.warm.rss_bytes > rig.warm.shared_bytes > 0
    start(rig, tmp_path, workers=2)
    (tmp_path / "go").write_text("")
    assert rig.finish(2).out == {0: "True False\n", 1: "True False\n"}

    # A local file of that name, which was not there before, still wins.
    (tmp_path / "einops.py").write_text("who = 'mine'")
    assert rig.run("import einops; print(einops.who)", tmp_path).out[0] == "mine\n"


def test_nothing_from_beside_the_script(rig, tmp_path, library):
    """The script's own modules are never imported ahead, whatever their names; nothing is left to tell of then."""
    (tmp_path / "einops.py").write_text(SLOW)
    start(rig, tmp_path)
    learnt = rig.wait(Learnt)
    (tmp_path / "go").write_text("")
    assert rig.finish().out[0] == "False True\n"
    assert (learnt.modules, learnt.left_out) == ([], {})
    assert rig.run("import sys; print('einops' in sys.modules)", tmp_path).out[0] == "False\n"


def test_what_fails_its_trial_is_left_out(rig, tmp_path, library):
    """A library that reads RANK while it is imported stays out of the parent, with the reason; others are learnt."""
    (library / "einops.py").write_text(SLOW + "\nrank = os.environ.get('RANK')")
    (library / "safetensors.py").write_text("")
    start(rig, tmp_path, USES.replace("import einops", "import einops, safetensors"))
    learnt = rig.wait(Learnt)
    (tmp_path / "go").write_text("")
    rig.finish()
    assert learnt.left_out == {"einops": "reads RANK while it is imported"}
    assert learnt.modules == ["safetensors"]
    assert rig.run("import sys, einops; print(einops.rank)", tmp_path).out[0] == "0\n"


def test_a_failed_script_teaches_as_well(rig, tmp_path, library):
    """A worker that ends with an exception before it has met anybody has told what it imported by then."""
    assert rig.run("import einops\nraise ValueError", tmp_path).codes == {0: 1}
    start(rig, tmp_path, "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    assert rig.wait(Learnt).modules == ["einops"]
    (tmp_path / "go").write_text("")
    rig.finish()


SLOW_TRIAL = """
import os, subprocess, sys, time
if "IN_WORKER" not in os.environ and os.path.exists("{place}/slow"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open("{place}/trial.tmp", "w") as file:
        file.write(f"{{os.getpid()}} {{child.pid}}")
    os.rename("{place}/trial.tmp", "{place}/trial")
    time.sleep(300)
who = 0
"""


@pytest.mark.parametrize("disturbance", ["worker ends", "worker starts"])
def test_a_recovery_stops_a_trial(rig, tmp_path, until, is_alive, disturbance):
    """A worker that ends or starts stops a trial with all that it has started; what it was for is learnt later."""
    (tmp_path / "library" / "einops.py").write_text(SLOW_TRIAL.format(place=tmp_path))
    (tmp_path / "slow").write_text("")
    (tmp_path / "script.py").write_text(textwrap.dedent(USES))
    rig.start(Command(("script.py",)), tmp_path, env={"IN_WORKER": "1"})
    worker = rig.pids()[0]
    until((tmp_path / "trial").exists, "the trial has begun")
    trial = [int(pid) for pid in (tmp_path / "trial").read_text().split()]
    assert all(map(is_alive, trial))
    old = rig.generation
    if disturbance == "worker ends":
        os.kill(worker, signal.SIGKILL)
        rig.finish()
    (tmp_path / "slow").unlink()
    rig.start(Command(("script.py",)), tmp_path, env={"IN_WORKER": "1"})
    until(lambda: not any(map(is_alive, trial)), "the trial is gone")
    if disturbance == "worker starts":
        rig.group.kill(old)
        rig.wait(GroupEnded, lambda event: event.generation == old)
    learnt = rig.wait(Learnt)
    (tmp_path / "go").write_text("")
    rig.finish()
    assert (learnt.modules, learnt.left_out) == (["einops"], {})


def test_a_parent_that_became_unsafe_is_not_forked(rig, tmp_path, library):
    """A library that starts a thread although its trial was clean: workers are fresh interpreters from then on."""
    (library / "einops.py").write_text(
        "import os, threading, time\n"
        f"if os.getppid() == {os.getpid()}:\n"
        "    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()\n"
        "who = os.getpid()"
    )
    start(rig, tmp_path)
    learnt = rig.wait(Learnt)
    (tmp_path / "go").write_text("")
    assert rig.finish().out[0] == "False True\n"
    assert learnt.unsafe == "a learnt module, up to 'einops', keeps 1 thread(s) running"
    result = rig.run("import sys; print('torch' in sys.modules)", tmp_path)
    assert (result.codes[0], result.out[0]) == (0, "False\n")
