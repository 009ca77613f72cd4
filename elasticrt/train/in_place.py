"""Going on in another generation without ending: a worker's part of losing a peer, and of letting one in.

A worker whose group has lost somebody finds out by an error in a collective, or not at all: then it hangs. In both
cases its agent sends it a seat in the next generation. A thread cuts the old group's sockets, the collective fails, and
the step that it was in is undone: random numbers, buffers and gradients go back to where the step began. The group is
made anew, DDP gets a new reducer, whoever is behind gets the state of one that is furthest, and the step is done again
with the samples that are this rank's in the new world.

What is not swallowed: any error that does not say that a peer is gone, and such an error when no seat comes for it.
"""

from __future__ import annotations

import copy
import logging
import operator
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from elasticrt.checkpoint import rng_state, state_transfer, stateful
from elasticrt.distributed import agent_client, barrier, context, regroup
from elasticrt.distributed.context import wrappers
from elasticrt.ipc.collateral_errors import is_collateral, is_of_a_collective
from elasticrt.ipc.messages import Left

_log = logging.getLogger(__name__)

IN_PLACE, READY = 1, 2

SEAT_S_MAX = 1800.0
"""How long a worker without a group waits for its next seat. Its agent ends it long before, if there is to be none;
when the agent itself is gone the wait ends at once."""


_LARGE = (torch.nn.Module, torch.optim.Optimizer)
"""Objects that only an optimizer's step changes, and what belongs to it."""


def _copied(value: Any, into: Any) -> Any:
    """A copy of a state, in the tensors of an older one where they fit."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(into, torch.Tensor) and (into.shape, into.dtype) == (value.shape, value.dtype)
        return into.copy_(value.detach()) if fits and into.device == value.device else value.detach().clone()
    if isinstance(value, dict):
        old = into if isinstance(into, dict) else {}
        return {key: _copied(each, old.get(key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        older = into if isinstance(into, (list, tuple)) and len(into) == len(value) else [None] * len(value)
        return type(value)(_copied(*pair) for pair in zip(value, older, strict=True))
    return copy.deepcopy(value)


class Undo:
    """What a step may have changed before its optimizer stepped: noted when it begins, put back when it is to be
    redone.

    Parameters and optimizers are among it only where a step goes on to communicate after an optimizer has stepped (two
    models in turn, a sum of the losses at the end): there all ranks can be in that state at once. Otherwise a rank that
    has stepped without ending its step gets the state of another.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], scalers: Sequence[torch.amp.GradScaler], seeded: bool
    ) -> None:
        self._modules = list(modules)
        self._owners: list[dict[str, torch.Tensor | None]] | None = None
        self._scalers = list(scalers)
        self._state: dict[str, Any] | None = None
        self._spare: dict[str, Any] | None = None
        self._between: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._seeded = seeded
        self._buffers: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None
        self._numbers: Callable[[], dict[str, Any]] | None = None
        self._vars: dict[str, Any] = {}

    def note(self, variables: Mapping[str, Any], *, accumulates: bool) -> None:
        """The step begins. `accumulates`: no optimizer has stepped since, so that older gradients still count.

        The modules are walked through once, as DDP does it: that takes longer than all the rest.
        """
        self._spare, self._state = self._state or self._spare, None
        if self._owners is None:
            layers = [layer for module in self._modules for layer in module.modules()]
            self._owners = [layer._buffers for layer in layers]
        buffers = [each for owner in self._owners for each in owner.values() if each is not None]
        if len(buffers) != len(self._buffers) or not all(map(operator.is_, buffers, self._buffers)):
            self._buffers, self._kept = buffers, [each.detach().clone() for each in buffers]
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, buffers)
        self._numbers = None if self._seeded else rng_state.note()
        self._vars = dict(variables)
        self._gradients = None
        if accumulates:
            owners = [each for module in self._modules for each in module.parameters()]
            if any(each.grad is not None for each in owners):
                self._gradients = [(each, None if each.grad is None else each.grad.detach().clone()) for each in owners]

    def put_back(self, variables: dict[str, Any]) -> None:
        """The step is to be done again."""
        with torch.no_grad():
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._kept)
        regroup.drop_gradients(self._modules)
        for owner, gradient in self._gradients or ():
            owner.grad = gradient
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()  # It would refuse to unscale or step twice in one step.
        if self._numbers is not None:
            rng_state.restore(self._numbers())
        variables.clear()
        variables.update(self._vars)

    def note_state(self, state: dict[str, Any]) -> None:
        """An optimizer is about to step, and the step will communicate after it: keep all of the state."""
        self._state = _copied(state, self._spare)

    def put_back_state(self, objects: Mapping[str, Any]) -> bool:
        """An optimizer has stepped in the step that is to be done again. False: what was before is not known."""
        state, self._state = self._state, None
        self._spare = None  # An optimizer adopts the tensors that it loads.
        if state is None:
            return False
        stateful.put_back(objects, state, "the beginning of the step")
        return True

    def note_between(self, objects: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
        """The step is undone. What the script does between this and the next try must not count either."""
        plain = {name: each for name, each in objects.items() if not isinstance(each, _LARGE)}
        self._between = copy.deepcopy((stateful.collect(plain), dict(variables)))

    def forget_between(self, objects: Mapping[str, Any], variables: dict[str, Any]) -> None:
        """The next try begins."""
        if self._between is None:
            return
        (states, kept), self._between = self._between, None
        stateful.put_back({name: objects[name] for name in states}, states, "the beginning of the step")
        variables.clear()
        variables.update(kept)

    def gradients(self) -> list[torch.Tensor | None]:
        """Those of all modules' parameters, in order."""
        return [each.grad for module in self._modules for each in module.parameters()]

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The reverse; none given: forget them."""
        regroup.drop_gradients(self._modules)
        owners = [each for module in self._modules for each in module.parameters()] if gradients else []
        for owner, gradient in zip(owners, gradients, strict=True):
            owner.grad = gradient


class InPlace:
    """One Loop's.

    Attributes:
        worker: who this process is now; None without an agent.
        possible: whether this process can go on in place.
    """

    def __init__(self, modules: Iterable[object]) -> None:
        found = [layer for each in modules if isinstance(each, torch.nn.Module) for layer in wrappers(each)]
        self._layers = [layer for layer in found if isinstance(layer, DistributedDataParallel)]
        self.worker = agent_client.worker_env()
        self._page = agent_client.status_page()
        self._link = agent_client.agent_link()
        self.possible = False

    @property
    def beside(self) -> bool:
        """Whether this process sets up while others train, and has no seat yet."""
        return self.worker is not None and self.worker.beside

    @property
    def has_seat(self) -> bool:
        """Whether this process has another seat, and may not know it yet."""
        return self.possible and self._link is not None and self._link.has_seat

    def begin(self, loader: object) -> None:
        """The first step with a beginning and an end: from now on this process may go on in place, if it can."""
        if self._link is None or self._page is None or self.possible:
            return
        against = self._obstacle(loader)
        if against:
            _log.info("workers are started anew when the membership changes: %s", against)
            return
        self._link.follow(regroup.SOCKETS.cut)
        self.possible = True
        self._page.in_place = IN_PLACE

    def end(self) -> None:
        """The Loop is over: what comes now cannot be done in another group."""
        self.possible = False
        if self._page is not None:
            self._page.in_place = 0

    def _obstacle(self, loader: object) -> str:
        if not context.has_own_group():
            return "the process group is not elasticrt.init()'s"
        if dist.get_backend() != "gloo":
            return f"the process group's backend is {dist.get_backend()}"
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
            return "the loader has a sampler of this world size"
        return next((text for layer in self._layers if (text := regroup.obstacle(layer))), "")

    def lost(self, error: BaseException, step: int) -> bool:
        """Whether `error` only says that this generation has lost somebody; then the agent is told."""
        if not self.possible or not isinstance(error, Exception):
            return False
        assert self._link is not None and self.worker is not None, "who can go on in place has an agent"
        name, text = type(error).__name__, str(error)
        callstack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if self._link.overtaken and is_of_a_collective(name, text, callstack):
            return True  # Its group has been cut off. An error of another cause comes again when the step is redone.
        if not is_collateral(name, text, callstack):
            return False
        if not self._link.overtaken:
            self._link.say(Left(self.worker.generation, step, f"{name}: {text}"[:400]))
        return True

    def wait_for_seat(self) -> bool:
        """Wait for the seat in the next generation, and take it. False: there is none, and this process is to leave."""
        assert self._link is not None, "who can go on in place has an agent"
        seat = self._link.wait_for_seat(SEAT_S_MAX)
        if seat is None:
            return False
        agent_client.take_seat(seat)
        self.worker = seat
        return True

    def _overtaken(self) -> bool:
        return self._link is not None and self._link.overtaken

    def rehearse(self, objects: Mapping[str, Any]) -> None:
        """Do once, alone, what the others will wait for when they let this process in: a first time takes longest."""
        assert self.worker is not None, "who sets up beside others has an agent"
        listening = socket.create_server(("127.0.0.1", 0))
        alone = replace(
            self.worker,
            rank=0,
            world_size=1,
            nonce=f"{self.worker.nonce}-rehearsal",
            master_addr="127.0.0.1",
            master_port=listening.getsockname()[1],
            listen_fd=listening.detach(),
        )
        regroup.leave()
        regroup.meet(alone, "gloo", context.timeout_s(), self._overtaken)
        regroup.rebuild(self._layers)
        regroup.warm_up()
        large = {name: each for name, each in objects.items() if isinstance(each, _LARGE)}
        stateful.put_back(large, state_transfer.rehearse(stateful.collect(large)), "this process itself")

    def announce_ready(self) -> None:
        """This process has set up beside the training: let it in."""
        assert self._link is not None and self._page is not None, "who sets up beside others has an agent"
        self._link.follow(regroup.SOCKETS.cut)
        self.possible = True
        self._page.in_place = READY
        self._link.say(Left(0))

    def meet(self, step: int) -> bool:
        """Leave the old group and meet in the seat's generation. False: somebody did not come."""
        assert self.worker is not None and self._page is not None, "who has a seat has an agent"
        self._page.init_at_ns = time.monotonic_ns()
        self._page.step_at_ns = 0
        try:
            regroup.leave()
            regroup.meet(self.worker, "gloo", context.timeout_s(), self._overtaken)
            regroup.rebuild(self._layers)
        except regroup.Overtaken:
            return False
        except (RuntimeError, ValueError, OSError) as error:
            if not self.lost(error, step):
                raise
            return False
        barrier.begin_anew()
        context.renew(self.worker)
        self._page.in_place = IN_PLACE
        self._page.joined_at_ns = time.monotonic_ns()
        return True
