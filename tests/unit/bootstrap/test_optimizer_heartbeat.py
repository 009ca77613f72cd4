"""Steps of optimizers as beats on the status page, in a process of its own: the hook is for the life of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import io, os, pickle, sys, tempfile, torch
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.status_page import StatusPage
from elasticrt.bootstrap import optimizer_heartbeat as pulse

fd = StatusPage.create()
page = StatusPage(fd)
fields = dict(rank=0, local_rank=0, world_size=1, local_world_size=1, group_rank=0, group_world_size=1)
fields |= dict(master_addr="127.0.0.1", master_port=1, restart_count=0, max_restarts=3, run_id="run", attempt=1)
fields |= dict(generation=1, nonce="a" * 32, node="n0", run_dir="/nowhere", page_fd=fd)
os.environ.update(WorkerEnv(**fields).to_env())
pulse.begin()
model = torch.nn.Linear(2, 1)
optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())]


def step():
    for optimizer in optimizers:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


assert (page.beats, page.beat_at_ns) == (0, 0)
with tempfile.TemporaryDirectory() as directory:

    def written(name, at_s):
        path = os.path.join(directory, name)
        torch.save({"name": name}, path)
        if at_s:
            os.utime(path, (at_s, at_s))
        return path

    def load(file, **options):
        assert torch.load(file, **options).keys() == {"name"}
        return page.loaded / 10**6

    old, new, own = written("old", 1000), written("new", 2000), written("own", 0)
    assert load(io.BytesIO(open(new, "rb").read())) == 0  # It has no name.
    assert load(own) == 0  # This life has written it.
    if os.fork() == 0:
        load(new)
        os._exit(0)
    os.wait()
    assert page.loaded == 0
    assert load(old) == 1000
    with os.fdopen(os.open(new, os.O_RDONLY), "rb") as file:
        assert load(file, map_location="cpu") == 2000
    assert load(old) == 2000
    try:
        torch.load(os.path.join(directory, "none"))
        sys.exit("it is there")
    except FileNotFoundError:
        assert pickle.loads(pickle.dumps(torch.load)) is torch.load
    step()
    assert load(written("late", 3000)) == 2000  # Steps have been made without it.
    page.beats = 0
step()
first = page.beat_at_ns
assert 0 < page.begun_at_ns < first
step()
assert page.beats == 4 and page.beat_at_ns > first > page.first_beat_at_ns > 0
if os.fork() == 0:
    step()
    os._exit(0)
os.wait()
assert page.beats == 4
"""


def test_steps_of_optimizers_and_what_was_loaded_before_them_are_seen_and_those_of_forks_are_not() -> None:
    """L5: a script that knows nothing of us is seen to go on from a file and to move; what its forks do is not seen."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_compiled_step_works_and_beats() -> None:
    """A function that steps an optimizer may be compiled; its steps are seen as well."""
    script = SCRIPT + "step(); torch.compile(lambda: optimizers[0].step(), backend='eager')(); assert page.beats == 7\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
