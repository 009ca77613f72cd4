"""What users name and workers say may be in any bytes, and as much as they like. Real agents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

END_S = 120

FAILS = r"""
import os, sys
sys.stderr.buffer.write((b"\0" * 300 + b"\n") * 40)
sys.stderr.buffer.write(("\u6f22" * 380 + "\n").encode() * 40)
raise ValueError("\x1b[2J cannot read " + os.fsdecode(b"caf\xe9.png"))
"""

TRAINS = r"""
import os, sys
import torch, torch.nn.functional as F
import elasticrt

checkpoints, data, killed = sys.argv[1:4]
print([os.fsencode(each) for each in sys.argv[4:]], flush=True)
ctx = elasticrt.init()
elasticrt.prepare(data, lambda place: (place / "x").write_text("1"), version="v" * 200, scope="shared", timeout_s=30)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.ones(60, 1))
sampler = elasticrt.ElasticBatchSampler(samples, 2)
loop = elasticrt.Loop(checkpoints, sampler=sampler, model=model, optimizer=optimizer, every="5 steps")
for epoch in loop.epochs(1):
    for (x,) in loop.batches(torch.utils.data.DataLoader(samples, batch_sampler=sampler)):
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if loop.steps_done == 20 and not os.path.exists(killed):
            open(killed, "w").close()
            os.kill(os.getpid(), 9)
"""


def _run(
    tmp_path: Path, script: bytes, text: str, *arguments: bytes, restarts: int = 0
) -> subprocess.CompletedProcess[bytes]:
    path = os.fsencode(tmp_path) + b"/" + script
    with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  A path in bytes.
        file.write(text)
    options = [
        "--max-restarts",
        str(restarts),
        "--standalone",
        "--nproc-per-node",
        "1",
        "--log-dir",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, "-m", "elasticrt", "run", *options, path, *arguments]
    return subprocess.run(command, capture_output=True, timeout=END_S, check=False, cwd=tmp_path)


def test_a_failure_in_any_words_ends_the_run(tmp_path: Path) -> None:
    """W17, C13: output of NUL and CJK, an exception with a lone surrogate: the run ends with 1, and says why."""
    done = _run(tmp_path, b"fails.py", FAILS)
    said = done.stderr.decode()
    assert done.returncode == 1, said
    report = [line for line in said.splitlines() if line.startswith("elasticrt: ")]
    assert r"ValueError: \x1b[2J cannot read caf\udce9.png (0 restarts used up)" in report[-1]
    assert r"elasticrt:   | ValueError: \x1b[2J cannot read caf\udce9.png" in report
    assert "not ours" not in said


@pytest.mark.slow
def test_names_in_any_bytes(tmp_path: Path) -> None:
    """CLI: script, arguments and data directories that are not UTF-8 arrive, and a restart resumes."""
    place = os.fsencode(tmp_path) + b"/caf\xe9-"
    names = [os.fsencode(tmp_path) + b"/checkpoints", place + b"data", place + b"killed"]
    done = _run(tmp_path, b"caf\xe9.py", TRAINS, *names, b"caf\xe9", b"\x01\xff", b"", restarts=1)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0, said
    assert done.stdout.splitlines() == [repr([b"caf\xe9", b"\x01\xff", b""]).encode()] * 2
    assert "killed by SIGKILL" in said
    assert "first step" in said
    assert os.listdir(names[0])  # noqa: PTH208  A path in bytes.


@pytest.mark.slow
def test_a_command_of_thousands_of_words(tmp_path: Path) -> None:
    """CLI: as many arguments as the system takes: the worker gets them all."""
    words = [b"shard-%d.tar" % number for number in range(6_000)]
    done = _run(tmp_path, b"counts.py", "import sys; print(len(sys.argv))", *words)
    assert (done.returncode, done.stdout) == (0, b"6001\n"), done.stderr.decode()
