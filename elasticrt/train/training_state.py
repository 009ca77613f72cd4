"""What a Loop saves and restores: the script's objects, the position, random numbers, variables."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticrt.checkpoint import rng_state, stateful
from elasticrt.checkpoint.state_copy import plain_copy
from elasticrt.data.ledger_writer import Ledger
from elasticrt.data.position import Position
from elasticrt.distributed import collectives
from elasticrt.errors import CheckpointError, MisfitError
from elasticrt.ipc.env import WorkerEnv
from elasticrt.train import validation
from elasticrt.train.batches import AnySampler

_OURS = {"position", "rng", "sampler", "vars", "ledger", "gradients", "begun", "passed", "habits"}


@dataclass
class Habits:
    """What steps of the script have done, and a newcomer could not know before its first one: see `undo.Undo`.

    `communicates_late`: collectives after the first optimizer began. `early_parameters`, `early_objects`: which of
    `TrainingState.parameters`, and of its objects, they have changed before that.
    """

    communicates_late: bool = False
    early_parameters: set[int] = field(default_factory=set)
    early_objects: set[str] = field(default_factory=set)


@dataclass
class Passed:
    """How much of the script's code between two steps is in the state already. Whoever restores it runs that again.

    Attributes:
        head: whether the head of the epoch's body, before `batches`.
        body: whether the body of the coming step, before its block.
        results: of the evaluations in that head. None for one that can't be saved, else the result in a list.
    """

    head: bool = False
    body: bool = False
    results: list[list[Any] | None] = field(default_factory=list)

    def result(self, number: int) -> list[Any] | None:
        """A copy of result `number`, from 0; None if it is not known."""
        kept = self.results[number] if number < len(self.results) else None
        return None if kept is None else plain_copy(kept, "result")


class TrainingState:
    """The state of one Loop.

    Args:
        objects: as given to the Loop, by name; `sampler`: the Loop's.
        seed: of the random numbers of each step.
        ledger: the directory of the ledger.
        shown: the checkpoint directory in the script's words, for errors.

    Raises TypeError and ConfigError for what can't be saved.
    """

    def __init__(
        self,
        objects: dict[str, Any],
        sampler: AnySampler,
        seed: int | None,
        ledger: str | os.PathLike[str] | None,
        shown: str,
    ) -> None:
        self.objects = stateful.checked(objects)  # The script's objects by name, modules without their wrappers.
        self.sampler = sampler
        self.position = Position()  # Between which two steps the training stands.
        self.numbers = rng_state.RngState(seed)  # The random numbers.
        self.ledger = Ledger(ledger, sampler)  # Notes which samples each step trains.
        self.vars: dict[str, Any] = {}  # The user's own plain values.
        self.habits = Habits()
        # Whether the objects have the state after the last step of `position`. False for a newcomer, and while a step
        # is half done.
        self.whole = True
        # Samples in a rank's batch, where the sampler does not know: the loader's, at first those of the other ranks.
        self.batch_size: int | None = None
        # The epoch whose batches have begun here: a loader then draws a random number, which is in the state.
        self.begun: int | None = None
        # Whether the state is of an epoch whose batches had begun before it was put back, and have not begun here.
        self.begins_late = False
        self.passed = Passed()
        # Whether gradients of earlier steps count, because an optimizer has not stepped since.
        self.accumulates = False
        self._shown = shown

    def samples(self) -> int:
        """Samples that the run has trained on, over all epochs; 0 without a sampler."""
        return 0 if self.sampler is None else self.sampler.trained

    def settings(self) -> dict[str, Any]:
        """Those of the sampler; empty without one."""
        return {} if self.sampler is None else self.sampler.settings()

    def compare(self, worker: WorkerEnv, **more: int) -> None:
        """Refuse a sampler that is not that of most ranks. Collective. Raises CheckpointError, MisfitError.

        `more`: of the loader's settings.
        """
        mine = json.dumps([worker.node, {**self.settings(), **more}]).encode()
        everyones = [json.loads(each) for each in collectives.gather_bytes(mine)]
        rank, _ = collectives.rank_and_world()
        validation.check_same_samplers(everyones, rank, has_trained=worker.generation > 1)

    def collect(self, **more: Any) -> dict[str, Any]:
        """All of it by name. `more` is added to our own part."""
        habits = self.habits
        ours = {
            "position": self.position._asdict(),
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "rng": rng_state.capture(),
            "vars": self.vars,
            "ledger": self.ledger.history(self.position.steps),
            "gradients": [each.grad for each in self.parameters()] if self.accumulates else [],
            "begun": self.begun == self.position.epoch,
            "passed": [self.passed.head, self.passed.body, self.passed.results],
            "habits": [habits.communicates_late, sorted(habits.early_parameters), sorted(habits.early_objects)],
            **more,
        }
        return {**stateful.collect(self.objects), stateful.OURS: ours}

    def restore(self, data: dict[str, Any]) -> None:
        """Go on from `data`, a saved result of `collect`. Raises CheckpointError when it does not fit."""
        ours = data.get(stateful.OURS)
        if not isinstance(ours, dict) or not set(ours) >= _OURS:
            got, remedy = sorted(map(str, data)), "Use another directory"
            raise CheckpointError("not saved by a Loop", self._shown, got=got, remedy=remedy)
        try:
            self._put_back(data, self._shown, shared=True)
        except CheckpointError as error:
            remedy = "Use the script and the data that it was saved with, and give objects their final shape before "
            remedy += "Loop, or start over in a new directory"
            raise CheckpointError(f"{error}. {remedy}") from error
        self.numbers.restore(ours["rng"], self.position.steps)

    def take_over(self, data: dict[str, Any]) -> None:
        """Go on from `data`, another rank's result of `collect`. Raises MisfitError when it does not fit."""
        ours = data[stateful.OURS]
        try:
            self._put_back(data, "another rank's state", shared=False)
            validation.check_same_sampler(self.settings(), ours["settings"])
            self.numbers.restore(ours["rng"], self.position.steps, ours["alike"])
        except CheckpointError as error:
            raise _misfit(error) from error
        self.batch_size = ours["batch_size"]

    def check_batches(self, batch_size: int) -> None:
        """A newcomer's loader has such batches. Raises MisfitError where those of the others in this epoch are not."""
        if self.position.batches and self.settings() and batch_size != self.batch_size:
            raise _misfit(f"a loader with batch_size={batch_size} here, and {self.batch_size} on other ranks")

    def _put_back(self, data: dict[str, Any], where: str, *, shared: bool) -> None:
        ours = plain_copy(data[stateful.OURS], where) if shared else data[stateful.OURS]
        if (ours["sampler"] is None) != (self.sampler is None):
            had = "without" if ours["sampler"] is None else "with"
            raise CheckpointError("the sampler changed", where, got=f"a state {had} a sampler")
        stateful.put_back(self.objects, data, where, shared=shared)
        self.accumulates = any(each is not None for each in ours["gradients"])
        self.drop_gradients()
        for owner, gradient in zip(self.parameters() if ours["gradients"] else [], ours["gradients"], strict=True):
            owner.grad = None if gradient is None else gradient.to(owner.device)
        if self.sampler is not None:
            self.sampler.load_state_dict(ours["sampler"])
        self.position = Position(**ours["position"])
        self.begins_late = ours["begun"] and self.begun != self.position.epoch
        self.passed = Passed(*ours["passed"])
        self.ledger.restored(ours["ledger"])
        self.put_vars(dict(self.vars), ours["vars"])
        late, parameters, objects = ours["habits"]
        self.habits = Habits(late, set(parameters), set(objects))

    def put_vars(self, named: dict[str, Any], values: dict[str, Any]) -> None:
        """Give `vars` the `values`. Containers and tensors stay the objects that `named` has: scripts hold some."""
        put = {name: _put(named[name], each) if name in named else each for name, each in values.items()}
        self.vars.clear()
        self.vars.update(put)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of all modules, in order."""
        modules = (each for each in self.objects.values() if isinstance(each, torch.nn.Module))
        return [each for module in modules for each in module.parameters()]

    def drop_gradients(self) -> None:
        """Let go of all gradients. They may be views of a bucket that a work of an old group still writes into."""
        for each in self.parameters():
            each.grad = None


def _put(old: Any, new: Any) -> Any:
    """`old` with the contents of `new`, if it can have them; else `new`."""
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
    same = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return same and not one.requires_grad  # One with a graph behind it is replaced.


def _misfit(error: object) -> MisfitError:
    remedy = "Start this node again with the run's script and arguments, whose objects get their final shape "
    remedy += "(an optimizer all of its parameter groups) before they are given to Loop"
    return MisfitError("this node's script differs from the run's", "Loop", got=error, remedy=remedy)
