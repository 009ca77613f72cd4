"""One thread that reads the output and the channels of all workers, and the channel of their parent.

It turns messages and ends of workers into events. Memory stays flat: a pipe is read only as fast as its output can be
passed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from elasticrt.ipc.cgroups import memory_groups
from elasticrt.ipc.channel import Channel, ChannelClosed
from elasticrt.ipc.env import WorkerEnv
from elasticrt.ipc.failure import Failure
from elasticrt.ipc.messages import Copied, Done, Exited, FromWorker, Message, Release, Reply, Started, Warm
from elasticrt.ipc.proc import gpus, stat, text_of
from elasticrt.ipc.selector_thread import READ, SelectorThread
from elasticrt.ipc.status_page import StatusPage
from elasticrt.option_values import ERR, OUT
from elasticrt.workers.failures import Remains, failure_of, raised
from elasticrt.workers.fork_server import ParentLost, WorkerParent
from elasticrt.workers.logs import Output

_LOG = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
_LAST_READ_MAX_BYTES = 1 << 22
_FLUSH_AFTER_S = 0.2
_ERROR_FILE_MAX_CHARACTERS = 1 << 18
_MESSAGES_PER_TURN = 64
_HAS_GPUS = gpus() > 0


@dataclass(frozen=True)
class WorkerStarted:
    """The worker's process exists, since `at_ns` (CLOCK_MONOTONIC)."""

    generation: int
    rank: int
    local_rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True)
class WorkerSaid:
    """The worker sent a message.

    `answer` tells that process something, whatever seat it has by then, and does nothing if it has ended. `fd`: the
    descriptor that came with the message, which the receiver owns; -1: none.
    """

    generation: int
    rank: int
    local_rank: int
    message: FromWorker
    answer: Callable[[Reply], None]
    fd: int = -1


@dataclass(frozen=True)
class WorkerEnded:
    """The worker has ended, or is done and lingers. Exactly one such event comes for each worker.

    `code` is the exit code or minus the signal number. `failure` is None after code 0, and after this agent's own
    SIGTERM or SIGKILL.
    """

    generation: int
    rank: int
    local_rank: int
    pid: int
    code: int
    failure: Failure | None


@dataclass(frozen=True)
class GroupEnded:
    """All processes of this generation's workers have ended (0: of workers that set up beside the training)."""

    generation: int


GroupEvent = Warm | ParentLost | WorkerStarted | WorkerSaid | WorkerEnded | GroupEnded


def oom_kills(root: Path = Path("/")) -> int:
    """How many processes of this control group the kernel has killed for memory so far; 0 if that is unknown.

    A kill is counted in the group of the process, whichever group's limit was reached; in version 2 also in the groups
    around it. So the count of this process's own group is right, or that of the nearest group that has one. `root`:
    where /proc and /sys are.
    """
    for group, names in memory_groups(root):
        for line in text_of(group / names.events).splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.strip().isdecimal():
                return int(count)
    return 0


@dataclass(eq=False)
class WorkerState:
    """One worker, as the group and its thread share it."""

    start: int  # The number of the start that it was a part of, as its parent knows it.
    env: WorkerEnv  # Its ranks in its present generation.
    output: Output
    channel: Channel
    page: StatusPage
    pipes: dict[str, int]
    oom_kills: int = 0  # The count of processes killed for memory when it was started.
    pid: int = 0  # 0 until it has been started.
    # `ended`: its `WorkerEnded` was sent; `gone`: its process has ended; `stopping`: the agent has told it to.
    ended: bool = False
    gone: bool = False
    stopping: bool = False
    read_at: float = 0.0  # When its output was last read (seconds of the monotonic clock).
    sending: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send it a message with `fds`. Does nothing if it has ended: an event says so."""
        with self.sending, contextlib.suppress(ChannelClosed, OSError):
            if not self.gone:
                self.channel.send(message, fds)


class WorkerIO:
    """The thread. Its methods may be called from any other. The sink is called on it, and must only enqueue."""

    def __init__(self, sink: Callable[[GroupEvent], None]) -> None:
        self._sink = sink
        self._workers: list[WorkerState] = []  # Those that are not gone.
        self._flushing = False  # Whether `_flush` is due.
        self.seating = threading.RLock()  # Held while workers get another generation, and while one's end is reported.
        self._thread = SelectorThread("elasticrt-group", self._end)

    def follow(self, parent: WorkerParent) -> None:
        """Listen to a worker parent."""
        self._thread.call(partial(self._thread.watch, parent, READ, partial(self._read_parent, parent)))

    def add(self, workers: Sequence[WorkerState]) -> None:
        """Listen to workers, before they are started."""

        def add() -> None:
            self._workers += workers
            for worker in workers:
                for stream, fd in worker.pipes.items():
                    self._thread.watch(fd, READ, partial(self._read_pipe, worker, stream, _READ_BYTES))
                self._thread.watch(worker.channel, READ, partial(self._read_channel, worker))

        self._thread.call(add)

    def seat(self, worker: WorkerState) -> None:
        """What this worker prints from now on is that of its new rank and generation."""
        env = worker.env

        def seat() -> None:
            if worker in self._workers:
                self._read_rest(worker)  # What it has printed so far is that of its old rank.
                worker.output.seat(env)

        self._thread.call(seat)

    def lose(self, workers: Sequence[WorkerState], reason: str) -> None:
        """These workers have ended with their parent, for this `reason`."""
        self._thread.call(partial(self._lost, workers, reason))

    def close(self, timeout_s: float) -> None:
        """End the thread within `timeout_s` seconds, after what has arrived was read."""
        self._thread.close(timeout_s)

    def _end(self) -> None:
        for worker in list(self._workers):
            self._forget(worker)

    def _read_parent(self, parent: WorkerParent) -> None:
        for event in parent.receive():
            match event:
                case Warm():
                    self._sink(event)
                case ParentLost():
                    self._thread.forget(parent)
                    # All that are known are its workers: the next parent starts none before this event was handled.
                    self._lost(list(self._workers), event.reason)
                    self._sink(event)
                case Started():
                    for worker in self._started_as(event):
                        worker.pid, env = event.pid, worker.env
                        self._sink(WorkerStarted(env.generation, env.rank, env.local_rank, event.pid, event.at_ns))
                case Exited():
                    for worker in self._started_as(event):
                        self._gone(worker, event.code, start_error=event.error)

    def _started_as(self, event: Started | Exited) -> list[WorkerState]:
        """The worker that an event of the parent is about; none if it is gone already."""
        wanted = (event.generation, event.local_rank)
        return [each for each in self._workers if (each.start, each.env.local_rank) == wanted]

    def _lost(self, workers: Sequence[WorkerState], reason: str) -> None:
        for worker in workers:
            if not worker.gone:
                self._gone(worker, -signal.SIGKILL, lost=reason)

    def _read_pipe(self, worker: WorkerState, stream: str, max_bytes: int) -> None:
        """Pass on what is there, up to about `max_bytes`."""
        fd = worker.pipes.get(stream)
        while fd is not None and max_bytes > 0:
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:  # The worker has closed its end, and may go on without it.
                self._thread.forget(fd)
                os.close(worker.pipes.pop(stream))
                return
            worker.output.write(stream, data)
            worker.read_at = time.monotonic()
            max_bytes -= len(data)
            if worker.output.unfinished and not self._flushing:
                self._flushing = True
                self._thread.after(_FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        """Show unfinished lines to which nothing was added for a while: prompts, dots of progress."""
        quiet_since = time.monotonic() - _FLUSH_AFTER_S
        unfinished = [each for each in self._workers if each.output.unfinished]
        for worker in unfinished:
            if worker.read_at <= quiet_since:
                worker.output.flush()
        self._flushing = any(each.read_at > quiet_since for each in unfinished)
        if self._flushing:
            self._thread.after(_FLUSH_AFTER_S, self._flush)

    def _read_channel(self, worker: WorkerState) -> None:
        try:
            count = 0
            # Take what the channel has buffered: the selector does not see it.
            while count < _MESSAGES_PER_TURN or worker.channel.pending():
                received = worker.channel.receive(0)
                if received is None:
                    return
                self._said(worker, *received)
                count += 1
        except (ChannelClosed, OSError):
            self._thread.forget(worker.channel)
            self._leaves(worker)
        except ValueError as error:
            _LOG.warning("rank %d says what is no message, and is not read any more: %s", worker.env.rank, error)
            self._thread.forget(worker.channel)

    def _leaves(self, worker: WorkerState) -> None:
        """Report the failure of a process that has closed its channel, if that is because it is ending.

        The kernel tells its parent of it later: it takes a tenth of a second or more to give a GPU's memory back.
        """
        process = stat(worker.pid) if worker.pid and _HAS_GPUS else None
        began = _stepped(worker) is not None  # Why it could not begin only its parent knows.
        if process is not None and process.leaving and began and not worker.gone:
            self._read_rest(worker)
            with self.seating:
                self._ended(worker, os.waitstatus_to_exitcode(process.leaving))

    def _said(self, worker: WorkerState, message: Message, fds: list[int]) -> None:
        fd = fds.pop(0) if fds and isinstance(message, Copied) else -1
        for other in fds:
            os.close(other)
        if not isinstance(message, FromWorker):
            raise ValueError(f"a worker sent a {type(message).__name__}")  # noqa: TRY004  It came over a wire.
        env = worker.env
        self._sink(WorkerSaid(env.generation, env.rank, env.local_rank, message, worker.tell, fd))
        if isinstance(message, Done):
            self._ended(worker, message.code)
            if worker.stopping:  # The group is being ended, so that its store is not needed any more.
                worker.tell(Release())

    def _gone(self, worker: WorkerState, code: int, *, start_error: str = "", lost: str = "") -> None:
        """The process has ended: read the rest of its output and messages, report its end, close its files."""
        self._read_rest(worker)
        if self._thread.watches(worker.channel):
            self._read_channel(worker)
        # A worker that is getting another seat ends either in its old generation or in the new one, and never in both.
        with self.seating:
            self._ended(worker, code, start_error=start_error, lost=lost)
            self._forget(worker)
            generation = worker.env.generation
        if all(each.env.generation != generation for each in self._workers):
            self._sink(GroupEnded(generation))

    def _read_rest(self, worker: WorkerState) -> None:
        """Read a worker's last words, which are in pipes of their own: the news of its end may have overtaken them."""
        for stream in (OUT, ERR):
            self._read_pipe(worker, stream, _LAST_READ_MAX_BYTES)

    def _forget(self, worker: WorkerState) -> None:
        self._workers.remove(worker)
        with worker.sending:
            worker.gone = True
            self._thread.forget(worker.channel)
            worker.channel.close()
        for fd in worker.pipes.values():
            self._thread.forget(fd)
            os.close(fd)
        worker.pipes.clear()
        worker.output.close()

    def _ended(self, worker: WorkerState, code: int, *, start_error: str = "", lost: str = "") -> None:
        if worker.ended:
            return
        worker.ended = True
        env, failure = worker.env, None
        if code != 0:
            pages = [each.page for each in self._workers if each.start == worker.start and not each.page.entered]
            left = Remains(
                code,
                error_file=text_of(Path(env.error_file), _ERROR_FILE_MAX_CHARACTERS),  # Only an exception writes it.
                last_lines=worker.output.tail(),
                log_path=worker.output.path,
                step=worker.page.step or None,
                stepped=_stepped(worker),
                beats=worker.page.step if worker.page.entered else worker.page.beats,
                loaded=max((page.loaded for page in pages if page.beats), default=0),
                start_error=start_error,
                lost=lost,
                oom=code == -signal.SIGKILL and oom_kills() > worker.oom_kills,
            )
            by_us = code in (-signal.SIGTERM, -signal.SIGKILL) or not raised(left).exception
            if not (worker.stopping and by_us):
                failure = failure_of(env, left)
        self._sink(WorkerEnded(env.generation, env.rank, env.local_rank, worker.pid, code, failure))


def _stepped(worker: WorkerState) -> bool | None:
    """Whether it has made a step; None if its page was never used, because then its steps are not marked either."""
    page = worker.page
    seen = page.begun_at_ns or page.init_at_ns
    return True if page.step or page.beats else False if seen else None
