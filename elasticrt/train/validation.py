"""Checks for wrong use of a Loop. Pure."""

from __future__ import annotations

from elasticrt.errors import ConfigError, explain, whole_number


def check_counts(total: object, max_steps: object, where: str) -> None:
    """Check the arguments of `Loop.epochs` and `Loop.steps`. Raises TypeError, ValueError."""
    whole_number(total, "total", where)
    if max_steps is not None:
        whole_number(max_steps, "max_steps", where)


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
        remedy = "Use it inside `for epoch in loop.epochs(...)` or `for step in loop.steps(...)`"
        raise ConfigError(explain("the Loop is not running", where, got=stage, remedy=remedy))


def check_entered(asked: object) -> None:
    """Raises ConfigError when `loop.step()` was called, and its block not entered."""
    if asked is not None:
        expected = "with loop.step(): ..."
        remedy = "Put the step into its block; numbers to show go to loop.report(...)"
        raise ConfigError(
            explain("called, and not entered", "step", got="loop.step()", expected=expected, remedy=remedy)
        )


def check_alone(*, in_step: bool, second: bool) -> None:
    """Raises ConfigError for a step inside a step, and for a second one with the same batch."""
    if in_step:
        raise ConfigError(explain("a step inside a step", "step", expected="one `with loop.step():` at a time"))
    if second:
        remedy = "Put both into one block"
        raise ConfigError(explain("a second step with the same batch", "step", expected="one", remedy=remedy))


def check_has_step(has_step: bool) -> None:
    """Raises ConfigError when a body of `loop.steps` has ended without a step, as it would again and again."""
    if not has_step:
        expected = "one `with loop.step():` in the body"
        raise ConfigError(explain("a step that was not made", "steps", got="no block", expected=expected))


def check_optimizer(*, outside: bool, completes: bool, step: int) -> None:
    """An optimizer is about to step. Raises ConfigError outside of the block, RuntimeError before the last micro-batch.

    Args:
        outside: whether the script has blocks, and this is outside of one.
        completes: whether the present batch completes its global batch.
        step: number of the present step, from 1.
    """
    if outside:
        expected = "inside `with loop.step():`, because what is outside is not undone when the membership changes"
        remedy = "Put backward, optimizer.step(), zero_grad() and scheduler.step() into the block"
        what = "the optimizer stepped outside of the step"
        raise ConfigError(explain(what, "optimizer.step", expected=expected, remedy=remedy))
    if not completes:
        raise RuntimeError(
            explain(
                "the optimizer stepped inside an unfinished global batch",
                "optimizer.step",
                got=f"step {step}, more micro-batches to come",
                remedy="Guard it: `if loop.complete: optimizer.step(); optimizer.zero_grad()`",
            )
        )
