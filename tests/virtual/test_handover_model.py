"""The handover's agreement on a step, in all orders of events of small worlds.

The model is the algorithm of `distributed/handover.py` (workers) and `agent/supervisor.py`,
`rendezvous/reconfiguration.py` (agents), reduced to what can be interleaved: a worker's two accesses at the end of a
step (write `entered`, read `stop`), and the agents' (for each worker write `stop`, then read `entered`; when all are
read, write `go`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True)
class Worker:
    """`place`: "train" (in step + 1), "wrote" (entered is written, stop not read), "hold" or "left" after `step`."""

    step: int = 0
    place: str = "train"
    entered: int = 1


@dataclass(frozen=True)
class World:
    """`stopped`: workers whose `stop` is set; `seen`: `entered` as read, per worker; `go`: 0 or the agreed step."""

    workers: tuple[Worker, ...]
    stopped: int = 0
    seen: tuple[int, ...] = ()
    go: int = 0


def successors(world: World, last: int, lockstep: bool, stop_before_read: bool) -> list[World]:
    """Every state that one access later may follow."""
    found = []
    count = len(world.workers)
    for index, worker in enumerate(world.workers):
        after = _worker_moves(world, index, worker, last, lockstep)
        found += [replace(world, workers=(*world.workers[:index], one, *world.workers[index + 1 :])) for one in after]
    if world.stopped < count:
        found.append(replace(world, stopped=world.stopped + 1))
    may_read = world.stopped > len(world.seen) or not stop_before_read
    if may_read and len(world.seen) < count:
        found.append(replace(world, seen=(*world.seen, world.workers[len(world.seen)].entered)))
    if len(world.seen) == world.stopped == count and world.go == 0:
        found.append(replace(world, go=max(world.seen)))
    return found


def _worker_moves(world: World, index: int, worker: Worker, last: int, lockstep: bool) -> list[Worker]:
    if worker.place == "train":
        # A collective: nobody finishes a step that another has not entered. Hosts that run ahead of their device can.
        together = all(other.entered > worker.step for other in world.workers)
        if worker.step < last and (together or not lockstep):
            return [Worker(worker.step + 1, "wrote", worker.step + 2)]
    elif worker.place == "wrote":
        return [replace(worker, place="hold" if index < world.stopped else "train")]
    elif worker.place == "hold" and world.go:
        return [replace(worker, place="left" if worker.step >= world.go else "train")]
    return []


def explore(count: int, last: int, *, lockstep: bool, stop_before_read: bool = True) -> tuple[int, list[World]]:
    """All reachable states; how many, and those in which nothing can happen any more."""
    start = World(tuple(Worker() for _ in range(count)))
    seen, todo, ends = {start}, deque([start]), []
    while todo:
        world = todo.popleft()
        after = successors(world, last, lockstep, stop_before_read)
        if not after:
            ends.append(world)
        for one in after:
            if one not in seen:
                seen.add(one)
                todo.append(one)
    return len(seen), ends


@pytest.mark.parametrize("lockstep", [True, False], ids=["lockstep", "running ahead"])
@pytest.mark.parametrize(("count", "last"), [(2, 6), (3, 4)])
def test_everybody_leaves_after_the_same_step(count: int, last: int, lockstep: bool) -> None:
    """In every order of events all workers leave after exactly the agreed step, or had come to the end of training."""
    states, ends = explore(count, last, lockstep=lockstep)
    assert states > 100
    assert ends
    for end in ends:
        assert end.go, "the agents always come to an agreement"
        for worker in end.workers:
            finished = worker.place == "train" and worker.step == last
            assert (worker.place == "left" and worker.step == end.go) or finished, end
        if any(worker.place == "left" for worker in end.workers):
            assert all(worker.step <= end.go for worker in end.workers), (
                "nobody is past the step that others left after"
            )


def test_the_model_can_fail() -> None:
    """When an agent reads `entered` before it has set `stop`, some worker gets past the agreed step."""
    _, ends = explore(2, 6, lockstep=False, stop_before_read=False)
    wrong = [
        end
        for end in ends
        if len({worker.step for worker in end.workers if worker.place == "left"}) > 1
        or (any(w.place == "left" for w in end.workers) and any(w.step > end.go for w in end.workers))
    ]
    assert wrong
