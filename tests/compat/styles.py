"""Every way of launching DDP, played twice: undisturbed, and with a worker killed. A row of the table for each.

    python -m tests.compat.styles [NAME ...]        all rows of tests/compat/STYLES.md, or some

A row passes when its nodes run it, one training process is killed in the middle, and it ends with exit code 0 and the
result of the undisturbed run: the same weights, but for float32's rounding.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import REPOSITORY, Cluster, kill
from tests.conftest import children

EXAMPLES = REPOSITORY / "examples"
TABLE = Path(__file__).with_name("STYLES.md")
KILL_AFTER = "epoch 3"
AT_ONCE = ("--join", "now")


@dataclass(frozen=True)
class Style:
    """One way.

    Attributes:
        name: what people call it.
        script: in the folder.
        arguments: of the script.
        command: what starts it on each node: "run", or "python" alone.
        options: of the command.
        nodes: how many.
        victim: the rank whose process is killed.
        inner: the process to kill is one that the worker has started.
        refused: instead, the run has to end with exit code 1 and these words.
        needs: a module that has to be installed.
        resumes: it goes on after the kill, instead of beginning again.
        folder: in examples.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    command: str = "run"
    options: tuple[str, ...] = ("--nnodes", "2", "--nproc-per-node", "2")
    nodes: int = 2
    victim: int = 3
    inner: bool = False
    refused: str = ""
    needs: str = ""
    resumes: bool = True
    folder: str = "styles"

    @property
    def line(self) -> str:
        """What is typed on each node."""
        start = "python" if self.command == "python" else f"elasticrt {self.command}"
        return " ".join((start, *self.options, self.script, *self.arguments))


ONE_EACH = ("--nnodes", "2", "--nproc-per-node", "1")
STYLES = (
    Style("nn.DataParallel, one process", "data_parallel.py", options=("--standalone",), nodes=1, victim=0),
    Style("DDP, mp.spawn in the script", "mp_spawn.py", ("--gpus", "2"), options=ONE_EACH, victim=1, inner=True),
    Style("elasticrt.spawn", "elastic_spawn.py", ("--nodes", "2"), command="python", options=()),
    Style("torch.distributed.launch, --local_rank", "launch_underscore.py", ("--local_rank=${local_rank}",)),
    Style("torch.distributed.launch, --local-rank", "launch_dash.py", ("--local-rank=${local_rank}",), victim=0),
    Style("torch.distributed.launch, --use-env", "torchrun_env.py", options=("--nnodes=2", "--nproc_per_node=2")),
    Style(
        "torchrun, one node",
        "torchrun_env.py",
        options=("--standalone", "--nnodes=1", "--nproc-per-node=2"),
        nodes=1,
        victim=1,
    ),
    Style("torchrun, several nodes", "torchrun_env.py", victim=0),
    Style("DDP tutorial: total_epochs save_every, relative snapshot", "tutorial.py", ("20", "2")),
    Style("gradient all-reduce by hand", "allreduce_by_hand.py", victim=2),
    Style("ImageNet example, env://", "imagenet_style.py", ("-b", "64", "--dist-backend", "gloo"), victim=1),
    Style(
        "ImageNet example, --multiprocessing-distributed",
        "imagenet_style.py",
        ("-b", "64", "--dist-backend", "gloo", "--multiprocessing-distributed", "--gpus-per-node", "2"),
        options=ONE_EACH,
        victim=0,
        inner=True,
    ),
    Style("Hydra, its own output directory", "hydra_app.py", ("lr=0.05", "+note=a b"), needs="hydra"),
    Style(
        "Hydra, the run's directory",
        "hydra_app.py",
        ("lr=0.05", "hydra.run.dir=${oc.env:ELASTICRT_RUN_DIR}/hydra"),
        victim=0,
        needs="hydra",
    ),
    Style("zero_first barrier", "zero_first.py", victim=2),
    Style("DistributedSampler.set_epoch", "set_epoch.py", victim=1),
    Style("rank 0 saves model.module.state_dict()", "rank0_save.py", victim=0),
    Style("gloo by name", "backend.py", ("gloo",)),
    Style("nccl by name, torch without it", "backend.py", ("nccl",), refused="doesn't have NCCL built in"),
    Style("mpi by name, torch without it", "backend.py", ("mpi",), refused="doesn't have MPI built in"),
    Style(
        "srun's variables on request", "slurm_task.py", options=("--as-srun", *ONE_EACH[:2], "--nproc-per-node", "2")
    ),
)


class Nodes(Cluster):
    """The nodes of one style, in one directory as on a shared file system."""

    def __init__(self, directory: Path, style: Style) -> None:
        script = [str(EXAMPLES / style.folder / style.script), *style.arguments]
        # A name of its own: the etcd of a run that has just ended may still be there.
        super().__init__(directory, f"style-{secrets.token_hex(4)}", [*AT_ONCE, *style.options], script)
        self.style = style

    def wrap(self, name: str, command: list[str]) -> list[str]:
        """`elasticrt run ...` as a cluster starts it, in this style's words."""
        if self.style.command == "python":
            options = {"RUN_ID": self.run_id, "NODE": name, "LOG_DIR": self.run_dir.parent}
            return [
                "env",
                *(f"ELASTICRT_{key}={value}" for key, value in options.items()),
                sys.executable,
                *self.script,
            ]
        return command

    def written(self, event: str) -> list[dict]:
        """Events of one kind, in order of time. With --standalone the run has a name, and a directory, of its own."""
        found = []
        for path in self.run_dir.parent.glob("*/events-*.jsonl"):
            for line in path.read_text().split("\n")[:-1]:
                fields = json.loads(line)
                if fields["event"] == event:
                    found.append(fields)
        return sorted(found, key=lambda fields: fields["at"])

    def victim(self) -> int:
        """The process to kill."""
        for started in reversed(self.written("workers_started")):
            pids = dict(zip(started["ranks"], started["pids"], strict=True))
            if self.style.victim in pids:
                worker = pids[self.style.victim]
                return max(children(worker)) if self.style.inner else worker
        raise AssertionError(f"nobody has rank {self.style.victim}\n{self.story()}")

    def wait_for_text(self, words: str, timeout_s: float = 90.0) -> None:
        """Wait until some node has printed a line that is `words`."""
        deadline = time.monotonic() + timeout_s
        pattern = re.compile(rf"^(\[rank \d+\] )?{re.escape(words)}$", re.MULTILINE)
        while not any(pattern.search(agent.text()) for agent in self.agents.values()):
            running = any(agent.process.poll() is None for agent in self.agents.values())
            if time.monotonic() > deadline or not running:
                raise AssertionError(f"nobody has printed {words!r}\n{self.story()}")
            time.sleep(0.01)

    def output(self) -> str:
        """What all nodes have printed."""
        return "".join(agent.text() for agent in self.agents.values())


@dataclass(frozen=True)
class Outcome:
    """How one play has ended: exit codes by node, the result that the script has printed, all output."""

    codes: dict[str, int]
    result: str
    output: str
    generations: int

    @property
    def begun(self) -> int:
        """How often a process has said that it finished the first epoch."""
        return len(re.findall(r"epoch 0$", self.output, re.MULTILINE))


def play(style: Style, directory: Path, *, disturbed: bool) -> Outcome:
    """Run a style to its end, with a training process killed on the way or not."""
    directory.mkdir()
    with Nodes(directory, style) as nodes:
        for number in range(style.nodes):
            nodes.start(f"node-{number}")
        if disturbed:
            nodes.wait_for_text(KILL_AFTER)
            kill(nodes.victim())
        codes = nodes.ended(120.0)
        results = re.findall(r"result: (.*)", nodes.output())
        generations = max((event["number"] for event in nodes.written("generation")), default=0)
        if set(codes.values()) != {0} and not style.refused:
            raise AssertionError(nodes.story())
    return Outcome(codes, results[-1] if results else "", nodes.output(), generations)


def verdict(style: Style, disturbed: Outcome, undisturbed: Outcome) -> str:
    """What is wrong with a disturbed run, "" for nothing."""
    if style.refused:
        ended = set(disturbed.codes.values()) == {1}
        return "" if ended and style.refused in disturbed.output else f"exit codes {disturbed.codes}, or other words"
    if disturbed.generations < 2:
        return "it was over before the worker was killed"
    if style.resumes and disturbed.begun != undisturbed.begun:
        return "it has begun again instead of going on"
    if not undisturbed.result or not alike(disturbed.result, undisturbed.result):
        return f"result {disturbed.result!r}, undisturbed {undisturbed.result!r}"
    return ""


def alike(one: str, other: str) -> bool:
    """Whether two results are the same, but for float32: DDP's first step adds in another order than later ones."""
    pairs = list(zip(numbers(one), numbers(other), strict=False))
    same = all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) for a, b in pairs)
    return same and len(numbers(one)) == len(numbers(other)) > 0


def numbers(result: str) -> list[float]:
    """Those of a result."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", result)]


def both(style: Style, directory: Path) -> tuple[Outcome, str]:
    """The run with a killed worker, and what is wrong with it."""
    if style.refused:
        outcome = play(style, directory / "refused", disturbed=False)
        return outcome, verdict(style, outcome, outcome)
    undisturbed = play(style, directory / "undisturbed", disturbed=False)
    outcome = play(style, directory / "disturbed", disturbed=True)
    return outcome, verdict(style, outcome, undisturbed)


def row(style: Style, outcome: Outcome | None, problem: str) -> str:
    """One line of the table."""
    if outcome is None:
        return f"| {style.name} | `{style.line}` | **{problem}** | |"
    said = (
        "refused, exit code 1, with the reason"
        if style.refused
        else f"`{' '.join(outcome.result.split()[:2])}`, same weights"
    )
    killed = "" if style.refused else f"{'a process of ' if style.inner else ''}rank {style.victim}"
    return f"| {style.name} | `{style.line}` | {f'**{problem}**' if problem else said} | {killed} |"


def main(names: list[str]) -> int:
    """Play the styles named, or all, and write their rows into the table."""
    wrong, lines = 0, []
    kept = TABLE.read_text().splitlines() if TABLE.exists() else []
    for style in STYLES:
        if names and style.name not in names and style.script not in names:
            lines += [line for line in kept if line.startswith(f"| {style.name} |")]
            continue
        with tempfile.TemporaryDirectory(prefix="styles-") as directory:
            outcome, problem = None, ""
            try:
                outcome, problem = both(style, Path(directory))
            except AssertionError as error:
                print(error, file=sys.stderr)
                problem = "failed"
        wrong += bool(problem)
        lines.append(row(style, outcome, problem))
        print(lines[-1], flush=True)
    TABLE.write_text("\n".join([*HEAD, *lines, ""]))
    return 1 if wrong else 0


HEAD = (
    "# Launch styles under elasticrt",
    "",
    "Made by `python -m tests.compat.styles` from the runs themselves (CPU, gloo). Each style ran twice with the nodes",
    "and workers that its line says: undisturbed, and with a process killed by SIGKILL after the fourth epoch.",
    "A row shows the final loss when both runs ended with exit code 0 and the same weights to 5 digits (in its first",
    "step after a start DDP adds in another order), and only the interrupted epoch was trained again. The scripts:",
    "`examples/styles`.",
    "",
    "| style | on each node | with a process killed | killed |",
    "|---|---|---|---|",
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="styles-run-") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        code = main(sys.argv[1:])
    sys.exit(code)
