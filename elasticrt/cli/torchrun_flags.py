"""Every flag of torchrun: what it means here, where that differs, or why it is refused. Data, and a few words on it.

Nothing of torchrun's is silently ignored. A test walks torchrun's own parser and fails when it has a flag that is not
in this table. `python -m tests.compat.flags` makes a page of it (tests/compat/FLAGS.md), with the tests that ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticrt.errors import ConfigError, explain


@dataclass(frozen=True)
class Flag:
    """One flag of torchrun.

    Attributes:
        name: its long spelling with dashes.
        option: where `Options.read` puts its value; "" when it is refused.
        meaning: what it does here; when it is refused, why, and what to use in its place.
        differs: where that is not what torchrun does; "" where it is.
        env: whether torchrun reads it from PET_<NAME>, too.
    """

    name: str
    option: str
    meaning: str
    differs: str = ""
    env: bool = True


FLAGS = (
    Flag("--nnodes", "nnodes", "how many nodes at least and at most; one number for both"),
    Flag(
        "--nproc-per-node",
        "nproc_per_node",
        "workers on this node: a number, gpu, cpu, or auto (GPUs, else CPUs)",
        "without it there is a worker for each GPU, else one; xpu is refused: give the number",
    ),
    Flag(
        "--rdzv-backend",
        "rdzv_backend",
        "static and c10d: agents meet at --rdzv-endpoint, where the one that owns the address serves an etcd",
        "etcd and etcd-v2 are refused: agents meet in etcd v3 (--etcd)",
    ),
    Flag("--rdzv-endpoint", "rdzv_endpoint", "where the agents meet; the others wait until it is served"),
    Flag("--rdzv-id", "run_id", "the run's name", "without it, one is made from the endpoint, or made up and printed"),
    Flag(
        "--rdzv-conf",
        "rdzv_conf",
        "join_timeout, timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt, is_host, store_type",
        "others are refused by name, with what to use in their place",
    ),
    Flag("--standalone", "standalone", "a run of this node only, with a name of its own"),
    Flag(
        "--max-restarts",
        "max_restarts",
        "restarts after a failure, counted over the whole run",
        "without it: three without newly committed steps (torchrun: none); lost and joining nodes cost none",
    ),
    Flag(
        "--monitor-interval",
        "monitor_interval",
        "taken, and said to have no effect: the end of a worker is an event, so nothing is polled",
    ),
    Flag(
        "--start-method",
        "start_method",
        "fork and forkserver: from a process that has imported torch; spawn: a fresh interpreter each",
        "it concerns scripts as well; the default is fork",
    ),
    Flag(
        "--event-log-handler",
        "",
        "events are always kept, as JSON lines. Use the files events-NODE.jsonl in the run's directory (tail -f)",
    ),
    Flag("--role", "role", "ROLE_NAME, and part of the console's prefix with --tee", "one for all nodes of a run"),
    Flag("--module", "module", "SCRIPT is a module, as with python -m"),
    Flag("--no-python", "no_python", "SCRIPT is a program"),
    Flag(
        "--run-path",
        "",
        "SCRIPT is a Python file unless --no-python or --module is given. Use neither, and leave it out",
    ),
    Flag(
        "--log-dir",
        "log_dir",
        "logs go to DIR/<run id>; /dev/null: workers' output is not kept",
        "files are logs/generation-G/rank-R.NODE.out and .err; those of earlier generations stay",
    ),
    Flag(
        "--redirects", "redirects", "these streams are not shown on the console", "files are kept of all streams anyway"
    ),
    Flag("--tee", "tee", "these are shown all the same, with torchrun's prefix [role local_rank]:"),
    Flag("--local-ranks-filter", "local_ranks_filter", "the console shows these local ranks only"),
    Flag(
        "--duplicate-stdout-filters",
        "",
        "all lines are in files already. Use grep, with logs/generation-*/*.out in the run's directory",
    ),
    Flag(
        "--duplicate-stderr-filters",
        "",
        "all lines are in files already. Use grep, with logs/generation-*/*.err in the run's directory",
    ),
    Flag(
        "--node-rank",
        "node_rank",
        "where this node would like to sit among those that come together",
        "a hint for newcomers: nodes that stay keep their ranks",
    ),
    Flag(
        "--master-addr",
        "master_addr",
        "with several nodes, where agents meet if there is no --rdzv-endpoint: its owner serves an etcd there",
        "workers' own MASTER_ADDR is the node with rank 0; for one node, both flags are left to the script",
    ),
    Flag(
        "--master-port",
        "master_port",
        "the port for it (29500)",
        "workers' own MASTER_PORT is another one in each generation",
    ),
    Flag("--local-addr", "local_addr", "the address at which the other nodes reach this one"),
    Flag(
        "--logs-specs",
        "",
        "it names a class of torch's, and the agent has no torch. Use --log-dir, --redirects, --tee "
        "and --local-ranks-filter",
        env=False,
    ),
    Flag(
        "--numa-binding",
        "",
        "which CPUs are near a GPU is not looked at. Use numactl (numactl --cpunodebind=0 elasticrt run ...), or "
        "os.sched_setaffinity in the script, by LOCAL_RANK",
        env=False,
    ),
    Flag(
        "--signals-to-handle",
        "signals_to_handle",
        "these signals make the node hand over and leave; those beyond the usual four are passed on to the workers",
    ),
    Flag(
        "--shutdown-timeout",
        "stop_timeout",
        "from SIGTERM to SIGKILL, for each worker, also when workers are restarted",
        "without it 10 s when the node leaves, and nothing on a restart; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    Flag("--virtual-local-rank", "virtual_local_rank", "LOCAL_RANK is 0 and only one GPU is visible, for each worker"),
)
"""In the order of torchrun's own help."""

_BY_NAME = {flag.name: flag for flag in FLAGS}


def variable(name: str) -> str | None:
    """The variable that torchrun reads for its flag `name` (with dashes); None for a flag that has none there."""
    flag = _BY_NAME.get(name)
    return "PET_" + name.lstrip("-").replace("-", "_").upper() if flag is not None and flag.env else None


_REFUSED_CONF = {
    "close_timeout": "nothing is closed here: a run has a result. Leave it out",
    "heartbeat_timeout": "Use --lease-ttl: a silent node is gone after so long",
    "read_timeout": "etcd is asked again until it answers. Leave it out",
    "etcd_prefix": "keys are below /elasticrt/<run id>/. Use --run-id",
    "protocol": "Use --etcd https://HOST:PORT",
    "ssl_cert": "Use --etcd-cert-file",
    "ssl_cert_key": "Use --etcd-key-file",
    "ca_cert": "Use --etcd-ca-file",
    "cert": "Use --etcd-cert-file",
    "key": "Use --etcd-key-file",
    "cacert": "Use --etcd-ca-file",
    "rank": "Use --node-rank",
}
_SECONDS = ("join_timeout", "timeout", "last_call_timeout", "keep_alive_interval")


def conf_values(conf: Mapping[str, str]) -> dict[str, Any]:
    """What `--rdzv-conf` asks for, under the names of our own options. Pure. Raises ConfigError.

    `join_timeout` (or `timeout`, which many mean by it), `settle`, `lease_ttl` in seconds; `is_host` true or false.
    """
    for key, text in conf.items():
        if key in _REFUSED_CONF or key not in (*_SECONDS, "keep_alive_max_attempt", "is_host", "store_type"):
            remedy = _REFUSED_CONF.get(key, "Leave it out")
            raise ConfigError(explain("means nothing here", f"--rdzv-conf {key}", got=text, remedy=remedy))
    found: dict[str, Any] = {}
    if "join_timeout" in conf or "timeout" in conf:
        found["join_timeout"] = _seconds(conf, "join_timeout" if "join_timeout" in conf else "timeout")
    if "last_call_timeout" in conf:
        found["settle"] = _seconds(conf, "last_call_timeout")
    if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
        tries = conf.get("keep_alive_max_attempt", "3")
        if not tries.isdigit() or int(tries) < 1:
            raise _unusable("keep_alive_max_attempt", tries, "a whole number greater than 0")
        found["lease_ttl"] = _seconds(conf, "keep_alive_interval", 5.0) * int(tries)
    if "is_host" in conf:
        words = {"1": True, "true": True, "yes": True, "y": True, "t": True}
        words |= {"0": False, "false": False, "no": False, "n": False, "f": False}
        if conf["is_host"].lower() not in words:
            raise _unusable("is_host", conf["is_host"], "true or false")
        found["is_host"] = words[conf["is_host"].lower()]
    if conf.get("store_type", "tcp") != "tcp":
        raise _unusable("store_type", conf["store_type"], "tcp: agents meet in an etcd (--etcd), not in a file")
    return found


def _seconds(conf: Mapping[str, str], key: str, default: float = 0.0) -> float:
    text = conf.get(key, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e7:
        raise _unusable(key, text, "seconds, more than 0")
    return value


def _unusable(key: str, got: str, expected: str) -> ConfigError:
    return ConfigError(explain("not a usable value", f"--rdzv-conf {key}", got=got, expected=expected))


STATIC_PORT = 29500
"""torchrun's default of `--master-port`."""


def in_our_words(values: Mapping[str, Any], max_nodes: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options with what torchrun's say put where ours are, and what to tell people about those without effect.

    Pure. Raises ConfigError.
    """
    conf, notes = conf_values(values["rdzv_conf"] or {}), []
    defaults = {"join_timeout": 600.0, "settle": 0.5, "lease_ttl": 5.0}
    given = {name: values[name] for name in defaults if values[name] is not None}
    found: dict[str, Any] = {**defaults, **{name: conf[name] for name in defaults if name in conf}, **given}
    found["settle_max"] = conf["settle"] if values["settle"] is None and "settle" in conf else max(3.0, found["settle"])
    found["is_host"] = conf.get("is_host")
    address, port = values["master_addr"], values["master_port"]
    if address is not None or port is not None:
        where = f"{_bracketed(address or '127.0.0.1')}:{port or STATIC_PORT}"
        if max_nodes == 1:
            notes.append(f"{where} (--master-addr, --master-port) is left to the script: this node meets nobody there")
        elif values["etcd"] or values["rdzv_endpoint"] or values["standalone"]:
            notes.append(f"agents do not meet at {where} (--master-addr, --master-port): they are told another place")
        else:
            found["rdzv_endpoint"] = where
    endpoint = found.get("rdzv_endpoint") or values["rdzv_endpoint"]
    ours = values["etcd"] or values["standalone"] or values["rdzv_backend"] in ("elasticrt", "etcd-v3")
    ours = ours or (endpoint or "").endswith(":0")  # A free port of this machine, as c10d has it: nobody else is told.
    if values["run_id"] is None and endpoint and max_nodes > 1 and not ours:
        # All agents are told the same endpoint, and nobody has told them a name: torchrun would take "none" for it.
        found["run_id"] = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in endpoint)
    if values["monitor_interval"] is not None:
        notes.append("--monitor-interval has no effect: nothing is polled, a worker's end is an event")
    return {**values, **found}, tuple(notes)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
