"""Checks that a script uses its Loop as it must, with errors that name the remedy. Pure.

Each check gets plain values, and raises or does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticrt.errors import CheckpointError, ConfigError, MisfitError, ReadAheadError, explain, whole_number


def check_counts(total: object, max_steps: object, where: str) -> None:
    """Raise TypeError or ValueError for wrong arguments of `Loop.epochs` or `Loop.steps`. `where` is its name."""
    whole_number(total, "total", where)
    if max_steps is not None:
        whole_number(max_steps, "max_steps", where)


def check_stage(stage: str, where: str) -> None:
    """Raise ConfigError if the Loop is not inside its epochs.

    Args:
        stage: the stage of the Loop, see `StepTracker.stage`.
        where: the name of the script's call.
    """
    if stage == "broken":
        what, got = "this Loop was left by an exception", "a step of the optimizer that was not counted"
        remedy = "Make a new Loop: it goes on from the newest checkpoint"
        raise ConfigError(what, where, got=got, remedy=remedy)
    if stage == "cut short":
        what, got = "the batches were ended by an iterator around them", "one like islice or zip"
        expected, remedy = (
            "none, because it also counts steps that are done again",
            "Leave the loop by `break`, by loop.steps_done",
        )
        raise ConfigError(what, where, got=got, expected=expected, remedy=remedy)
    if stage != "running":
        remedy = "Use it inside `for epoch in loop.epochs(...)` or `for step in loop.steps(...)`"
        raise ConfigError("the Loop is not running", where, got=stage, remedy=remedy)


def check_entered(*, requested: bool) -> None:
    """Raise ConfigError if `loop.step()` was called, and its block was not entered."""
    if requested:
        got, expected = "loop.step()", "with loop.step(): ..."
        remedy = "Put the step into its block; numbers to show go to loop.report(...)"
        raise ConfigError("called without a with block", "step", got=got, expected=expected, remedy=remedy)


def check_left(error: BaseException | None, step: int) -> None:
    """Raise RuntimeError if `error` has ended the block of `step`, which counts from 1, and the script goes on."""
    if error is not None:
        what, expected = "a step was left by an exception, and the script goes on", "each step is made or repeated"
        got = f"step {step}: {type(error).__name__}, caught outside of the block"
        remedy = "Catch it inside of `with loop.step():`, on all ranks alike, or let it end the worker"
        raise RuntimeError(explain(what, "step", got=got, expected=expected, remedy=remedy)) from error


def check_only_block(*, in_step: bool, second: bool) -> None:
    """Raise ConfigError for a step inside of a step, and for a second step with the same batch or number."""
    if in_step:
        expected, remedy = "one `with loop.step():` at a time", "Remove the inner one"
        raise ConfigError("a step inside a step", "step", expected=expected, remedy=remedy)
    if second:
        expected, remedy = "one for each batch of loop.batches, or number of loop.steps", "Put both into one block"
        raise ConfigError("a second step with the same batch", "step", expected=expected, remedy=remedy)


def check_not_paused(where: str, *, is_paused: bool) -> None:
    """Raise ConfigError for training in a pause or an evaluation. `where` is the name of the script's call."""
    if is_paused:
        what, remedy = "training inside of loop.pause or loop.evaluate", "Draw from a loader of its own there"
        raise ConfigError(what, where, expected="it between them", remedy=remedy)


def check_no_read_ahead(*, passed: int = 0, in_step: bool = False) -> None:
    """Raise ReadAheadError for batches that the script reads ahead.

    Args:
        passed: how many batches it has passed before its first step.
        in_step: whether it draws a batch inside of a step.
    """
    if passed or in_step:
        got = "one drawn inside of a step" if in_step else f"{passed} drawn before the first step, and not trained"
        expected = "each trained in a block of its own before the next is drawn"
        remedy = "No list() and no prefetcher around loop.batches: read ahead in the loader (num_workers, "
        remedy += "prefetch_factor). A batch to be skipped is skipped inside of `with loop.step():`"
        raise ReadAheadError("batches that were read ahead", "batches", got=got, expected=expected, remedy=remedy)


def check_has_batch(*, has_batch: bool, has_drawn: bool) -> None:
    """Raise ConfigError for a step in neither `loop.batches` nor `loop.steps`, which could not be made again.

    Raise ReadAheadError instead if the script `has_drawn` batches: it reads them ahead, or makes one step more.
    """
    if not has_batch:
        expected = "one in the body of `for batch in loop.batches(loader):`"
        if has_drawn:
            remedy = "No list() and no prefetcher around loop.batches, and no step after its batches"
            raise ReadAheadError("a step without a batch", "step", expected=expected, remedy=remedy)
        remedy = "Where the script draws its data itself write `for step in loop.steps(total):`"
        raise ConfigError("a step without a batch", "step", expected=expected, remedy=remedy)


def check_evaluation(*, in_step: bool, function: object) -> None:
    """Raise TypeError if `function` can't be called, ConfigError for an evaluation in the block of a step."""
    if not callable(function):
        expected = "a function, and then its arguments"
        raise TypeError(explain("nothing to call", "evaluate", got=function, expected=expected))
    if in_step:
        expected = "after the block of the step, or after the batches of an epoch"
        raise ConfigError("an evaluation inside a step", "evaluate", expected=expected)


def check_head_result(*, comes_alone: bool) -> None:
    """Raise ConfigError for an evaluation at the head of an epoch that only a newcomer comes to.

    The other ranks have passed it, and their result could not be sent.
    """
    if comes_alone:
        what, got = "an evaluation that the others have passed", "a result that can't be sent to newcomers"
        expected = "one of numbers, texts and tensors, or an evaluation after loop.batches"
        raise ConfigError(what, "evaluate", got=got, expected=expected)


def check_replayed(*, known: bool) -> None:
    """Raise ConfigError for an evaluation after a step that was undone, if its result is not known.

    Such an evaluation returns what it returned after the step before. The other ranks may not make it.
    """
    if not known:
        what, got = "an evaluation after a try that is done again", "no evaluation after the step before"
        remedy = "Write `if loop.complete:` around what follows the block of the step"
        raise ConfigError(what, "evaluate", got=got, expected="a complete step", remedy=remedy)


def check_not_awaited(*, is_awaited: bool, step: int) -> None:
    """Raise RuntimeError if other ranks are in an evaluation after `step`, and this rank's script has not called it.

    The other ranks would wait for this one in its collectives for ever.
    """
    if is_awaited:
        what, got = "other ranks evaluate here, and this one does not", f"the end of step {step}, and no `evaluate`"
        remedy = "Decide whether to call it by loop.steps_done and loop.complete alone, which are the same on all ranks"
        raise RuntimeError(explain(what, "evaluate", got=got, expected="the same calls on all ranks", remedy=remedy))


def check_has_step(has_step: bool) -> None:
    """Raise ConfigError if a body of `loop.steps` has ended without a step, as it would again and again."""
    if not has_step:
        expected = "one `with loop.step():` in the body"
        raise ConfigError("a step that was not made", "steps", got="no block", expected=expected)


def check_optimizer(*, outside: bool, completes: bool, step: int) -> None:
    """Raise an error if an optimizer may not step now.

    Args:
        outside: whether the script uses blocks and the optimizer steps outside of one, which is a ConfigError.
        completes: whether the present batch completes its global batch. If not, it is a RuntimeError.
        step: the number of the step, from 1.
    """
    if outside:
        expected = "inside `with loop.step():`, because what is outside is not undone when the membership changes"
        remedy = "Put backward, optimizer.step(), zero_grad() and scheduler.step() into the block"
        what = "the optimizer stepped outside of the step"
        raise ConfigError(what, "optimizer.step", expected=expected, remedy=remedy)
    if not completes:
        what = "the optimizer stepped inside an unfinished global batch"
        got = f"step {step}, more micro-batches to come"
        remedy = "Guard it: `if loop.complete: optimizer.step(); optimizer.zero_grad()`"
        raise RuntimeError(explain(what, "optimizer.step", got=got, remedy=remedy))


def check_same_sampler(own: Mapping[str, Any], runs: Mapping[str, Any], who: str = "here", remedy: str = "") -> None:
    """Raise CheckpointError if a sampler has other settings than the run's, and would train other samples.

    Args:
        own: the settings of the sampler.
        runs: the settings of the run's sampler.
        who: whose sampler it is, for the error.
        remedy: the remedy, for the error.
    """
    for name in {**runs, **own}:
        if own.get(name) != runs.get(name):
            got, expected = f"{name}={own.get(name)} {who}", f"{name}={runs.get(name)}, as on other ranks"
            what = f"a sampler with another {name}"
            raise CheckpointError(what, "Loop(sampler=)", got=got, expected=expected, remedy=remedy)


def check_same_samplers(everyones: Sequence[tuple[str, Mapping[str, Any]]], rank: int, *, has_trained: bool) -> None:
    """Compare the settings of each rank's sampler with those that most ranks have.

    Args:
        everyones: by rank, the name of its node and the settings of its sampler.
        rank: the rank of this process.
        has_trained: whether the run has trained already. Then a rank that differs is wrong, and only its node leaves.

    Raises CheckpointError on all ranks if one differs; with `has_trained` MisfitError, and only on that rank.
    """
    settings = [each for _, each in everyones]
    runs = max(settings, key=settings.count)
    for number, (node, own) in enumerate(everyones):
        # The node of a rank that differs leaves alone. The other ranks go on.
        if has_trained and number != rank:
            continue
        who = f"on rank {number}" + (f" of {node}" if node else "")
        try:
            check_same_sampler(own, runs, who, "Start all nodes with the same script and arguments")
        except CheckpointError as error:
            raise (MisfitError(str(error)) if has_trained else error) from None
