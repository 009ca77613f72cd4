"""How a worker leaves a group that has lost a rank, and meets the others in the next generation's group.

A worker whose group has lost a rank gets an error in a collective, or hangs in one. In both cases its agent sends it a
seat in the next generation. A thread frees it (`distributed.regroup`), `train.world` undoes the open step, and the
group is made anew.

An error that has another cause than a lost peer is never swallowed. If no seat comes, the process leaves its loop.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.hooks import RemovableHandle

from elasticrt.checkpoint import state_transfer, stateful
from elasticrt.distributed import agent_client, barrier, collectives, context, regroup
from elasticrt.distributed.wrapping import ddp_layers
from elasticrt.ipc import proc
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.error_file import described, write_error_file
from elasticrt.ipc.failure import LET_GO_NEVER, is_collateral, is_of_a_collective
from elasticrt.ipc.messages import Left
from elasticrt.ipc.status_page import IN_PLACE, READY
from elasticrt.train.batches import AnySampler, samplers_of
from elasticrt.train.not_given import not_given
from elasticrt.train.undo import LARGE

_log = logging.getLogger(__name__)

STUCK_S, STUCK_AGAIN_S = 1.0, 0.2
"""A work that still waits for a peer STUCK_S after its group was cut, and again STUCK_AGAIN_S later, waits for ever."""

CLOSED_S_MAX, CLOSED_AGAIN_S = 0.5, 0.01
"""When gloo tells of a lost peer it has closed the connection, or does it within CLOSED_S_MAX on a busy machine."""


class InPlace:
    """One Loop's way from group to group.

    Args:
        objects: the Loop's; DDP modules among them get new reducers.
        give_up: called by another thread when the main thread can't come back from the group that it has lost.
        undoable: whether a step is open, and would be undone if it failed now.
        renews: whether the script makes something of its own anew after each change.

    Attributes:
        possible: whether this process can go on in place.
        spare: memory for the state of others, until it is used.
    """

    def __init__(
        self,
        objects: Iterable[object],
        give_up: Callable[[], object],
        undoable: Callable[[], bool],
        renews: Callable[[], bool],
    ) -> None:
        self._given = list(objects)
        self._layers = [(each, regroup.exchanged(each)) for each in ddp_layers(self._given)]
        self._give_up = give_up
        self._undoable = undoable
        self._renews = renews
        self._hindered = False  # Whether something in the script keeps this process from going on in place.
        self._page = agent_client.status_page()
        self._agent = agent_client.agent_link()
        self._backend = dist.get_backend() if dist.is_initialized() else "gloo"
        self._thread = 0  # The thread that makes the steps.
        self._refusal: RemovableHandle | None = None
        self.possible = False
        self.spare: state_transfer.Spare | None = None

    @property
    def worker(self) -> WorkerEnv:
        """Who this process is now."""
        return agent_client.worker_env()

    @property
    def has_seat(self) -> bool:
        """Whether this process has another seat, and may not have noticed yet."""
        return self.possible and self._agent.has_seat

    @property
    def overtaken(self) -> bool:
        """Whether a newer seat has come than the one that was taken."""
        return self._agent.overtaken

    def begin(self, loader: object, sampler: AnySampler) -> None:
        """The first step with a block: from now on this process goes on in place, if it can."""
        if not self._agent.linked or self.possible or self._hindered:
            return
        obstacle = self._obstacle(loader, sampler)
        if obstacle:
            self._hindered = True
            if not self.worker.rank:
                _log.warning("workers are started anew when the membership changes: %s", obstacle)
            return
        self._follow()
        self._page.in_place = IN_PLACE

    def end(self) -> None:
        """The Loop is over: what comes next cannot be done in another group."""
        self.possible = False
        self._page.in_place = 0

    def _obstacle(self, loader: object, sampler: AnySampler) -> str:
        if sampler is not None and sampler.has_given_rank:
            return "the sampler was given its rank: leave rank and world size out"
        if sampler is not None and isinstance(loader, Iterator):
            return "the batches come from an iterator, which cannot begin anew: give the loader, or a class around it"
        if sampler is None:
            # What another iterable draws from, or the script itself, is not known: so any that lives may be in use.
            used = samplers_of(loader) if isinstance(loader, DataLoader) else gc.get_objects()
            if any(issubclass(type(each), DistributedSampler) for each in used):
                remedy = "use a sampler of elasticrt's"
                return f"the script has a DistributedSampler, which cuts for this world size: {remedy}"
        if not context.has_own_group():
            return "the process group is not elasticrt.init()'s"
        self._backend = dist.get_backend()
        if self._backend not in ("gloo", "nccl"):
            return f"the process group's backend is {self._backend}"
        if regroup.has_subgroups() and not self._renews():
            return "the script has made a process group of its own, and not in loop.on_change"
        missing = not_given(self._given, [layer for layer, _ in self._layers])
        return missing or next((text for layer in self._layers if (text := regroup.obstacle(*layer, self._given))), "")

    def lost(self, error: BaseException, step: int, *, in_step: bool = False) -> bool:
        """Whether `error` only says that this generation has lost a rank. If so, it is reported to the agent.

        `in_step`: it has left the block of a step.
        """
        if not self.is_of_peer(error) or (in_step and self._is_of_another_group()):
            return False
        if not self.overtaken:
            name, text, *_ = described(error)
            self._agent.say(Left(self.worker.generation, step, f"{name}: {text}"[:400]))
        return True

    def is_of_peer(self, error: BaseException) -> bool:
        """Whether `error` only says that this generation has lost a rank, and this process can go on in place."""
        if not self.possible or not isinstance(error, Exception):
            return False
        name, text, callstack, _ = described(error)
        # The group has been cut. With NCCL the script may have used what an aborted kernel left, so any error may come
        # of that; one of another cause comes again when the step is done again.
        if self.overtaken and (self._backend == "nccl" or is_of_a_collective(name, text, callstack)):
            return True
        return is_collateral(name, text, callstack)

    def _is_of_another_group(self) -> bool:
        """Whether all connections of the default group live, so that an error that names a lost peer is not its.

        It comes of a group that the script has made in a generation before, or of a DDP module that the Loop does not
        know. Both fail again in every new world, until the script begins anew.
        """
        if self._backend != "gloo" or not regroup.SOCKETS.knows_peers(self.worker.world_size):
            return False
        until = time.monotonic() + CLOSED_S_MAX
        while not (self.overtaken or regroup.SOCKETS.lost_a_peer()):
            if time.monotonic() > until:
                return True
            time.sleep(CLOSED_AGAIN_S)
        return False

    def check_caught(self) -> None:
        """Raise if a rank is lost: the script may have caught the error of a collective, and go on without its result.

        Before an optimizer steps, and where a step ends in which none has.
        """
        if self._backend == "gloo" and self.possible and (self.overtaken or regroup.SOCKETS.lost_a_peer()):
            raise dist.DistNetworkError("connection closed by peer, and the script has caught the error")

    def check_replaced(self) -> None:
        """Raise if another generation follows, because a rank of this one is lost.

        A collective may have failed, and the script have caught that. A rank that is away may also have ended well.
        """
        if self._backend != "gloo" or not self.possible:
            return
        until = time.monotonic() + CLOSED_S_MAX
        while regroup.SOCKETS.lost_a_peer() and not self.overtaken and time.monotonic() < until:
            time.sleep(CLOSED_AGAIN_S)
        if self.overtaken:
            raise dist.DistNetworkError("connection closed by peer: another generation has begun")

    def check_results(self) -> None:
        """Raise if collectives of this step may have ended without their results.

        An aborted kernel of NCCL ends like any other. So wait for all that this step has queued, the last bucket's sum
        included, and only then look whether anything was aborted.
        """
        if self._backend == "nccl" and self.possible:
            torch.cuda.current_stream().synchronize()
            if self.overtaken:
                raise dist.DistBackendError("NCCL communicator was aborted, as a peer is gone")

    def settle(self) -> None:
        """Wait until all collectives so far have their results, which a later abort can no longer spoil."""
        if self._backend == "nccl":
            torch.cuda.synchronize()

    def wait_for_seat(self) -> bool:
        """Wait for the seat in the next generation, and take it. False: there is none, and this process must leave."""
        seat = self._agent.wait_for_seat()
        if seat is None:
            return False
        agent_client.take_seat(seat)
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            refusal.remove()
        return True

    def _follow(self) -> None:
        """From now on this thread, which makes the steps, may have to leave its group."""
        self._thread = threading.get_ident()
        self._agent.follow(self._cut)
        self.possible = True

    def _cut(self) -> None:
        """A seat has come. Called by the reading thread; the main thread may be in its group or on the way into it."""
        regroup.cut()
        self._refusal = self._refusal or register_module_forward_pre_hook(self._refuse)
        look = threading.Timer(STUCK_S, self._end_if_stuck)
        look.daemon = True
        look.start()

    def _refuse(self, *_: object) -> None:
        """Fail where a module is called in a step that would be thrown away. Costs nothing until a seat has come."""
        if self.overtaken and threading.get_ident() == self._thread and self._undoable():
            raise dist.DistNetworkError("connection closed by peer: another generation has begun")

    def _end_if_stuck(self) -> None:
        """End a process whose collective waits for ever, because gloo has lost a message: nothing ends such a wait.

        Gloo (torch 2.13) forgets two kinds of messages when a connection breaks: one of which a part has been read, and
        one whose write failed with EPIPE or ECONNRESET before gloo's event loop saw the loss of the connection. The
        agent would end the process later anyway, because it does not take its seat, and its state would be lost.
        """
        for pause_s in (STUCK_AGAIN_S, 0.0):
            if not (self.overtaken and regroup.is_stuck()):
                return
            time.sleep(pause_s)
        try:
            self._give_up()
        except Exception:  # noqa: BLE001  Whatever it is, this process ends now.
            _log.exception("the newest step could not be left to the agent")
        write_error_file(ConnectionError(LET_GO_NEVER))
        os._exit(1)

    def set_up_beside(self, objects: Mapping[str, Any]) -> None:
        """Get ready beside the training of others, and ask to be let in.

        Everything that the others will wait for is done once here, alone, because a first time takes longest.
        """
        listening = proc.listening("127.0.0.1")
        alone = replace(
            self.worker,
            rank=0,
            world_size=1,
            nonce=f"{self.worker.nonce}-rehearsal",
            master_addr="127.0.0.1",
            master_port=listening.getsockname()[1],
            listen_fd=listening.detach(),
        )
        self._regroup(alone)
        regroup.warm_up(collectives.device())
        large = {name: each for name, each in objects.items() if isinstance(each, LARGE)}
        if any(isinstance(each, torch.optim.Optimizer) and not each.state for each in large.values()):
            modules = [each for each in large.values() if isinstance(each, torch.nn.Module)]
            self.spare = state_transfer.Spare(
                [each for module in modules for each in module.parameters() if each.requires_grad]
            )
        stateful.put_back(large, state_transfer.rehearse(stateful.collect(large)), "this process itself")
        # What optimizers did until here, in this rehearsal or before the Loop, was no step of the run.
        self._page.beats = self._page.beat_at_ns = self._page.first_beat_at_ns = 0
        self._follow()
        self._page.in_place = READY
        self._agent.say(Left(0))

    def meet(self, step: int) -> regroup.Meeting | None:
        """Leave the old group, and meet in the seat's generation. None: a rank did not come."""
        self._page.init_at_ns = time.monotonic_ns()
        self._page.step_at_ns = self._page.loop_at_ns = 0
        try:
            meeting = self._regroup(self.worker)
        except regroup.Overtaken:
            return None
        except (RuntimeError, ValueError, OSError) as error:
            if not self.lost(error, step):
                raise
            return None
        barrier.begin_anew()
        context.renew(self.worker)
        self._page.in_place = IN_PLACE
        self._page.joined_at_ns = time.monotonic_ns()
        return meeting

    def _regroup(self, worker: WorkerEnv) -> regroup.Meeting:
        regroup.leave()
        meeting = regroup.meet(worker, self._backend, context.timeout_s(), lambda: self.overtaken, context.make_group)
        regroup.rebuild(self._layers)
        return meeting
