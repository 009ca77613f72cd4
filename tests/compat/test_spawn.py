"""elasticrt.spawn as a user has it: from a script, from notebook cells, when the function fails, or the caller dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from elasticrt import ConfigError, events, spawn
from elasticrt.multiprocessing.spawn import _keep_ends
from elasticrt.story import run_dir, sentences
from tests.cluster import gone
from tests.conftest import children
from tests.servers import wait_until

WAIT_S = 60.0


def start(command: list[str], directory: Path, *, session: bool = False, **env: str) -> subprocess.Popen[str]:
    """A Python program in `directory`; with a `session`, as at a terminal of its own."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=session,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Its output, when it has ended well."""
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    return output


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
import elasticrt

class Settings:
    def __init__(self, scale):
        self.scale = scale

def train(i, settings, words):
    dist.init_process_group("gloo")
    total = torch.tensor([float(i + 1)])
    dist.all_reduce(total)
    if i == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"worker {i} is {__name__} with {sys.argv[1:]}", flush=True)
    return i, total * settings.scale, words

def fail(i):
    raise ValueError("no such luck")

if __name__ == "__main__":
    values = elasticrt.spawn(train, (Settings(10), ["a"]), 2, join=True)
    assert sorted(values) == [0, 1], values
    assert all(values[i][0] == i and values[i][1].item() == 30 and values[i][2] == ["a"] for i in (0, 1)), values
    print("values are back", flush=True)
    os.environ["ELASTICRT_MAX_RESTARTS"] = "0"
    try:
        elasticrt.spawn(fail)
    except elasticrt.WorkersFailedError as error:
        print("the error says", str(error).replace("\\n", " / "), flush=True)
"""


def test_a_script(tmp_path: Path) -> None:
    """W01: workers call a function of the script, survive a kill, and return values; errors bring the report."""
    (tmp_path / "script.py").write_text(SCRIPT)
    output = finish(start(["script.py", "--flag"], tmp_path))
    assert "worker 0 is __mp_main__ with ['--flag']" in output
    assert "values are back" in output
    said = output.partition("the error says")[2]
    assert "ValueError: no such luck" in said
    assert "rank 0 failed first" in said
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "elasticrt_runs"}


ONE_GPU_EACH = """
import os, elasticrt

def which(i):
    return i, os.environ["LOCAL_RANK"]

if __name__ == "__main__":
    print(elasticrt.spawn(which, nprocs=2))
"""


def test_workers_that_see_one_gpu_each(tmp_path: Path) -> None:
    """With --virtual-local-rank LOCAL_RANK is 0 for all, and yet each is called with its own i, and returns a value."""
    (tmp_path / "script.py").write_text(ONE_GPU_EACH)
    output = finish(start(["script.py"], tmp_path, ELASTICRT_VIRTUAL_LOCAL_RANK="1"))
    assert "{0: (0, '0'), 1: (1, '0')}" in output


def test_a_program_from_stdin_and_one_without_a_guard(tmp_path: Path) -> None:
    """The first has no file, and its function travels by value; in the second a worker would call spawn itself."""
    with (tmp_path / "script.py").open("w+") as file:
        file.write(ONE_GPU_EACH)
        file.seek(0)
        done = subprocess.run(
            [sys.executable, "-"], stdin=file, cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert "{0: (0, '0'), 1: (1, '1')}" in done.stdout, done.stderr
    (tmp_path / "script.py").write_text(ONE_GPU_EACH.replace('if __name__ == "__main__":', "if True:"))
    process = start(["script.py"], tmp_path)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "a worker of spawn calls spawn (spawn): got <function which" in output
    assert 'Put the call below `if __name__ == "__main__":`' in output


IN_PLACE = """
import os, pathlib, signal
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
import elasticrt

def train(i):
    ctx, replaces, seated = elasticrt.init(), pathlib.Path("killed").exists(), 0
    model = DDP(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = elasticrt.Loop("ckpt", model=model, optimizer=optimizer)
    for step in loop.steps(10**6):
        if i == 0 and step == 5 and not pathlib.Path("killed").exists():
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with loop.step():
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            seated = ctx.sum(replaces)
        if seated:
            break
    return i

if __name__ == "__main__":
    print("values", sorted(elasticrt.spawn(train, nprocs=2)))
"""


def test_values_have_the_ranks_at_the_end(tmp_path: Path) -> None:
    """A replacement of a killed worker sets up with another rank, until it has a seat: that is none of the keys."""
    (tmp_path / "script.py").write_text(IN_PLACE)
    output = finish(start(["script.py"], tmp_path))
    assert (tmp_path / "killed").exists()
    assert "values [0, 1]" in output


NOTEBOOK = """
import linecache, sys

def run_cell(number, text):
    name = f"<cell {number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(sys.modules["__main__"]))

run_cell(1, '''
import torch, torch.distributed as dist
from torch import nn
import elasticrt as e
WIDTH = 3
lock = __import__("threading").Lock()
''')
run_cell(2, '''
class Base(nn.Module):
    def forward(self, x):
        return self.layer(x)

class Net(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

def twice(function):
    return lambda *args: function(*args) * 2

net = Net()
''')
run_cell(3, '''
@torch.no_grad()
def score(model):
    x = torch.ones(1, WIDTH)
    return model(x).item()

def train(i, start):
    dist.init_process_group("gloo")
    assert isinstance(net, Net) and dist.get_world_size() == 2
    return score(net) + start

values = e.spawn(train, args=(1.0,), nprocs=2)
assert values == {0: score(net) + 1.0, 1: score(net) + 1.0}, values
print("the cell has its values")
''')
run_cell(4, '''
def needs_lock(i):
    return lock

try:
    e.spawn(needs_lock)
except e.ConfigError as error:
    print("refused:", error)
''')
"""


BARE = """
import elasticrt
def function(i): pass
try:
    elasticrt.spawn(function)
except elasticrt.ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_notebook_cells(tmp_path: Path) -> None:
    """Functions of a notebook cell are sent with the classes and values they use; what cannot be sent is named."""
    output = finish(start(["-c", NOTEBOOK], tmp_path))
    assert "the cell has its values" in output
    assert "refused: a call that can't be sent to workers" in output
    assert "lock" in output.rpartition("refused: ")[2]


def test_notebook_cells_without_cloudpickle(tmp_path: Path) -> None:
    """What is missing is said before anything is started, with the remedy."""
    output = finish(start(["-c", "import sys\nsys.modules['cloudpickle'] = None\n" + BARE], tmp_path))
    assert "refused: a function of an interactive session needs cloudpickle" in output
    assert "pip install cloudpickle" in output


CHATTY = """
import sys
import elasticrt

def talk(i):
    print("x" * (1 << 20))
    return i

if __name__ == "__main__":
    print(elasticrt.spawn(talk), file=sys.stderr)
"""


def test_a_full_disk_behind_the_output(tmp_path: Path) -> None:
    """What workers print is lost, more than a pipe holds; the call ends as it does otherwise."""
    (tmp_path / "script.py").write_text(CHATTY)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.stderr.endswith("{0: 0}\n"), done.stderr
    assert "Traceback" not in done.stderr


FOREIGN = """
import os
import elasticrt

def talk(i):
    os.write(1, "caf\u00e9\\n".encode())
    os.write(1, b"and more\\n")

if __name__ == "__main__":
    elasticrt.spawn(talk)
"""


def test_output_that_the_caller_cannot_encode(tmp_path: Path) -> None:
    """Such a character is escaped, and what follows it is shown."""
    (tmp_path / "script.py").write_text(FOREIGN)
    assert finish(start(["script.py"], tmp_path, PYTHONIOENCODING="ascii")) == "caf\\xe9\nand more\n"


def test_of_all_events_the_last_words_are_kept() -> None:
    """However many there are: an agent writes some each second, and the call needs how the run has ended."""
    source, target = os.pipe()
    step, result = events.Step(1, 2, 0), events.Result("failed", 1, "rank 0 raised")
    with os.fdopen(target, "wb") as file:
        for event in (step, events.Failure("where"), step, result, step):
            file.write(events.encode(event, "n0", 1.0, datetime.now(timezone.utc)) + b"\n")
        file.write(b'{"event": "half a')
    ends: dict[str, Any] = {}
    _keep_ends(source, ends)
    assert ends.keys() == {"failure", "result"}
    assert (ends["failure"]["text"], ends["result"]["reason"]) == ("where", "rank 0 raised")


SLEEPER = """
import pathlib, time
import elasticrt

def sleep(i):
    pathlib.Path(f"here-{i}").touch()
    time.sleep(600)

if __name__ == "__main__":
    elasticrt.spawn(sleep, nprocs=2)
"""


SAVER = """
import os, pathlib, time
import torch
import elasticrt

def train(i):
    elasticrt.init()
    model = torch.nn.Linear(1, 1)
    loop = elasticrt.Loop("ckpt", model=model)
    for step in loop.steps(10**6):
        with loop.step():
            if step == 1:
                pathlib.Path("here").touch()
            time.sleep(2)  # The step is under way for longer than a process that is to end at once.

if __name__ == "__main__":
    elasticrt.spawn(train)
"""


@pytest.mark.slow
def test_an_interrupt_at_the_terminal_saves(tmp_path: Path) -> None:
    """Ctrl-C, which all processes of the terminal get: the agent finishes the step and saves it, as under `run`."""
    (tmp_path / "script.py").write_text(SAVER)
    caller = start(["script.py"], tmp_path, session=True)
    wait_until((tmp_path / "here").exists, "the second step has begun", WAIT_S)
    os.killpg(caller.pid, signal.SIGINT)
    output, _ = caller.communicate(timeout=WAIT_S)
    assert "KeyboardInterrupt" in output
    (directory,) = (tmp_path / "elasticrt_runs").iterdir()
    assert sentences.state(run_dir.read(directory)).startswith("stopped; step 2 is saved")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_caller_that_dies(number: signal.Signals, tmp_path: Path) -> None:
    """A03: when the calling process is killed or interrupted, its agent and workers are gone soon."""
    (tmp_path / "script.py").write_text(SLEEPER)
    caller = start(["script.py"], tmp_path)
    deadline = time.monotonic() + WAIT_S
    while not all((tmp_path / f"here-{i}").exists() for i in range(2)):
        assert time.monotonic() < deadline
        assert caller.poll() is None, caller.communicate()[0]
        time.sleep(0.02)
    pids = children(caller.pid)
    caller.send_signal(number)
    output, _ = caller.communicate(timeout=WAIT_S)
    assert caller.returncode != 0
    assert number == signal.SIGKILL or "KeyboardInterrupt" in output
    assert gone(sorted(pids), 20.0) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: spawn(print, join=False), "join=False"),
        (lambda: spawn(print, nprocs=0), "nprocs from 1"),
        (lambda: spawn(lambda i: i), "can't be sent"),
        (lambda: spawn(print, args=(threading.Lock(),)), "can't be sent"),
        (lambda: spawn(7), "not a function"),  # type: ignore[arg-type]  # That is the point.
        (lambda: spawn(print, args=7), "not a sequence"),  # type: ignore[arg-type]  # The same.
    ],
)
def test_a_call_that_cannot_be(call: Any, words: str) -> None:
    """What cannot be called is refused before anything is started."""
    with pytest.raises(ConfigError, match=words):
        call()
