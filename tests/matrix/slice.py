"""A slice of everything, with real processes: start, kill, join, leave, and the same run again to its end.

    python -m tests.matrix.slice DIRECTORY

Runs under the interpreter whose torch is to be tried, and prints one line of JSON: seconds, and lines that nobody asked
for. Ends with code 0 when every sample has counted exactly once and no finished step was done again.
"""

from __future__ import annotations

import itertools
import json
import secrets
import signal
import sys
import time
from pathlib import Path

import torch

from elasticrt.audit.exactly_once import check
from elasticrt.cli.audit import books
from tests.cluster import REPOSITORY, AgentProcess, Cluster, kill

SCRIPT = REPOSITORY / "tests" / "chaos" / "in_place_script.py"
EPOCHS, STEPS_PER_EPOCH = 40, 20
NAP_S = 0.05
"""The pause in each step until the run is to come to its end."""
STEP_S_MAX = 120.0


class Slice:
    """One run, and what it has noted of its steps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seconds: dict[str, float] = {}
        plan = [{"point": "none", "rank": -1, "how": "raise", "world": 0, "step": 10**9}]
        (directory / "faults.json").write_text(json.dumps(plan))  # While a fault is to come, steps take a nap.
        script = [str(SCRIPT), str(directory), str(EPOCHS), f"nap={NAP_S}"]
        options = ["--nnodes", "1:3", "--join", "now"]
        self.cluster = Cluster(directory, f"matrix-{secrets.token_hex(4)}", options, script)

    def steps(self) -> list[tuple[float, int, int, int]]:
        """Time, generation, world size and number of each step that any process has finished, in order of time."""
        found = []
        for path in self.directory.glob("steps-*"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    at, generation, _, world, step, *_ = json.loads(line)
                    found.append((at, generation, world, step))
        return sorted(found)

    def step_in(self, what: str, world: int, since: float, *, more: int = 10) -> float:
        """Wait until a world of this size has made so many steps after `since`; when the first of them was done."""
        found: list[float] = []

        def enough() -> bool:
            found[:] = [at for at, _, size, _ in self.steps() if size == world and at > since]
            return len(found) >= more * world

        deadline = time.monotonic() + STEP_S_MAX
        while not enough():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {STEP_S_MAX:g} s: {what}\n{self.cluster.story()}")
            time.sleep(0.02)
        return found[0]

    def pause(self, at: float) -> float:
        """The longest time without a step around a change of the membership that ended at `at`."""
        times = [each[0] for each in self.steps() if at - 5 < each[0] <= at]
        return max(after - before for before, after in itertools.pairwise(times))

    def start(self, what: str, names: str, world: int) -> None:
        """Start nodes together."""
        began = time.monotonic()
        for name in names:
            self.cluster.start(name)
        self.seconds[what] = self.step_in(what, world, began) - began

    def kill(self) -> None:
        """Kill node b's worker: node a goes on alone, and a replacement joins it."""
        (victim,) = self.cluster.agents["b"].worker_pids().values()
        began = time.monotonic()
        kill(victim)
        self.seconds["kill"] = self.step_in("a step without the killed worker", 1, began, more=1) - began
        self.step_in("a step with its replacement", 2, began)

    def join(self) -> None:
        """A third node comes."""
        began = time.monotonic()
        self.cluster.start("c")
        self.seconds["join"] = self.pause(self.step_in("a step of three nodes", 3, began))

    def leave(self) -> None:
        """One of the three is told to leave."""
        began = time.monotonic()
        self._tell_to_leave("b")
        self.seconds["leave"] = self.pause(self.step_in("a step of the two that stay", 2, began))

    def resume(self) -> None:
        """All leave; the same run goes on where it was, to its end."""
        self._tell_to_leave("a", "c")
        last = self.steps()[-1][3]
        began = time.monotonic()
        self.start("resume", "de", 2)
        again = [step for at, _, _, step in self.steps() if at > began]
        assert min(again) == last + 1, f"went on with step {min(again)} after {last}\n{self.cluster.story()}"
        (self.directory / "fault-0").touch()
        codes = [self.cluster.agents[name].process.wait(120) for name in "de"]
        assert codes == [0, 0], self.cluster.story()

    def _tell_to_leave(self, *names: str) -> None:
        agents = [self.cluster.agents[name] for name in names]
        for agent in agents:
            agent.process.send_signal(signal.SIGTERM)
        codes = [agent.process.wait(60) for agent in agents]
        assert codes == [143] * len(names), self.cluster.story()

    def check(self) -> None:
        """Every sample counts exactly once, and every step was made."""
        result = check(books(self.directory / "ledger"))
        assert (result.steps, result.problems) == (EPOCHS * STEPS_PER_EPOCH, ()), self.cluster.story()

    def noise(self) -> list[str]:
        """Lines that neither the agents nor the script have printed."""
        return [line for agent in self.cluster.agents.values() for line in foreign(agent)]


def foreign(agent: AgentProcess) -> list[str]:
    """Lines of an agent's output that are not ours: the script prints nothing."""
    ours = ("elasticrt: ", "  ", "the checkpoint of step ")
    return [line for line in agent.text().splitlines() if line.strip() and not line.startswith(ours)]


def main() -> None:
    """Run the slice."""
    run = Slice(Path(sys.argv[1]))
    with run.cluster:
        run.start("start", "ab", 2)
        run.kill()
        run.join()
        run.leave()
        run.resume()
        run.check()
    print(json.dumps({"torch": torch.__version__, **run.seconds, "noise": run.noise()}))


if __name__ == "__main__":
    main()
