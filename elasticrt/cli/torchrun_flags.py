"""Every flag of torchrun: what it means here, where that differs, or why it is refused; and what it becomes. Pure.

Nothing of torchrun's is silently ignored. A test walks torchrun's own parser and fails when it has a flag that is not
in this table. Most flags are options of ours (run_options.py). The others are `TorchrunFlags`, which are turned into
those. `python -m tests.compat.flags` makes a page of the table (tests/compat/FLAGS.md), with the tests that ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from elasticrt.errors import ConfigError, explain
from elasticrt.option_values import NO_STREAMS, Streams, key_values, option, options_of, streams, whole
from elasticrt.run_options import EtcdOptions, RunOptions
from elasticrt.store.address import is_loopback, parse_endpoints
from elasticrt.store.protocol import Address

_OURS = {name: each for each in options_of(RunOptions).values() for name in each.names}
"""Flags of torchrun that are options of ours."""


@dataclass(frozen=True)
class Flag:
    """One flag of torchrun.

    Attributes:
        name: its long spelling with dashes.
        here: what it does where that is not said by an option of ours; of one that is refused, why, and what to use
            in its place.
        differs: where that is not what torchrun does; "" where it is.
        env: whether torchrun reads it from PET_<NAME>, too.
        refused: whether it is not taken.
    """

    name: str
    here: str = ""
    differs: str = ""
    env: bool = True
    refused: bool = False

    @property
    def meaning(self) -> str:
        """What it does here."""
        return self.here or _OURS[self.name].text


FLAGS = (
    Flag("--nnodes"),
    Flag(
        "--nproc-per-node",
        differs="without it there is a worker for each GPU, else one; xpu is refused: give the number",
    ),
    Flag(
        "--rdzv-backend",
        "static and c10d: who owns --rdzv-endpoint serves an etcd there; elasticrt and etcd-v3: an etcd runs there",
        "etcd and etcd-v2 are refused: agents meet in etcd v3 (--etcd)",
    ),
    Flag("--rdzv-endpoint", "where the agents meet; the others wait until it is served"),
    Flag("--rdzv-id", differs="without it, one is made from the endpoint, or made up and printed"),
    Flag(
        "--rdzv-conf",
        "join_timeout, timeout, last_call_timeout, keep_alive_interval, keep_alive_max_attempt, is_host, store_type",
        "others are refused by name, with what to use in their place",
    ),
    Flag("--standalone", "a run of this node only, with a name of its own"),
    Flag(
        "--max-restarts",
        differs="without it: three without newly committed steps (torchrun: none); lost and joining nodes cost none",
    ),
    Flag(
        "--monitor-interval", "taken, and said to have no effect: the end of a worker is an event, so nothing is polled"
    ),
    Flag("--start-method", differs="it concerns scripts as well; the default is fork, and forkserver means the same"),
    Flag(
        "--event-log-handler",
        "events are always kept, as JSON lines. Use the files events-NODE.jsonl in the run's directory (tail -f)",
        refused=True,
    ),
    Flag("--role", differs="one for all nodes of a run; part of the console's prefix with --tee"),
    Flag("--module"),
    Flag("--no-python"),
    Flag(
        "--run-path",
        "SCRIPT is a Python file unless --no-python or --module is given. Use neither, and leave it out",
        refused=True,
    ),
    Flag(
        "--log-dir", differs="files are logs/generation-G/rank-R.NODE.out and .err; those of earlier generations stay"
    ),
    Flag(
        "--redirects",
        "the console does not show these streams: 1 stdout, 2 stderr, 3 both; or 0:3,1:1 by local rank",
        "files are kept of all streams anyway",
    ),
    Flag("--tee", "these are shown all the same, with torchrun's prefix [role local_rank]:"),
    Flag("--local-ranks-filter"),
    Flag(
        "--duplicate-stdout-filters",
        "all lines are in files already. Use grep, with logs/generation-*/*.out in the run's directory",
        refused=True,
    ),
    Flag(
        "--duplicate-stderr-filters",
        "all lines are in files already. Use grep, with logs/generation-*/*.err in the run's directory",
        refused=True,
    ),
    Flag("--node-rank", differs="a hint for newcomers: nodes that stay keep their ranks"),
    Flag(
        "--master-addr",
        "with several nodes, where agents meet if there is no --rdzv-endpoint: its owner serves an etcd there",
        "workers' own MASTER_ADDR is the node with rank 0; for one node, both flags are left to the script",
    ),
    Flag("--master-port", "the port for it (29500)", "workers' own MASTER_PORT is another one in each generation"),
    Flag("--local-addr"),
    Flag(
        "--logs-specs",
        "it names a class of torch's, and the agent has no torch. Use --log-dir, --redirects, --tee "
        "and --local-ranks-filter",
        env=False,
        refused=True,
    ),
    Flag(
        "--numa-binding",
        "which CPUs are near a GPU is not looked at. Use numactl (numactl --cpunodebind=0 elasticrt run ...), or "
        "os.sched_setaffinity in the script, by LOCAL_RANK",
        env=False,
        refused=True,
    ),
    Flag("--signals-to-handle", differs="signals beyond the usual four are passed on to the workers"),
    Flag(
        "--shutdown-timeout",
        differs="without it 10 s when the node leaves, and nothing on a restart; also TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    Flag("--virtual-local-rank"),
)
"""In the order of torchrun's own help."""

_BY_NAME = {flag.name: flag for flag in FLAGS}


def variable(name: str) -> str | None:
    """The variable that torchrun reads for its flag `name` (with dashes); None for a flag that has none there."""
    flag = _BY_NAME.get(name)
    return "PET_" + name.lstrip("-").replace("-", "_").upper() if flag is not None and flag.env else None


# What the flags become that are not options of ours.

C10D_PORT = 29400
"""torchrun's default port of `--rdzv-endpoint`."""

STATIC_PORT = 29500
"""torchrun's default of `--master-port`."""

TEE_PREFIX = "[${role_name}${local_rank}]:"
"""What torchrun puts before each line that it shows."""

SECTION = "torchrun's flags"

_THEIR_ETCD = ("elasticrt", "etcd-v3")
"""Backends with which an endpoint is an etcd that runs already."""

E = TypeVar("E", bound=EtcdOptions)


def poll_interval(text: str) -> float:
    """A number of seconds that nobody uses."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        raise ValueError("a number of seconds")
    return float(text)


def _flag(spelled: str, initial: Any, parse: Callable[[str], Any] = str, *, own: bool = False) -> Any:
    """A flag that is no option of ours, with what the table says of it."""
    return option(spelled, initial, _BY_NAME[re.split("[, ]", spelled)[0]].meaning, parse, section=SECTION, own=own)


@dataclass(frozen=True, kw_only=True)
class MeetingFlags:
    """Where agents meet, in torchrun's words: for every command that talks to a run."""

    rdzv_backend: str = _flag("--rdzv-backend WORD", "", own=True)
    rdzv_endpoint: str = _flag("--rdzv-endpoint HOST:PORT", "", own=True)

    def placed(self, options: E) -> E:
        """`options` with the way to etcd that these say, unless they have one. Raises ConfigError."""
        if self.rdzv_backend not in ("", "static", "c10d", *_THEIR_ETCD):
            raise ConfigError(
                explain(
                    "a rendezvous backend that elasticrt does not have",
                    "--rdzv-backend",
                    got=self.rdzv_backend,
                    expected="c10d, static, elasticrt or etcd-v3",
                    remedy="Agents meet in etcd v3: use --etcd ENDPOINTS",
                )
            )
        if options.etcd or not self.rdzv_endpoint:
            return options
        if self.rdzv_backend in _THEIR_ETCD:
            return replace(options, etcd=parse_endpoints(self.rdzv_endpoint))
        return replace(options, meet_at=meeting_place(self.rdzv_endpoint))


def meeting_place(text: str) -> Address | None:
    """`HOST` or `HOST:PORT`; None where only agents of this machine meet. Raises ConfigError."""
    text = text if ":" in text.rpartition("]")[2] else f"{text}:{C10D_PORT}"
    if text in ("localhost:0", "127.0.0.1:0"):
        return None
    (address,) = parse_endpoints(text)[:1]
    # Agents of this machine need no port for that, which its other users could use as well.
    return None if is_loopback(address) else address


@dataclass(frozen=True, kw_only=True)
class TorchrunFlags(MeetingFlags):
    """The flags of torchrun that say in other words what `RunOptions` say."""

    rdzv_conf: Mapping[str, str] | None = _flag("--rdzv-conf KEY=VALUE,...", None, key_values)
    standalone: bool = _flag("--standalone", False, own=True)
    master_addr: str | None = _flag("--master-addr HOST", None, own=True)
    master_port: int | None = _flag("--master-port PORT", None, whole(1, 65535), own=True)
    monitor_interval: float | None = _flag("--monitor-interval T", None, poll_interval, own=True)
    redirects: Streams = _flag("--redirects, -r S", NO_STREAMS, streams)
    tee: Streams = _flag("--tee, -t S", NO_STREAMS, streams)

    def base(self) -> RunOptions:
        """What --rdzv-conf says, for options of ours that are not given. Raises ConfigError."""
        return conf_options(self.rdzv_conf or {})

    def translated(self, options: RunOptions) -> RunOptions:
        """`options` with what these flags say, and notes on those without effect. Raises ConfigError."""
        endpoint, notes = self.rdzv_endpoint, []
        if self.standalone:
            if options.run_id is not None:
                notes.append(f"--standalone makes a run with a name of its own: not {options.run_id}")
            endpoint, options = "", _standalone(options)
        if self.master_addr is not None or self.master_port is not None:
            where = f"{_bracketed(self.master_addr or '127.0.0.1')}:{self.master_port or STATIC_PORT}"
            said = f"{where} (--master-addr, --master-port)"
            if options.nnodes[1] == 1:
                notes.append(f"{said} is left to the script: this node meets nobody there")
            elif options.etcd or endpoint:
                notes.append(f"agents do not meet at {said}: they are told another place")
            else:
                endpoint = where
        if self.monitor_interval is not None:
            notes.append("--monitor-interval has no effect: nothing is polled, a worker's end is an event")
        return replace(
            replace(self, rdzv_endpoint=endpoint).placed(options),
            run_id=options.run_id or self._run_of(options, endpoint),
            hidden=_less(self.redirects, self.tee),
            prefix=TEE_PREFIX if self.tee != NO_STREAMS else None,
            notes=tuple(notes),
        )

    def _run_of(self, options: RunOptions, endpoint: str) -> str | None:
        """A name for the run where all agents are told the same endpoint and no name: torchrun takes "none" for it."""
        # A free port of this machine, as c10d has it, is told to nobody else.
        alone = options.nnodes[1] == 1 or endpoint.endswith(":0")
        if not endpoint or alone or options.etcd or self.rdzv_backend in _THEIR_ETCD:
            return None
        return re.sub(r"[^A-Za-z0-9._-]", "-", endpoint)


def _standalone(options: RunOptions) -> RunOptions:
    if options.nnodes[0] > 1:
        raise ConfigError(
            explain(
                "a run of one node that waits for more",
                "--standalone, --nnodes",
                got=":".join(map(str, options.nnodes)),
                remedy="Leave one of them out",
            )
        )
    return replace(options, nnodes=(1, 1), run_id=None, etcd=())


def _less(shown: Streams, kept: Streams) -> Streams:
    """Streams of the first without those of the second."""
    some = {rank: shown.of(rank) - kept.of(rank) for rank in {*shown.some, *kept.some}}
    return Streams(shown.others - kept.others, some)


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
_TRUTH = dict.fromkeys(("1", "true", "yes", "y", "t"), True) | dict.fromkeys(("0", "false", "no", "n", "f"), False)


def conf_options(conf: Mapping[str, str]) -> RunOptions:
    """What `--rdzv-conf` asks for. Raises ConfigError.

    `join_timeout` (or `timeout`, which many mean by it), `last_call_timeout` and `keep_alive_interval` in seconds;
    `is_host` true or false.
    """
    for key, text in conf.items():
        if key not in (*_SECONDS, "keep_alive_max_attempt", "is_host", "store_type"):
            remedy = _REFUSED_CONF.get(key, "Leave it out")
            raise ConfigError(explain("means nothing here", f"--rdzv-conf {key}", got=text, remedy=remedy))
    found = RunOptions()
    if "join_timeout" in conf or "timeout" in conf:
        found = replace(found, join_timeout_s=_seconds(conf, "join_timeout" if "join_timeout" in conf else "timeout"))
    if "last_call_timeout" in conf:
        quiet_s = _seconds(conf, "last_call_timeout")
        found = replace(found, settle_quiet_s=min(60.0, quiet_s), settle_max_s=min(600.0, quiet_s))
    if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
        tries = conf.get("keep_alive_max_attempt", "3")
        if not tries.isdigit() or int(tries) < 1:
            raise _unusable("keep_alive_max_attempt", tries, "a whole number greater than 0")
        found = replace(found, lease_ttl_s=_seconds(conf, "keep_alive_interval", 5.0) * int(tries))
    if "is_host" in conf:
        if conf["is_host"].lower() not in _TRUTH:
            raise _unusable("is_host", conf["is_host"], "true or false")
        found = replace(found, serves=_TRUTH[conf["is_host"].lower()])
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


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
