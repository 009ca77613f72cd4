"""What a module may not do while it is imported, if it is to be imported once for all workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRIAL = """\
import json, os, sys
from elasticrt.worker import trial
origins, directory = json.loads(sys.argv[1]), sys.argv[2]
trial.run(origins, directory, int(sys.argv[3]))
"""


def tried(origins: dict[str, str], library: Path, directory: Path) -> list[list[str]]:
    """The lines of a trial of these modules, run by a fresh interpreter."""
    reader, writer = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(library)}
    command = [sys.executable, "-c", TRIAL, json.dumps(origins), str(directory), str(writer)]
    try:
        done = subprocess.run(command, env=environment, pass_fds=[writer], cwd="/", timeout=60, check=False)
    finally:
        os.close(writer)
    assert done.returncode in (0, -9, 7)
    with os.fdopen(reader) as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture
def library(tmp_path):
    """A directory of installed libraries, with an `einops` that imports what it is told to."""
    path = tmp_path / "library"
    path.mkdir()
    (tmp_path / "place").mkdir()
    return path


BAD = {
    "reads RANK": "import os\nrank = os.environ.get('RANK', 0)",
    "reads MASTER_ADDR": "import os\nx = os.getenv('MASTER_ADDR')",
    "reads LOCAL_RANK": "import os\nx = 'LOCAL_RANK' in os.environ",
    "reads WORLD_SIZE": "import os\nx = os.environb.get(b'WORLD_SIZE')",
    "reads all of the environment": "import os\nx = dict(os.environ)",
    "changes the environment": "import os\nos.environ['KMP_DUPLICATE_LIB_OK'] = '1'",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "started a process": "import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', ''])",
    "opened a socket": "import socket\ns = socket.socket()",
    "signal handler": "import signal\nsignal.signal(signal.SIGUSR1, lambda *a: None)",
    "sys.excepthook": "import sys\nsys.excepthook = print",
    "prints": "import os\nos.write(2, b'hello')",
    "cannot be imported: ImportError: not today": "raise ImportError('not today')",
    "cannot be imported: SystemExit": "raise SystemExit(0)",
    "imports 'utils', which is beside the script": "import utils",
}


@pytest.mark.parametrize(("why", "body"), BAD.items(), ids=BAD)
def test_what_a_learnt_module_may_not_do(library, tmp_path, why, body):
    """Each of these ends the trial with the module and the reason, although the one before has passed."""
    (library / "numpy.py").write_text("import os\nx = os.environ.get('HOME')")
    (library / "einops.py").write_text(body)
    (library / "utils.py").write_text("")
    (tmp_path / "place" / "utils.py").write_text("")
    origins = {name: str(library / f"{name}.py") for name in ("numpy", "einops")}
    lines = tried(origins, library, tmp_path / "place")
    assert lines[:2] == [["numpy"], ["einops"]]
    assert lines[2][0] == "einops"
    assert why in lines[2][1]
    assert len(lines) == 3


def test_what_a_learnt_module_may_do(library, tmp_path):
    """Reading other variables, a thread that is over, a socket that is closed: nothing of that stays."""
    (library / "einops.py").write_text(
        "import os, socket, threading\nx = os.environ.get('HOME'), os.environ.get('OMP_NUM_THREADS')\n"
        "t = threading.Thread(target=print); t.start(); t.join()\nsocket.socket().close()"
    )
    (library / "einops.py").write_text((library / "einops.py").read_text().replace("print", "int"))
    lines = tried({"einops": str(library / "einops.py")}, library, tmp_path / "place")
    assert lines == [["einops"], []]


@pytest.mark.parametrize("body", ["import os; os._exit(7)", "import os; os.kill(os.getpid(), 9)"])
def test_a_module_that_ends_the_process(library, tmp_path, body):
    """The last line names the module that was being imported."""
    (library / "einops.py").write_text(body)
    assert tried({"einops": str(library / "einops.py")}, library, tmp_path / "place") == [["einops"]]


def test_another_file_than_the_scripts(library, tmp_path):
    """What the script's own path gives another file for is not imported in its place."""
    (library / "einops.py").write_text("")
    lines = tried({"einops": "/elsewhere/einops.py"}, library, tmp_path / "place")
    assert lines[-1] == ["einops", "is another one for the script: /elsewhere/einops.py"]
