"""Leaves a process group that has lost a rank, and meets the other ranks in the next generation's group.

A worker whose group has lost a rank gets an error in a collective, or hangs there. In both cases its agent sends it a
seat in the next generation. The thread that reads the agent's messages then cuts the group's connections, so a
collective that hangs fails too (`distributed.regroup`). The main thread undoes the open step (`train.world`), and makes
the next group with the ranks that it meets there.

This module also decides whether an error comes from a lost peer. An error with any other cause is never swallowed. If
the agent has no seat for the process, the process leaves its loop.
"""

from __future__ import annotations

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
from torch.utils.hooks import RemovableHandle

from elasticrt.checkpoint import state_transfer, stateful
from elasticrt.distributed import agent_client, barrier, collectives, context, regroup
from elasticrt.distributed.wrapping import ddp_layers
from elasticrt.ipc import proc
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.error_file import described, write_error_file
from elasticrt.ipc.failure import LET_GO_NEVER, is_collateral, is_of_a_collective
from elasticrt.ipc.messages import LeftGeneration
from elasticrt.ipc.status_page import IN_PLACE, READY
from elasticrt.train.batches import AnySampler, own_sampler
from elasticrt.train.not_given import not_given
from elasticrt.train.undo import LARGE

_log = logging.getLogger(__name__)

STUCK_S, STUCK_AGAIN_S = 1.0, 0.2
"""A work (a queued collective) that still waits for a peer STUCK_S seconds after its group was cut, and again
STUCK_AGAIN_S seconds later, waits for ever. A single look might meet a wait that is about to end."""

CLOSED_S_MAX, CLOSED_AGAIN_S = 0.5, 0.01
"""When gloo reports a lost peer, it has closed the connection, or closes it within CLOSED_S_MAX seconds on a busy
machine. CLOSED_AGAIN_S is the time between two looks."""


class InPlace:
    """One Loop's way from group to group.

    Args:
        objects: the objects given to the Loop. DDP modules among them get new reducers in each group.
        give_up: hands the state over to the agent. Called by another thread when the main thread can't come back from
            the group that it has lost.
        is_undoable: tells whether a step is open that would be undone if it failed now.
        has_on_change: tells whether the script makes objects of its own anew after each change of the membership.

    Attributes:
        possible: whether this process can go on in place, in another generation.
        spare: a newcomer's memory for the state of another rank, until it is used; else None.
    """

    def __init__(
        self,
        objects: Iterable[object],
        give_up: Callable[[], object],
        is_undoable: Callable[[], bool],
        has_on_change: Callable[[], bool],
    ) -> None:
        self._given = list(objects)
        self._layers = [(each, regroup.exchanged_parameters(each)) for each in ddp_layers(self._given)]
        self._give_up = give_up
        self._is_undoable = is_undoable
        self._has_on_change = has_on_change
        # Whether something in the script keeps this process from going on in place.
        self._has_obstacle = False
        self._page = agent_client.status_page()
        self._agent = agent_client.agent_link()
        self._backend = dist.get_backend() if dist.is_initialized() else "gloo"
        # The thread that makes the steps.
        self._step_thread = 0
        # The hook that ends a step which would be thrown away; None while no seat waits.
        self._doomed_step_hook: RemovableHandle | None = None
        self.possible = False
        self.spare: state_transfer.SpareTensors | None = None

    @property
    def worker(self) -> WorkerEnv:
        """The seat of this process."""
        return agent_client.worker_env()

    @property
    def has_seat(self) -> bool:
        """Whether a seat waits that this process has not taken."""
        return self.possible and self._agent.has_seat

    @property
    def overtaken(self) -> bool:
        """Whether a newer seat has come than the one that was taken."""
        return self._agent.is_overtaken

    def enable(self, loader: object, sampler: AnySampler) -> None:
        """Go on in place from now on, if the script allows it. Called when the block of a step begins.

        Args:
            loader: the loader of the batches; None if the script draws its data itself.
            sampler: the sampler of the Loop.
        """
        # Only the first step comes further, as looking for obstacles searches all objects of the process.
        if not self._agent.has_agent or self.possible or self._has_obstacle:
            return
        obstacle = self._obstacle(loader, sampler)
        if obstacle:
            self._has_obstacle = True
            if not self.worker.rank:
                _log.warning("all workers restart when the membership changes: %s", obstacle)
            return
        self._follow()
        self._page.in_place = IN_PLACE

    def disable(self) -> None:
        """Go on in place no longer, because the Loop is over, or another Loop has begun inside of it."""
        self.possible = False
        self._page.in_place = 0

    def _obstacle(self, loader: object, sampler: AnySampler) -> str:
        """What keeps this process from going on in place, in words; "" if nothing does."""
        # In each case a process that lives on would use what belongs to its old place in the world, or newcomers would
        # lack what it has.
        if sampler is not None and sampler.has_given_rank:
            return "the sampler was given its rank: leave rank and world size out"
        if sampler is not None and isinstance(loader, Iterator):
            return "the batches come from an iterator, which cannot start again: give the loader, or a class around it"
        own = own_sampler(loader) if sampler is None else ""
        if own:
            return f"the script has a {own}, which may cut by rank and world size: use a sampler of elasticrt's"
        if not context.has_own_group():
            return "the process group is not elasticrt.init()'s"
        self._backend = dist.get_backend()
        if self._backend not in ("gloo", "nccl"):
            return f"the process group's backend is {self._backend}"
        if regroup.has_subgroups() and not self._has_on_change():
            return "the script has made a process group of its own, and not in loop.on_change"
        missing = not_given(self._given, [layer for layer, _ in self._layers])
        return missing or next(
            (text for layer in self._layers if (text := regroup.rebuild_obstacle(*layer, self._given))), ""
        )

    def report_if_lost(self, error: BaseException, step: int, *, in_step: bool = False) -> bool:
        """Report the loss to the agent if `error` only says that this generation has lost a rank.

        Returns whether `error` says that.

        Args:
            error: the error.
            step: the last step that this process has finished.
            in_step: whether the error has left the block of a step, or an evaluation, which would be made again.
        """
        if not self.is_from_lost_peer(error) or (in_step and self._is_from_another_group()):
            return False
        # If another seat has come, the agents know of the loss already.
        if not self.overtaken:
            name, text, *_ = described(error)
            self._agent.send(LeftGeneration(self.worker.generation, step, f"{name}: {text}"[:400]))
        return True

    def is_from_lost_peer(self, error: BaseException) -> bool:
        """Whether `error` only says that this generation has lost a rank, and this process can go on in place."""
        if not self.possible or not isinstance(error, Exception):
            return False
        name, text, callstack, _ = described(error)
        # The group has been cut, so any error of a collective may come from that. With NCCL the script may also have
        # used the worthless results of an aborted kernel, so any error at all may come from that. An error that has
        # another cause comes again when the step is made again.
        if self.overtaken and (self._backend == "nccl" or is_of_a_collective(name, text, callstack)):
            return True
        return is_collateral(name, text, callstack)

    def _is_from_another_group(self) -> bool:
        """Whether an error that names a lost peer comes from another group than the default group.

        This is so if all connections of the default group live. The error then comes from a group that the script has
        made in an earlier generation, or from a DDP module that the Loop does not know. Both fail again in every new
        generation, until the script begins anew.
        """
        if self._backend != "gloo" or not regroup.SOCKETS.knows_peers(self.worker.world_size):
            return False
        until = time.monotonic() + CLOSED_S_MAX
        while not (self.overtaken or regroup.SOCKETS.lost_a_peer()):
            if time.monotonic() > until:
                return True
            time.sleep(CLOSED_AGAIN_S)
        return False

    def check_connections(self) -> None:
        """Raise DistNetworkError if a rank is lost.

        The script may have caught the error of a collective, and go on without its result. Called before an optimizer
        steps, and at the end of a step in which none has stepped.
        """
        if self._backend == "gloo" and self.possible and (self.overtaken or regroup.SOCKETS.lost_a_peer()):
            raise dist.DistNetworkError("connection closed by peer, and the script has caught the error")

    def check_generation(self) -> None:
        """Raise DistNetworkError if another generation follows because a rank of this one is lost.

        Called at the end of an evaluation: a collective may have failed, and the script may have caught the error.
        """
        if self._backend != "gloo" or not self.possible:
            return
        # A lost connection is not enough: the peer may have ended well. Only a new seat shows that it was lost.
        until = time.monotonic() + CLOSED_S_MAX
        while regroup.SOCKETS.lost_a_peer() and not self.overtaken and time.monotonic() < until:
            time.sleep(CLOSED_AGAIN_S)
        if self.overtaken:
            raise dist.DistNetworkError("connection closed by peer: another generation has begun")

    def check_results(self) -> None:
        """Raise DistBackendError if collectives of this step may have ended without their results. Only with NCCL.

        An aborted kernel of NCCL ends like any other. So this waits for all that the step has queued on the GPU, the
        all-reduce of DDP's last bucket included. Only then can it tell whether a kernel was aborted.
        """
        if self._backend == "nccl" and self.possible:
            torch.cuda.current_stream().synchronize()
            if self.overtaken:
                raise dist.DistBackendError("NCCL communicator was aborted, as a peer is gone")

    def wait_for_collectives(self) -> None:
        """Wait until all collectives so far have their results. A later abort can't spoil these any more."""
        if self._backend == "nccl":
            torch.cuda.synchronize()

    def wait_for_seat(self) -> bool:
        """Wait for the seat in the next generation, and take it.

        Returns False if the agent has no seat for this process, which must leave its loop then.
        """
        seat = self._agent.wait_for_seat()
        if seat is None:
            return False
        agent_client.take_seat(seat)
        hook, self._doomed_step_hook = self._doomed_step_hook, None
        if hook is not None:
            hook.remove()
        return True

    def _follow(self) -> None:
        """Be ready for new seats from now on. This thread makes the steps, and has to leave its group for a seat."""
        self._step_thread = threading.get_ident()
        self._agent.call_on_seat(self._cut)
        self.possible = True

    def _cut(self) -> None:
        """Free the main thread from its group, because a seat has come. Called by the thread that reads messages.

        The main thread may be in a collective, in the middle of computing, or on the way into the group.
        """
        regroup.cut()
        self._doomed_step_hook = self._doomed_step_hook or register_module_forward_pre_hook(self._fail_doomed_step)
        # A cut frees every thread but those whose message gloo has lost. A later look finds these.
        look = threading.Timer(STUCK_S, self._end_if_stuck)
        look.daemon = True
        look.start()

    def _fail_doomed_step(self, *_: object) -> None:
        """Fail where the script calls a module in a step that will be undone anyway, so that it ends early.

        The hook is set only when a seat has come, and so costs nothing before.
        """
        # Other threads of the script may call modules as well, and a module may be called outside of a step.
        if self.overtaken and threading.get_ident() == self._step_thread and self._is_undoable():
            raise dist.DistNetworkError("connection closed by peer: another generation has begun")

    def _end_if_stuck(self) -> None:
        """End this process if its collective waits for ever, because gloo has lost a message. Nothing ends such a wait.

        Gloo (torch 2.13) forgets two kinds of messages when a connection breaks: a message of which a part has been
        read, and a message whose write failed with EPIPE or ECONNRESET before gloo's event loop saw the loss of the
        connection. The agent would end the process later anyway, because the process does not take its seat. Then its
        state would be lost. Here the state is left to the agent first.
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
        # An orderly exit would wait for the main thread, which never comes back.
        os._exit(1)

    def set_up_beside(self, objects: Mapping[str, Any]) -> None:
        """Get ready while the other ranks train, and ask to be let in.

        Everything for which the others will wait is done once here, alone, because the first time takes longest.

        Args:
            objects: the objects of the Loop by name, modules without their wrappers.
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
        # An optimizer makes its state in its first step, so a newcomer has no tensors yet to receive that state into.
        if any(isinstance(each, torch.optim.Optimizer) and not each.state for each in large.values()):
            modules = [each for each in large.values() if isinstance(each, torch.nn.Module)]
            self.spare = state_transfer.SpareTensors(
                [each for module in modules for each in module.parameters() if each.requires_grad]
            )
        stateful.put_back(large, state_transfer.rehearse(stateful.collect(large)), "this process itself")
        # The agent counts steps of optimizers. Those until here, in this rehearsal or before the Loop, are no steps of
        # the run.
        self._page.beats = self._page.beat_at_ns = self._page.first_beat_at_ns = 0
        self._follow()
        self._page.in_place = READY
        self._agent.send(LeftGeneration(0))

    def meet(self, step: int) -> regroup.Meeting | None:
        """Leave the old group, and meet the other ranks in the generation of the seat that was taken.

        Returns None if a rank did not come, or if a newer seat has come meanwhile: take the next seat then.

        Args:
            step: the last step that this process has finished, for the report of a lost rank.
        """
        # By these times the agent sees that this process has come for its seat, and how far it is.
        self._page.init_at_ns = time.monotonic_ns()
        self._page.step_at_ns = self._page.loop_at_ns = 0
        try:
            meeting = self._regroup(self.worker)
        except regroup.Overtaken:
            return None
        except (RuntimeError, ValueError, OSError) as error:
            if not self.report_if_lost(error, step):
                raise
            return None
        # Barriers are counted in the group's store, and newcomers begin at 0.
        barrier.begin_anew()
        context.renew(self.worker)
        self._page.in_place = IN_PLACE
        self._page.joined_at_ns = time.monotonic_ns()
        return meeting

    def _regroup(self, worker: WorkerEnv) -> regroup.Meeting:
        """Make the group of the generation in which `worker` is a seat."""
        regroup.leave()
        meeting = regroup.meet(worker, self._backend, context.timeout_s(), lambda: self.overtaken, context.make_group)
        regroup.rebuild(self._layers)
        return meeting
