"""A program that behaves towards a simulation as an agent does: options, events, signals, a worker process.

Its nodes agree through files in the directory that is its last argument: each lives as long as its `alive-` file names
a live process, the first of them publishes the generations, and rank 0 counts steps until there are STEPS of them.

    fake_agent.py --node node-1 --events-fd 5 ... BEHAVIOUR STEPS DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from elasticrt import events
from elasticrt.ipc.leash import command_of

STEP_S = 0.005
LEFT = 143


class Agent:
    """One fake agent."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.node: str = options.node
        self.run_id: str = options.run_id
        self.minimum = int(options.nnodes.partition(":")[0])
        self.behaviour, self.steps = options.behaviour, int(options.steps)
        self.directory = Path(options.directory)
        self.events: int = options.events_fd
        self.alive = self.directory / f"alive-{self.node}"
        self.worker: subprocess.Popen[bytes] | None = None

    def say(self, event: events.Event) -> None:
        """Send one event."""
        line = events.encode(event, self.node, time.monotonic(), datetime.now(timezone.utc))
        os.write(self.events, line + b"\n")

    def write(self, name: str, value: object) -> None:
        """Replace a shared file as a whole."""
        temporary = self.directory / f".{name}-{self.node}"
        temporary.write_text(json.dumps(value))
        temporary.rename(self.directory / name)

    def read(self, name: str, default: object) -> object:
        """A shared file."""
        path = self.directory / name
        return json.loads(path.read_text()) if path.exists() else default

    def members(self) -> list[str]:
        """The nodes whose process runs."""
        found = []
        for path in sorted(self.directory.glob("alive-*")):
            try:
                os.kill(int(path.read_text()), 0)
                found.append(path.name.removeprefix("alive-"))
            except (ProcessLookupError, FileNotFoundError, ValueError):
                continue
        return found

    def run(self) -> int:
        """Live until the steps are done, or SIGTERM comes: that raises, because it may come in the middle of a wait."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.behaviour == "stubborn" else lambda *_: sys.exit(LEFT))
        try:
            return self.take_part()
        except SystemExit:
            self.alive.unlink(missing_ok=True)
            raise
        finally:
            self.stop_worker()

    def take_part(self) -> int:
        """The run, from the first event to the last."""
        self.alive.write_text(str(os.getpid()))
        self.say(events.AgentStarted(os.getpid(), self.run_id, "files", str(self.directory), "this machine"))
        print(f"hello from {self.node}, OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}", flush=True)
        number = 0
        while True:
            members = self.members()
            published = self.read("generation", [0, [], ""])
            if members[0] == self.node and len(members) >= self.minimum and published[1] != members:
                gone = [f"{node} is gone" for node in published[1] if node not in members]
                come = [f"{node} joined" for node in members if node not in published[1]]
                published = [published[0] + 1, members, ", ".join(gone + come) if published[0] else "start"]
                self.write("generation", published)
            if published[0] > number and self.node in published[1]:
                number = published[0]
                self.begin(*published)
            step = self.read("step", 0)
            if step >= self.steps:
                return self.end()
            if number and published[1][0] == self.node:
                self.write("step", step + 1)
                self.say(events.Step(number, step + 1, 0, {"loss": 1 / (step + 1)}))
            time.sleep(STEP_S)

    def begin(self, number: int, nodes: list[str], cause: str) -> None:
        """A new generation: a new worker and a first step."""
        self.stop_worker()
        step = self.read("step", 0)
        kind = "start" if number == 1 else "lost"
        self.say(events.Generation(number, len(nodes), cause, kind, 0, tuple(nodes), step))
        self.worker = subprocess.Popen(command_of(["sleep", "100"]), close_fds=True)
        self.say(events.WorkersStarted(number, (nodes.index(self.node),), (self.worker.pid,)))
        pause = None if number == 1 else 0.25
        self.say(events.FirstStep(number, step + 1, step, pause, 0))

    def end(self) -> int:
        """The run is over."""
        if self.behaviour == "fails":
            self.say(events.Failure("rank 0 failed\n  ValueError: no"))
            self.say(events.Result("failed", 1, "budget spent"))
            return 1
        self.say(events.Result("succeeded", 0, ""))
        sys.stderr.write("an unfinished last line")
        return 7 if self.behaviour == "bad-end" and self.node == "node-0" else 0

    def stop_worker(self) -> None:
        """End this generation's worker."""
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()


def main() -> int:
    """Read what `elasticrt run` would be given."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("node", "run-id", "nnodes", "nproc-per-node"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--events-fd", type=int, required=True)
    for name in ("behaviour", "steps", "directory"):
        parser.add_argument(name)
    return Agent(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
