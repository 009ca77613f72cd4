"""Collects and puts back the state of a Loop: the script's objects, the position, random numbers and variables.

The same state goes into checkpoints, into copies in memory, and to newcomers and ranks that are behind.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticrt.checkpoint import rng_state, stateful
from elasticrt.checkpoint.state_copy import plain_copy
from elasticrt.data.ledger_writer import Ledger
from elasticrt.data.position import Position
from elasticrt.distributed import collectives
from elasticrt.errors import CheckpointError, ConfigError, MisfitError
from elasticrt.ipc.env import WorkerEnv
from elasticrt.train import validation
from elasticrt.train.batches import AnySampler

_log = logging.getLogger(__name__)

# So many numbers of a tensor, and so many items at the end of a list, are compared between ranks.
DIGEST_ITEMS = 1000

# The parts that each saved state of a Loop has besides the script's objects.
_OUR_KEYS = {"position", "rng", "sampler", "vars", "ledger", "gradients", "begun", "begun_by", "applied", "traits"}


@dataclass
class StepTraits:
    """What the steps of the script have been seen to do, so that `undo.Undo` copies the right things.

    A part of the state, because a newcomer could not know this before its first step.

    Attributes:
        communicates_late: whether a step has begun collectives after its first optimizer began.
        early_parameters: which of `TrainingState.parameters`, by number, a step has changed before that.
        early_objects: which of the script's objects, by name, a step has changed before that.
    """

    communicates_late: bool = False
    early_parameters: set[int] = field(default_factory=set)
    early_objects: set[str] = field(default_factory=set)


@dataclass
class AppliedCode:
    """Which of the script's code between two steps has its effects in the state already.

    A process that restores the state, or takes it over, runs this code once more. The second run must not count.

    Attributes:
        has_head: whether the head of the epoch's body (the code before `batches`) is in the state.
        has_body: whether the body of the coming step, as far as its block, is in the state.
        head_results: the results of the evaluations in that head, each in a list; None for one that can't be saved.
        head_rng: the states of the random number generators where that head began, and behind each of its evaluations.
    """

    has_head: bool = False
    has_body: bool = False
    head_results: list[list[Any] | None] = field(default_factory=list)
    head_rng: list[dict[str, Any]] = field(default_factory=list)

    def begin_head(self, states: dict[str, Any]) -> None:
        """Note that the head begins, with these `states` of the generators."""
        self.head_results, self.head_rng = [], [states]

    def add_result(self, result: list[Any] | None, states: dict[str, Any]) -> None:
        """Keep the `result` of an evaluation in the head, and the `states` of the generators behind it."""
        self.head_results.append(result)
        self.head_rng.append(states)

    def head_result(self, number: int) -> list[Any] | None:
        """A copy of result `number`, from 0; None if it is not known."""
        kept = self.head_results[number] if number < len(self.head_results) else None
        return None if kept is None else plain_copy(kept, "result")


class TrainingState:
    """The state of one Loop.

    Args:
        objects: the objects given to the Loop, by name.
        sampler: the sampler of the Loop; None without one.
        seed: the seed of the random numbers of each step; None without one.
        ledger: the directory of the ledger; None without one.
        shown_directory: the checkpoint directory as the script has given it, for errors.

    Attributes:
        objects: the script's objects by name, modules without their wrappers.
        sampler: the sampler of the Loop.
        position: between which two steps the training stands.
        rng: the random numbers.
        ledger: notes which samples each step trains.
        vars: the script's own plain values.
        traits: what the steps have been seen to do.
        applied: which code between two steps is in the state.
        is_valid: whether the objects have the state after the last step of `position`. False for a newcomer, and while
            a step is half done.
        batch_size: the samples in a rank's batch, where the sampler does not know that: those of this loader, at first
            those of the other ranks. None if not known.
        length: without a sampler, the batches in an epoch of the loader, in the same way.
        begun_epoch: the epoch whose batches have begun in this process. A loader draws a random number when it begins,
            and that is in the state then.
        begun_by: the number of processes that began the batches of the present epoch; 0 if none has begun.
        begun_elsewhere: whether the state comes from an epoch whose batches had begun, and have not begun in this
            process.
        accumulates: whether gradients of earlier steps count, because an optimizer has not stepped since.

    Raises TypeError and ConfigError for what can't be saved.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        sampler: AnySampler,
        seed: int | None,
        ledger: str | os.PathLike[str] | None,
        shown_directory: str,
    ) -> None:
        self.objects = stateful.checked(objects)
        self.sampler = sampler
        self.position = Position()
        self.rng = rng_state.RngState(seed)
        self.ledger = Ledger(ledger, sampler)
        self.vars: dict[str, Any] = {}
        self.traits = StepTraits()
        self.is_valid = True
        self.batch_size: int | None = None
        self.length: int | None = None
        self.begun_epoch: int | None = None
        self.begun_by = 0
        self.begun_elsewhere = False
        self.applied = AppliedCode()
        self.accumulates = False
        self._shown_directory = shown_directory
        modules = {name: each for name, each in self.objects.items() if isinstance(each, torch.nn.Module)}
        self._shapes = stateful.shapes(self.objects, stateful.collect(modules))
        # The names of `vars` that were seen to differ between ranks.
        self._own_vars: set[str] = set()

    def samples(self) -> int:
        """How many samples the run has trained, over all epochs; 0 without a sampler."""
        return 0 if self.sampler is None else self.sampler.trained

    def sampler_settings(self) -> dict[str, Any]:
        """The settings of the sampler, which all ranks must have alike; empty without a sampler."""
        return {} if self.sampler is None else self.sampler.settings()

    def compare_samplers(self, worker: WorkerEnv, **more: int) -> None:
        """Refuse a sampler whose settings differ from those of most ranks. Collective.

        Args:
            worker: the seat of this process.
            **more: settings of the loader that have to be alike as well.

        Raises CheckpointError on all ranks; MisfitError, and only on a rank that differs, when the run has trained.
        """
        mine = json.dumps([worker.node, {**self.sampler_settings(), **more}]).encode()
        everyones = [json.loads(each) for each in collectives.gather_bytes(mine)]
        rank, _ = collectives.rank_and_world()
        validation.check_same_samplers(everyones, rank, has_trained=worker.generation > 1)

    def collect(self, **more: Any) -> dict[str, Any]:
        """The whole state by name: of each object, and under LOOP_KEY elasticrt's own part.

        The result is not copied: its tensors are those of the objects. `more` is added to elasticrt's own part.
        """
        states, traits = stateful.collect(self.objects), self.traits
        _check_vars(self.vars, "loop.vars")
        self._warn_of_other_shapes(states)
        ours = {
            "position": self.position._asdict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "rng": rng_state.capture(),
            "vars": self.vars,
            "ledger": self.ledger.history(self.position.steps),
            # Large, and so only where an optimizer has still to use them.
            "gradients": [each.grad for each in self.parameters()] if self.accumulates else [],
            "begun": self.begun_epoch == self.position.epoch,
            "begun_by": self.begun_by,
            "applied": list(vars(self.applied).values()),
            "traits": [traits.communicates_late, sorted(traits.early_parameters), sorted(traits.early_objects)],
            **more,
        }
        return {**states, stateful.LOOP_KEY: ours}

    def _warn_of_other_shapes(self, states: dict[str, Any]) -> None:
        """Warn of objects that do not have the shape any more with which a new process makes them. Once for each.

        Args:
            states: the present states of the objects, by name.
        """
        now = stateful.shapes(self.objects, states)
        changed = sorted(name for name, each in now.items() if each != self._shapes[name])
        self._shapes = now
        if changed and self.rng.rank == 0:
            what = "%s got another shape in the training (pruning, a parametrization, add_param_group): newcomers and "
            what += "restarted workers, which make them as before, cannot load the state. Give them their final shape "
            what += "before Loop"
            _log.warning(what, " and ".join(map(repr, changed)))

    def restore(self, data: dict[str, Any]) -> None:
        """Go on from `data`, a result of `collect` that was saved. Raises CheckpointError when it does not fit."""
        ours = data.get(stateful.LOOP_KEY)
        if not isinstance(ours, dict) or not set(ours) >= _OUR_KEYS:
            got, remedy = sorted(map(str, data)), "Use another directory"
            raise CheckpointError("not saved by a Loop", self._shown_directory, got=got, remedy=remedy)
        try:
            self._put_back(data, self._shown_directory, shared=True)
        except CheckpointError as error:
            remedy = "Use the script and the data that it was saved with, and give objects their final shape before "
            remedy += "Loop, or start over in a new directory"
            raise CheckpointError(f"{error}. {remedy}") from error
        self.rng.restore(ours["rng"], self.position.steps)

    def take_over(self, data: dict[str, Any]) -> None:
        """Go on from `data`, a result of `collect` on another rank. Raises MisfitError when it does not fit."""
        ours = data[stateful.LOOP_KEY]
        try:
            self._put_back(data, "another rank's state", shared=False)
            validation.check_same_sampler(self.sampler_settings(), ours["settings"])
            self.rng.restore(ours["rng"], self.position.steps, ours["alike"])
        except CheckpointError as error:
            raise _misfit(error) from error
        self.batch_size, self.length = ours["batch_size"], ours["length"]

    def check_batch_size(self, batch_size: int) -> None:
        """Compare a newcomer's loader, whose batches have `batch_size` samples, with those of the other ranks.

        Raises MisfitError in the middle of an epoch that the other ranks train with another size.
        """
        if self.position.batches and self.sampler_settings() and batch_size != self.batch_size:
            raise _misfit(f"a loader with batch_size={batch_size} here, and {self.batch_size} on other ranks")

    def check_length(self, length: int | None) -> None:
        """Compare a newcomer's loader, which has `length` batches in an epoch, with those of the other ranks.

        Raises MisfitError in the middle of an epoch that has another length for the other ranks.
        """
        if self.position.batches and None not in (length, self.length) and length != self.length:
            what = f"a loader with {length} batches here, and {self.length} on other ranks"
            raise _misfit(what, "A newcomer sets up in a world of one: cut data with ElasticBatchSampler")

    def _put_back(self, data: dict[str, Any], where: str, *, shared: bool) -> None:
        """Load a result of `collect`.

        Args:
            data: the result.
            where: the name of `data` in errors.
            shared: whether the tensors of `data` lie in memory that all ranks of this machine share, and are copied.
        """
        ours = plain_copy(data[stateful.LOOP_KEY], where) if shared else data[stateful.LOOP_KEY]
        if (ours["sampler"] is None) != (self.sampler is None):
            had = "without" if ours["sampler"] is None else "with"
            raise CheckpointError("the sampler changed", where, got=f"a state {had} a sampler")
        stateful.put_back(self.objects, data, where, shared=shared)
        # Gradients of earlier steps, as a part of the state: an optimizer has still to use them.
        self.accumulates = any(each is not None for each in ours["gradients"])
        self.drop_gradients()
        for owner, gradient in zip(self.parameters() if ours["gradients"] else [], ours["gradients"], strict=True):
            owner.grad = None if gradient is None else gradient.to(owner.device)
        if self.sampler is not None:
            self.sampler.load_state_dict(ours["sampler"])
        self.position = Position(**ours["position"])
        # The loader has drawn its random number before the state was saved, and will draw once more in this process.
        self.begun_elsewhere = ours["begun"] and self.begun_epoch != self.position.epoch
        self.begun_by = ours["begun_by"]
        self.applied = AppliedCode(*ours["applied"])
        self.ledger.restored(ours["ledger"])
        self.put_vars(dict(self.vars), ours["vars"])
        late, parameters, objects = ours["traits"]
        self.traits = StepTraits(late, set(parameters), set(objects))

    def put_vars(self, named: dict[str, Any], values: dict[str, Any]) -> None:
        """Give `vars` the `values`, by name.

        Lists, dicts, sets and tensors stay the same objects, with new contents: the script may have a name of its own
        for one of them.

        Args:
            named: the objects to keep, by name.
            values: the values to put into them.
        """
        put = {name: _put(named[name], each) if name in named else each for name, each in values.items()}
        self.vars.clear()
        self.vars.update(put)

    def var_digests(self) -> dict[str, str]:
        """A short digest of each of `vars`, the same on two ranks whose values are equal."""
        return {name: hashlib.sha256(_as_bytes(each)).hexdigest()[:8] for name, each in self.vars.items()}

    def warn_of_own_vars(self, said: Sequence[dict[str, str]]) -> None:
        """Warn of `vars` that differ between ranks: newcomers, and all ranks after a restart, get those of one rank.

        Each is told once in a process. `said`: the results of `var_digests` on ranks after the same step.
        """
        names = {name for each in said for name in each}
        differ = sorted(name for name in names if len({each.get(name) for each in said}) > 1)
        if self._own_vars.issuperset(differ):
            return
        self._own_vars.update(differ)
        what = (
            "loop.vars[%s] differ between ranks: newcomers, and all ranks after a restart, get the values of one rank. "
        )
        what += "Keep there what is the same on all ranks, such as sums by ctx.sum"
        _log.warning(what, ", ".join(map(repr, differ)))

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all modules, in order. `StepTraits` numbers them in this order."""
        modules = (each for each in self.objects.values() if isinstance(each, torch.nn.Module))
        return [each for module in modules for each in module.parameters()]

    def drop_gradients(self) -> None:
        """Let go of all gradients.

        They may be views of a bucket into which a work (a queued collective) of an old group still writes.
        """
        for each in self.parameters():
            each.grad = None


def _check_vars(value: object, where: str) -> None:
    """Raise ConfigError for a defaultdict in `value`: it would be a plain dict in newcomers and after a restart."""
    if isinstance(value, defaultdict):
        what, remedy = "its factory can't be saved", "Use a dict: counts[key] = counts.get(key, 0) + 1"
        raise ConfigError(what, where, got="a defaultdict", expected="a dict", remedy=remedy)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, each in items:
        if isinstance(each, (dict, list, tuple)):
            _check_vars(each, f"{where}[{key!r}]")


def _as_bytes(value: Any) -> bytes:
    """Equal bytes for equal values of `vars`. Of a large value only a part is looked at."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return f"{value.dtype}{tuple(value.shape)}".encode()
        plain = value.detach().flatten()[:DIGEST_ITEMS].cpu().resolve_conj().resolve_neg().view(torch.uint8)
        return f"{value.dtype}{tuple(value.shape)}".encode() + bytes(plain.tolist())
    if isinstance(value, dict):
        return b"".join(b"{" + _as_bytes(key) + b":" + _as_bytes(each) for key, each in value.items()) + b"}"
    if isinstance(value, (list, tuple)):
        return f"[{len(value)} ".encode() + b",".join(map(_as_bytes, value[-DIGEST_ITEMS:])) + b"]"
    if isinstance(value, set):
        return b"{" + b",".join(sorted(map(_as_bytes, value))) + b"}"
    return repr(value).encode()


def _put(old: Any, new: Any) -> Any:
    """`old` with the contents of `new`, if `old` can hold them; else `new`."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [*map(_put, old, new), *new[len(old) :]]
    elif isinstance(old, dict) and isinstance(new, dict):
        put = {key: _put(old[key], each) if key in old else each for key, each in new.items()}
        old.clear()
        old.update(put)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and _alike(old, new):
        with torch.no_grad():
            old.copy_(new)
    else:
        return new
    return old


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the numbers of `other` can be copied into `one`."""
    same = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    # A tensor that is part of an autograd graph is replaced: writing to it would spoil a backward.
    return same and not one.requires_grad


def _misfit(error: object, remedy: str = "") -> MisfitError:
    """The error that makes a node leave whose script differs from the run's. `error` says how."""
    usual = "Start this node again with the run's script and arguments, whose objects get their final shape "
    usual += "(an optimizer all of its parameter groups) before they are given to Loop"
    remedy = remedy or usual
    return MisfitError("this node's script differs from the run's", "Loop", got=error, remedy=remedy)
