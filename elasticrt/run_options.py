"""Every option of `elasticrt run`: spellings, value, default and what it does, each said once. Pure.

The parser, `--help`, the tables in docs/commands.md, the line that brings another node and the check of the Kubernetes
manifests are made from here. Every option also reads `ELASTICRT_<NAME>`. torchrun's flags that are not options of ours
are in cli/torchrun_flags.py, which turns them into these.
"""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals
from typing import Literal

from elasticrt.option_values import (
    NO_STREAMS,
    Streams,
    choice,
    comma_separated,
    endpoints,
    health_address,
    name_for,
    option,
    parse_nodes,
    positive_seconds,
    ranks,
    seconds,
    signals,
    start_method,
    whole,
    workers,
)
from elasticrt.store.protocol import ETCD_WAIT_S, Address

NODES, WORKERS, OUTPUT, ETCD = "nodes", "workers", "output", "etcd"

RESTARTS = 3
"""Restarts without new commits that end a run, unless --max-restarts says how many in all."""

STOP_TIMEOUT_S = 10.0
"""From SIGTERM to SIGKILL for the workers of a node that leaves, unless --stop-timeout says otherwise."""


@dataclass(frozen=True, kw_only=True)
class EtcdOptions:
    """Which run, and how its etcd is reached: for every command that talks to a run.

    `meet_at` has no option of its own: it is where agents without an etcd meet, as torchrun's flags or SLURM say. The
    one whose machine has that address serves an etcd there; `serves` says so where the address does not.
    """

    run_id: str | None = option(
        None,
        *("--run-id", "--rdzv-id"),
        text="the run's name",
        value="ID",
        parse=name_for("--run-id"),
        section=NODES,
        own=True,
    )
    etcd: tuple[Address, ...] = option(
        (),
        "--etcd",
        text="such as https://a:2379,https://b:2379, or unix:/path. Without it the agents of one machine share an etcd "
        "of their own, on a socket that only their user can use; it ends with the run",
        value="ENDPOINTS",
        parse=endpoints,
        section=ETCD,
        own=True,
    )
    insecure_etcd: bool = option(
        False, "--insecure-etcd", text="accept an etcd on another machine without TLS", section=ETCD, own=True
    )
    etcd_ca_file: str | None = option(
        None, "--etcd-ca-file", text="TLS: the certificate authority of etcd", value="FILE", section=ETCD
    )
    etcd_cert_file: str | None = option(
        None, "--etcd-cert-file", text="TLS: this client's certificate", value="FILE", section=ETCD
    )
    etcd_key_file: str | None = option(None, "--etcd-key-file", text="TLS: and its key", value="FILE", section=ETCD)
    etcd_user: str | None = option(
        None, "--etcd-user", text="a login, with --etcd-password-file", value="NAME", section=ETCD
    )
    etcd_password_file: str | None = option(
        None, "--etcd-password-file", text="a file that holds its password", value="FILE", section=ETCD
    )
    meet_at: Address | None = None
    serves: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(EtcdOptions):
    """What `elasticrt run` is told. The last fields have no option of their own: torchrun's flags fill them in.

    Attributes:
        settle_quiet_s, settle_max_s: how long the first members wait for more.
        hidden: streams of workers that the console does not show.
        prefix: what the console puts before each line of workers, None: as fits their number.
        notes: what people should know of their options.
    """

    run_id: str | None = option(
        None,
        *("--run-id", "--rdzv-id"),
        text="the run's name; the same id again goes on where the run was. After success it says so and does nothing",
        value="ID",
        parse=name_for("--run-id"),
        default="a new one, which is printed",
        section=NODES,
        own=True,
    )
    nnodes: tuple[int, int] = option(
        (1, 1),
        "--nnodes",
        text="how many nodes train, one number for both. Below the minimum the rest waits; beyond the maximum nodes "
        "stand by, warm",
        value="MIN:MAX",
        parse=parse_nodes,
        default="1",
        section=NODES,
        own=True,
    )
    again: bool = option(
        False, "--again", text="run once more although this run id has succeeded", section=NODES, own=True
    )
    node: str | None = option(
        None,
        "--node",
        text="this node's name",
        value="NAME",
        parse=name_for("--node"),
        default="SLURM's, or the host name",
        section=NODES,
        own=True,
    )
    node_rank: int | None = option(
        None,
        "--node-rank",
        text="where this node would like to sit; nodes that stay keep their ranks",
        value="N",
        parse=whole(0, 100_000),
        section=NODES,
        own=True,
    )
    local_addr: str | None = option(
        None,
        "--local-addr",
        text="the address at which the other nodes reach this one",
        value="ADDRESS",
        default="that of the way to etcd",
        section=NODES,
        own=True,
    )
    max_restarts: int | None = option(
        None,
        "--max-restarts",
        text="restarts in all; lost and joining nodes cost none",
        value="N",
        parse=whole(0, 10**6),
        default=f"{RESTARTS} without newly committed steps",
        section=NODES,
    )
    join: Literal["now", "budget", "failure"] = option(
        "budget",
        "--join",
        text="when newcomers are let in: now, budget (changes cost at most 5 percent of the time), or failure (only "
        "together with a failure or a leaving node)",
        value="WHEN",
        parse=choice("now", "budget", "failure"),
        section=NODES,
    )
    join_timeout_s: float = option(
        600.0,
        "--join-timeout",
        text="how long to wait for the minimum of nodes",
        value="T",
        parse=positive_seconds,
        section=NODES,
    )
    lease_ttl_s: float = option(
        5.0,
        "--lease-ttl",
        text="a node that etcd does not hear is out after so long, at least 1s",
        value="T",
        parse=positive_seconds,
        section=NODES,
    )
    drain_timeout_s: float = option(
        15.0,
        "--drain-timeout",
        text="from SIGTERM to leaving without a handover",
        value="T",
        parse=seconds,
        section=NODES,
    )
    signals: tuple[Signals, ...] = option(
        (SIGTERM, SIGINT, SIGHUP, SIGQUIT),
        "--signals-to-handle",
        text="which signals make the node leave; a second one waits for nothing",
        value="NAMES",
        parse=signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        section=NODES,
    )
    health: tuple[str, int] | None = option(
        None,
        "--health-port",
        text="answer GET /live and /ready there, also while etcd is away; 0: at a free port. On loopback without HOST",
        value="[HOST:]PORT",
        parse=health_address,
        section=NODES,
        own=True,
    )

    nproc_per_node: int | str | None = option(
        None,
        "--nproc-per-node",
        text="workers on this node: a number, gpu, cpu, or auto (GPUs, else CPUs)",
        value="K",
        parse=workers,
        default="one for each GPU, else one",
        section=WORKERS,
    )
    start_method: Literal["fork", "spawn"] = option(
        "fork",
        "--start-method",
        text="fork: from a process that has imported torch already; spawn: a fresh interpreter each",
        value="HOW",
        parse=start_method,
        section=WORKERS,
    )
    preload: tuple[str, ...] = option(
        (),
        "--preload",
        text="modules to import in that process besides torch, with commas",
        value="MODULES",
        parse=comma_separated,
        section=WORKERS,
    )
    module: bool = option(False, "--module", "-m", text="SCRIPT is a module, as with python -m", section=WORKERS)
    no_python: bool = option(False, "--no-python", text="SCRIPT is a program, not Python", section=WORKERS)
    role: str = option(
        "default", "--role", text="ROLE_NAME of the workers; one for all nodes of a run", value="NAME", section=WORKERS
    )
    as_srun: bool = option(
        False,
        "--as-srun",
        text="give workers SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS ... as srun gives its tasks",
        section=WORKERS,
    )
    virtual_local_rank: bool = option(
        False,
        "--virtual-local-rank",
        text="LOCAL_RANK is 0 and one GPU is visible, for each worker",
        section=WORKERS,
    )
    stop_timeout_s: float | None = option(
        None,
        *("--stop-timeout", "--shutdown-timeout"),
        text="from SIGTERM to SIGKILL, also on restarts",
        value="T",
        parse=seconds,
        default=f"{STOP_TIMEOUT_S:g}s when the node leaves; workers of a replaced generation are killed at once",
        section=WORKERS,
        also=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )
    hang_timeout_s: float = option(
        600.0,
        "--hang-timeout",
        text="no step for so long is a failure; 0: never",
        value="T",
        parse=seconds,
        section=WORKERS,
    )

    log_dir: str = option(
        "elasticrt_runs",
        "--log-dir",
        text="logs and events go to DIR/<run id>; /dev/null: what workers print is not kept",
        value="DIR",
        section=OUTPUT,
    )
    local_ranks_filter: frozenset[int] | None = option(
        None,
        "--local-ranks-filter",
        text="the console shows these local ranks only, such as 0,1",
        value="RANKS",
        parse=ranks,
        section=OUTPUT,
    )
    events_fd: int = option(-1, "--events-fd", text="", value="FD", parse=whole(3, 1 << 20), section=OUTPUT, own=True)

    etcd_wait_s: float | None = option(
        None,
        "--etcd-wait",
        text="how long to wait for etcd's first answer",
        value="T",
        parse=seconds,
        default=f"{ETCD_WAIT_S:g}s, if something listens there",
        section=ETCD,
    )

    settle_quiet_s: float = 0.5
    settle_max_s: float = 3.0
    hidden: Streams = NO_STREAMS
    prefix: str | None = None
    notes: tuple[str, ...] = ()
