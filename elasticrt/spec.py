"""What a run is: the options that all its nodes must agree on. Pure.

A `RunSpec` is written to etcd once. A joiner whose own spec differs is refused, with the fields that differ. What only
one node needs to know (its name, its log directory, its etcd endpoints) is not part of the spec.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from elasticrt.option_values import NODES_MAX, options_of
from elasticrt.run_options import RESTARTS, RunOptions
from elasticrt.text import known, size

PROTOCOL = 1
"""To be raised whenever records or their meaning change: agents of different protocols never share a run."""

ROLE_MAX_BYTES = 128
COMMAND_MAX_BYTES = 8192
WORD_MAX_BYTES = 4096


def _command(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a command.

    Those that are long or not plain stand as a digest, because commands are only compared.
    """
    plain = tuple(known(word, WORD_MAX_BYTES) for word in words)
    if sum(size(word) + len('"",') for word in plain) <= COMMAND_MAX_BYTES:
        return plain
    # No argument contains a NUL, so the joined text is unique.
    return (plain[0], known("\0".join(words[1:]), WORD_MAX_BYTES))


class RunSpec(BaseModel):
    """The agreed options of a run.

    Attributes:
        protocol: see `PROTOCOL`.
        min_nodes: the run waits while it has fewer nodes.
        max_nodes: nodes beyond this number stand by.
        command: what a worker runs, with its arguments. It is compared with the joiner's own, never executed from etcd.
        max_restarts: the restarts that are allowed, see `restarts_reset`.
        restarts_reset: whether progress (see `leader_context.restarts_after`) gives the whole restart budget back.
        join_timeout_s: how long to wait for `min_nodes`.
        lease_ttl_s: the lease that every member asks of etcd.
        join, settle_quiet_s, settle_max_s: see `RunOptions`.
        role: ROLE_NAME of all workers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    protocol: int = PROTOCOL
    min_nodes: int = Field(ge=1, le=NODES_MAX)
    max_nodes: int = Field(ge=1, le=NODES_MAX)
    command: Annotated[tuple[str, ...], AfterValidator(_command)] = Field(strict=False)
    max_restarts: int = Field(default=RESTARTS, ge=0)
    restarts_reset: bool = True
    join_timeout_s: float = Field(default=RunOptions.join_timeout_s, gt=0, le=1e7)
    lease_ttl_s: float = Field(default=RunOptions.lease_ttl_s, ge=1, le=3600)
    join: Literal["now", "budget", "failure"] = RunOptions.join
    settle_quiet_s: float = Field(default=RunOptions.settle_quiet_s, ge=0, le=60)
    settle_max_s: float = Field(default=RunOptions.settle_max_s, ge=0, le=600)
    role: Annotated[str, AfterValidator(lambda text: known(text, ROLE_MAX_BYTES))] = RunOptions.role


def difference(mine: RunSpec, theirs: RunSpec) -> str:
    """The options in which two specs differ, as text for a message; "" if they agree."""
    ours, others = _options(mine), _options(theirs)
    words = enumerate(zip_longest(mine.command, theirs.command, fillvalue=""))
    differ = ((f"word {place} is {word!r}", repr(other)) for place, (word, other) in words if word != other)
    ours["command"], others["command"] = next(differ, ("", ""))
    return ", ".join(
        f"{name}: {ours[name]} here, {others[name]} in the run" for name in ours if ours[name] != others[name]
    )


def _options(spec: RunSpec) -> dict[str, str]:
    """What a user has given for a spec, by the names of the options."""
    names = {field: option.names[0] for field, option in options_of(RunOptions).items()}
    shown = {
        names.get(field, field): f"{value:g}s" if isinstance(value, float) else repr(value)
        for field, value in spec.model_dump(exclude={"restarts_reset", "settle_quiet_s", "settle_max_s"}).items()
    }
    # These two have no option of their own: torchrun's `last_call_timeout` sets both.
    shown["last_call_timeout of --rdzv-conf"] = f"{spec.settle_quiet_s:g}s to {spec.settle_max_s:g}s"
    shown["--max-restarts"] += " without a new step" if spec.restarts_reset else ""
    return shown


def resized(spec: RunSpec, to: RunSpec) -> RunSpec:
    """`spec` with the limits on the number of nodes of `to`."""
    return spec.model_copy(update={"min_nodes": to.min_nodes, "max_nodes": to.max_nodes})
