"""Draws training scripts by seed, as researchers would write them, and runs them under faults that are drawn as well.

    python -m tests.chaos.drawn_scripts [--first 0] [--count 20] [--keep DIR]

Each seed gives a script, a way to run it (nodes, workers), and one to three losses of workers. All workers that are
there at the end must have the same state, bit by bit. Except for rounding, that state must be the state at the end of
an undisturbed run of one process. `--keep` keeps the scripts and the output of runs that failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import TOGETHER, Cluster

STEPS = 48
END_S_MAX = 120.0
PRECISION, PRECISION_OF_LBFGS = 1e-9, 1e-6
"""The largest relative difference between two equal states. The scripts train in float64. Other world sizes add numbers
up in another order, which costs a few of the sixteen digits. LBFGS enlarges that in each step, by its history of
gradients."""

# The beginning and the end of each script. Between them `_script` puts what is drawn.
HEAD = """
import json, os, pathlib, random, signal, sys, threading, time
import torch, elasticrt
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

# The node and local rank of a worker, from which step, at which point, how many seconds after it, and what it does:
# kill or freeze itself, or kill its agent, or have it drain.
FAULTS = json.loads(pathlib.Path("faults.json").read_text())
ME = [os.environ.get("ELASTICRT_NODE", ""), int(os.environ.get("LOCAL_RANK", 0))]

def agent():  # The worker's parent is its agent's child.
    return int(pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])

def at(point):
    for number, (node, local_rank, step, where, after, kind) in enumerate(FAULTS):
        if where == point and [node, local_rank] == ME and loop.steps_done >= step:
            try:
                pathlib.Path(f"fault-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            signals = {"freeze": signal.SIGSTOP, "drain": signal.SIGTERM}
            pid = os.getpid() if kind in ("kill", "freeze") else agent()
            threading.Timer(after, os.kill, (pid, signals.get(kind, signal.SIGKILL))).start()

ctx = elasticrt.init()
torch.manual_seed(3)
random.seed(3)
torch.set_default_dtype(torch.float64)
inputs = torch.randn(96, 5)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += COUNTS
        return self.second(torch.tanh(self.first(x)))
"""

TAIL = """
group = optimizer.param_groups[0]
end = {
    "weights": [each.flatten().tolist() for each in model.parameters()],
    "optimizer": [sum(v.sum().item() for v in s.values() if torch.is_tensor(v)) for s in optimizer.state.values()],
    "lr": group["lr"], "seen": model.module.seen.item(), "training": model.training,
    "vars": {name: value for name, value in loop.vars.items()},
    "steps": loop.steps_done, "draws": [draw(), 0.0 if draw is float else torch.rand(()).item()],
    **more(),
}
pathlib.Path(f"end-{os.getpid()}.json").write_text(json.dumps([end, results]))
"""

# The points of a script at which a worker may kill itself: those that the script calls `at` with.
POINTS = ("top", "block", "backward", "stepped", "behind", "evaluation", "after epoch", "head", "pause")


@dataclass(frozen=True)
class Drawn:
    """What a seed has drawn.

    Attributes:
        script: the script.
        topology: the name of the way to run it.
        nodes: the number of workers of each node, by the node's name.
        options: options of `elasticrt run`.
        faults: the losses of workers, in the form of `FAULTS` in `HEAD`.
    """

    script: str
    topology: str
    nodes: dict[str, int]
    options: tuple[str, ...]
    faults: list[list[Any]]
    late: str  # The node that is started after the others have made `late_from` steps; "" for none.
    late_from: int
    power_loss: int = 0  # The step after which all agents are killed at once, and started again; 0 for none.


def draw(seed: int) -> Drawn:
    """The script, the way to run it, and the faults of a seed."""
    dice = random.Random(f"script {seed}")
    topology = dice.choice(("one node", "elastic", "fixed", "two workers each"))
    nodes, options = {
        "one node": ({"a": 3}, ("--nnodes", "1", "--nproc-per-node", "3")),
        "elastic": ({"a": 1, "b": 1, "c": 1}, ("--nnodes", "1:3", *TOGETHER)),
        "fixed": ({"a": 1, "b": 1}, ("--nnodes", "2", *TOGETHER)),
        "two workers each": ({"a": 2, "b": 2}, ("--nnodes", "1:2", "--nproc-per-node", "2", *TOGETHER)),
    }[topology]
    # What was added later is drawn by dice of its own, so that the seeds from before still have what they had.
    more = random.Random(f"more {seed}")
    script = _script(dice, more)
    points = [each for each in POINTS if f'at("{each}")' in script or f'evaluate("{each}"' in script]
    workers = [(node, rank) for node, count in nodes.items() for rank in range(count)]
    faults, doomed = [], set()
    for _ in range(dice.choice((1, 1, 2, 3))):
        after = dice.choice((0.0, 0.0, dice.uniform(0, 0.004), dice.uniform(0, 0.03)))
        worker, kind = dice.choice(workers), dice.choice(("kill", "kill", "kill", "freeze", "lose", "drain"))
        if kind in ("lose", "drain"):
            # One node at least stays; where all are needed, an agent is not started again.
            if topology in ("one node", "fixed") or len(doomed | {worker[0]}) == len(nodes):
                kind = "kill"
            else:
                doomed.add(worker[0])
        faults.append([*worker, dice.randrange(2, STEPS - 8), dice.choice(points), after, kind])
    late = dice.choice((*nodes, "", "", "")) if len(nodes) > 1 and topology != "fixed" else ""
    if late:  # It comes when the others have made some steps, which they make without waiting for it.
        options = tuple(each for each in options if each not in TOGETHER)
    late_from, power_loss = dice.randrange(3, STEPS // 2), more.randrange(4, STEPS - 8) if more.random() < 0.15 else 0
    return Drawn(script, topology, nodes, options, faults, late, late_from, power_loss)


class _Code:
    """The lines of a script, indented."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, depth: int, text: str) -> None:
        """Add the lines of `text` inside of `depth` blocks."""
        self.lines += ["    " * depth + line if line else "" for line in text.strip("\n").splitlines()]


def _script(dice: random.Random, more: random.Random) -> str:
    """A script.

    Args:
        dice: draws what the script does.
        more: draws the features of `_MORE_CHANCES`.
    """
    has = {name: dice.random() < chance for name, chance in _CHANCES.items()}
    way = dice.choice(("batches", "steps", "micro"))
    rate = dice.choice(("step", "step by epochs", "cosine", "one cycle", "plateau", "none"))
    # Noise on the loss must be the same on all ranks, and at any world size. With a seed for the Loop each rank draws
    # numbers of its own. And the number of micro-batches of a rank, each of which draws, depends on the world size.
    has["noise"] = has["noise"] and way != "micro" and not has["seed"]
    has["over blocks"] = has["over blocks"] and way != "micro"
    has["average"] = has["average"] and not has["over blocks"]
    has |= {name: more.random() < chance for name, chance in _MORE_CHANCES.items()}
    has["two models"] = has["two models"] and not (has["over blocks"] or way == "micro")
    # The loss that LBFGS gets from its closure must be that of all ranks.
    usable = way == "steps" and rate != "one cycle"  # LBFGS has no momentum for a cycle.
    has["closure"] = has["closure"] and usable and not (has["over blocks"] or has["two models"])
    has["swaps"] = has["swaps"] and has["average"]
    has["draws early"] = has["draws early"] and not has["seed"]
    has["goes on"] = has["goes on"] and not has["closure"]
    code = _Code()
    code.add(0, f"COUNTS = {int(way != 'micro')}" + HEAD)
    code.add(0, f"model = DDP(Net(), find_unused_parameters={has['freezes']})")
    drawn = dice.choice(_OPTIMIZERS)
    code.add(0, f"optimizer = torch.optim.{_LBFGS if has['closure'] else drawn}")
    code.add(0, "scheduler = " + _SCHEDULERS[rate])
    given = ["model=model", "optimizer=optimizer"] + (["scheduler=scheduler"] if rate != "none" else [])
    code.add(0, "def more():\n    return {}")
    for name, text, objects in (
        ("average", _AVERAGE, ["average=average"]),
        ("two models", _CRITIC, ["critic=critic", "critic_optimizer=critic_optimizer"]),
        ("tracks", _TRACKER, ["tracker=tracker"]),
    ):
        if has[name]:
            code.add(0, text)
            given += objects
    if way != "steps":
        micro = ", micro_batch_size=2" if way == "micro" else ""
        sizes = f"global_batch_size=12{micro}, seed={dice.randrange(9)}"
        code.add(0, f"sampler = elasticrt.ElasticBatchSampler(data, {sizes})")
        given.append("sampler=sampler")
    every, memory = dice.choice(("1000 steps", "7 steps")), dice.choice(("", ", memory=0"))
    seed = ", seed=5" if has["seed"] else ""
    code.add(0, f'loop = elasticrt.Loop("ckpt", every="{every}"{memory}{seed}, {", ".join(given)})')
    code.add(0, "loop.vars.update(head=0, top=0, inside=0, behind=0, best=[1e9], history=[])\nresults = []")
    code.add(0, f"draw = {'float' if has['seed'] else 'random.random'}" + _EVALUATION)
    code.add(0, "noise = " + ("random.random" if has["noise"] else "float"))
    if has["draws early"]:
        code.add(0, _EARLY)
    if has["subgroups"]:
        code.add(0, _SUBGROUP)
    code.add(0, _train(has, rate, way))
    if way == "steps":
        code.add(0, f"for step in loop.steps({STEPS}):")
        _top(code, dice, has)
        if has["draws early"]:
            code.add(1, "of_step = random.random() + torch.rand(()).item()")
        code.add(1, "x, y = data[(12 * step) % 96:(12 * step) % 96 + 12]\ntrain(x, y)")
        _behind(code, dice, has, rate, 1)
    else:
        _epochs(code, dice, has, rate, whole=way != "micro")
    if has["goes on"]:
        code.add(0, _SECOND_LOOP)
    code.add(0, TAIL)
    return "\n".join(code.lines) + "\n"


def _head(code: _Code, has: dict[str, bool], rate: str) -> None:
    """Add the head of an epoch's body."""
    code.add(1, 'at("head")')
    if has["freezes"]:
        code.add(1, "model.module.first.bias.requires_grad_(epoch % 2 == 0)")
    if has["counts"]:
        code.add(1, 'loop.vars["head"] += 1')
    if has["evaluates first"]:
        code.add(1, 'loop.vars["history"].append(evaluate("evaluation", "head"))')
        if has["evaluates twice"]:
            code.add(1, 'evaluate("evaluation", "head again")')
    if has["draws early"]:
        code.add(1, "of_epoch = random.random() + torch.rand(()).item()")
    if rate == "step by epochs":
        code.add(1, "scheduler.step()")


def _epochs(code: _Code, dice: random.Random, has: dict[str, bool], rate: str, *, whole: bool) -> None:
    """Add a loop over epochs. `whole`: whether each step has one batch on each rank."""
    code.add(0, f"for epoch in loop.epochs({STEPS // 8}):")
    _head(code, has, rate)
    workers = ", num_workers=2, persistent_workers=True" if has["loader workers"] else ""
    code.add(1, f"loader = DataLoader(data, batch_sampler=sampler{workers})")
    code.add(1, "for x, y in loop.batches(loader):")
    code.add(2, 'at("top")')
    if has["counts"] and whole:
        code.add(2, 'loop.vars["top"] += 1')
    if has["draws early"] and whole:
        code.add(2, "of_step = random.random() + torch.rand(()).item()")
    code.add(2, "train(x, y)")
    _behind(code, dice, has, rate, 2)
    code.add(1, 'at("after epoch")')
    if has["pauses"]:
        code.add(1, 'with loop.pause("export"):\n    at("pause")\n    time.sleep(0.003)')
    if has["evaluates epochs"] or rate == "plateau":
        code.add(1, f'loss = evaluate("evaluation", "epoch", swaps={has["swaps"]})')
        if rate == "plateau":
            code.add(1, "scheduler.step(loss)")
    if has["counts"]:
        code.add(1, 'loop.vars["behind"] += 1')
    if has["evaluates twice"]:
        code.add(1, 'loop.vars["history"].append(evaluate("evaluation", "once more"))')
    if has["stops"]:
        code.add(1, f"if loop.steps_done >= {STEPS - 16}:\n    break")


def _train(has: dict[str, bool], rate: str, way: str) -> str:
    """The function that makes one step, or with micro-batches one batch of it."""
    code, whole = _Code(), way != "micro"
    code.add(0, "def train(x, y):")
    code.add(1, "with loop.step():")
    code.add(2, 'at("block")\ntime.sleep(0.003)')
    if has["counts"] and whole:
        code.add(2, 'loop.vars["inside"] += 1')
    if has["sums"] and whole:
        code.add(2, "total = torch.tensor([float(len(x))])\ndist.all_reduce(total)")
    if has["subgroups"] and whole:
        code.add(2, "dist.all_reduce(torch.ones(3), group=subgroup)")
    if has["tracks"] and whole:
        code.add(2, "tracker.track(loop.steps_done)")
    depth = _update(code, has, way)
    if has["average"] and has["inside"]:
        code.add(depth, "average.update_parameters(model.module)")
    if rate in _EACH_STEP and has["inside"]:
        code.add(depth, "scheduler.step()")
    if has["sums late"] and whole and not has["over blocks"]:
        code.add(depth, "mean = torch.ones(1)\ndist.all_reduce(mean)")
    if has["reports"] and not has["closure"]:
        code.add(2, "loop.report(loss=loss)")
    return "\n".join(code.lines)


def _update(code: _Code, has: dict[str, bool], way: str) -> int:
    """Add backward passes and optimizers. Returns how deep the code is that runs where an optimizer has stepped."""
    if has["over blocks"]:
        code.add(2, "(loss := (model(x) - y).square().mean() * (1 + noise())).backward()")
        code.add(2, 'at("backward")\nif loop.steps_done % 2:')
        code.add(3, 'optimizer.step()\noptimizer.zero_grad()\nat("stepped")')
        return 3
    if has["two models"] or has["closure"]:
        code.add(2, _TRAIN_BOTH if has["two models"] else _TRAIN_BY_CLOSURE)
        return 2
    if has["accumulates"] and way == "steps":
        code.add(2, "with model.no_sync():\n    ((model(x) - y).square().mean() / 2).backward()")
    code.add(2, 'loss = (model(x) - y).square().mean() * (1 + noise())\nloss.backward()\nat("backward")')
    depth = 3 if way == "micro" else 2
    if way == "micro":
        code.add(2, "if loop.complete:")
    if has["clips"]:
        code.add(depth, "nn.utils.clip_grad_norm_(model.parameters(), 0.5)")
    code.add(depth, 'optimizer.step()\noptimizer.zero_grad()\nat("stepped")')
    return depth


def _top(code: _Code, dice: random.Random, has: dict[str, bool]) -> None:
    """Add the top of the body of `loop.steps`, before the block."""
    code.add(1, 'at("top")')
    if has["counts"]:
        code.add(1, 'loop.vars["top"] += 1')
    if has["evaluates first"]:
        every = dice.choice((1, 4, 5))
        code.add(1, f"if step % {every} == 0:")
        code.add(2, 'loss = evaluate("evaluation", "top")')
        if has["keeps best"]:
            code.add(2, 'loop.vars["best"][0] = min(loss, loop.vars["best"][0])')
        if has["evaluates twice"]:
            code.add(2, 'evaluate("evaluation", "top again")')


def _behind(code: _Code, dice: random.Random, has: dict[str, bool], rate: str, depth: int) -> None:
    """Add what follows the block of a step, `depth` blocks deep."""
    code.add(depth, 'at("behind")\nif loop.complete:')
    code.add(depth + 1, "pass")
    if has["average"] and not has["inside"]:
        code.add(depth + 1, "average.update_parameters(model.module)")
    if rate in _EACH_STEP and not has["inside"]:
        code.add(depth + 1, "scheduler.step()")
    if has["counts"]:
        code.add(depth + 1, 'loop.vars["behind"] += 1')
    if has["evaluates behind"]:
        code.add(depth, f"if loop.complete and loop.steps_done % {dice.choice((1, 3, 6))} == 0:")
        code.add(depth + 1, 'loop.vars["history"].append(evaluate("evaluation", "behind"))')
        if has["evaluates twice"]:
            code.add(depth + 1, 'evaluate("evaluation", "behind again")')


# How likely a script is to have each of these features.
_CHANCES = {
    "average": 0.4, "seed": 0.2, "noise": 0.5, "freezes": 0.3, "counts": 0.6, "sums": 0.3, "accumulates": 0.3,
    "clips": 0.4, "inside": 0.5, "sums late": 0.2, "reports": 0.3, "evaluates first": 0.4, "keeps best": 0.5,
    "evaluates twice": 0.4, "over blocks": 0.15, "evaluates behind": 0.5, "evaluates epochs": 0.5, "stops": 0.2,
}  # fmt: skip

# The same of features that were added later.
_MORE_CHANCES = {
    "two models": 0.2, "closure": 0.3, "tracks": 0.25, "swaps": 0.5, "subgroups": 0.2, "loader workers": 0.15,
    "pauses": 0.2, "goes on": 0.15, "draws early": 0.4,
}  # fmt: skip

_EARLY = """
of_epoch = of_step = 0.0

def noise(base=noise):
    return base() + of_epoch + of_step
"""

_LBFGS = "LBFGS(model.parameters(), 0.05, max_iter=3, history_size=4)"

_OPTIMIZERS = (
    "SGD(model.parameters(), 0.05, momentum=0.9)",
    "Adam(model.parameters(), 0.01)",
    "AdamW([{'params': model.module.first.parameters()}, {'params': model.module.second.parameters(), 'lr': 0.02}])",
)

# The schedules that step once in each step, and not once in an epoch.
_EACH_STEP = ("step", "cosine", "one cycle")

_SCHEDULERS = {
    "step": "torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7)",
    "step by epochs": "torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)",
    "cosine": f"torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {STEPS})",
    "one cycle": f"torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps={4 * STEPS})",
    "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.8)",
    "none": "None",
}

_AVERAGE = """
average = torch.optim.swa_utils.AveragedModel(model.module, avg_fn=lambda old, new, count: 0.8 * old + 0.2 * new)

def more(rest=more):
    return {"average": [each.flatten().tolist() for each in average.parameters()], **rest()}
"""

_CRITIC = """
critic = DDP(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)))
critic_optimizer = torch.optim.Adam(critic.parameters(), 0.02)

def more(rest=more):
    return {"critic": [each.flatten().tolist() for each in critic.parameters()], **rest()}
"""

# As in adversarial training: each model has a backward and an optimizer of its own, in one step.
_TRAIN_BOTH = """
guess = model(x)
judged = critic(torch.cat([x, guess.detach()], 1))
loss = (judged - (guess.detach() - y).abs()).square().mean() * (1 + noise())
loss.backward()
at("backward")
critic_optimizer.step()
critic_optimizer.zero_grad()
loss = (guess - y).square().mean() + 0.1 * critic(torch.cat([x, guess], 1)).mean()
loss.backward()
at("backward")
optimizer.step()
optimizer.zero_grad()
critic_optimizer.zero_grad()
at("stepped")
"""

_TRAIN_BY_CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean() * (1 + noise())
    loss.backward()
    at("backward")
    return loss
optimizer.step(closure)
at("stepped")
"""

# An object of the script's own, with a small and a large tensor that a step changes in place.
_TRACKER = """
class Tracker:
    def __init__(self):
        self.mean, self.large, self.seen = torch.zeros(3), torch.zeros(20_000), []

    def track(self, number):
        self.mean.mul_(0.9).add_(number)
        self.large[number % 7::7] += number
        self.seen.append(number)

    def state_dict(self):
        return {"mean": self.mean, "large": self.large, "seen": self.seen}

    def load_state_dict(self, state):
        self.mean, self.large, self.seen = state["mean"], state["large"], state["seen"]

tracker = Tracker()

def more(rest=more):
    return {"tracker": [tracker.mean.tolist(), tracker.large.sum().item(), tracker.seen], **rest()}
"""

_SUBGROUP = """
def regroup(change):
    global subgroup
    subgroup = dist.new_group(list(range(0, dist.get_world_size(), 2)))

subgroup = None
loop.on_change(regroup)
"""

# A second Loop, as for fine-tuning. Only the first one lives on in place.
_SECOND_LOOP = """
loop.vars["first"] = loop.steps_done
first_vars = dict(loop.vars)
for each in optimizer.param_groups:
    each["lr"] = 0.001
model.requires_grad_(True)  # A worker that starts now does not come to the epochs, which freeze and unfreeze.
loop = elasticrt.Loop("ckpt2", every="5 steps", model=model, optimizer=optimizer)
for step in loop.steps(12):
    with loop.step():
        at("block")
        loss = (model(data.tensors[0]) - data.tensors[1]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
loop.vars.update(first_vars)
"""

_EVALUATION = """
def validate(point, swaps):
    model.eval()
    if swaps:
        kept = [each.detach().clone() for each in model.parameters()]
        for each, other in zip(model.parameters(), average.parameters()):
            each.data.copy_(other.data)
    drawn = draw()
    at(point)
    with torch.no_grad():
        loss = (model.module(data.tensors[0]) - data.tensors[1]).square().mean()
    time.sleep(0.004)
    dist.all_reduce(loss)
    if swaps:
        for each, other in zip(model.parameters(), kept):
            each.data.copy_(other)
    model.train()
    return loss.item() / dist.get_world_size() + drawn

def evaluate(point, name, swaps=False):
    loss = loop.evaluate(validate, point, swaps)
    results.append([loop.steps_done, name, loss])
    return loss
"""


def undisturbed(drawn: Drawn, directory: Path) -> list[Any]:
    """The state at the end of a run of one process without an agent, and the results of its evaluations."""
    _write(drawn, directory, faults=[])
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py"]
    done = subprocess.run(
        command, check=False, cwd=directory, env=env, capture_output=True, text=True, timeout=END_S_MAX
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (end,) = _ends(directory)
    return end


def _has_ended(cluster: Cluster) -> bool:
    return all(agent.process.poll() is not None for agent in cluster.agents.values())


def _write(drawn: Drawn, directory: Path, faults: list[list[Any]]) -> None:
    directory.mkdir(parents=True)
    (directory / "train.py").write_text(drawn.script)
    (directory / "faults.json").write_text(json.dumps(faults))


def _ends(directory: Path) -> list[list[Any]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("end-*.json"))]


def check(drawn: Drawn, directory: Path) -> str:
    """Run a seed. Returns what has happened, in a line.

    Raises AssertionError when the states of ranks differ from each other, or from that of an undisturbed run.
    """
    expected, results = undisturbed(drawn, directory / "alone")
    _write(drawn, directory / "run", drawn.faults)
    with Cluster(directory / "run", f"drawn-{secrets.token_hex(4)}", list(drawn.options), ["train.py"]) as cluster:
        for node in drawn.nodes:
            if node != drawn.late:
                cluster.start(node, "--node-rank", str("abc".index(node)))
        if drawn.late:
            cluster.wait("a few steps", lambda: cluster.last_step() >= drawn.late_from or _has_ended(cluster))
            cluster.start(drawn.late, "--node-rank", str("abc".index(drawn.late)))
        before: set[str] = set()
        if drawn.power_loss:
            cluster.wait("a few steps", lambda: cluster.last_step() >= drawn.power_loss or _has_ended(cluster))
            if not _has_ended(cluster):
                before = set(cluster.agents)
                for agent in list(cluster.agents.values()):
                    agent.process.kill()
                for node in drawn.nodes:
                    cluster.start(node, "--node-rank", str("abc".index(node)))
        codes = cluster.ended(END_S_MAX)
        story = cluster.story()
    lost = {node for number, (node, *_, kind) in enumerate(drawn.faults) if kind in ("lose", "drain")}
    # A node that comes when all is over may find the run succeeded, or be told so.
    judged = {code for key, code in codes.items() if key not in before and key.split("#")[0] not in lost | {drawn.late}}
    assert judged <= {0}, f"codes {codes}\n{story}"
    found = _ends(directory / "run")
    assert found, f"nobody has come to the end\n{story}"
    happened = len(list((directory / "run").glob("fault-*")))
    for end, own in found:
        assert end == found[0][0], f"ranks differ: {_difference(end, found[0][0], 0.0)}\n{story}"
        precision = PRECISION_OF_LBFGS if "LBFGS" in drawn.script else PRECISION
        assert not (wrong := _difference(end, expected, precision)), f"not as undisturbed: {wrong}\n{story}"
        assert not (wrong := _wrong(own, results, precision)), f"results: {wrong}\n{story}"
    lost = [each.get("steps_lost", 0) for each in cluster.events("resumed")]
    started = len({pid for each in cluster.events("workers_started") for pid in each["pids"]})
    survivors = any(len(own) == len(results) for _, own in found)
    return f"{drawn.topology}, {happened} lost, {started} processes, {'' if survivors else 'no '}survivor {lost or ''}"


def _wrong(own: list[Any], results: list[Any], precision: float) -> str:
    """What is wrong with the results of one process's evaluations, in words; "" if nothing is.

    A newcomer has only the last results of the run. Before these it has the results from the head of the epoch that it
    has entered. A step that is made again gets the results of the top of its body again.

    Args:
        own: the results of the process, each with its step and name.
        results: those of an undisturbed run.
        precision: see `_difference`.
    """
    # A result that was got again counts once.
    own = [list(each) for each in dict.fromkeys(map(tuple, own))]
    came = next((number for number, (_, name, _) in enumerate(own) if "head" not in name), len(own))
    for first in range(came + 1):
        last = results[len(results) - len(own) + first :]
        if len(own) - first <= len(results) and not _difference(own[first:], last, precision):
            earlier = [[name, result] for _, name, result in results]
            strange = [each for each in own[:first] if all(_difference(each[1:], one, precision) for one in earlier)]
            return f"not of the run: {strange}" if strange else ""
    return f"{own} instead of {results}"[:3000]


def _difference(found: Any, expected: Any, precision: float, where: str = "") -> str:
    """Where two states differ by more than rounding, with both values; "" for nowhere.

    Args:
        found: the one state.
        expected: the other one.
        precision: the largest relative difference between two equal states.
        where: the keys that lead to these parts of the states.
    """
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        pairs = [(f"{where}.{name}", found[name], expected[name]) for name in expected]
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = [(f"{where}[{number}]", *each) for number, each in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, float) and isinstance(found, float):
        return (
            "" if math.isclose(found, expected, rel_tol=precision, abs_tol=precision) else f"{where} {found} {expected}"
        )
    else:
        return "" if found == expected else f"{where} {found} {expected}"[:600]
    return next((text for place, one, other in pairs if (text := _difference(one, other, precision, place))), "")


def main() -> int:
    """Run the seeds one after the other, and print a line for each. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="a directory for what failed")
    arguments = parser.parse_args()
    kinds: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.count):
        with tempfile.TemporaryDirectory(prefix="ert-drawn-") as name:
            try:
                print(f"{seed}: {check(draw(seed), Path(name))}", flush=True)
                kinds["well"] += 1
            except Exception as error:  # noqa: BLE001  The next seed is run all the same.
                kinds["failed"] += 1
                text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
                print(f"{seed}: FAILED {text.splitlines()[0][:200] if text else error!r}", flush=True)
                if arguments.keep is not None:
                    shutil.copytree(name, arguments.keep / str(seed), dirs_exist_ok=True)
                    (arguments.keep / str(seed) / "why.txt").write_text(text)
    print(dict(kinds))
    return 1 if kinds["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
