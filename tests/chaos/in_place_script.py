"""Trains a small model in double precision and does to itself, in order, what a plan of faults says.

    python in_place_script.py DIRECTORY EPOCHS [key=value ...]

DIRECTORY/faults.json is a list of faults: {"point", "rank", "how", "world", "step"}. A fault is due when all before it
have happened, the world has the size that it wants (0: any; the full one: what was lost is back), and its process has
made `step` steps since the last one; with "skip" not before the point was passed so often, with "after" so many seconds
later. Whoever does it notes its process id in DIRECTORY/fault-N first. Each process appends its finished steps to a
file of its own, at the end of the step's block.

With requests=PORT a server is asked, at each step, on connections that were opened while groups were made.

With evaluate=N all ranks evaluate together after each N-th step and each epoch, by `loop.evaluate`, in which they
rest for rest=SECONDS: each process appends the results that it gets to a file of its own. Two ranks wait for
lag=SECONDS before that of a step.

With hold="RANK STEP" that rank waits in that step, before its optimizer, until another one is lost.

With large=all_reduce or large=broadcast each step has a message of 64 MB, or megabytes=MB; ballast=MB is so
much more state.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import elasticrt
from elasticrt.checkpoint.state_transfer import RankConnection
from elasticrt.distributed.group_store import GroupStore
from elasticrt.distributed.regroup import SOCKETS

DIRECTORY, EPOCHS = Path(sys.argv[1]), int(sys.argv[2])
OPTIONS = dict(word.split("=", 1) for word in sys.argv[3:])
SAMPLES, BATCH = int(OPTIONS.get("samples", "480")), 24
NAP_S = float(OPTIONS.get("nap", "0"))
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "mark": signal.SIGCONT}


class Faults:
    """The plan, and what of it has happened: its state is the files in the directory, which all processes see."""

    def __init__(self) -> None:
        path = DIRECTORY / "faults.json"
        self._plan: list[dict] = json.loads(path.read_text()) if path.exists() else []
        self._next = 0
        self._since = 0
        self._passed = 0
        self._lock = threading.Lock()  # Another thread has faults at any time.
        self.own = self.step = self.rank = self.world = 0

    def due(self, point: str) -> int | None:
        """The number of the next fault, if that is this process's, here and now."""
        with self._lock:
            while self._next < len(self._plan) and (DIRECTORY / f"fault-{self._next}").exists():
                self._next += 1
                self._since, self._passed = self.own, 0
            if self._next == len(self._plan):
                return None
            number = self._next
        fault = self._plan[number]
        is_due = (
            point in fault["point"].split("|")
            and fault["rank"] in (self.rank, -1)
            and fault["world"] in (0, self.world)
            and self.own >= self._since + fault.get("step", 3)
        )
        return number if is_due else None

    def pace(self) -> None:
        """Be slow while the next fault waits for a replacement, which takes a second."""
        if self._next < len(self._plan):
            time.sleep(NAP_S if self._plan[self._next]["world"] in (0, self.world) else 0.05)

    def at(self, point: str) -> None:
        """Be killed, frozen, stuck or wrong here, if that is due."""
        number = self.due(point)
        if number is None:
            return
        fault = self._plan[number]
        self._passed += 1
        if self._passed <= fault.get("skip", 0):
            return
        how = fault["how"]
        try:
            fd = os.open(DIRECTORY / f"fault-{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.write(fd, f"{os.getpid()} {time.monotonic()} {point} {how} {self.step}".encode())
        os.close(fd)
        if "after" in fault:
            threading.Timer(fault["after"], os.kill, [os.getpid(), SIGNALS[how]]).start()
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "raise":
            raise ValueError(f"a fault of the script's own at {point}")
        elif how == "lock":
            # With the interpreter's lock held: no thread of this process runs. A signal does not end this, as it ends a
            # sleep.
            ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
        elif how == "stick":
            while True:
                time.sleep(0.01)


FAULTS = Faults()


class Numbers(Dataset):
    """Samples that say where they are drawn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 12, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, :1] * 2 + self.x[:, 1:2]).tanh()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        FAULTS.at("loader")
        return self.x[index], self.y[index]


class Net(nn.Module):
    """With a buffer that each forward changes, and that counts: a step that is done again must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.middle = nn.Linear(24, 24)
        self.last = nn.Linear(24, 1)
        self.norm = nn.BatchNorm1d(24) if OPTIONS.get("norm") else nn.Identity()
        self.drop = nn.Dropout(0.2) if OPTIONS.get("drop") else nn.Identity()
        self.register_buffer("passes", torch.zeros(1))
        if OPTIONS.get("ballast"):  # Each process's own, until DDP or another rank's state makes them equal.
            ballast = torch.full((int(OPTIONS["ballast"]) * 125_000,), float(os.getpid()))
            self.ballast = nn.Parameter(ballast, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count the pass, and let the count matter."""
        self.passes += 1
        hidden = self.drop(self.norm(self.first(x).tanh()))
        return self.last(self.middle(hidden).tanh()) * (1 + 0.001 * self.passes)


class Saved:
    """What takes part in each checkpoint, and may not survive it."""

    def state_dict(self) -> dict[str, int]:
        """Nothing, if this process lives."""
        FAULTS.at("save")
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing."""
        assert state == {"nothing": 0}


def around(name: str, *, before: str = "", after: str = "", of: Any = dist) -> None:
    """A fault before or after a function, torch's own unless told."""
    made = getattr(of, name)

    def wrapped(*args: object, **options: object) -> object:
        if before:
            FAULTS.at(before)
        result = made(*args, **options)
        if after:
            FAULTS.at(after)
        return result

    setattr(of, name, wrapped)


def main() -> None:
    """Train."""
    requests = Requests(int(OPTIONS["requests"])) if OPTIONS.get("requests") else None
    ctx = elasticrt.init()
    if OPTIONS.get("prepare"):
        FAULTS.rank, FAULTS.world = ctx.rank, ctx.world_size

        def build(directory: Path) -> None:
            FAULTS.at("prepare")
            (directory / "built").write_text("")

        elasticrt.prepare(DIRECTORY / "prepared", build)
    FAULTS.at("set up")
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    data = Numbers()
    sampler = elasticrt.ElasticBatchSampler(data, global_batch_size=BATCH)
    loader = DataLoader(data, batch_sampler=sampler)
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    loop = elasticrt.Loop(
        DIRECTORY / "ckpt",
        sampler=sampler,
        every=OPTIONS.get("every", "7 steps"),
        memory=float(OPTIONS.get("memory", "0.01")),
        seed=5 if OPTIONS.get("drop") else None,
        ledger=DIRECTORY / "ledger",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        saved=Saved(),
    )
    loop.vars["samples"] = 0
    net.last.weight.register_hook(lambda _: FAULTS.at("first bucket"))
    net.first.weight.register_hook(lambda _: FAULTS.at("last bucket"))
    around("_broadcast_coalesced", before="broadcast")
    around("init_process_group", before="meet", after="met")
    around("set", after="published", of=GroupStore)  # The others know its address; it has not connected yet.
    around("send", of=RankConnection, before="send", after="sent")
    around("fill", of=RankConnection, before="receive", after="received")
    if OPTIONS.get("any time"):
        threading.Thread(target=at_any_time, daemon=True).start()
    out = (DIRECTORY / f"steps-{os.getpid()}").open("a", buffering=1)
    results = (DIRECTORY / f"results-{os.getpid()}").open("a", buffering=1)
    stacks = (DIRECTORY / f"stacks-{os.getpid()}").open("w")
    large = torch.ones(
        int(OPTIONS.get("megabytes", "64")) * 250_000 if OPTIONS.get("large") else 0, dtype=torch.float32
    )
    hooked, every = False, int(OPTIONS.get("evaluate", "0"))

    def evaluation(part: float) -> tuple[float, float]:
        """A sum over all samples, in three collectives, and a random number that all ranks draw alike."""
        drawn, total = random.random(), 0.0
        was_training = net.training
        net.eval()
        for turn in range(3):
            look()
            time.sleep(float(OPTIONS.get("rest", "0")) if turn == 2 else 0.0)
            FAULTS.at(f"evaluate {turn}")
            with torch.no_grad():
                for x, y in ctx.shard(data):
                    total += part * functional.mse_loss(net(x[None]), y[None]).item() / 3
                    net.passes -= 1
            total = ctx.sum(total) if turn == 2 else ctx.sum(total) / ctx.world_size
            FAULTS.at(f"evaluated {turn}")
        net.train(was_training)
        loop.vars["evaluations"] = loop.vars.get("evaluations", 0) + 1
        return total, drawn

    def evaluate() -> None:
        """As scripts do: one for each of two parts."""
        for part in (0.25, 0.75) if every else ():
            total, drawn = loop.evaluate(evaluation, part)
            results.write(json.dumps([loop.steps_done, part, total, drawn, net.training]) + "\n")

    def hold() -> None:
        while OPTIONS.get("hold") == f"{ctx.rank} {loop.steps_done + 1}" and not SOCKETS.lost_a_peer():
            time.sleep(0.01)

    def step_done() -> None:
        """Count it, and evaluate if that is due."""
        if every:
            loop.vars["complete"] = loop.vars.get("complete", 0) + 1
            if loop.steps_done % every == 0:
                lag()
                evaluate()

    def lag() -> None:
        if FAULTS.world == 2 and OPTIONS.get("lag"):
            time.sleep(float(OPTIONS["lag"]))
            FAULTS.at("lag")
            time.sleep(0.5)

    def look() -> None:
        FAULTS.step, FAULTS.rank, FAULTS.world = loop.steps_done, ctx.rank, ctx.world_size
        faulthandler.dump_traceback_later(5, file=stacks)  # For whoever looks into a run that stood still.

    for _ in loop.epochs(EPOCHS):
        look()
        for x, y in loop.batches(loader):
            look()
            if not hooked:  # After the Loop's own, which has noted that the optimizer begins.
                optimizer.register_step_pre_hook(lambda *_: FAULTS.at("in optimizer"))
                hooked = True
            with loop.step() if not OPTIONS.get("plain") else contextlib.nullcontext():
                look()
                FAULTS.pace()
                if requests:
                    requests.make()
                FAULTS.at("before forward")
                loss = functional.mse_loss(model(x), y)
                FAULTS.at("after forward")
                loss.backward()
                if OPTIONS.get("ahead"):
                    one_after_the_other(ctx)
                if OPTIONS.get("large"):
                    FAULTS.at("large")
                    getattr(dist, OPTIONS["large"])(large, *([0] if OPTIONS["large"] == "broadcast" else []))
                FAULTS.at("before optimizer")
                hold()
                if not OPTIONS.get("hand") or loop.steps_done % 2:  # By hand: gradients of two steps are added up.
                    optimizer.step()
                    if OPTIONS.get("ahead"):
                        answer(ctx)
                    FAULTS.at("after optimizer")
                    optimizer.zero_grad()
                    scheduler.step()
                loop.vars["samples"] += BATCH
                FAULTS.own += 1
                line = (time.monotonic(), ctx.generation, ctx.rank, ctx.world_size, loop.steps_done + 1, loss.item())
                out.write(json.dumps([*line, *(size() if OPTIONS.get("sizes") else ())]) + "\n")
            look()
            FAULTS.at("between")
            if loop.complete:
                step_done()
        look()
        evaluate()
        with loop.pause("evaluate"):
            FAULTS.at("evaluate")
            model.eval()
            with torch.no_grad():
                net(data.x[:8])
            net.passes -= 1
            model.train()
            if OPTIONS.get("sums"):
                ctx.sum(1)
    faulthandler.cancel_dump_traceback_later()
    last = DIRECTORY / f"last-{os.getpid()}"
    # Statistics of a norm are each rank's own until DDP sends rank 0's with the next forward.
    alike = [each for name, each in net.state_dict().items() if not name.startswith("norm.running")]
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in alike))
    torch.save(
        {
            "rank": ctx.rank,
            "steps": loop.steps_done,
            "digest": digest.hexdigest(),
            "vars": dict(loop.vars),
            "model": net.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        last,
    )


def at_any_time() -> None:
    """A fault that does not wait for the main thread, which may wait for others."""
    while True:
        FAULTS.at("any time")
        time.sleep(0.01)


class Requests:
    """Connections to a server that answers with what it gets, each opened while a group is made.

    One of each two is closed in the next step. What breaks is noted in DIRECTORY/broken-PID.
    """

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._short: list[socket.socket] = []
        self._long: list[socket.socket] = []
        made = dist.init_process_group

        def init_process_group(*args: object, **options: object) -> None:
            self.open()
            made(*args, **options)

        dist.init_process_group = init_process_group

    def open(self) -> None:
        """As another thread might, at this moment."""
        for each in (self._short, self._long):
            each.append(socket.create_connection(self._server))

    def make(self) -> None:
        """Ask on each connection."""
        for each in self._short + self._long:
            try:
                each.sendall(b"x")
                assert each.recv(1) == b"x", "end of stream"
            except (OSError, AssertionError) as error:
                (DIRECTORY / f"broken-{os.getpid()}").write_text(repr(error))
        while self._short:
            self._short.pop().close()


def size() -> tuple[int, int, int]:
    """How many descriptors and threads this process has, and how much memory in KiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return len(list(Path("/proc/self/fd").iterdir())), int(fields["Threads"]), int(fields["VmRSS"].split()[0])


def one_after_the_other(ctx: elasticrt.Context) -> None:
    """The last rank tells the others in turn, and may die when the first has stepped: that one then finishes the step,
    and the rest cannot."""
    word, teller = torch.zeros(1), ctx.world_size - 1
    if ctx.rank != teller:
        dist.recv(word, teller)
        return
    for rank in range(teller):
        dist.send(word, rank)
        dist.recv(word, rank)
        FAULTS.at("told one")


def answer(ctx: elasticrt.Context) -> None:
    """Tell the last rank that this one's optimizer has stepped."""
    if ctx.rank != ctx.world_size - 1:
        dist.send(torch.zeros(1), ctx.world_size - 1)


if __name__ == "__main__":
    main()
