"""What SLURM knows about an agent that it has started: its node, its run, where the others are. Pure.

All of it comes from the variables that SLURM sets for a task, so nodes need no `scontrol`. Options overrule it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elasticrt.cli.torchrun_flags import meeting_place
from elasticrt.errors import ConfigError
from elasticrt.run_options import RunOptions
from elasticrt.text import shell

_OWN_STEPS = 0xFFFFFFF0
"""SLURM numbers its own steps downwards from 2^32: the batch script, an interactive shell, `extern`."""

_PORTS = range(10_000, 30_000)
"""Where a job's first node serves an etcd if it has to: below the ports that Linux gives to clients. Jobs on one node
seldom get the same; the second then reports it."""


@dataclass(frozen=True)
class Slurm:
    """One agent's place in a SLURM job."""

    cluster: str  # The cluster's name, "slurm" where it has none.
    job: int  # The job's number; of an array's element the element's own.
    array: int | None  # The number of the whole array, None outside of one.
    step: int | None  # The number of the step that `srun` has made; None in the batch script and in a shell.
    node: str  # SLURM's name of this node; "" on a machine outside the job, where `salloc` was typed.
    first: str  # The name of the step's first node.
    step_nodes: int  # Nodes of the step; 1 outside of a step.
    step_tasks: int  # Its tasks; as many as nodes outside of a step.
    job_nodes: int  # Nodes of the job.

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Slurm | None:
        """The place; None outside of SLURM, and inside a worker. Raises ConfigError that names a malformed variable."""
        if not env.get("SLURM_JOB_ID") or "ELASTICRT_GENERATION" in env:
            return None
        number = _whole(env, "SLURM_STEP_ID", _OWN_STEPS)
        step = number if number < _OWN_STEPS else None
        nodes = _whole(env, "SLURM_STEP_NUM_NODES", 1) if step is not None else 1
        return cls(
            cluster=re.sub(r"[^A-Za-z0-9_-]", "-", env.get("SLURM_CLUSTER_NAME", "")) or "slurm",
            job=_whole(env, "SLURM_JOB_ID", 0),
            array=_whole(env, "SLURM_ARRAY_JOB_ID", 0) if env.get("SLURM_ARRAY_JOB_ID") else None,
            step=step,
            node=env.get("SLURMD_NODENAME", ""),
            first=first_node(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")),
            step_nodes=nodes,
            step_tasks=_whole(env, "SLURM_STEP_NUM_TASKS", nodes) if step is not None else nodes,
            job_nodes=_whole(env, "SLURM_JOB_NUM_NODES", 1),
        )

    def run_id(self, max_nodes: int) -> str | None:
        """The run that this agent belongs to; None where SLURM does not know, or where `max_nodes` is 1.

        The tasks of a step of several nodes are one run. So are the elements of an array of single nodes, if more than
        one node may take part; otherwise each is a run of its own, as in a search for hyperparameters.
        """
        job = self.job if self.step_nodes > 1 else self.array
        if self.step is None or job is None or max_nodes == 1:
            return None
        # The next `srun` in the same batch script is another run. By this name it would find that it has succeeded.
        return f"{self.cluster}-{job}" + (f".{self.step}" if self.step else "")


def surplus(slurm: Slurm | None) -> list[str]:
    """The note for an agent beside another one of its step on the same node, if there must be such."""
    if slurm is None or slurm.step_tasks <= slurm.step_nodes:
        return []
    what = f"srun has started {slurm.step_tasks} agents on {slurm.step_nodes} nodes"
    return [f"{what}: one on each is enough, and starts all of its workers (--ntasks-per-node=1 --nproc-per-node K)"]


def placed(options: RunOptions, slurm: Slurm | None) -> RunOptions:
    """`options` with the run id and the way to etcd that SLURM knows, where they are not given.

    Raises ConfigError where each agent of a step of several nodes would train alone, or start an etcd of its own.
    """
    if (
        slurm is not None
        and slurm.step_nodes > 1
        and options.nnodes[1] == 1
        and not (options.run_id or options.standalone)
    ):
        raise ConfigError(
            "a step of several nodes, and runs of one node",
            "--nnodes",
            got=f"{slurm.step_nodes} nodes in step {slurm.step}, each of which would train alone",
            expected="how many nodes train together",
            remedy=f"Give --nnodes 1:{slurm.step_nodes}, or --standalone where each node is to train for itself",
        )
    run_id = slurm.run_id(options.nnodes[1]) if slurm is not None else None
    if slurm is None or run_id is None:
        return options
    options = replace(options, run_id=options.run_id or run_id)
    if options.etcd or options.meet_at is not None:
        return options
    first = slurm.step_nodes > 1 and bool(slurm.first)
    if first and options.insecure_etcd:
        there = meeting_place(f"{slurm.first}:{_PORTS[slurm.job % len(_PORTS)]}")
        return replace(options, meet_at=there, serves=True if slurm.node == slurm.first else None)
    raise ConfigError(
        "nodes of a SLURM job that have no etcd to meet in",
        "--etcd",
        got=f"{slurm.step_nodes} nodes in step {slurm.step}" if first else f"an element of array {slurm.array}",
        expected="an etcd that all of them reach",
        remedy="Name one with --etcd (deploy/slurm/etcd.sbatch starts one)"
        + (f"; with --insecure-etcd {slurm.first} serves one for this job, without TLS" if first else ""),
    )


def alone(slurm: Slurm | None, max_nodes: int, argv: Sequence[str]) -> str:
    """The warning for an agent that stays alone in a job of several nodes; "" where that may be intended.

    `argv` are the words after `elasticrt`.
    """
    if slurm is None or slurm.job_nodes == 1 or (slurm.step is not None and max_nodes == 1):
        return ""
    nodes = slurm.job_nodes
    words = [*argv[:1], *([f"--nnodes=1:{nodes}"] if max_nodes == 1 else []), *argv[1:]]
    srun = f"srun --nodes={nodes} --ntasks={nodes} --kill-on-bad-exit=0 --wait=0"
    return f"1 of {nodes} nodes here; start one agent per node: {srun} {shell(('elasticrt', *words))}"


def first_node(nodes: str) -> str:
    """The first name in a node list as SLURM writes it: `gpu[07-09,12],login` is gpu07; "" of an empty one."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert name is not None, "it also matches nothing"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0])


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,12}", text):
        expected, remedy = "a whole number >= 0", "Unset it outside of SLURM"
        raise ConfigError(f"{name} is malformed", "environment", got=text, expected=expected, remedy=remedy)
    return int(text)
