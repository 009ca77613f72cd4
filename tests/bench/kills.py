"""A worker that is killed again and again: how many restarts succeed at their first attempt.

    python -m tests.bench.kills [--kills 100] [--runtime elasticrt|fresh|default] [--timeout S]
    python -m tests.bench.kills --in-place [--kills 1000]

One node with two workers. After its first all-reduce, rank 1 kills itself (SIGKILL) as often as told. An attempt is a
group of workers that was started; it succeeds when its all-reduce does. Exits 1 when a first attempt failed.

With --in-place the workers train with `loop.step()` (`kills_in_place.py`): one lives on through all deaths of its
peers. Then its weights are those of an undisturbed run, and what it holds at the end is what it held at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.bench.runtimes import RUNTIMES

SCRIPT = """
import glob, json, os, signal, sys
import torch, torch.distributed as dist

directory, kills = sys.argv[1], int(sys.argv[2])
count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
open(os.path.join(directory, f"began-{count}-{rank}"), "x").close()
dist.init_process_group("gloo")
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
record = {"count": count, "rank": rank, "total": total.item(), "generation": os.environ.get("ELASTICRT_GENERATION")}
with open(os.path.join(directory, f"well-{count}-{rank}.json"), "x") as file:
    json.dump(record, file)
dist.barrier()
if rank == 1 and len(glob.glob(os.path.join(directory, "well-*-1.json"))) <= kills:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""
"""Arguments: a directory for one record per group and rank, and how often rank 1 is to kill itself."""


WEIGHTS_DIFFER_MAX = 1e-10
"""Of the largest. Gradients of two ranks are rounded otherwise than those of one, but this training forgets that as it
goes on: 2e-16 is left after any number of steps. Of a sample that is lost or counts twice it forgets slowly: that makes
3e-5, and 2e-8 are left 300,000 steps later."""


@dataclass(frozen=True)
class Attempts:
    """Whether each group that was started succeeded, in order."""

    succeeded: tuple[bool, ...]

    @classmethod
    def read(cls, directory: Path) -> Attempts:
        """From the script's records."""
        counts = sorted(int(path.name.split("-")[1]) for path in directory.glob("began-*-1"))
        return cls(tuple((directory / f"well-{count}-1.json").exists() for count in counts))

    @property
    def kills(self) -> int:
        """A group that succeeded was killed, but for the last."""
        return max(0, sum(self.succeeded) - 1)

    @property
    def first(self) -> int:
        """After how many kills the very next group succeeded."""
        return sum(before and after for before, after in pairwise(self.succeeded))


def run(runtime: str, kills: int, timeout_s: float) -> tuple[Attempts, str, float]:
    """All kills under one runtime; the attempts, how the job ended, and the seconds it took."""
    chosen = RUNTIMES[runtime]
    with tempfile.TemporaryDirectory(prefix="ertb-") as name:
        directory = Path(name)
        (directory / "records").mkdir()
        (directory / "script.py").write_text(SCRIPT)
        module = "elasticrt" if chosen.ours else "torch.distributed.run"
        command = [sys.executable, "-m", module, *(["run"] if chosen.ours else []), "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", str(10 * kills + 10), "--log-dir", f"{name}/logs"]
        command += ["script.py", "records", str(kills)]
        env = {**os.environ, **dict(chosen.env), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        began = time.monotonic()
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                ended = f"exit code {process.wait(timeout_s)}"
            except subprocess.TimeoutExpired:
                ended = f"given up after {timeout_s:g} s"
                process.terminate()
                process.wait(60)
        return Attempts.read(directory / "records"), ended, time.monotonic() - began


def in_place(kills: int, timeout_s: float) -> bool:
    """All kills in one run that goes on in place; prints how it went. Whether all is as it should be."""
    script = str(Path(__file__).with_name("kills_in_place.py"))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="ertb-") as name:
        disturbed, alone = Path(name, "a"), Path(name, "b")
        disturbed.mkdir()
        alone.mkdir()
        command = [sys.executable, "-m", "elasticrt", "run", "--standalone", "--nproc-per-node", "2", "--join", "now"]
        command += ["--max-restarts", str(10 * kills + 10), "--log-dir", f"{name}/logs"]
        began = time.monotonic()
        _finish([*command, script, str(disturbed), str(kills)], env, timeout_s)
        took = time.monotonic() - began
        mine = json.loads((disturbed / "result.json").read_text())
        _finish([sys.executable, script, str(alone), "0", str(mine["steps"])], env, timeout_s)
        other = json.loads((alone / "result.json").read_text())
    differs = max(abs(a - b) for a, b in zip(mine["weights"], other["weights"], strict=True))
    largest = max(map(abs, other["weights"]))
    print(f"{mine['deaths']} of {kills} kills, all in place: one process through {mine['steps']} steps in {took:.0f} s")
    print(f"weights differ from the undisturbed run's by {differs / largest:.1e} of the largest")
    for what, value in mine["start"].items():
        print(f"{what:12} {value:.0f} after the first kills, {mine['end'][what]:.0f} at the end")
    return mine["deaths"] == kills and differs < WEIGHTS_DIFFER_MAX * largest


def _finish(command: list[str], env: dict[str, str], timeout_s: float) -> None:
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            ended = f"exit code {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)
            ended = f"nothing within {timeout_s:g} s"
        if ended != "exit code 0":
            log.seek(0)
            raise SystemExit(f"{' '.join(command)}: {ended}\n{log.read()[-3000:]}")


def main() -> None:
    """Do it and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--runtime", choices=("elasticrt", "fresh", "default"), default="elasticrt")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for all of it (default: 600)")
    parser.add_argument("--in-place", action="store_true", help="workers that live on when others are killed")
    arguments = parser.parse_args()
    if arguments.in_place:
        sys.exit(int(not in_place(arguments.kills, arguments.timeout)))
    attempts, ended, seconds = run(arguments.runtime, arguments.kills, arguments.timeout)
    print(
        f"{RUNTIMES[arguments.runtime].text}: {arguments.kills} kills wanted, {attempts.kills} survived, "
        f"{attempts.first} of them by the first attempt; {len(attempts.succeeded)} groups started; "
        f"{ended}; {seconds:.0f} s"
    )
    sys.exit(int(attempts.first != arguments.kills))


if __name__ == "__main__":
    main()
