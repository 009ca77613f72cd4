"""What is said about wrong use of a Loop. Pure."""

from __future__ import annotations

from elasticrt.errors import ConfigError, explain
from elasticrt.train.sampler import ElasticBatchSampler


def check_counts(total: object, max_steps: object) -> None:
    """The arguments of `Loop.epochs`. Raises TypeError, ValueError."""
    for name, value in (("total", total), ("max_steps", max_steps)):
        if value is None and name == "max_steps":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(explain(f"{name} is not a whole number", "epochs", got=value))
        if value < 0:
            raise ValueError(explain(f"{name} is negative", "epochs", got=value))


def check_stage(stage: str, where: str) -> None:
    """Raises ConfigError when the Loop is not inside its epochs."""
    if stage == "broken":
        raise ConfigError(
            explain(
                "this Loop was left by an exception",
                where,
                got="a step that the optimizer took and nobody counted",
                remedy="Make a new Loop: it goes on from the newest checkpoint",
            )
        )
    if stage != "running":
        remedy = "Use it inside `for epoch in loop.epochs(...)`"
        raise ConfigError(explain("the Loop is not running", where, got=stage, remedy=remedy))


def check_exchange(sampler: ElasticBatchSampler, world_size: int, *, can_skip: bool) -> None:
    """Ranks differ in their number of micro-batches; only DDP can be told to exchange gradients once. ConfigError."""
    if world_size > 1 and sampler.micro_batch_size is not None and not can_skip:
        raise ConfigError(
            explain(
                "micro-batches need the DDP module",
                "batches",
                got=f"world size {world_size} and no DistributedDataParallel among Loop's objects",
                remedy="Give Loop the wrapped model: Loop(..., model=DDP(net))",
            )
        )


def unfinished_batch(step: int) -> str:
    """The optimizer stepped before its global batch was complete."""
    return explain(
        "the optimizer stepped inside an unfinished global batch",
        "optimizer.step",
        got=f"step {step}, more micro-batches to come",
        remedy="Guard it: `if loop.complete: optimizer.step(); optimizer.zero_grad()`",
    )
