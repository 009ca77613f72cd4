"""torchrun's flags: which are accepted, which are refused, and the options that they become. Pure.

No flag of torchrun is silently ignored: a test walks torchrun's own parser and fails on a flag that is neither accepted
nor in `REFUSED`. Most of the accepted flags are options of `run` by the same name (run_options.py). `TorchrunFlags` are
the others, which are translated into `RunOptions`. tests/compat/FLAGS.md lists all, with what differs from torchrun.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from elasticrt import option_values as parse
from elasticrt.errors import ConfigError
from elasticrt.option_values import NO_STREAMS, Streams, option
from elasticrt.run_options import EtcdOptions, RunOptions
from elasticrt.store.address import is_loopback, parse_endpoints
from elasticrt.store.protocol import Address, bracketed

REFUSED = {
    "--event-log-handler": "events are always kept, as JSON lines. Use the files events-NODE.jsonl in the run's "
    "directory (tail -f)",
    "--run-path": "SCRIPT is a Python file unless --no-python or --module is given. Use neither, and leave it out",
    "--duplicate-stdout-filters": "all lines are in files already. Use grep, with logs/generation-*/*.out in the run's "
    "directory",
    "--duplicate-stderr-filters": "all lines are in files already. Use grep, with logs/generation-*/*.err in the run's "
    "directory",
    "--logs-specs": "it names a class of torch's, and the agent has no torch. Use --log-dir, --redirects, --tee and "
    "--local-ranks-filter",
    "--numa-binding": "which CPUs are near a GPU is not looked at. Use numactl (numactl --cpunodebind=0 elasticrt run "
    "...), or os.sched_setaffinity in the script, by LOCAL_RANK",
}
"""Why each flag is refused, and what to use in its place."""

C10D_PORT = 29400
"""torchrun's default port of `--rdzv-endpoint`."""

STATIC_PORT = 29500
"""torchrun's default of `--master-port`."""

TEE_PREFIX = "[${role_name}${local_rank}]:"
"""What torchrun puts before each line that it shows."""

SECTION = "torchrun's flags"

_THEIR_ETCD = ("elasticrt", "etcd-v3")
"""Backends whose endpoint is an etcd that is running already."""

_flag = partial(option, section=SECTION)

E = TypeVar("E", bound=EtcdOptions)


@dataclass(frozen=True, kw_only=True)
class MeetingFlags:
    """Where agents meet, in torchrun's words: for every command that talks to a run."""

    rdzv_backend: str = _flag(
        "--rdzv-backend WORD", "", "static and c10d: the machine of --rdzv-endpoint serves an etcd there; elasticrt "
        "and etcd-v3: an etcd runs there", str, own=True,
    )  # fmt: skip
    rdzv_endpoint: str = _flag(
        "--rdzv-endpoint HOST:PORT", "", "where the agents meet; the others wait until it is served", str, own=True
    )

    def placed(self, options: E) -> E:
        """`options` with the way to etcd that these flags name, unless they have one already. Raises ConfigError."""
        if self.rdzv_backend not in ("", "static", "c10d", *_THEIR_ETCD):
            raise ConfigError(
                "a rendezvous backend that elasticrt does not have",
                "--rdzv-backend",
                got=self.rdzv_backend,
                expected="c10d, static, elasticrt or etcd-v3",
                remedy="Agents meet in etcd v3: use --etcd ENDPOINTS",
            )
        if options.etcd or not self.rdzv_endpoint:
            return options
        if self.rdzv_backend in _THEIR_ETCD:
            return replace(options, etcd=parse_endpoints(self.rdzv_endpoint, "--rdzv-endpoint"))
        return replace(options, meet_at=meeting_place(self.rdzv_endpoint))

    def run_id(self, options: EtcdOptions) -> str | None:
        """A name for the run, made from the endpoint that its agents share. torchrun calls every such run "none"."""
        # With `HOST:0` the port is a free one, which no other node can know, so nobody shares the endpoint.
        if not self.rdzv_endpoint or self.rdzv_endpoint.endswith(":0"):
            return None
        return None if options.etcd or self.rdzv_backend in _THEIR_ETCD else parse.as_name(self.rdzv_endpoint)


def meeting_place(text: str) -> Address | None:
    """The address of `HOST` or `HOST:PORT`; None if only agents of this machine can meet there. Raises ConfigError."""
    text = text if ":" in text.rpartition("]")[2] else f"{text}:{C10D_PORT}"
    if text in ("localhost:0", "127.0.0.1:0"):
        return None
    address = parse_endpoints(text, "--rdzv-endpoint")[0]
    # Agents of one machine meet at a socket of their user's instead. A port would be open to the machine's other users.
    return None if is_loopback(address) else address


@dataclass(frozen=True, kw_only=True)
class TorchrunFlags(MeetingFlags):
    """The flags of torchrun that say in other words what `RunOptions` say."""

    rdzv_conf: Mapping[str, str] | None = _flag(
        "--rdzv-conf KEY=VALUE,...", None, "join_timeout, timeout, last_call_timeout, keep_alive_interval, "
        "keep_alive_max_attempt, is_host, store_type", parse.key_values,
    )  # fmt: skip
    standalone: bool = _flag("--standalone", False, "a run of this node only, with a name of its own", own=True)
    master_addr: str | None = _flag(
        "--master-addr HOST", None, "with several nodes, where agents meet if there is no --rdzv-endpoint: its owner "
        "serves an etcd there", own=True,
    )  # fmt: skip
    master_port: int | None = _flag(
        "--master-port PORT", None, f"the port for it ({STATIC_PORT})", parse.whole(1, 65535), own=True
    )
    monitor_interval: float | None = _flag(
        "--monitor-interval T", None, "accepted without effect, as a note says: the end of a worker is an event, so "
        "nothing is polled", parse.seconds, own=True,
    )  # fmt: skip
    redirects: Streams = option(
        "--redirects, -r S", NO_STREAMS, "the console does not show these streams: 1 stdout, 2 stderr, 3 both; or "
        "0:3,1:1 by local rank", parse.streams, section=SECTION,
    )  # fmt: skip
    tee: Streams = option(
        "--tee, -t S", NO_STREAMS, "the console shows these streams nevertheless, with torchrun's prefix [role "
        "local_rank]:",
        parse.streams, section=SECTION,
    )  # fmt: skip

    def translated(self, options: RunOptions) -> RunOptions:
        """`options` with what these flags set, and with a note on each flag without effect. Raises ConfigError."""
        endpoint, notes = self.rdzv_endpoint, []
        if self.standalone:
            if options.run_id is not None:
                notes.append(f"--standalone gives the run a name of its own: --run-id {options.run_id} is ignored")
            endpoint, options = "", _standalone(options)
        if self.master_addr is not None or self.master_port is not None:
            where = f"{bracketed(self.master_addr or '127.0.0.1')}:{self.master_port or STATIC_PORT}"
            said = f"{where} (--master-addr, --master-port)"
            if options.nnodes[1] == 1:
                notes.append(f"{said} is left to the script: a run of one node does not use it")
            elif options.etcd or endpoint:
                notes.append(f"{said} is ignored: --etcd or --rdzv-endpoint says where agents meet")
            else:
                endpoint = where
        if self.monitor_interval is not None:
            notes.append("--monitor-interval has no effect: nothing is polled, a worker's end is an event")
        meeting = replace(self, rdzv_endpoint=endpoint)
        made = meeting.run_id(options) if options.run_id is None and options.nnodes[1] > 1 else None
        return replace(
            meeting.placed(options),
            run_id=options.run_id or made,
            # Nobody has named a run to go on with, so the same command again is another training, as with torchrun.
            again=options.again or made is not None,
            hidden=_less(self.redirects, self.tee),
            prefix=TEE_PREFIX if self.tee != NO_STREAMS else None,
            notes=tuple(notes),
        )


def _standalone(options: RunOptions) -> RunOptions:
    if options.nnodes[0] > 1:
        what, got = "a run of one node that would wait for more", f"a minimum of {options.nnodes[0]} nodes"
        remedy = "Leave --standalone out, or --nnodes and --min-nodes"
        raise ConfigError(what, "--standalone", got=got, expected="a minimum of 1", remedy=remedy)
    return replace(options, nnodes=(1, 1), run_id=None, etcd=(), standalone=True)


def _less(shown: Streams, kept: Streams) -> Streams:
    """The streams of the first without those of the second."""
    some = {rank: shown.of(rank) - kept.of(rank) for rank in {*shown.some, *kept.some}}
    return Streams(shown.others - kept.others, some)


_CONF = {
    "join_timeout": parse.duration(0.001),
    "timeout": parse.duration(0.001),
    "last_call_timeout": parse.duration(0.001),
    "keep_alive_interval": parse.duration(0.001),
    "keep_alive_max_attempt": parse.whole(1, 1000),
    "is_host": parse.yes_or_no,
    "store_type": parse.choice("tcp"),
}
"""Keys of `--rdzv-conf` that mean something here, with their parsers."""

_REFUSED_CONF = {
    "heartbeat_timeout": "Use --lease-ttl: a silent node is gone after so long",
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


def conf_options(conf: Mapping[str, str]) -> RunOptions:
    """The options that the keys of `--rdzv-conf` stand for. Raises ConfigError for unknown keys and unusable values."""
    given: dict[str, Any] = {}
    for key, text in conf.items():
        where = f"--rdzv-conf {key}"
        if key not in _CONF:
            expected, remedy = f"one of {', '.join(_CONF)}", _REFUSED_CONF.get(key, "Leave it out")
            raise ConfigError("a key that is not supported", where, got=text, expected=expected, remedy=remedy)
        given[key] = parse.parsed(_CONF[key], where, "elasticrt run")(text)
    ttl_s = RunOptions.lease_ttl_s
    # By torchrun's defaults a node is gone after three times 5 s.
    if "keep_alive_interval" in given or "keep_alive_max_attempt" in given:
        ttl_s = given.get("keep_alive_interval", 5.0) * given.get("keep_alive_max_attempt", 3)
        if not 1.0 <= ttl_s <= 3600.0:
            where, expected = "--rdzv-conf", "keep_alive_interval times keep_alive_max_attempt from 1 s to 3600 s"
            remedy = "Use --lease-ttl"
            raise ConfigError("not a usable value", where, got=f"{ttl_s:g} s", expected=expected, remedy=remedy)
    # The ranges are those of the options.
    return RunOptions(
        serves=given.get("is_host"),
        # Many write `timeout` for it.
        join_timeout_s=given.get("join_timeout", given.get("timeout", RunOptions.join_timeout_s)),
        settle_quiet_s=min(60.0, given.get("last_call_timeout", RunOptions.settle_quiet_s)),
        settle_max_s=min(600.0, given.get("last_call_timeout", RunOptions.settle_max_s)),
        lease_ttl_s=ttl_s,
    )
