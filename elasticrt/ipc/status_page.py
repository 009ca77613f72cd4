"""The status page: memory that a worker and its agent share, so that a step needs no system call to be seen.

The page is a memfd, created by the agent and inherited by the worker. Its first 4096 bytes are aligned 64-bit words,
one for each field, so a reader sees an old or a new value, never a torn one (x86-64 and arm64). After them is room for
the stack of the worker's main thread, which the worker writes when it is asked. This room is a hole in the file, so it
takes no memory before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

PAGE_BYTES = 4096
FLIGHTS_AT = 2048
"""The offset of the text `flights`, in the second half of the words' page."""

# The room for the stack.
TEXT_BYTES = 1 << 17

IN_PLACE, READY = 1, 2
"""The values of `in_place` besides 0."""

FIRST_BATCH = 2
"""The value of `stepping` besides 0 and 1."""

STACKS_SIGNAL = int(signal.SIGRTMAX) - 3
"""A worker that gets this signal writes the stack of its main thread behind the words. No known program uses it."""

STACK_BEGINS = "Stack (most recent call first):"
"""The first line of a stack that faulthandler writes."""


class StatusPage(ctypes.Structure):
    """The page in the memfd `fd`. Times are CLOCK_MONOTONIC in nanoseconds, 0 for never.

    Written by the worker:
        entered: the step that the worker has entered. It writes s + 1 at the end of step s, before it reads `stop`.
        step, step_at_ns: the last finished step of the run, and when it ended.
        init_at_ns, joined_at_ns: when `elasticrt.init` was called, and when it had a process group.
        loop_at_ns: when the script came to its Loop in this start; 0 in later generations of the process.
        restored_at_ns: when the Loop had its state back; 0 while it holds the state of no step.
        stepping: 1 from an epoch's first batch to its last, when steps are to be expected; FIRST_BATCH while the worker
            waits for the loader's first batch; 0 while saving, in a pause, between epochs and outside of a Loop.
        beats, beat_at_ns: steps of optimizers, in any script, and when the newest one ended.
        first_beat_at_ns: when the first of these ended.
        loaded: the modification time of the newest file that `torch.load` read before the first beat, in microseconds
            since the epoch; see `bootstrap.optimizer_heartbeat`.
        begun_at_ns: when the script began, and with it the wait for the first beat.
        building: 1 while the worker prepares data: the next generation waits on this node until that is done.
        looks: the number of stacks that the worker has written at the agent's `messages.ShowStack`. Each replaces the
            one before.
        begun: how many collectives of the default group it had begun at the agent's last `messages.ShowStack`.
        flights: its collectives by torch's flight recorder at that time; see `ipc.flights`.
        waited_ns, waits: how long backward passes have waited for the other ranks' gradients, and in how many steps DDP
            has measured that.
        in_place: IN_PLACE while the worker can go on in another generation without ending; READY when it has set up
            beside the training and waits to be let in; 0 when only a new process could take its place.
        data_ns, save_ns, pause_ns: time spent waiting for the loader, standing still for a checkpoint or a copy of the
            state, and in `loop.pause`, without what is under way of each.
        drawing_ns, halted_ns, pausing_ns: when that began.
        over: 1 behind the script's Loop: no step follows unless the script begins another Loop. This time counts as a
            pause.
        saving_ns: when the newest checkpoint was begun.
        samples: trained on by the run, over all epochs; 0 without a sampler.

    Written by the agent:
        stop: not 0: hold at the end of the present step.
        go: while workers hold: the step after which all hand over; 0 while it is not known.
        save: before `go`: whether rank 0 commits a checkpoint before it leaves (1) or not (0).
        ending: not 0: the next SIGTERM comes from the agent, and the worker obeys it.
        leaves: not 0: the agent itself was told to leave and will say when, so the worker does not obey a SIGTERM from
            elsewhere.
    """

    entered: int
    stop: int
    step: int
    step_at_ns: int
    go: int
    save: int
    ending: int
    leaves: int
    init_at_ns: int
    joined_at_ns: int
    loop_at_ns: int
    restored_at_ns: int
    stepping: int
    beats: int
    beat_at_ns: int
    first_beat_at_ns: int
    begun_at_ns: int
    loaded: int
    building: int
    in_place: int
    looks: int
    begun: int
    waited_ns: int
    waits: int
    data_ns: int
    save_ns: int
    pause_ns: int
    drawing_ns: int
    halted_ns: int
    pausing_ns: int
    over: int
    saving_ns: int
    samples: int

    _map: mmap.mmap
    # ctypes removes it.
    __hash__ = object.__hash__

    def __new__(cls, fd: int) -> StatusPage:
        """Map the file of `fd`, which may be closed then; -1: memory that only this process and its forks see."""
        memory = mmap.mmap(fd, PAGE_BYTES + TEXT_BYTES)
        page = cls.from_buffer(memory)
        # Keeps the mapping alive as long as the page.
        page._map = memory
        return page

    def __init__(self, fd: int) -> None:
        """Leave the words as they are: the constructor of ctypes would write `fd` to the first one."""

    @staticmethod
    def create() -> int:
        """A new, zeroed page as a memfd (close-on-exec), which the caller owns. Raises OSError without memory."""
        fd = os.memfd_create("elasticrt-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES + TEXT_BYTES)
        return fd

    def spent(self, now_ns: int) -> tuple[int, int, int]:
        """Nanoseconds spent on data, saves and pauses until `now_ns`, with what is under way."""
        begun = (self.drawing_ns, self.halted_ns, self.pausing_ns)
        draws_ns, halts_ns, pauses_ns = (max(0, now_ns - each) if each else 0 for each in begun)
        return self.data_ns + draws_ns, self.save_ns + halts_ns, self.pause_ns + pauses_ns

    @property
    def is_meeting(self) -> bool:
        """Whether the worker meets the other ranks of a generation, or takes over their state."""
        return self.init_at_ns > self.restored_at_ns

    def text(self) -> bytes:
        """The text behind the words."""
        return self._map[PAGE_BYTES:].partition(b"\0")[0]

    def clear_text(self) -> None:
        """Remove the text behind the words."""
        length = len(self.text())
        self._map[PAGE_BYTES : PAGE_BYTES + length] = bytes(length)

    @property
    def flights(self) -> str:
        """The worker's collectives; see the class."""
        return self._map[FLIGHTS_AT:PAGE_BYTES].partition(b"\0")[0].decode(errors="replace")

    @flights.setter
    def flights(self, text: str) -> None:
        room = PAGE_BYTES - FLIGHTS_AT
        self._map[FLIGHTS_AT:PAGE_BYTES] = text.encode()[: room - 1].ljust(room, b"\0")

    @contextmanager
    def halted(self) -> Iterator[None]:
        """The training stands still for a checkpoint or a copy of the state in this block."""
        self.halted_ns = time.monotonic_ns()
        try:
            yield
        finally:
            since_ns, self.halted_ns = self.halted_ns, 0
            self.save_ns += time.monotonic_ns() - since_ns

    def finished(self, step: int, at_ns: int) -> None:
        """Note that `step` ended at `at_ns`. The step is written last, because it announces the rest to readers."""
        self.step_at_ns = at_ns
        self.step = step


# The fields are those of ctypes, which cost no Python call: each step reads and writes sixteen of them.
StatusPage._fields_ = [(name, ctypes.c_uint64) for name in StatusPage.__annotations__ if name != "_map"]
