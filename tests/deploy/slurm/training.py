"""A run inside SLURM, as the files in its run directory tell it, and the script that it runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from tests.deploy.slurm.lab import Lab

SCRIPT = """
import os, time
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

assert "SLURM_JOB_ID" in os.environ and "SLURM_PROCID" not in os.environ and "SLURM_NTASKS" not in os.environ
ctx = elasticrt.init(timeout_s=20)
data = TensorDataset(torch.randn(640, 2), torch.randn(640, 1))
sampler = elasticrt.ElasticBatchSampler(data, 64)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop("ckpt", sampler=sampler, every="20 steps", model=model, optimizer=optimizer)
over = False
for epoch in loop.epochs(10**6):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        over = ctx.sum(int(os.path.exists("finish"))) > 0
        if over:
            break
    if over:
        break
"""


SPOKEN_OFTEN = re.compile(r'\{"event": "(step|copied|committed)"')


class Training:
    """A run in `directory`. Times are seconds on this machine's monotonic clock."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.directory = directory
        self._read: dict[Path, int] = {}
        self._events: list[dict] = []
        if directory.exists():  # Otherwise a test is about to make it, and brings another script.
            (directory / "train.py").write_text(SCRIPT)

    def finish(self) -> None:
        """Let the script come to its end."""
        (self.directory / "finish").touch()

    def events(self, name: str) -> list[dict]:
        """All events of one kind, of all agents, in order of time."""
        for path in self.directory.glob("elasticrt_runs/*/events-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]  # The last line may still be being written.
            self._read[path] = self._read.get(path, 0) + len(text)
            self._events += map(json.loads, text.splitlines())
        return sorted((event for event in self._events if event["event"] == name), key=lambda event: event["at"])

    def runs(self) -> list[str]:
        """The names of the runs that have begun here."""
        return sorted(path.name for path in self.directory.glob("elasticrt_runs/*"))

    def number(self) -> int:
        """The newest generation that has started anywhere."""
        return max((event["number"] for event in self.events("generation")), default=0)

    def agent(self, node: str) -> int:
        """The process id of a node's newest agent."""
        return [event["pid"] for event in self.events("agent_started") if event["node"] == node][-1]

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait until the events make `condition` true."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{self.story()}"
            time.sleep(0.05)

    def together(self, *nodes: str, after: int = 0, timeout_s: float = 60.0) -> dict:
        """Wait until exactly these nodes have stepped in the newest generation, one after `after`; its first step.

        The first step of the node that came first, because a newcomer cannot know what was done again.
        """

        def newest() -> bool:
            started = [event for event in self.events("generation") if event["number"] == self.number()]
            return bool(started) and self.number() > after and sorted(started[0]["nodes"]) == sorted(nodes)

        def stepped() -> list[dict]:
            return [event for event in self.events("first_step") if event["generation"] == self.number()]

        self.wait(f"{nodes} together", lambda: newest() and len(stepped()) == len(nodes), timeout_s)
        return min(stepped(), key=lambda event: event["pause_s"] is None)

    def started(self, number: int) -> dict:
        """The event of a generation's start."""
        return next(event for event in self.events("generation") if event["number"] == number)

    def stopped(self, *nodes: str) -> list[int]:
        """The exit codes of the newest agents of these nodes that have ended."""
        codes = {event["node"]: event["code"] for event in self.events("agent_stopped")}
        return [codes[node] for node in nodes if node in codes]

    def ready(self) -> None:
        """Wait until the newest generation has committed a checkpoint, which a loss can fall back to."""
        number = self.number()
        self.wait("a commit", lambda: any(event["generation"] == number for event in self.events("committed")))

    def story(self) -> str:
        """Everything known, for a failing test."""
        parts = []
        for path in sorted(self.directory.glob("elasticrt_runs/*/events-*.jsonl")):
            parts.append(f"--- {path.name}")
            parts += [line for line in path.read_text().splitlines() if not SPOKEN_OFTEN.match(line)][-40:]
        for path in sorted(self.directory.glob("*.out")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join([*parts, self.lab.logs()])
