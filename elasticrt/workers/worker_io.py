"""Reads the output and the messages of all workers and of their parent, on one thread.

The thread turns messages and ends of workers into events. Memory stays flat: the thread reads a pipe only as fast as it
can pass the output on.
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
from elasticrt.ipc.messages import Copied, Exited, FromWorker, Message, Release, Reply, ScriptDone, Started, Warm
from elasticrt.ipc.proc import gpus, stat, text_of
from elasticrt.ipc.selector_thread import READ, SelectorThread
from elasticrt.ipc.status_page import StatusPage
from elasticrt.option_values import ERR, OUT
from elasticrt.workers.failures import Remains, failure_of, raised
from elasticrt.workers.fork_server import ParentLost, WorkerParent
from elasticrt.workers.logs import Output

_LOG = logging.getLogger(__name__)

_READ_BYTES = 1 << 16
# The maximum to read from each pipe of a worker that has ended. A process that it has started may print on for ever.
_LAST_READ_MAX_BYTES = 1 << 22
# An unfinished line is shown when nothing was added to it for this time.
_FLUSH_AFTER_S = 0.2
_ERROR_FILE_MAX_CHARACTERS = 1 << 18
_HAS_GPUS = gpus() > 0


@dataclass(frozen=True)
class WorkerStarted:
    """The process `pid` of a worker exists, since `at_ns` (CLOCK_MONOTONIC)."""

    generation: int
    rank: int
    local_rank: int
    pid: int
    at_ns: int


@dataclass(frozen=True)
class WorkerMessage:
    """A worker has sent a message.

    Attributes:
        generation, rank, local_rank: the seat that the worker had when the message was read.
        message: the message.
        answer: sends a reply to the worker's process, whatever seat it has by then. Does nothing if it has ended.
        fd: the descriptor that came with the message, which the receiver of this event owns; -1 for none.
    """

    generation: int
    rank: int
    local_rank: int
    message: FromWorker
    answer: Callable[[Reply], None]
    fd: int = -1


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has ended, or is done and lingers. Exactly one such event comes for each worker.

    Attributes:
        generation, rank, local_rank: the last seat of the worker.
        pid: its process id; 0 if it could not be started.
        code: its exit code, or minus the signal number.
        failure: why it failed; None after code 0, and after this agent's own SIGTERM or SIGKILL.
    """

    generation: int
    rank: int
    local_rank: int
    pid: int
    code: int
    failure: Failure | None


@dataclass(frozen=True)
class GroupEnded:
    """All processes of the workers of `generation` have ended; 0: those of workers that set up beside the training."""

    generation: int


GroupEvent = Warm | ParentLost | WorkerStarted | WorkerMessage | WorkerEnded | GroupEnded


def oom_kills(root: Path = Path("/")) -> int:
    """The number of processes of this control group that the kernel has killed for memory so far; 0 if unknown.

    The kernel counts a kill in the control group of the process, whichever group's limit was reached. With version 2 of
    control groups, the groups around it count the kill as well. So the count of this process's own group is right, or
    else that of the nearest group around it that has a count.

    `root`: the directory with /proc and /sys.
    """
    for group, names in memory_groups(root):
        for line in text_of(group / names.events).splitlines():
            word, _, count = line.partition(" ")
            if word == "oom_kill" and count.strip().isdecimal():
                return int(count)
    return 0


@dataclass(eq=False)
class WorkerState:
    """One worker, as the `WorkerGroup` and the thread of `WorkerIO` share it.

    Attributes:
        start: the number of the start to which the worker belongs. The worker parent knows the worker by this number.
        env: the worker's seat in its present generation.
        output: keeps and shows what the worker prints.
        channel: the agent's end of the worker's channel.
        page: the worker's status page.
        pipes: the read ends of its stdout and stderr, by stream.
        oom_kills: the count of processes killed for memory when the worker was started.
        pid: its process id; 0 until it has been started.
        ended: whether its `WorkerEnded` was sent.
        gone: whether its process has ended.
        stopping: whether the agent has sent it a signal to end.
        was_dying: whether it was dying already when the agent sent the first one.
        read_at: when its output was last read, in seconds of the monotonic clock.
        sending: held while a message is sent to the worker, and while its channel is closed.
    """

    start: int
    env: WorkerEnv
    output: Output
    channel: Channel
    page: StatusPage
    pipes: dict[str, int]
    oom_kills: int = 0
    pid: int = 0
    ended: bool = False
    gone: bool = False
    stopping: bool = False
    was_dying: bool = False
    read_at: float = 0.0
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send the worker a message with the descriptors `fds`, from any thread.

        Does nothing if the worker has ended: an event tells of that.
        """
        with self.sending, contextlib.suppress(ChannelClosed, OSError):
            if not self.gone:
                self.channel.send(message, fds)


class WorkerIO:
    """The thread that reads from workers and their parent. Any other thread may call the public methods.

    Args:
        sink: takes each event, on this thread. It must only put the event into a queue.

    Attributes:
        seating: a lock, held while workers get seats in another generation, and while the end of one is reported.
    """

    def __init__(self, sink: Callable[[GroupEvent], None]) -> None:
        self._sink = sink
        # The workers whose processes have not ended.
        self._workers: list[WorkerState] = []
        # Whether a timer for `_flush` is set.
        self._flushing = False
        self.seating = threading.RLock()
        self._thread = SelectorThread("elasticrt-group", self._end)

    def watch_parent(self, parent: WorkerParent) -> None:
        """Read messages of this worker parent from now on."""
        self._thread.call(partial(self._thread.watch, parent, READ, partial(self._read_parent, parent)))

    def add(self, workers: Sequence[WorkerState]) -> None:
        """Read output and messages of these workers from now on. Call this before they are started."""

        def add() -> None:
            self._workers += workers
            for worker in workers:
                for stream, fd in worker.pipes.items():
                    self._thread.watch(fd, READ, partial(self._read_pipe, worker, stream, _READ_BYTES))
                self._thread.watch(worker.channel, READ, partial(self._read_channel, worker))

        self._thread.call(add)

    def seat(self, worker: WorkerState) -> None:
        """Write what this worker prints from now on to the logs of its new rank and generation."""
        env = worker.env

        def seat() -> None:
            if worker in self._workers:
                # What the worker has printed so far belongs to its old seat.
                self._read_rest(worker)
                worker.output.seat(env)

        self._thread.call(seat)

    def report_lost(self, workers: Sequence[WorkerState], reason: str) -> None:
        """Report the ends of these workers, which have ended with their parent for this `reason`."""
        self._thread.call(partial(self._close_lost, workers, reason))

    def close(self, timeout_s: float) -> None:
        """End the thread within `timeout_s` seconds, after it has read what has arrived."""
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
                    # All known workers are children of this parent: the next parent starts none before the agent has
                    # handled this event.
                    self._close_lost(list(self._workers), event.reason)
                    self._sink(event)
                case Started():
                    for worker in self._started_as(event):
                        worker.pid, env = event.pid, worker.env
                        self._sink(WorkerStarted(env.generation, env.rank, env.local_rank, event.pid, event.at_ns))
                case Exited():
                    for worker in self._started_as(event):
                        self._close_worker(worker, event.code, start_error=event.error)

    def _started_as(self, event: Started | Exited) -> list[WorkerState]:
        """The worker that a message of the parent is about, as a list; empty if its process has ended already."""
        wanted = (event.generation, event.local_rank)
        return [each for each in self._workers if (each.start, each.env.local_rank) == wanted]

    def _close_lost(self, workers: Sequence[WorkerState], reason: str) -> None:
        """Report that these workers were killed because their parent has ended."""
        for worker in workers:
            if not worker.gone:
                self._close_worker(worker, -signal.SIGKILL, lost=reason)

    def _read_pipe(self, worker: WorkerState, stream: str, max_bytes: int) -> None:
        """Pass on what the pipe holds, up to about `max_bytes`."""
        fd = worker.pipes.get(stream)
        while fd is not None and max_bytes > 0:
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            # The worker, and all processes that it has started, have closed the pipe. They may run on without it.
            if not data:
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
        """Show unfinished lines to which nothing was added for a while, such as prompts and dots of progress."""
        quiet_since = time.monotonic() - _FLUSH_AFTER_S
        unfinished = [each for each in self._workers if each.output.unfinished]
        for worker in unfinished:
            if worker.read_at <= quiet_since:
                worker.output.flush()
        self._flushing = any(each.read_at > quiet_since for each in unfinished)
        if self._flushing:
            self._thread.after(_FLUSH_AFTER_S, self._flush)

    def _read_channel(self, worker: WorkerState) -> None:
        """Take the messages of a worker, and notice that it has closed its channel."""
        try:
            while received := worker.channel.receive(0):
                self._pass_on(worker, *received)
        except (ChannelClosed, OSError):
            self._thread.forget(worker.channel)
            self._report_ending(worker)
        except ValueError as error:
            _LOG.warning("rank %d sent what is not a message, and is no longer read: %s", worker.env.rank, error)
            self._thread.forget(worker.channel)

    def _report_ending(self, worker: WorkerState) -> None:
        """Report the failure of a process that has closed its channel because it is ending.

        This comes sooner than the exit status from the parent: before the parent can reap the process, the kernel gives
        the memory of its GPU back, which takes a tenth of a second or more.
        """
        process = stat(worker.pid) if worker.pid and _HAS_GPUS else None
        # Only the parent knows why a process could not begin its script.
        began = _stepped(worker) is not None
        if process is not None and process.leaving and began and not worker.gone:
            self._read_rest(worker)
            with self.seating:
                self._report_end(worker, os.waitstatus_to_exitcode(process.leaving))

    def _pass_on(self, worker: WorkerState, message: Message, fds: list[int]) -> None:
        """Pass a worker's message on as an event. Raises ValueError for a message that workers do not send."""
        fd = fds.pop(0) if fds and isinstance(message, Copied) else -1
        for other in fds:
            os.close(other)
        if not isinstance(message, FromWorker):
            raise ValueError(f"a worker sent a {type(message).__name__}")  # noqa: TRY004  It came over a wire.
        env = worker.env
        self._sink(WorkerMessage(env.generation, env.rank, env.local_rank, message, worker.send, fd))
        if isinstance(message, ScriptDone):
            self._report_end(worker, message.code)
            # The process lingers because it holds the group's store. A group that is being ended needs no store.
            if worker.stopping:
                worker.send(Release())

    def _close_worker(self, worker: WorkerState, code: int, *, start_error: str = "", lost: str = "") -> None:
        """Read the rest of the output and messages of a process that has ended, report its end, and close its files."""
        self._read_rest(worker)
        if self._thread.watches(worker.channel):
            self._read_channel(worker)
        # Under the lock, a worker that is getting another seat ends either in its old generation or in the new one.
        with self.seating:
            self._report_end(worker, code, start_error=start_error, lost=lost)
            self._forget(worker)
            generation = worker.env.generation
        if all(each.env.generation != generation for each in self._workers):
            self._sink(GroupEnded(generation))

    def _read_rest(self, worker: WorkerState) -> None:
        """Read what is left in a worker's pipes. News of its end comes by another channel, and may be faster."""
        for stream in (OUT, ERR):
            self._read_pipe(worker, stream, _LAST_READ_MAX_BYTES)

    def _forget(self, worker: WorkerState) -> None:
        """Stop reading from a worker, and close its files."""
        self._workers.remove(worker)
        # Another thread may be sending a message on the channel.
        with worker.sending:
            worker.gone = True
            self._thread.forget(worker.channel)
            worker.channel.close()
        for fd in worker.pipes.values():
            self._thread.forget(fd)
            os.close(fd)
        worker.pipes.clear()
        worker.output.close()

    def _report_end(self, worker: WorkerState, code: int, *, start_error: str = "", lost: str = "") -> None:
        """Send the worker's `WorkerEnded`, unless it was sent already: a lingering process ends a second time."""
        if worker.ended:
            return
        worker.ended = True
        env, failure = worker.env, None
        if code != 0:
            pages = [each.page for each in self._workers if each.start == worker.start and not each.page.entered]
            left = Remains(
                code,
                # Without an exception there is no error file, and the text is empty.
                error_file=text_of(Path(env.error_file), _ERROR_FILE_MAX_CHARACTERS),
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
            # A worker that the agent stops counts as failed only if an exception has ended it, and not the agent's
            # signal.
            by_us = code in (-signal.SIGTERM, -signal.SIGKILL) or not raised(left).exception
            by_another = code == -signal.SIGKILL and worker.was_dying
            if by_another or not (worker.stopping and by_us):
                failure = failure_of(env, left)
        self._sink(WorkerEnded(env.generation, env.rank, env.local_rank, worker.pid, code, failure))


def _stepped(worker: WorkerState) -> bool | None:
    """Whether a worker has made a step; None if its page was never used: then its steps are not on the page either."""
    page = worker.page
    seen = page.begun_at_ns or page.init_at_ns
    return True if page.step or page.beats else False if seen else None
