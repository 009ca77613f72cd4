"""Is the right rank named, and how soon? `python -m tests.bench.culprit [--count N] [--nodes N] [--workers N]`.

Nodes train; one after the other, ranks get stuck, stop, fail or die in one of many ways. It prints a table: what was
done, how often rank and node were named, and the seconds until then.
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
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import TOGETHER, AgentProcess, Cluster

JOB = Path(__file__).with_name("culprit_job.py")
KINDS = {
    "sleeps": "sleeps in the script's code",
    "deadlocks": "waits for a lock for ever",
    "loader": "draws a sample for ever",
    "computes": "computes for ever",
    "barrier": "a barrier that the others leave out",
    "all_reduce": "an all-reduce that the others leave out",
    "reads": "reads from a disk that does not answer",
    "stops": "is stopped (SIGSTOP)",
    "raises": "raises an error",
    "runs_out_of_memory": "runs out of memory",
    "dies": "is killed (SIGKILL)",
    "node": "stands still with its agent, as when its machine is cut off",
}
LIMIT_S = 10.0
GIVE_UP_S = 25.0


@dataclass(frozen=True)
class Found:
    """One fault: its kind, and the seconds until the right rank was named; None when it was not.

    `said`: what was.
    """

    kind: str
    after_s: float | None
    said: str


def faults(count: int, world_size: int) -> Iterator[tuple[str, int]]:
    """Kinds and victims: every kind, then every kind again with other victims."""
    kinds = list(KINDS)
    for number in range(count):
        yield kinds[number % len(kinds)], (number + number // len(kinds)) % world_size


class Injecting(Cluster):
    """A run of so many `ranks` that commit faults when they are told."""

    ranks = 0

    def begin(self, nodes: int, workers: int) -> None:
        """Start the nodes, and see them train."""
        self.ranks = nodes * workers
        for number in range(nodes):
            self.start(f"n{number}")
        self.whole()

    def whole(self) -> None:
        """Wait until all workers take part, and have made steps together."""

        def full() -> bool:
            made = self.events("generation")
            return bool(made) and made[-1]["world_size"] == self.ranks

        self.wait("all workers are in", full, timeout_s=90)
        self.wait_for_step_after(self.last_step() + 15)
        if not full():
            self.whole()

    def freeze(self, rank: int, number: int = signal.SIGSTOP, agent: AgentProcess | None = None) -> AgentProcess:
        """Stop a rank's agent and all its workers, or continue them; the agent."""
        agent = agent or next(each for each in self.agents.values() if rank in each.worker_pids())
        for pid in (agent.pid, *agent.worker_pids().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return agent

    def inject(self, number: int, kind: str, rank: int) -> Found:
        """Have `rank` commit the fault, and see who is named."""
        frozen = self.freeze(rank) if kind == "node" else None
        did = self.directory / f"did-{number}"
        if frozen is not None:
            did.write_text(f"{time.monotonic()} 0 {frozen.name} {rank} .")
        written = self.directory / "inject.new"
        written.write_text(f"{number} {kind} {rank}")
        written.rename(self.directory / "inject")
        self.wait(f"fault {number} happens", lambda: did.exists() and did.read_text().endswith("."))
        at_s, pid, node, of_rank = did.read_text().split()[:4]
        victim, name = int(of_rank), f"rank {of_rank} on {node}" if frozen is None else f"{node} lost"

        def said() -> list[tuple[float, str, bool]]:
            blamed = [(each["at"], each["reason"], each["ranks"] == [victim]) for each in self.events("culprit")]
            causes = [(each["at"], each["cause"], name in each["cause"]) for each in self.events("generation")]
            causes = [each for each in causes if "joined" not in each[1]]
            return sorted(each for each in [*blamed, *causes] if each[0] > float(at_s))

        with contextlib.suppress(AssertionError):  # Then it is so noted.
            self.wait("somebody is named", lambda: any(right for *_, right in said()), timeout_s=GIVE_UP_S)
        known = said()
        right = next((each for each in known if each[2]), None)
        (self.directory / f"end-{number}").touch()
        if frozen is not None:
            self.freeze(rank, signal.SIGCONT, frozen)
        if kind in ("barrier", "all_reduce"):
            with contextlib.suppress(ProcessLookupError):  # Gloo may have ended it meanwhile.
                os.kill(int(pid), signal.SIGKILL)
            self.wait("it is replaced", lambda: int(pid) in {each["pid"] for each in self.events("worker_ended")})
        self.whole()
        if right is None:
            return Found(kind, None, f"{name}: " + "; ".join(text for _, text, _ in known))
        return Found(kind, right[0] - float(at_s), right[1])


def injected(directory: Path, given: argparse.Namespace) -> Iterator[Found]:
    """All faults of one run."""
    size = ["--nnodes", f"1:{given.nodes}", "--nproc-per-node", str(given.workers)]
    options = [*size, "--max-restarts", "1000", "--join", "now", *TOGETHER]
    script = [str(JOB), str(directory), str(given.loader_workers)]
    with Injecting(directory, f"culprit-{secrets.token_hex(4)}", options, script) as run:
        run.begin(given.nodes, given.workers)
        for number, (kind, rank) in enumerate(faults(given.count, run.ranks)):
            yield run.inject(number, kind, rank)


def table(found: list[Found]) -> str:
    """For people."""
    by_kind: dict[str, list[Found]] = defaultdict(list)
    for each in found:
        by_kind[each.kind].append(each)
    lines = ["| a rank ... | faults | named within 10 s | median s | worst s |", "|---|---|---|---|---|"]
    for kind, each in by_kind.items():
        times = [one.after_s for one in each if one.after_s is not None]
        good = sum(one.after_s is not None and one.after_s <= LIMIT_S for one in each)
        median, worst = (f"{statistics.median(times):.1f}", f"{max(times):.1f}") if times else ("", "")
        lines.append(f"| {KINDS[kind]} | {len(each)} | {good} | {median} | {worst} |")
    good = sum(one.after_s is not None and one.after_s <= LIMIT_S for one in found)
    return "\n".join([*lines, f"| all | {len(found)} | {good} ({good / len(found):.0%}) | | |"])


def main() -> None:
    """As above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=len(KINDS))
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--loader-workers", type=int, default=0)
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for each in injected(Path(directory), given):
            found.append(each)
            after = "not named" if each.after_s is None else f"{each.after_s:.1f} s"
            print(f"{each.kind:20} {after:10} {each.said}", file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
