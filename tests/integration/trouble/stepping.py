"""A run that steps, commits and writes down what it did, and the history that etcd kept of it.

The script trains a tiny model with `Loop`, one global batch per step, all ranks together. After each step a rank
appends a mark (step, time) to a file of its own. `History` replays every revision of the run's keys and checks what
must hold whatever was done to the agents, the network or etcd: one membership per generation number, and commits by
the current generation only, each a child of the one before (S1, S2).
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticrt.ipc.env import Commit
from elasticrt.rendezvous.records import Generation, Keys, Member, Result, decode
from elasticrt.store.etcd import EtcdStore
from elasticrt.store.protocol import Address, Changes, Event, Put, Txn
from tests.cluster import AgentProcess, Cluster

SCRIPT = """
import json, os, sys, time
import torch, torch.nn.functional as F, elasticrt
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

directory, pace_s, every, timeout_s = sys.argv[1], float(sys.argv[2]), sys.argv[3], float(sys.argv[4])
ctx = elasticrt.init(timeout_s=timeout_s)
data = TensorDataset(torch.randn(640, 2), torch.randn(640, 1))
sampler = elasticrt.ElasticBatchSampler(data, 8)
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loop = elasticrt.Loop(os.path.join(directory, "ckpt"), sampler=sampler, every=every, model=model, optimizer=optimizer)
name = f"{ctx.generation:03d}-{ctx.rank:02d}-{os.environ['ELASTICRT_NODE']}-{os.getpid()}.jsonl"
marks = open(os.path.join(directory, "marks", name), "a", buffering=1)
finish, fail = os.path.join(directory, "finish"), os.path.join(directory, f"fail-{ctx.generation}-{ctx.rank}")
over = False
for epoch in loop.epochs(10**6):
    for x, y in loop.batches(DataLoader(data, batch_sampler=sampler)):
        F.mse_loss(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
        marks.write(json.dumps({"step": loop.steps_done + 1, "at": time.monotonic()}) + "\\n")
        if os.path.exists(fail):
            raise RuntimeError("told to fail")
        time.sleep(pace_s)
        over = ctx.sum(int(os.path.exists(finish))) > 0
        if over:
            break
    if over:
        break
"""


@dataclass(frozen=True)
class Mark:
    """One step of one rank in one generation; `at` is on this machine's monotonic clock."""

    generation: int
    rank: int
    node: str
    pid: int
    step: int
    at: float


class Stepping(Cluster):
    """Agents whose workers step until told to finish."""

    def __init__(
        self, tmp_path: Path, *options: str, pace_s: float = 0.05, every: str = "5 steps", timeout_s: float = 1800.0
    ) -> None:
        self.marks_directory = tmp_path / "marks"
        self.marks_directory.mkdir()
        script = tmp_path / "stepper.py"
        script.write_text(SCRIPT)
        command = [str(script), str(tmp_path), str(pace_s), every, str(timeout_s)]
        super().__init__(tmp_path, f"step-{secrets.token_hex(4)}", ["--join", "now", *options], command)

    def marks(self, generation: int | None = None) -> list[Mark]:
        """All marks so far (of one generation), in order of time. A line that is being written is left out."""
        found = []
        for path in self.marks_directory.glob(f"{'*' if generation is None else f'{generation:03d}'}-*.jsonl"):
            number, rank, *node, pid = path.stem.split("-")
            for line in path.read_text().split("\n")[:-1]:
                entry = json.loads(line)
                found.append(Mark(int(number), int(rank), "-".join(node), int(pid), entry["step"], entry["at"]))
        return sorted(found, key=lambda mark: mark.at)

    def newest_step(self, generation: int | None = None) -> int:
        """The highest step that any rank has done."""
        return max((mark.step for mark in self.marks(generation)), default=0)

    def wait_for_steps(self, count: int, generation: int | None = None, timeout_s: float = 60.0) -> None:
        """Wait until `count` more steps have been done (in a generation: of its own)."""
        start = self.newest_step(generation)
        self.wait(
            f"{count} more steps in generation {generation or 'any'}",
            lambda: self.newest_step(generation) >= start + count,
            timeout_s,
        )

    def pids(self) -> dict[str, dict[int, int]]:
        """The workers of every agent, by rank."""
        return {name: agent.worker_pids() for name, agent in self.agents.items()}

    def started(self) -> list[int]:
        """The generations that were started anywhere, each once, in order."""
        return sorted({event["number"] for event in self.events("generation")})

    def wait_for_silence(self, seconds: float) -> None:
        """Let time pass in which nothing may happen; what must not have happened is checked afterwards."""
        end = time.monotonic() + seconds
        self.wait(f"{seconds} s", lambda: time.monotonic() >= end, seconds + 5)

    def finish(self) -> None:
        """Let the script end well: all ranks leave in the same step."""
        (self.directory / "finish").touch()

    def fail(self, generation: int, rank: int) -> None:
        """Let one rank of a generation raise after its present step."""
        (self.directory / f"fail-{generation}-{rank}").touch()

    def start_many(self, names: Sequence[str], steps: int = 3) -> list[AgentProcess]:
        """Start nodes that form generation 1 together, and let them do some steps."""
        agents = [self.start(name) for name in names]
        self.wait_for_steps(steps, generation=1)
        return agents


@dataclass
class History:
    """What etcd has seen of a run, revision by revision."""

    generations: list[tuple[int, Generation]] = field(default_factory=list)
    commits: list[tuple[int, Commit]] = field(default_factory=list)
    members: list[tuple[int, str, Member | None]] = field(default_factory=list)
    results: list[tuple[int, Result]] = field(default_factory=list)

    @classmethod
    def read(cls, address: Address, run_id: str) -> History:
        """Everything from revision 1 on. The history must not have been compacted."""
        events: list[Event] = []
        end = threading.Event()
        problems: list[object] = []
        keys = Keys(run_id)
        last = f"{keys.prefix}the-test-has-ended"

        def sink(item: object) -> None:
            if not isinstance(item, Changes):
                problems.append(item)
                return
            events.extend(item.events)
            if any(event.key == last for event in item.events):
                end.set()

        store = EtcdStore((address,), timeout_s=10.0)
        try:
            store.commit(Txn((), (Put(last, b""),), "mark the end for a test"))
            store.watch(keys.prefix, sink, from_revision=1)
            assert end.wait(20), f"the history did not come: {problems}"
        finally:
            store.close()
        return cls.of(events, keys)

    @classmethod
    def of(cls, events: Sequence[Event], keys: Keys) -> History:
        """Sort events by kind."""
        history = cls()
        for event in events:
            revision, value = event.mod_revision, event.value
            if event.key.startswith(keys.members):
                member = decode(Member, event.key, value.value) if value is not None else None
                history.members.append((revision, event.key.removeprefix(keys.members), member))
            elif value is None:
                assert event.key not in (keys.generation, keys.checkpoint), f"{event.key} was deleted"
            elif event.key == keys.generation:
                history.generations.append((revision, decode(Generation, event.key, value.value)))
            elif event.key == keys.checkpoint:
                history.commits.append((revision, decode(Commit, event.key, value.value)))
            elif event.key.startswith(keys.results):
                history.results.append((revision, decode(Result, event.key, value.value)))
        return history

    def numbers(self) -> list[int]:
        """Generation numbers in the order they were published."""
        return [generation.number for _, generation in self.generations]

    def check(self, marks: Sequence[Mark] = ()) -> None:
        """S1 and S2 over all revisions; with `marks` also that what was committed has been done by all ranks."""
        assert self.numbers() == list(range(1, len(self.generations) + 1)), f"S1: {self.numbers()}"
        done: dict[tuple[int, int], set[int]] = {}
        for mark in marks:
            done.setdefault((mark.generation, mark.step), set()).add(mark.rank)
        whole: dict[int, set[int]] = {}
        head: Commit | None = None
        for revision, record in sorted([*self.generations, *self.commits], key=lambda entry: entry[0]):
            if isinstance(record, Generation):
                current = record
                whole = {**(whole if record.in_place else {}), record.number: set(range(record.world_size))}
                assert record.resume == head, f"S6: generation {record.number} resumes from {record.resume}, not {head}"
                continue
            assert record.generation == current.number, f"S2: revision {revision}: {record} in {current.number}"
            if head is not None:
                assert record.parent == head.nonce, f"S2: revision {revision}: {record} does not follow {head}"
                assert record.step > head.step, f"S2: revision {revision}: {record} after {head}"
            # A generation that goes on in place may commit what the one before has done.
            did = [number for number, ranks in whole.items() if ranks <= done.get((number, record.step), set())]
            assert did or not marks, f"{record} was committed but not all ranks have done the step"
            head = record
        if marks:
            self._check_marks(marks)

    def _check_marks(self, marks: Sequence[Mark]) -> None:
        """S3, S6: only published generations step, each rank is one process, and it goes on where it should."""
        by_number = {generation.number: generation for _, generation in self.generations}
        for number in {mark.generation for mark in marks}:
            generation = by_number[number]
            mine = [mark for mark in marks if mark.generation == number]
            assert len({mark.pid for mark in mine}) == len({mark.rank for mark in mine}) <= generation.world_size
            start = _start(generation)
            assert min(mark.step for mark in mine) == start + 1
            if generation.memory is not None:
                # A copy is of the generation that is replaced: of a step that was done there, or of its own start.
                before = by_number[number - 1]
                done = {mark.step for mark in marks if mark.generation == before.number}
                assert start in done | {_start(before)}, f"S6: generation {number} starts from a copy of step {start}"

    def lives(self, node: str) -> list[str]:
        """The incarnations that this node has had a key for, in order."""
        found: list[str] = []
        for _, name, member in self.members:
            if name == node and member is not None and member.incarnation not in found:
                found.append(member.incarnation)
        return found

    def rank_count(self) -> dict[int, int]:
        """World size by generation number."""
        return {generation.number: generation.world_size for _, generation in self.generations}


def _start(generation: Generation) -> int:
    """The step that a generation goes on after."""
    start = generation.memory or generation.resume
    return 0 if start is None else start.step


def raw_delete(address: Address, key: str) -> None:
    """What an operator's `etcdctl del` does, with a key or a range."""
    from elasticrt.store.protocol import Delete

    store = EtcdStore((address,), timeout_s=10.0)
    try:
        store.commit(Txn((), (Delete(key),), "delete by hand for a test"))
    finally:
        store.close()


def leases_of(address: Address, run_id: str) -> dict[str, int]:
    """The lease of every member key."""
    keys = Keys(run_id)
    store = EtcdStore((address,), timeout_s=10.0)
    try:
        return {kv.key.removeprefix(keys.members): kv.lease for kv in store.read(keys.members).keys}
    finally:
        store.close()


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def node_pids(agent: AgentProcess) -> list[int]:
    """All processes of a node: the agent, then its descendants. They are signalled by id, the agent first."""
    found, todo = [], [agent.pid]
    while todo:
        pid = todo.pop(0)
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                todo += [int(word) for word in task.read_text().split()]
            except OSError:
                continue  # It ended while we looked.
    return found


def send(pids: Sequence[int], number: int) -> None:
    """Signal processes of this test by their ids; one that has ended needs none."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
