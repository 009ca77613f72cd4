"""Three hosts on one machine: the walk-through of deploy/README.md, typed as it is printed there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns import missing, notes
from tests.servers import wait_until

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
TYPED = "python3 dev.py cluster"
PROGRAM = [sys.executable, "-m", "tests.netns"]
"""What `python3 dev.py cluster` becomes when the environment has been set up."""


def walk_through() -> list[str]:
    """The commands of the README's section."""
    text = (ROOT / "deploy" / "README.md").read_text().partition("## Three hosts on one machine")[2]
    return text.split("```")[1].strip().splitlines()


def tool(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """One call of the tool."""
    done = subprocess.run(
        [*PROGRAM, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture
def _removed() -> Iterator[None]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    yield
    if notes().exists():
        tool("down")


def listed() -> str:
    """All network namespaces and interfaces of this machine."""
    commands = (["ip", "netns", "list"], ["ip", "-o", "link"])
    return "".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in commands)


def reaches(name: str, address: str, port: int) -> bool:
    """Whether that host gets a connection, asked on the host itself."""
    ask = f"import socket; socket.create_connection(({address!r}, {port}), timeout=1).close()"
    return tool("exec", name, "python", "-c", ask, check=False).returncode == 0


@pytest.mark.usefixtures("_removed")
def test_the_walk_through() -> None:
    """Every command does what the README says: three hosts, cut, heal, power off and on, and nothing is left."""
    commands = [shlex.split(line.removeprefix(TYPED)) for line in walk_through() if line.startswith(TYPED)]
    assert [words[0] for words in commands] == ["up", "exec", "status", "cut", "heal", "off", "on", "down"]
    up, run, status, cut, heal, off, on, down = commands
    said = tool(*up).stdout
    hosts = dict(re.findall(r"^  (\w+) is ([0-9.]+): 0 processes$", said, re.MULTILINE))
    here = re.search(r"this machine is ([0-9.]+)", said)
    assert list(hosts) == ["a", "b", "c"]
    assert here is not None

    token = json.loads(notes().read_text())["token"]
    assert token in listed()

    first = run[1]
    named = tool("exec", first, "sh", "-c", "hostname; command -v elasticrt; echo $ELASTICRT_NODE").stdout.split()
    assert named == [first, str(Path(sys.executable).parent / "elasticrt"), first]
    port = 29399
    serve = "import socket, time; s = socket.create_server(('0.0.0.0', 29399)); time.sleep(600)"
    servers = [
        subprocess.Popen([*PROGRAM, "exec", name, "python", "-c", serve], cwd=ROOT, stdin=subprocess.DEVNULL)
        for name in hosts
    ]
    try:
        for name in ("b", "c"):
            wait_until(lambda name=name: reaches("a", hosts[name], port), f"{name} serves", 20)
        assert "a is" in tool(*status).stdout
        victim = cut[1]
        assert f"{victim} is {hosts[victim]}: 1 processes, drops: " in tool(*cut).stdout
        assert not reaches("a", hosts[victim], port)
        assert reaches("a", hosts["c"], port)
        tool(*heal)
        assert reaches("a", hosts[victim], port)
        dark = off[1]
        assert f"{dark} is {hosts[dark]}: off" in tool(*off).stdout
        assert not reaches("a", hosts[dark], port)
        assert tool("exec", dark, "true", check=False).returncode != 0
        assert f"{dark} is {hosts[dark]}: 0 processes" in tool(*on).stdout, "the same address, empty"
        tool(*down)
    finally:
        for server in servers:
            server.kill()
            server.wait(20)
    assert token not in listed()
    assert not notes().exists()


@pytest.mark.usefixtures("_removed")
def test_mistakes() -> None:
    """Whatever is typed wrong is said in one line, with what would be right."""
    assert "up [NAME ...]" in tool(check=False).stderr
    assert "up [NAME ...]" in tool("cut", check=False).stderr
    assert "`up` makes one" in tool("status", check=False).stderr
    tool("up", "solo")
    assert "there is a cluster already" in tool("up", check=False).stderr
    assert "no host is called nobody; there are solo" in tool("off", "nobody", check=False).stderr
    assert json.loads(notes().read_text())["nodes"] == {"solo": True}


@pytest.mark.slow
@pytest.mark.usefixtures("_removed")
def test_a_run_over_three_hosts(tmp_path: Path) -> None:
    """The README's run, on all three hosts with an etcd beside them, survives the loss of a host's power."""
    (run,) = [shlex.split(line.removeprefix(TYPED)) for line in walk_through() if " exec " in line]
    here = re.search(r"this machine is ([0-9.]+)", tool("up").stdout)
    assert here is not None
    bin_ = Path(sys.executable).parent
    processes = [
        subprocess.Popen(
            [bin_ / "elasticrt", "etcd", "--insecure-etcd", "--listen", f"{here[1]}:2379"], stdout=subprocess.PIPE
        )
    ]
    assert processes[0].stdout is not None
    assert b"serves at" in processes[0].stdout.readline()
    (tmp_path / "train.py").write_text(TRAIN.format(directory=str(tmp_path)))
    try:
        words = [word.replace("HOST", here[1]).replace("train.py", str(tmp_path / "train.py")) for word in run]
        assert words[-1].endswith("train.py")
        for name in ("a", "b", "c"):
            output = (tmp_path / f"{name}.out").open("wb")
            with output:
                command = [*PROGRAM, "exec", name, *words[2:-1], "--log-dir", str(tmp_path / "runs"), words[-1]]
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                     env={**os.environ, "OMP_NUM_THREADS": "1"})
                )  # fmt: skip
        sizes = tmp_path / "sizes"
        wait_until(lambda: sizes.exists() and sizes.read_text().split()[-1] == "3", "three nodes train", 90)
        tool("off", "b")
        wait_until(lambda: sizes.read_text().split()[-1] == "2", "two nodes train", 60)
        (tmp_path / "stop").touch()
        assert [processes[1].wait(60), processes[3].wait(60)] == [0, 0], (tmp_path / "a.out").read_text()
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)
        processes[0].stdout.close()


TRAIN = """
import os, pathlib, time, torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
directory = pathlib.Path({directory!r})
ctx = elasticrt.init()
if ctx.is_first:
    with (directory / "sizes").open("a") as sizes: print(ctx.world_size, file=sizes)
data = TensorDataset(torch.randn(240, 2), torch.randn(240, 1))
sampler = elasticrt.ElasticBatchSampler(data, 12)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop(directory / "ckpt", every="1s", sampler=sampler, model=model, optimizer=optimizer)
for epoch in loop.epochs(500):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        F.mse_loss(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        time.sleep(0.02)
    if ctx.sum(int((directory / "stop").exists())): break
"""
