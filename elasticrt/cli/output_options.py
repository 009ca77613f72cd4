"""Where a run's output goes: its directory, what the console shows, in torchrun's words and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticrt.cli.options import Options, ranks, streams
from elasticrt.errors import ConfigError
from elasticrt.settings import LogOptions, Streams

DEFAULT_RUN_DIR = "elasticrt_runs"

TEE_PREFIX = "[${role_name}${local_rank}]:"
"""What torchrun puts before each line that it shows."""


def declare(options: Options) -> None:
    """The options of this file."""
    add = options.add
    options.section("output")
    add("--run-dir", value="DIR", text=f"logs and events (default: {DEFAULT_RUN_DIR}/<run id>)", rivals=("log_dir",))
    add("--log-dir", value="DIR", text="the same in DIR/<run id>, as torchrun has it", rivals=("run_dir",))
    add("--redirects", "-r", parse=streams, value="S", text="do not show 1 stdout, 2 stderr, 3 both; or 0:3,1:1")
    add("--tee", "-t", parse=streams, value="S", text="show these all the same, with torchrun's prefix")
    add("--local-ranks-filter", parse=ranks, value="RANKS", text="show these local ranks only, e.g. 0,1")


def run_dir(values: Mapping[str, Any], run_id: str) -> Path:
    """The run's directory. Raises ConfigError when it was said twice."""
    own, base = values["run_dir"], values["log_dir"]
    if base in (None, os.devnull):
        return Path(own or Path(DEFAULT_RUN_DIR) / run_id).absolute()
    if own is not None:
        raise ConfigError("--log-dir and --run-dir say the same thing twice (--run-dir). Use one of them")
    return Path(base, run_id).absolute()


def log_options(values: Mapping[str, Any], workers: int, env: Mapping[str, str]) -> LogOptions:
    """What is kept and shown of this many workers' output."""
    redirected, tee = values["redirects"] or Streams(), values["tee"] or Streams()
    hidden = {rank: redirected.of(rank) - tee.of(rank) for rank in range(workers)}
    told = env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
    if told is not None:
        prefix = told
    elif any(tee.of(rank) for rank in range(workers)):
        prefix = TEE_PREFIX
    else:
        prefix = "[rank ${rank}] " if workers > 1 and values["events_fd"] < 0 else ""
    return LogOptions(
        prefix=prefix,
        console_ranks=values["local_ranks_filter"],
        redirected=Streams(some=hidden),
        files=values["log_dir"] != os.devnull,
    )
