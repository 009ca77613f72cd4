"""A machine loses its power: no reset, no goodbye. The others see that their steps stand still, and ask around.

Nodes are network namespaces. The lease lasts for a minute here and a collective for half an hour, so that nothing but
the standing steps can have told; how long it took is printed, not judged.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.split.test_networks import Site
from tests.integration.trouble.stepping import History, alive
from tests.netns import Network, missing
from tests.servers import EtcdServer, wheel_binary

pytestmark = [pytest.mark.root]

NAMES = ("a", "b", "c")

PLAIN = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

directory, pace_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
name = f"{int(os.environ['ELASTICRT_GENERATION']):03d}-{dist.get_rank():02d}-{os.environ['ELASTICRT_NODE']}"
marks = open(os.path.join(directory, "marks", f"{name}-{os.getpid()}.jsonl"), "a", buffering=1)
over, step = torch.zeros(1), 0
while not over:
    optimizer.zero_grad()
    model(torch.randn(8, 2)).sum().backward()
    optimizer.step()
    step += 1
    marks.write(json.dumps({"step": step, "at": time.monotonic()}) + "\\n")
    time.sleep(pace_s)
    over += os.path.exists(os.path.join(directory, "finish"))
    dist.all_reduce(over)
"""

EVALUATES = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
import elasticrt

directory = sys.argv[1]
ctx = elasticrt.init()
data = TensorDataset(torch.randn(1200, 2))
sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=12)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop(os.path.join(directory, "ckpt"), sampler=sampler, model=model, optimizer=optimizer)

def evaluate():
    over = torch.zeros(1)
    while not over:
        open(os.path.join(directory, f"evaluates-{ctx.generation}-{ctx.rank}"), "w").close()
        over += os.path.exists(os.path.join(directory, "finish"))
        dist.all_reduce(over)
        time.sleep(0.05)

for epoch in loop.epochs(1):
    for batch, in loop.batches(DataLoader(data, batch_sampler=sampler)):
        with loop.step():
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if loop.steps_done == 10:
            loop.evaluate(evaluate)
"""


IN_PLACE = """
import os, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
import elasticrt

directory = sys.argv[1]
ctx = elasticrt.init()
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop(os.path.join(directory, "ckpt"), model=model, optimizer=optimizer)
for step in loop.steps(10**9):
    with loop.step():
        model(torch.randn(8, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        over = ctx.sum(int(os.path.exists(os.path.join(directory, "finish"))))
        time.sleep(0.02)
    open(os.path.join(directory, f"stepped-{ctx.generation}-{ctx.rank}"), "w").close()
    if loop.complete and over:
        break
"""


class Powered(Site):
    """A run in which no collective ends by itself."""

    def __init__(self, tmp_path: Path, network: Network, etcd: EtcdServer, ttl_s: float) -> None:
        super().__init__(tmp_path, network, etcd, "1:3", ttl_s=ttl_s)
        self.script[-1] = "1800"

    def leader(self) -> str:
        """The holder of the oldest member key."""
        keys: dict[str, int] = {}
        for revision, name, member in History.read(self.etcd.address, self.run_id).members:
            if member is None:
                del keys[name]
            else:
                keys.setdefault(name, revision)
        return min(keys, key=lambda name: keys[name])

    def without_power(self, victim: str) -> float:
        """Cut its power and wait for the others' next step, of all of them; the seconds between."""
        survivors = [name for name in NAMES if name != victim]
        number = self.number()
        at = time.monotonic()
        self.network.nodes[victim].power_off()
        self.together(*survivors)
        assert self.number() == number + 1, self.story()
        first: dict[int, float] = {}
        for mark in self.marks(number + 1):
            first.setdefault(mark.rank, mark.at)
        assert len(first) == len(survivors)
        return max(first.values()) - at


@contextmanager
def powered(tmp_path: Path, ttl_s: float, script: str = "", *options: str) -> Iterator[Powered]:
    """Three nodes that train together and have saved; with another `script`, three that have been started.

    `options`: further ones of the agents.
    """
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Network() as network:
        server = EtcdServer(wheel_binary(), tmp_path / f"etcd-{secrets.token_hex(2)}")
        server.address = type(server.address)("http", network.host, server.port)
        with server as etcd, Powered(tmp_path, network, etcd, ttl_s) as run:
            run.options += options
            if script:
                Path(run.script[0]).write_text(script)
            for name in NAMES:
                run.start(name)
            if not script:
                run.together(*NAMES)
                run.wait_for_commits(1)
            yield run


@pytest.mark.parametrize(
    "leads", [pytest.param(False, id="N11-follower"), pytest.param(True, id="A07-leader", marks=pytest.mark.slow)]
)
def test_a_power_loss_is_found_long_before_the_lease_ends(tmp_path: Path, leads: bool) -> None:
    """N11, L1, L5: two of three see their steps stand, ask the third, hear nothing, and go on without it."""
    with powered(tmp_path, ttl_s=60.0) as run:
        leader = run.leader()
        victim = leader if leads else next(name for name in NAMES if name != leader)
        took_s = run.without_power(victim)
        print(f"power loss to next step: {took_s:.2f} s, with a lease of 60 s")
        history = run.ends_well(victim)
        (lost,) = run.events("member_lost")
        assert lost["lost"] == victim
        generation = history.generations[-1][1]
        assert (generation.kind, generation.restarts.total) == ("lost", 0), "it costs no restart"


@pytest.mark.slow
def test_a_power_loss_is_found_in_a_plain_script(tmp_path: Path) -> None:
    """N11: without a Loop, too: the steps of its optimizers stand still, and that is told from outside."""
    with powered(tmp_path, 60.0, PLAIN) as run:
        run.together(*NAMES)
        leader = run.leader()
        victim = next(name for name in NAMES if name != leader)
        took_s = run.without_power(victim)
        print(f"power loss to next step: {took_s:.2f} s, with a lease of 60 s")
        run.finish()
        assert {code for name, code in run.ended().items() if name != victim} == {0}, run.story()
        (lost,) = run.events("member_lost")
        assert lost["lost"] == victim


@pytest.mark.slow
@pytest.mark.parametrize("leads", [pytest.param(False, id="N02-follower"), pytest.param(True, id="N02-leader")])
def test_a_node_cut_off_in_an_evaluation_is_left_out(tmp_path: Path, leads: bool) -> None:
    """N02, L5: no step is expected there, and etcd hears all; what the workers wait for tells that one is silent."""
    with powered(tmp_path, 60.0, EVALUATES) as run:
        place = Path(run.script[1])
        run.wait("all evaluate", lambda: len(list(place.glob("evaluates-*"))) >= len(NAMES))
        number, leader = run.number(), run.leader()
        victim = leader if leads else next(name for name in NAMES if name != leader)
        others = [name for name in NAMES if name != victim]
        workers = [pid for name in others for pid in run.agents[name].worker_pids().values()]
        run.network.cut(run.nodes_of(victim), run.nodes_of(*others))
        run.wait("the others evaluate again", lambda: len(list(place.glob(f"evaluates-{number + 1}-*"))) == 2)
        assert all(map(alive, workers)), "they keep their processes"
        (place / "finish").touch()
        assert {run.agents[name].process.wait(60) for name in others} == {0}, run.story()
        run.network.heal()
        assert run.agents[victim].process.wait(60) == 0


@pytest.mark.slow
def test_a_link_cut_while_a_group_is_made_is_a_hang(tmp_path: Path) -> None:
    """N02, L5: survivors that never meet are ended after three times --hang-timeout; all go on when it is mended."""
    with powered(tmp_path, 60.0, IN_PLACE, "--hang-timeout", "1s") as run:
        place = Path(run.script[1])
        run.wait("all step", lambda: len(list(place.glob("stepped-1-*"))) == len(NAMES))
        (first,) = (name for name in NAMES if 0 in run.agents[name].worker_pids())
        others = [name for name in NAMES if name != first]
        run.network.cut(run.nodes_of(others[0]), run.nodes_of(others[1]))
        os.kill(run.agents[first].worker_pids()[0], signal.SIGKILL)
        run.wait("a hang", lambda: any(event["final"] for event in run.events("stalled")))
        assert not list(place.glob("stepped-2-*")), "the survivors have not met"
        number = run.number()
        run.network.heal()
        run.wait("all step again", lambda: len(list(place.glob(f"stepped-{run.number()}-*"))) == len(NAMES), 90)
        assert run.number() > number
        (place / "finish").touch()
        assert set(run.ended(60).values()) == {0}, run.story()
