"""Stopping together at an agreed step, without a collective: the worker's half of a handover.

At the end of step s the worker writes `entered` = s + 1 on its page, and *then* reads `stop`. If that is set it
holds. The agents read how far everybody has been let in, agree on T, the furthest, and write it as `go`: whoever is
behind goes on to T (others' collectives need it), and after T everybody leaves. Nobody can be past T: whoever was let
into a step had written so before it looked. Local rank 0 of each node copies the state to memory that belongs to its
agent.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import sys
import time
from types import TracebackType
from typing import Any

import torch

from elasticrt.contract.env import Copy, WorkerEnv
from elasticrt.contract.messages import Damaged, HandedOver
from elasticrt.contract.page import Page
from elasticrt.errors import Handover
from elasticrt.train import link

_log = logging.getLogger(__name__)

left = False
"""Whether this process has left its loop to hand over: it ends, and what it has not saved it has handed over."""

POLL_S = 0.0005
HOLD_S_MAX = 120.0
"""An agent that asks to hold and then says nothing for so long has forgotten us: go on. It ends us if that is wrong."""


def must_leave(page: Page, step: int) -> bool:
    """Called between `step`, which is done, and the next. False: train on; True: all leave after this step.

    Holds as long as the agents have not agreed. When they give the handover up, training goes on.
    """
    deadline = time.monotonic() + HOLD_S_MAX
    while page.stop:
        go = page.go
        if go:
            return step >= go
        if time.monotonic() > deadline:
            _log.warning("held after step %d for %.0f s without a word from the agent; going on", step, HOLD_S_MAX)
            return False
        time.sleep(POLL_S)
    return False


def leave(worker: WorkerEnv, state: dict[str, Any] | None, step: int, epoch: int, place: str = "") -> None:
    """Hand over after `step` and leave the loop: raises `Handover`. `state` is None where no copy is to be taken."""
    size, digest = 0, ""
    if state is not None and worker.copy_fd >= 0:
        try:
            size, digest = write(worker.copy_fd, state)
        except OSError as error:  # No memory: the generation then resumes from the head, which costs steps, not safety.
            _log.warning("no copy of the state was taken (%s); training resumes from the last checkpoint", error)
    agent = link.agent_link()
    if agent is not None:
        agent.say(HandedOver(step, epoch, size, digest, place))
    _be_quiet_about_it()
    global left  # noqa: PLW0603  A process hands over once.
    left = True
    raise Handover(f"the membership changes: all workers stop after step {step}")


def stay(step: int, epoch: int) -> None:
    """Say that this process has stopped after `step`, as agreed, and waits for its seat in the next generation."""
    agent = link.agent_link()
    if agent is not None:
        agent.say(HandedOver(step, epoch, 0, ""))


def departure(step: int) -> Handover:
    """What is raised where a process leaves its loop for good because there is no seat for it."""
    _be_quiet_about_it()
    return Handover(f"the membership changes: this process stops after step {step}")


def write(fd: int, state: dict[str, Any]) -> tuple[int, str]:
    """Write a state to a memory file; its size in bytes and SHA-256. OSError when there is no memory."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "wb") as file:
        torch.save(state, file)
    size = os.fstat(fd).st_size
    return size, _digest(fd, size)


def read(worker: WorkerEnv) -> bytearray:
    """The copy that this generation resumes from, verified. RuntimeError when it is not what was promised.

    That is no CheckpointError: the run can go on in the next generation, from another node's copy or from its head. The
    agent is told, so that this copy is offered to nobody again.
    """
    copy = worker.copy
    assert copy is not None, "asked for only when there is one"
    if worker.state_fd < 0:
        raise RuntimeError(f"the copy of step {copy.step} is not in this node's memory")
    problem = _damage(worker.state_fd, copy)
    if problem:
        agent = link.agent_link()
        if agent is not None:
            agent.say(Damaged(copy.step, problem))
        raise RuntimeError(f"the copy of step {copy.step} in this node's memory is damaged: {problem}")
    with mmap.mmap(worker.state_fd, copy.size, prot=mmap.PROT_READ) as mapped:
        return bytearray(mapped)


def _damage(fd: int, copy: Copy) -> str:
    """What is wrong with the copy in a memory file, "" if nothing is."""
    size = os.fstat(fd).st_size
    if size != copy.size:  # Said before anything is read: behind the end of a file there is only SIGBUS.
        return f"got {size} bytes; expected {copy.size}"
    digest = _digest(fd, size)
    if digest != copy.digest:
        return f"got SHA-256 {digest[:12]}...; expected {copy.digest[:12]}..."
    return ""


def describe(copy: Copy) -> dict[str, Any]:
    """What restoring reports of a copy, in a manifest's words."""
    commit = {"step": copy.step, "epoch": copy.epoch, "size": copy.size, "digest": copy.digest}
    return {"commit": commit, "world_size": copy.world_size, "run": ""}


def _digest(fd: int, size: int) -> str:
    if size == 0:
        return ""
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
        return hashlib.sha256(mapped).hexdigest()


def _be_quiet_about_it() -> None:
    """An interpreter of the script's own would print a traceback for Handover, which is no error."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, Handover):
            before(kind, error, trace)

    sys.excepthook = hook
