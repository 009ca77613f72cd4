"""The status page: one memory page that a worker and its agent share, without a system call per step.

A memfd, created by the agent, inherited by the worker, gone with the last of the two. Its first 4096 bytes are words:
each field is one aligned 64-bit word, so that a reader sees an old or a new value, never a torn one (x86-64 and arm64).
Behind them is room for text: the worker's stacks, when the agent asks for them by a signal. The room is a hole in the
file, which takes no memory before it is written to.
"""

from __future__ import annotations

import mmap
import os
import signal

PAGE_BYTES = 4096
FLIGHTS_AT = 2048
"""Here begins the second half of the words' page, which is text."""

TEXT_BYTES = 1 << 17

IN_PLACE, READY = 1, 2
"""What `in_place` can say besides 0."""

STACKS_SIGNAL = int(signal.SIGRTMAX) - 3
"""A worker that gets it writes the stacks of its threads behind the words. One that no program is known to use."""


class _Word:
    """One word of the page as an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, page: StatusPage, _: type[StatusPage]) -> int:
        return page.words[self._index]

    def __set__(self, page: StatusPage, value: int) -> None:
        page.words[self._index] = value


class StatusPage:
    """The page in the memfd `fd`. Times are CLOCK_MONOTONIC in nanoseconds, 0 for never.

    Written by the worker:
        entered: the step that it has entered (it writes s + 1 at the end of step s, before it reads `stop`).
        step, step_at_ns: the last finished global step, and when it finished.
        init_at_ns, joined_at_ns: when `elasticrt.init` was called, and when it had a process group.
        restored_at_ns: when the Loop had its state back; 0 while what it has is the state of no step.
        stepping: 1 from an epoch's first batch to its last, when steps are to be expected; 0 while saving, in a pause,
            between epochs and outside of a Loop.
        beats, beat_at_ns: steps of optimizers, in any script, and when the newest one ended. Nobody expects one.
        first_beat_at_ns: when the first one ended.
        loaded: when the newest file was written that `torch.load` read before it, in microseconds since the epoch; see
            `bootstrap.optimizer_heartbeat`.
        begun_at_ns: when the script began, and with it the waiting for the first of them.
        building: 1 while it prepares data: a generation that begins meanwhile waits on this node until that is done.
        begun: how many collectives of the default group it had begun when its agent last asked (`messages.Look`), or 0.
        waited_ns: how long backward has waited for the other ranks' gradients, in the `waits` steps that DDP measured.
        flights: what torch's flight recorder said of its collectives then, see `ipc.flights`.
        in_place: IN_PLACE while it can go on in another generation without ending; READY when it has set up beside the
            training and waits to be let in; 0 when only a new process could take its place.
        data_ns, save_ns, pause_ns: nanoseconds so far in which the loader was waited for; in which training stood still
            for a checkpoint or a copy of the state; in `loop.pause`, without the one that is under way.
        pausing_ns: since when one is.
        saving_ns: when the newest checkpoint was begun.
        samples: of the data set, that the run has trained on, over all epochs; 0 without a sampler.

    Written by the agent:
        stop: not 0: hold at the end of the present step.
        go: while workers hold: the step after which all hand over; 0 while it is not known.
        save: before `go`: rank 0 commits a checkpoint before it leaves (1), or not (0).
        ending: not 0: a SIGTERM that comes now is the agent's own, and means it.
    """

    entered = _Word(0)
    stop = _Word(1)
    step = _Word(2)
    step_at_ns = _Word(3)
    go = _Word(4)
    save = _Word(5)
    init_at_ns = _Word(6)
    joined_at_ns = _Word(7)
    restored_at_ns = _Word(8)
    ending = _Word(9)
    stepping = _Word(10)
    building = _Word(11)
    beats = _Word(12)
    beat_at_ns = _Word(13)
    first_beat_at_ns = _Word(14)
    begun_at_ns = _Word(15)
    in_place = _Word(16)
    loaded = _Word(17)
    begun = _Word(18)
    waited_ns = _Word(19)
    waits = _Word(20)

    data_ns = _Word(32)
    save_ns = _Word(33)
    pause_ns = _Word(34)
    pausing_ns = _Word(35)
    saving_ns = _Word(36)
    samples = _Word(37)

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, PAGE_BYTES + TEXT_BYTES)
        self.words = memoryview(self._map)[:PAGE_BYTES].cast("Q")

    @staticmethod
    def create() -> int:
        """A new, zeroed page as a memfd (close-on-exec); the caller owns the descriptor. OSError when out of memory."""
        fd = os.memfd_create("elasticrt-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES + TEXT_BYTES)
        return fd

    def spent(self, now_ns: int) -> tuple[int, int, int]:
        """Nanoseconds besides the steps, as of now: for data, for saves, in pauses."""
        since_ns = self.pausing_ns
        return self.data_ns, self.save_ns, self.pause_ns + (max(0, now_ns - since_ns) if since_ns else 0)

    def text(self) -> bytes:
        """What has been written behind the words."""
        return self._map[PAGE_BYTES:].partition(b"\0")[0]

    @property
    def flights(self) -> str:
        """See the class."""
        return self._map[FLIGHTS_AT:PAGE_BYTES].partition(b"\0")[0].decode(errors="replace")

    @flights.setter
    def flights(self, text: str) -> None:
        room = PAGE_BYTES - FLIGHTS_AT
        self._map[FLIGHTS_AT:PAGE_BYTES] = text.encode()[: room - 1].ljust(room, b"\0")

    def close(self) -> None:
        """Unmap."""
        self.words.release()
        self._map.close()

    def finished(self, step: int, at_ns: int) -> None:
        """The worker has finished global `step` at `at_ns`. The step is written last: it announces the rest."""
        self.step_at_ns = at_ns
        self.step = step
