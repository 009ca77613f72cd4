"""Fork or fresh program: what is preloaded, what makes forking unsafe, and what a worker without it looks like."""

from __future__ import annotations

import py_compile
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import psutil
import pytest
from rig import Rig


def test_exec_workers(cold, tmp_path):
    """Without a warm parent a worker is a fresh Python with the contract's descriptors, and no listening socket."""
    body = """
        import os, sys
        from elasticrt.ipc.channel import Channel
        from elasticrt.ipc.messages import ClaimBuild
        from elasticrt.ipc.env import WorkerEnv
        env = WorkerEnv.from_env(os.environ)
        Channel.adopt(env.channel_fd).send(ClaimBuild(1, "x", "1"))
        print("torch" in sys.modules, env.listen_fd, sys.stdout.write_through, sys.argv[1:])
        sys.exit(3)
        """
    result = cold.run(body, tmp_path, arguments=("a", "b"))
    assert result.out[0] == "False -1 True ['a', 'b']\n", result.err
    assert result.codes == {0: 3}
    assert [e.message.name for e in result.events if type(e).__name__ == "WorkerMessage"] == ["x"]
    assert cold.warm.method == "exec"


@pytest.mark.parametrize("name", ["torch", "sympy", "queue"])
def test_a_script_with_a_torch_of_its_own(session_mark, tmp_path, name):
    """A file beside the script that is called as a preloaded module makes fresh interpreters, and the reason is said.

    It is what the script gets, as with plain Python.
    """
    (tmp_path / f"{name}.py").write_text("who = 'mine'")
    (tmp_path / "script.py").touch()
    rig = Rig("fork", target=str(tmp_path / "script.py"))
    try:
        result = rig.run(f"import {name}; print({name}.who)", tmp_path)
    finally:
        rig.close()
    assert (rig.warm.method, result.out[0]) == ("exec", "mine\n")
    assert name in rig.warm.reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(300,), daemon=True).start()", "thread"),
        pytest.param(
            "import torch\ntorch.set_num_threads(2)\nx = torch.ones(600, 600)\nx = x @ x",
            "thread",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import torch\ntorch.cuda._is_in_bad_fork = lambda: True\ntorch.cuda.device_count = lambda: 1",
            "asked for the GPUs",
            marks=pytest.mark.slow,
        ),
        ("import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', ''])", "process"),
        pytest.param(
            "from multiprocessing import resource_tracker as r\nr.ensure_running()", "process", marks=pytest.mark.slow
        ),
        ("import socket\ns = socket.socket()", "socket"),
        # No GPU is needed to see that the question is asked and the answer believed.
        ("import torch\ntorch.cuda.is_initialized = lambda: True", "CUDA"),
        ("raise ImportError('not today')", "not today"),
    ],
)
def test_what_cannot_be_forked_is_not(session_mark, tmp_path, body, reason):
    """Threads (those of a large matrix product: children would hang), processes, sockets, CUDA: seen, said, not forked.

    Workers are fresh interpreters then.
    """
    (tmp_path / "preloaded.py").write_text(body)
    (tmp_path / "script.py").touch()
    rig = Rig("fork", preload=["preloaded"], target=str(tmp_path / "script.py"))
    try:
        result = rig.run("import sys; print('torch' in sys.modules)", tmp_path)
    finally:
        rig.close()
    assert (rig.warm.method, result.out[0]) == ("exec", "False\n")
    assert reason in rig.warm.reason


def test_preload(session_mark, tmp_path):
    """A preloaded module is imported once, from beside the script, and is there in every worker."""
    (tmp_path / "slow.py").write_text("import os\nwho = os.getpid()")
    (tmp_path / "script.py").touch()
    rig = Rig("fork", preload=["slow"], target=str(tmp_path / "script.py"))
    try:
        result = rig.run("import slow, sys; print(slow.who, sys.path.count(sys.path[0]))", tmp_path)
    finally:
        rig.close()
    assert result.out[0] == f"{rig.parent.pid} 1\n"


def test_what_the_script_begins_with(session_mark, tmp_path):
    """A well-known library is there before the fork."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "einops.py").write_text("import os\nwho = os.getpid()")
    (tmp_path / "script.py").write_text("import einops\nfrom einops import nothing_of_it\n")
    rig = Rig("fork", env={"PYTHONPATH": str(library)}, target=str(tmp_path / "script.py"))
    try:
        result = rig.run("import einops; print(einops.who)", tmp_path)
    finally:
        rig.close()
    assert (rig.warm.method, result.out[0]) == ("fork", f"{rig.parent.pid}\n")


def test_another_python(session_mark, tmp_path):
    """$PYTHON_EXEC names the Python that workers run in, and nothing is forked for it."""
    other = tmp_path / "other"
    other.write_text(f'#!/bin/sh\necho other\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    (tmp_path / "script.py").touch()
    rig = Rig("fork", env={"PYTHON_EXEC": str(other)}, target=str(tmp_path / "script.py"))
    try:
        result = rig.run("print('runs')", tmp_path)
    finally:
        rig.close()
    assert (rig.warm.method, rig.warm.reason) == ("exec", "$PYTHON_EXEC is another Python")
    assert result.out[0] == "other\nruns\n"


EARLY = "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\nprint(torch.get_num_threads())"


@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_script_that_sets_variables_before_its_imports(session_mark, tmp_path, monkeypatch, kind):
    """What it sets is obeyed: its workers are fresh interpreters, the parent stays small, and the reason is said."""
    from elasticrt.settings import Command

    (tmp_path / "early.py").write_text(EARLY)
    monkeypatch.chdir(tmp_path)
    name = "early.py" if kind == "script" else "early"
    rig = Rig("fork", kind=kind, target=name)
    try:
        rss = psutil.Process(rig.parent.pid).memory_info().rss
        rig.start(Command((name,), kind), tmp_path)
        result = rig.finish()
    finally:
        rig.close()
    reason = "early.py line 2 sets OMP_NUM_THREADS before `import torch` in line 3, which is too late in a fork"
    assert (rig.warm.method, rig.warm.reason, result.out[0]) == ("exec", reason, "2\n")
    assert rss < 60_000_000


@pytest.mark.parametrize("name", ["directory", "archive", "compiled.pyc", "missing.py", "empty"])
def test_what_is_no_source_file(session_mark, tmp_path, monkeypatch, name):
    """A directory, an archive and byte code are run by fresh interpreters, which is said before they start.

    What cannot be run ends with Python's own message and code.
    """
    from elasticrt.settings import Command

    (tmp_path / "empty").mkdir()
    main = tmp_path / "directory" / "__main__.py"
    main.parent.mkdir()
    main.write_text("print('runs')")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.write(main, "__main__.py")
    py_compile.compile(str(main), str(tmp_path / "compiled.pyc"))
    monkeypatch.chdir(tmp_path)
    rig = Rig("fork", target=name)
    try:
        rig.start(Command((name,)), tmp_path)
        result = rig.finish()
    finally:
        rig.close()
    command = [sys.executable, "-u", name]
    plainly = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (rig.warm.method, rig.warm.reason) == ("exec", f"{name} is not a plain source file")
    assert (result.codes[0], result.out[0], result.err[0]) == (plainly.returncode, plainly.stdout, plainly.stderr)


def test_the_parent_stays_what_a_fork_can_copy(warm, tmp_path):
    """A warm parent has one thread, although `import torch` alone leaves two, and so has a worker when it starts."""
    result = warm.run("import os; print(len(os.listdir('/proc/self/task')))", tmp_path)
    assert len(list(Path(f"/proc/{warm.parent.pid}/task").iterdir())) == 1
    assert result.out[0] == "1\n"


def test_the_thread_that_started_the_parent_ends(session_mark, tmp_path):
    """A parent-death signal comes when the parent's *thread* ends; the one that started a worker parent may end."""
    made = []
    thread = threading.Thread(target=lambda: made.append(Rig("exec")))
    thread.start()
    thread.join()
    rig = made[0]
    try:
        result = rig.run("print('runs')", tmp_path)
    finally:
        rig.close()
    assert result.out[0] == "runs\n"
