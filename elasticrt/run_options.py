"""Every option of `elasticrt run`, declared once: spellings, value, default and meaning. Pure.

The parser, `--help`, the tables in docs/commands.md, the line that brings another node and the check of the Kubernetes
manifests are made from these declarations. Every option also reads `ELASTICRT_<NAME>`. cli/torchrun_flags.py translates
the flags of torchrun that are not options here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM, Signals
from typing import Literal

from elasticrt import option_values as parse
from elasticrt.option_values import NO_STREAMS, Streams, check_name, option
from elasticrt.store.address import parse_endpoints
from elasticrt.store.protocol import ETCD_WAIT_S, Address

RESTARTS = 3
"""How many restarts without new commits end a run, unless --max-restarts says how many in all."""

STOP_TIMEOUT_S = 10.0
"""From SIGTERM to SIGKILL for the workers of a node that leaves, unless --stop-timeout says otherwise."""

# One function for each section of `--help`.
_nodes, _workers = partial(option, section="nodes"), partial(option, section="workers")
_output, _etcd = partial(option, section="output"), partial(option, section="etcd")


@dataclass(frozen=True, kw_only=True)
class EtcdOptions:
    """Which run, and how its etcd is reached: the options of every command that talks to a run."""

    run_id: str | None = _nodes(
        "--run-id, --rdzv-id ID", None, "the run's name; `run` with the same id again goes on where the run was. After "
        "success it says so and does nothing", partial(check_name, where="--run-id"),
        default="of `run` a new one, which is printed", own=True,
    )  # fmt: skip
    etcd: tuple[Address, ...] = _etcd(
        "--etcd ENDPOINTS", (), "such as https://a:2379,https://b:2379, or unix:/path. Without it the agents of one "
        "machine share an etcd of their own, on a socket that only their user can use; it ends half a minute "
        "after the last agent, or 5 s after the result of a run",
        parse_endpoints, own=True,
    )  # fmt: skip
    insecure_etcd: bool = _etcd("--insecure-etcd", False, "accept an etcd on another machine without TLS", own=True)
    etcd_ca_file: str | None = _etcd("--etcd-ca-file FILE", None, "TLS: the certificate authority of etcd")
    etcd_cert_file: str | None = _etcd("--etcd-cert-file FILE", None, "TLS: this client's certificate")
    etcd_key_file: str | None = _etcd("--etcd-key-file FILE", None, "TLS: the key of that certificate")
    etcd_user: str | None = _etcd(
        "--etcd-user NAME", None, "the name to log in with, together with --etcd-password-file"
    )
    etcd_password_file: str | None = _etcd("--etcd-password-file FILE", None, "a file that holds its password")
    # Where agents without an etcd meet, as torchrun's flags or SLURM say. The agent whose machine has this address
    # serves an etcd there.
    meet_at: Address | None = None
    serves: bool | None = None  # Whether this agent serves it; None: the address decides.
    standalone: bool = False  # Whether the run was said to be of this node only.


@dataclass(frozen=True, kw_only=True)
class RunOptions(EtcdOptions):
    """The options of `elasticrt run`. The last fields have no option of their own: torchrun's flags fill them in."""

    min_nodes: int | None = _nodes(
        "--min-nodes N", None, "train with at least so many nodes; below that the rest waits",
        parse.whole(1, parse.NODES_MAX), default="1", own=True,
    )  # fmt: skip
    max_nodes: int | None = _nodes(
        "--max-nodes N", None, "train with at most so many nodes; nodes beyond that stand by, warm",
        parse.whole(1, parse.NODES_MAX), default="the minimum", own=True,
    )  # fmt: skip
    nnodes: tuple[int, int] = _nodes(
        "--nnodes MIN:MAX", (1, 1), "both in one, as torchrun has it; one number means both", parse.parse_nodes,
        default="1", own=True,
    )  # fmt: skip
    again: bool = _nodes("--again", False, "run once more although this run id has succeeded", own=True)
    fresh: bool = _nodes(
        "--fresh", False, "do not resume from the checkpoint directory; for a run's first start only", own=True
    )
    node: str | None = _nodes(
        "--node NAME", None, "this node's name", partial(check_name, where="--node"),
        default="SLURM's, or the host name", own=True,
    )  # fmt: skip
    node_rank: int | None = _nodes(
        "--node-rank N", None, "the rank that this node asks for; nodes that stay keep theirs",
        parse.whole(0, 100_000), own=True,
    )  # fmt: skip
    local_addr: str | None = _nodes(
        "--local-addr ADDRESS", None, "the address at which the other nodes reach this one",
        default="that of the way to etcd", own=True,
    )  # fmt: skip
    max_restarts: int | None = _nodes(
        "--max-restarts N", None, "so many restarts after failures in the whole run; lost and joining nodes cost none",
        parse.whole(0, 10**6), default=f"{RESTARTS} in a row without a new step",
    )  # fmt: skip
    join: Literal["now", "budget", "failure"] = _nodes(
        "--join WHEN", "budget", "when newcomers are let in: now, budget (changes cost at most 5 percent of the time), "
        "or failure (only after a loss, or together with a leaving node). After a loss no budget counts",
        parse.choice("now", "budget", "failure"),
    )  # fmt: skip
    join_timeout_s: float = _nodes(
        "--join-timeout T", 600.0, "how long to wait for the minimum of nodes", parse.duration(0.001)
    )
    lease_ttl_s: float = _nodes(
        "--lease-ttl T", 5.0, "a node that etcd has not heard for so long is out; at least 1s",
        parse.duration(1.0, 3600.0),
    )  # fmt: skip
    drain_timeout_s: float = _nodes(
        "--drain-timeout T", 15.0, "how long a node that is told to leave waits for its handover", parse.seconds
    )
    signals: tuple[Signals, ...] = _nodes(
        "--signals-to-handle NAMES", (SIGTERM, SIGINT, SIGHUP, SIGQUIT), "signals that make the node leave; a second "
        "one, half a second later or more, ends it at once. Under nohup SIGHUP does nothing", parse.signals,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )  # fmt: skip
    health: tuple[str, int] | None = _nodes(
        "--health-port [HOST:]PORT", None, "answer GET /live, /ready and /metrics there, also while etcd is away; 0: "
        "at a free port. On loopback without HOST", parse.host_and_port("--health-port", "127.0.0.1"), own=True,
    )  # fmt: skip

    nproc_per_node: int | str | None = _workers(
        "--nproc-per-node K", None, "workers on this node: a number, gpu, cpu, or auto (GPUs, else CPUs)",
        parse.workers, default="one for each GPU, else one",
    )  # fmt: skip
    start_method: Literal["fork", "spawn"] = _workers(
        "--start-method HOW", "fork", "fork: from a process that has imported torch already; spawn: a fresh "
        "interpreter each", parse.start_method,
    )  # fmt: skip
    preload: tuple[str, ...] = _workers(
        "--preload MODULES", (), "modules to import in that process besides torch, with commas", parse.comma_separated
    )
    module: bool = _workers("--module, -m", False, "SCRIPT is a module, as with python -m")
    no_python: bool = _workers("--no-python", False, "SCRIPT is a program, not Python")
    role: str = _workers("--role NAME", "default", "ROLE_NAME of the workers; one for all nodes of a run")
    as_srun: bool = _workers(
        "--as-srun", False, "give workers SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS ... as srun gives its tasks"
    )
    virtual_local_rank: bool = _workers(
        "--virtual-local-rank", False, "LOCAL_RANK is 0 and one GPU is visible, for each worker"
    )
    node_check: tuple[str, ...] = _workers(
        "--node-check COMMAND", (), "a command that exits with 0 on a node that may train. It runs before workers "
        "start, and after a failure of a GPU until it exits with 0", parse.command,
        default="nvidia-smi, after a failure of a GPU", own=True,
    )  # fmt: skip
    stop_timeout_s: float | None = _workers(
        "--stop-timeout, --shutdown-timeout T", None, "from workers' SIGTERM to SIGKILL, also on restarts",
        parse.seconds,
        default=f"{STOP_TIMEOUT_S:g}s when the node leaves; workers of a replaced generation are killed at once",
        also=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    )  # fmt: skip
    hang_timeout_s: float = _workers(
        "--hang-timeout T", 600.0, "no step for so long is a failure; 0: never", parse.seconds
    )

    log_dir: str = _output(
        "--log-dir DIR", "elasticrt_runs", "logs and events go to DIR/<run id>; /dev/null: what workers print is not "
        "kept",
    )  # fmt: skip
    local_ranks_filter: frozenset[int] | None = _output(
        "--local-ranks-filter RANKS", None, "the console shows these local ranks only, such as 0,1", parse.ranks
    )
    quiet: bool = _output(
        "--quiet, -q", False, "print errors and warnings only; the output of workers is still shown", own=True
    )
    verbose: bool = _output("--verbose, -v", False, "print each decision of this agent, with its reason", own=True)
    log_format: Literal["text", "json"] = _output(
        "--log-format FORMAT", "text", "text, or json: each line of the agent's own is an object of JSON, with time, "
        "node, level, kind, text and the fields of its event", parse.choice("text", "json"), own=True,
    )  # fmt: skip
    events_fd: int = _output("--events-fd FD", -1, "", parse.whole(3, 1 << 20), own=True)

    etcd_wait_s: float | None = _etcd(
        "--etcd-wait T", None, "how long to wait for etcd's first answer", parse.seconds,
        default=f"{ETCD_WAIT_S:g}s, if something listens there",
    )  # fmt: skip

    # How long the first members wait for more, in seconds: until none has come for `settle_quiet_s`, at most
    # `settle_max_s`.
    settle_quiet_s: float = 0.5
    settle_max_s: float = 3.0
    hidden: Streams = NO_STREAMS  # The workers' streams that the console does not show.
    # What the console puts before each line of a worker; None: whatever suits the number of workers.
    prefix: str | None = None
    notes: tuple[str, ...] = ()  # Sentences to print about the options, such as one without effect.
