"""What SLURM knows about an agent that it has started: its node, its run, and where the other agents are. Pure.

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
"""Where a job's first node serves an etcd if it has to: below the ports that Linux gives to clients. Two jobs on one
node seldom get the same port; the second one then reports that it is taken."""


@dataclass(frozen=True)
class Slurm:
    """One agent's place in a SLURM job."""

    cluster: str  # The cluster's name, or "slurm" without one.
    job: int  # The job's number; for an element of an array the element's own.
    array: int | None  # The number of the whole array; None outside of one.
    # The number of the step that `srun` has made; None in the batch script and in a shell.
    step: int | None
    # SLURM's name of this node; "" on a machine outside the job, where `salloc` was typed.
    node: str
    first: str  # The name of the step's first node.
    step_nodes: int  # The step's nodes; 1 outside of a step.
    step_tasks: int  # The step's tasks; outside of a step as many as nodes.
    job_nodes: int  # The job's nodes.

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Slurm | None:
        """The agent's place; None outside of SLURM, and inside a worker.

        Raises ConfigError that names a malformed variable.
        """
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
        """The id of the run that this agent belongs to; None if SLURM does not know one, or if `max_nodes` is 1.

        The tasks of a step of several nodes are one run. So are the elements of an array of single nodes, if more than
        one node may take part; otherwise each element is a run of its own, as in a search for hyperparameters.
        """
        job = self.job if self.step_nodes > 1 else self.array
        if self.step is None or job is None or max_nodes == 1:
            return None
        # The next `srun` in the same batch script is another run. Without the step in its name it would find that it
        # has succeeded.
        return f"{self.cluster}-{job}" + (f".{self.step}" if self.step else "")


def surplus(slurm: Slurm | None) -> list[str]:
    """A note if `srun` has started more agents than nodes, as a list; empty otherwise."""
    if slurm is None or slurm.step_tasks <= slurm.step_nodes:
        return []
    what = f"srun has started {slurm.step_tasks} agents on {slurm.step_nodes} nodes"
    return [f"{what}: one on each is enough, and starts all of its workers (--ntasks-per-node=1 --nproc-per-node K)"]


def placed(options: RunOptions, slurm: Slurm | None) -> RunOptions:
    """`options` with the run id and the way to etcd that SLURM knows, if they are not given.

    Raises ConfigError if each agent of a step of several nodes would train alone, or start an etcd of its own.
    """
    if slurm is None:
        return options
    most = options.nnodes[1]
    if slurm.step_nodes > 1 and most == 1 and not (options.run_id or options.standalone):
        raise ConfigError(
            "each node of this SLURM step would train alone",
            "--nnodes",
            got=f"{slurm.step_nodes} nodes in step {slurm.step}",
            expected="how many nodes train together",
            remedy=f"Give --nnodes 1:{slurm.step_nodes}, or --standalone if each node is to train alone",
        )
    run_id = slurm.run_id(most)
    if run_id is None:
        return options
    options = replace(options, run_id=options.run_id or run_id)
    if options.etcd or options.meet_at is not None:
        return options
    first = slurm.step_nodes > 1 and bool(slurm.first)
    if first and options.insecure_etcd:
        there = meeting_place(f"{slurm.first}:{_PORTS[slurm.job % len(_PORTS)]}")
        # On the step's first node this agent serves the etcd, whatever the name resolves to there. On the other nodes
        # the address decides.
        return replace(options, meet_at=there, serves=True if slurm.node == slurm.first else None)
    raise ConfigError(
        "the nodes of this SLURM job have no common etcd",
        "--etcd",
        got=f"{slurm.step_nodes} nodes in step {slurm.step}" if first else f"an element of array {slurm.array}",
        expected="an etcd that all of them reach",
        remedy="Name one with --etcd (deploy/slurm/etcd.sbatch starts one)"
        + (f"; with --insecure-etcd {slurm.first} serves one for this job, without TLS" if first else ""),
    )


def alone(slurm: Slurm | None, max_nodes: int, argv: Sequence[str]) -> str:
    """The warning for an agent that stays alone in a job of several nodes; "" if that may be intended.

    `argv` are the words after `elasticrt`.
    """
    if slurm is None or slurm.job_nodes == 1 or (slurm.step is not None and max_nodes == 1):
        return ""
    nodes = slurm.job_nodes
    words = [*argv[:1], *([f"--nnodes=1:{nodes}"] if max_nodes == 1 else []), *argv[1:]]
    srun = f"srun --nodes={nodes} --ntasks={nodes} --kill-on-bad-exit=0 --wait=0"
    return f"1 of {nodes} nodes here; start one agent per node: {srun} {shell(('elasticrt', *words))}"


def first_node(nodes: str) -> str:
    """The first name in a node list as SLURM writes it: `gpu[07-09,12],login` is gpu07; "" for an empty list."""
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert name is not None, "it also matches nothing"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name[0])


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,12}", text):
        expected, remedy = "a whole number >= 0", "Unset it outside of SLURM"
        raise ConfigError(f"{name} is malformed", "environment", got=text, expected=expected, remedy=remedy)
    return int(text)
