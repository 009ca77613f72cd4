"""Going on in another generation without ending: a worker's part of losing a peer, and of letting one in.

A worker whose group has lost a rank gets an error in a collective, or hangs in one. In both cases its agent sends it a
seat in the next generation. A thread cuts the old group's sockets, the collective fails, and
the step that it was in is undone: random numbers, buffers and gradients go back to where the step began. The group is
made anew, DDP gets a new reducer, whoever is behind gets the state of one that is furthest, and the step is done again
with the samples that are this rank's in the new world.

What is not swallowed: any error that does not say that a peer is gone, and such an error when no seat comes for it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.hooks import RemovableHandle

from elasticrt.checkpoint import state_transfer, stateful
from elasticrt.checkpoint.state_transfer import Standing
from elasticrt.distributed import agent_client, barrier, collectives, context, regroup
from elasticrt.distributed.wrapping import ddp_layers
from elasticrt.ipc.collateral_errors import is_collateral, is_of_a_collective
from elasticrt.ipc.error_file import described, write_error_file
from elasticrt.ipc.messages import Left
from elasticrt.ipc.status_page import IN_PLACE, READY
from elasticrt.train.undo import LARGE

_log = logging.getLogger(__name__)

STUCK_S, STUCK_AGAIN_S = 1.0, 0.2
"""A work that still waits for a peer so long after its group was cut, and at another look so long after the first, will
do so for ever."""

SEAT_S_MAX = 1800.0
"""How long a worker without a group waits for its next seat. Its agent ends it long before, if there is to be none;
when the agent itself is gone the wait ends at once."""


class InPlace:
    """One Loop's.

    Args:
        modules: the Loop's objects; DDP modules among them get new reducers.
        give_up: called by another thread when the main thread can't come back from the group that it has lost.
        undoable: whether a step is open, and would be undone if it failed now.

    Attributes:
        worker: who this process is now; None without an agent.
        possible: whether this process can go on in place.
    """

    def __init__(self, modules: Iterable[object], give_up: Callable[[], object], undoable: Callable[[], bool]) -> None:
        self._layers = ddp_layers(modules)
        self.worker = agent_client.worker_env()
        self._page = agent_client.status_page()
        self._link = agent_client.agent_link()
        self.possible = False
        self._give_up = give_up
        self._undoable = undoable
        self._thread = 0  # In which steps are made.
        self._refusal: RemovableHandle | None = None
        self._meeting: regroup.Meeting | None = None
        self._backend = dist.get_backend() if dist.is_initialized() else "gloo"

    @property
    def beside(self) -> bool:
        """Whether this process sets up while others train, and has no seat yet."""
        return self.worker is not None and self.worker.beside

    @property
    def _agent(self) -> agent_client.AgentClient:
        assert self._link is not None, "who can go on in place has an agent"
        return self._link

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
        self._follow()
        self._page.in_place = IN_PLACE

    def end(self) -> None:
        """The Loop is over: what comes now cannot be done in another group."""
        self.possible = False
        if self._page is not None:
            self._page.in_place = 0

    def _obstacle(self, loader: object) -> str:
        if not context.has_own_group():
            return "the process group is not elasticrt.init()'s"
        self._backend = dist.get_backend()
        if self._backend not in ("gloo", "nccl"):
            return f"the process group's backend is {self._backend}"
        if isinstance(loader, DataLoader) and isinstance(loader.sampler, DistributedSampler):
            return "the loader has a sampler of this world size"
        return next((text for layer in self._layers if (text := regroup.obstacle(layer))), "")

    def lost(self, error: BaseException, step: int) -> bool:
        """Whether `error` only says that this generation has lost a rank; then the agent is told."""
        if not self.is_of_peer(error):
            return False
        if not self._agent.overtaken:
            assert self.worker is not None, "a worker with an agent has a place"
            name, text, *_ = described(error)
            self._agent.say(Left(self.worker.generation, step, f"{name}: {text}"[:400]))
        return True

    def is_of_peer(self, error: BaseException) -> bool:
        """Whether `error` only says that this generation has lost a rank, and this process could go on in place."""
        if not self.possible or not isinstance(error, Exception):
            return False
        name, text, callstack, _ = described(error)
        if self._agent.overtaken and (self._backend == "nccl" or is_of_a_collective(name, text, callstack)):
            # Its group has been cut off, and with NCCL the script may have worked with what an aborted kernel left. An
            # error of another cause comes again when the step is redone.
            return True
        return is_collateral(name, text, callstack)

    def check_results(self) -> None:
        """Raise where this step's collectives may have ended without their results.

        An aborted kernel of NCCL ends like any other. So all that this step has queued is waited for, the last bucket's
        sum too, and after that it is seen whether anything was aborted until then.
        """
        if self._backend == "nccl" and self.possible:
            torch.cuda.current_stream().synchronize()
            if self._overtaken():
                raise dist.DistBackendError("NCCL communicator was aborted, as a peer is gone")

    def settle(self) -> None:
        """All collectives so far have their results: what is aborted after this was not under way."""
        if self._backend == "nccl":
            torch.cuda.synchronize()

    def stepped_at(self) -> float | None:
        """When this process ended its last step in its group, by the monotonic clock; None: it has made none."""
        return self._page.step_at_ns / 1e9 if self._page is not None and self._page.step_at_ns else None

    def wait_for_seat(self) -> bool:
        """Wait for the seat in the next generation, and take it. False: there is none, and this process is to leave."""
        seat = self._agent.wait_for_seat(SEAT_S_MAX)
        if seat is None:
            return False
        agent_client.take_seat(seat)
        self.worker = seat
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
        """A seat has come, says the thread that listens to the agent: the main thread may be waiting in its group, or
        be on the way into it."""
        regroup.cut()
        self._refusal = self._refusal or register_module_forward_pre_hook(self._refuse)
        look = threading.Timer(STUCK_S, self._end_if_stuck)
        look.daemon = True
        look.start()

    def _refuse(self, *_: object) -> None:
        """A module is called, in a world that has come to its end: what is computed now would be thrown away.

        This costs nothing as long as no seat has come. Between two modules a step may fail as in a collective.
        """
        if self._overtaken() and threading.get_ident() == self._thread and self._undoable():
            raise dist.DistNetworkError("connection closed by peer: another generation has begun")

    def _end_if_stuck(self) -> None:
        """A collective that waits for the rest of a message can't be ended; but its process can, with all that it has.

        The seat is not taken, so the agent would end it anyway, later, and the state would be lost.
        """
        if self._overtaken() and regroup.is_stuck():
            time.sleep(STUCK_AGAIN_S)
            if self._overtaken() and regroup.is_stuck():
                try:
                    self._give_up()
                except Exception:  # noqa: BLE001  Whatever it is, this process ends now.
                    _log.exception("the newest step could not be left to the agent")
                write_error_file(ConnectionError("gloo: connection closed by peer in the middle of a message"))
                os._exit(1)

    def _overtaken(self) -> bool:
        return self._link is not None and self._link.overtaken

    def rehearse(self, objects: Mapping[str, Any]) -> None:
        """Do once, alone, what the others will wait for when they let this process in: a first time takes longest."""
        assert self.worker is not None, "only a worker with an agent sets up beside others"
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
        regroup.meet(alone, self._backend, context.timeout_s(), self._overtaken, context.make_group)
        regroup.rebuild(self._layers)
        regroup.warm_up(collectives.device())
        large = {name: each for name, each in objects.items() if isinstance(each, LARGE)}
        stateful.put_back(large, state_transfer.rehearse(stateful.collect(large)), "this process itself")

    def announce_ready(self) -> None:
        """This process has set up beside the training: let it in."""
        assert self._page is not None, "a worker with an agent has a page"
        self._follow()
        self._page.in_place = READY
        self._agent.say(Left(0))

    def meet(self, step: int) -> bool:
        """Leave the old group and meet in the seat's generation. False: a rank did not come."""
        assert self.worker is not None and self._page is not None, "seats come from an agent"
        self._page.init_at_ns = time.monotonic_ns()
        self._page.step_at_ns = 0
        try:
            regroup.leave()
            self._meeting = regroup.meet(
                self.worker, self._backend, context.timeout_s(), self._overtaken, context.make_group
            )
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

    def share(
        self, standing: Standing, state: Callable[[], dict[str, Any]], overwrites: Callable[[], None]
    ) -> dict[str, Any] | None:
        """Agree with those who have met on the furthest state: see `state_transfer.share`."""
        assert self._meeting is not None, "ranks share after they have met"
        return state_transfer.share(standing, self._meeting, state, overwrites)
