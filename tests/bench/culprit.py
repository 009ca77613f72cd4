"""Is the right rank named, and how soon? `python -m tests.bench.culprit [--kinds A,B] [--points A,B] [--nodes N]`.

Nodes train; one after the other, ranks get stuck, stop, fail or die in one of many ways, at one of several points of a
step, and links between nodes are cut (as root). Its tables, by kind and by point, say how often rank and
node were named, the seconds until then, and how often another rank was named before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path

from tests.cluster import TOGETHER, AgentProcess, Cluster
from tests.netns import Network, missing
from tests.servers import EtcdServer, wheel_binary

JOB = Path(__file__).with_name("culprit_job.py")
KINDS = {
    "sleeps": "sleeps in the script's code",
    "deadlocks": "waits for a lock for ever",
    "loader": "draws a sample for ever",
    "computes": "computes for ever",
    "barrier": "a barrier that the others leave out",
    "all_reduce": "an all-reduce that the others leave out",
    "reads": "reads from a pipe that nobody writes to",
    "sleeps_in_the_kernel": "sleeps in the kernel, as for a disk that does not answer",
    "stops": "is stopped (SIGSTOP)",
    "raises": "raises an error",
    "runs_out_of_memory": "runs out of memory",
    "dies": "is killed (SIGKILL)",
    "node": "stands still with its agent, as when its machine is cut off",
    "link": "is cut off from one other node, and both answer the rest",
}
STUCK = ("sleeps", "deadlocks", "computes", "reads", "sleeps_in_the_kernel", "stops")
ENDS = ("raises", "runs_out_of_memory", "dies")
POINTS = {
    "first": "before the first step",
    "forward": "before forward",
    "backward": "in backward",
    "optimizer": "in the optimizer's step",
    "evaluation": "in an evaluation, not the first one",
    "any": "at any time",
}
LIMIT_S = 10.0
GIVE_UP_S = 25.0


@dataclass(frozen=True)
class Fault:
    """One to be injected: into so many `nodes`, into `rank`, or the link between it and the next."""

    kind: str
    point: str
    nodes: int
    rank: int


def faults() -> Iterator[Fault]:
    """All of them: every kind at every point where there is such a fault, in three nodes; every kind in two."""
    three, two = count(), count()
    for point in ("forward", "backward", "optimizer", "evaluation"):
        for kind in (*STUCK, *ENDS):
            yield Fault(kind, point, 3, next(three) % 3)
    for point in ("forward", "backward", "evaluation"):
        for kind in ("barrier", "all_reduce"):
            yield Fault(kind, point, 3, next(three) % 3)
    for kind, point in (("loader", "forward"), ("loader", "forward"), ("node", "any"), ("node", "any")):
        yield Fault(kind, point, 3, next(three) % 3)
    for kind in KINDS:
        if kind != "link":
            yield Fault(kind, "any" if kind == "node" else "forward", 2, next(two) % 2)
    for kind in ("sleeps", "loader", "computes", "all_reduce", "stops", "dies"):
        yield Fault(kind, "first", 3, next(three) % 3)
    for nodes, rank in ((3, 1), (3, 1), (4, 1), (4, 2)):
        yield Fault("link", "any", nodes, rank)


@dataclass(frozen=True)
class Found:
    """A fault, and the seconds until the right rank was named; None when it was not.

    `said`: what was; `wrong`: whether another rank was named before.
    """

    fault: Fault
    after_s: float | None
    said: str
    wrong: bool


class Injecting(Cluster):
    """A run of so many `ranks` that commit faults when they are told."""

    ranks = 0
    network: Network | None = None

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """See `Cluster`: on a machine of its own, where there is a network."""
        return self.network.add(name).command(command) if self.network is not None else command

    def begin(self, nodes: int) -> None:
        """Start the nodes."""
        self.ranks = nodes
        for number in range(nodes):
            self.start(f"n{number}")

    def whole(self) -> None:
        """Wait until all workers take part, and have made steps together."""

        def full() -> bool:
            made = self.events("generation")
            return bool(made) and made[-1]["world_size"] == self.ranks

        self.wait("all workers are in", full, timeout_s=240)
        step = self.last_step() + 15
        self.wait(f"step {step}", lambda: self.last_step() >= step, timeout_s=240)
        if not full():
            self.whole()

    def freeze(self, rank: int, number: int = signal.SIGSTOP, agent: AgentProcess | None = None) -> AgentProcess:
        """Stop a rank's agent and all its workers, or continue them; the agent."""
        agent = agent or next(each for each in self.agents.values() if rank in each.worker_pids())
        for pid in (agent.pid, *agent.worker_pids().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return agent

    def inject(self, number: int, fault: Fault) -> Found:
        """Have its rank commit the fault, and see who is named."""
        if fault.kind == "link":
            return self.cut(fault)
        if fault.point == "evaluation":
            self.wait_for_step_after(self.last_step() + 30)
        frozen = self.freeze(fault.rank) if fault.kind == "node" else None
        did = self.directory / f"did-{number}"
        if frozen is not None:
            did.write_text(f"{time.monotonic()} 0 {frozen.name} {fault.rank} .")
        self.order(number, fault)
        self.wait(f"fault {number} happens", lambda: did.exists() and did.read_text().endswith("."), 180)
        at_s, pid, node, of_rank = did.read_text().split()[:4]
        victim, name = int(of_rank), f"rank {of_rank} on {node}" if frozen is None else f"{node} lost"
        found = self.see(fault, float(at_s), lambda event: event["ranks"] == [victim], name)
        (self.directory / f"end-{number}").touch()
        if frozen is not None:
            self.freeze(fault.rank, signal.SIGCONT, frozen)
        if fault.kind in ("barrier", "all_reduce"):
            with contextlib.suppress(ProcessLookupError):  # Gloo may have ended it meanwhile.
                os.kill(int(pid), signal.SIGKILL)
            self.wait("it is replaced", lambda: int(pid) in {each["pid"] for each in self.events("worker_ended")})
        self.whole()
        return found

    def order(self, number: int, fault: Fault) -> None:
        """Tell the workers of the fault."""
        written = self.directory / "inject.new"
        written.write_text(f"{number} {fault.kind} {fault.rank} {fault.point}")
        written.rename(self.directory / "inject")

    def cut(self, fault: Fault) -> Found:
        """Cut the link between the nodes of the rank and of the next one, and see whether both are named."""
        assert self.network is not None
        ends = [
            next(a.name for a in self.agents.values() if r in a.worker_pids()) for r in (fault.rank, fault.rank + 1)
        ]
        at_s = time.monotonic()
        self.network.cut([self.network.nodes[ends[0]]], [self.network.nodes[ends[1]]])
        found = self.see(fault, at_s, lambda event: set(event["nodes"]) == set(ends), " and ".join(sorted(ends)))
        self.network.heal()
        self.whole()
        return found

    def see(self, fault: Fault, at_s: float, is_right: Callable[[dict], bool], name: str) -> Found:
        """Wait until somebody is named who `is_right`, or a generation's cause has the `name`."""

        def said() -> list[tuple[float, str, bool, bool]]:
            blamed = [
                (each["at"], each["reason"], is_right(each), bool(each["nodes"])) for each in self.events("culprit")
            ]
            causes = [(each["at"], each["cause"], name in each["cause"], False) for each in self.events("generation")]
            causes = [each for each in causes if "joined" not in each[1]]
            return sorted(each for each in [*blamed, *causes] if each[0] > at_s)

        with contextlib.suppress(AssertionError):  # Then it is so noted.
            self.wait("somebody is named", lambda: any(right for _, _, right, _ in said()), timeout_s=GIVE_UP_S)
        known = said()
        right = next((each for each in known if each[2]), None)
        before = [each for each in known if right is None or each[0] < right[0]]
        wrong = any(names for _, _, _, names in before)
        if right is None:
            return Found(fault, None, f"{name}: " + "; ".join(text for _, text, *_ in known), wrong)
        return Found(fault, right[0] - at_s, right[1], wrong)


@contextlib.contextmanager
def run(nodes: int, *, links: bool) -> Iterator[Injecting]:
    """A run of so many nodes, with addresses of their own if links are to be cut."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options = ["--nnodes", f"1:{nodes}", "--max-restarts", "1000", "--join", "now", *TOGETHER]
        network = stack.enter_context(Network()) if links else None
        if network is not None:
            server = EtcdServer(wheel_binary(), directory / "etcd")
            server.address = type(server.address)("http", network.host, server.port)
            options += ["--etcd", str(stack.enter_context(server).address), "--insecure-etcd"]
        script = [str(JOB), str(directory), "0"]
        injecting = Injecting(directory, f"culprit-{secrets.token_hex(4)}", options, script)
        injecting.network = network
        yield stack.enter_context(injecting)


def injected(chosen: Sequence[Fault]) -> Iterator[Found]:
    """All of these faults: a run for each that comes before the first step, and one for the others of so many nodes."""
    for (nodes, links, first), group in groupby(
        chosen, lambda each: (each.nodes, each.kind == "link", each if each.point == "first" else None)
    ):
        if links and missing():
            print(f"left out: {missing()}", file=sys.stderr)
            continue
        with run(nodes, links=links) as injecting:
            if first is not None:
                injecting.order(0, first)
                injecting.begin(nodes)
            else:
                injecting.begin(nodes)
                injecting.whole()
            for number, fault in enumerate(group):
                yield injecting.inject(number, fault)


def table(found: Sequence[Found], title: str, names: dict[str, str], of: Callable[[Fault], str]) -> str:
    """For people: a line for each group of faults by `of`, in the order of `names`."""
    lines = [f"| {title} | faults | named within 10 s | median s | worst s | another was named before |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        row(text, mine) for name, text in names.items() if (mine := [one for one in found if of(one.fault) == name])
    ]
    return "\n".join([*lines, row("all", found)])


def row(text: str, found: Sequence[Found]) -> str:
    """One line."""
    times = [one.after_s for one in found if one.after_s is not None]
    good = sum(after_s <= LIMIT_S for after_s in times)
    median, worst = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
    return f"| {text} | {len(found)} | {good} | {median} | {worst} | {sum(one.wrong for one in found)} |"


def words(text: str, known: Iterable[str]) -> list[str]:
    """The words of an option, all of them where there is none."""
    return text.split(",") if text else list(known)


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--points", default="")
    parser.add_argument("--nodes", type=int, default=0)
    given = parser.parse_args()
    kinds, points = words(given.kinds, KINDS), words(given.points, POINTS)
    chosen = [each for each in faults() if each.kind in kinds and each.point in points]
    found = []
    for each in injected([each for each in chosen if given.nodes in (0, each.nodes)]):
        found.append(each)
        after = "not named" if each.after_s is None else f"{each.after_s:.1f} s"
        fault = each.fault
        said = f"{fault.kind:20} {fault.point:10} {fault.nodes} {after:10} {'(another before) ' if each.wrong else ''}"
        print(said + each.said, file=sys.stderr, flush=True)
    print(table(found, "a rank ...", KINDS, lambda fault: fault.kind))
    print()
    print(table(found, "when", POINTS, lambda fault: fault.point))


if __name__ == "__main__":
    main()
